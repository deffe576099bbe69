{% include "header.sh" %}
# Start or continue the run, and show the server's log. RUN_DIR=/PATH names another run folder.
exec "$here/flwr.sh" run "$here/app" hetero-ssfl --stream \
    --run-config "config=\"$here/federation.toml\" run-dir=\"${RUN_DIR:-$here/run}\""
