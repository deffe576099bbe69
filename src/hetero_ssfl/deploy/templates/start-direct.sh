# Take part in the federation until stopped. NODE_PORT names another port for the node's own processes.
# An encoder "my_module:MyEncoder" can be in my_module.py, next to node.toml.
export PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}$here"
keep_running flower-supernode --superlink "${{SUPERLINK:-{superlink}}}" --host 127.0.0.1 \
    --port "${{NODE_PORT:-{node_port}}}" --node-config "settings=\"$here/node.toml\"" {trust}
