{% include "header.sh" %}
# Take part in the federation until stopped. NODE_PORT names another port for the node's own processes.
# An encoder "my_module:MyEncoder" can be in my_module.py, next to node.toml.
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$here"
{% if writer.proxied %}
need_nginx
# The port is written in one place only: `listen` in forwarder.conf.
superlink=$(sed -n 's/^ *listen \([^ ]*\) ssl;.*/\1/p' "$here/forwarder.conf")
end_orphan forwarder
keep_running nginx -e stderr -p "$here/" -c "$here/forwarder.conf" &
forwarder=$!
keep_running flower-supernode --superlink "$superlink" --host 127.0.0.1 --port "${NODE_PORT:-{{ node_port }}}" \
    --node-config "settings=\"$here/node.toml\"" \
    --root-certificates "$here/local.crt" --auth-supernode-private-key "$here/node.key"
kill "$forwarder" 2>/dev/null || true  # only now: the SuperNode signs off through it
wait "$forwarder" || true
{% else %}
keep_running flower-supernode --superlink "${SUPERLINK:-{{ it.entrance }}}" --host 127.0.0.1 \
    --port "${NODE_PORT:-{{ node_port }}}" --node-config "settings=\"$here/node.toml\"" {{ writer.trust }}{{ ' --auth-supernode-private-key "$here/node.key"' if it.secure }}
{% endif %}
