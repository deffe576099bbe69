{% include "header.sh" %}
# Run the proxy, which all nodes connect to. It admits nodes only, and only to the routes they need.
need_nginx
end_orphan proxy
keep_running nginx -e stderr -p "$here/" -c "$here/proxy.conf"
