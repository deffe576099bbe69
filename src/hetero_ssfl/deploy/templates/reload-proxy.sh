{% include "header.sh" %}
# Let the running proxy read proxy.conf, client.crl and its certificate again.
need_nginx
nginx -e stderr -p "$here/" -c "$here/proxy.conf" -t -q
exec nginx -e stderr -p "$here/" -c "$here/proxy.conf" -s reload
