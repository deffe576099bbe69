{% include "header.sh" %}
# Flower's command `flwr` for this deployment: `./flwr.sh list`, `./flwr.sh supernode list`.
# Flower needs the absolute path of the certificate, and this folder may have been moved.
mkdir -p "$FLWR_HOME"
cat > "$FLWR_HOME/config.toml.$$" <<END
[superlink]
default = "hetero-ssfl"

[superlink.hetero-ssfl]
address = "{{ writer.superlink }}"
{{ 'root-certificates = "$here/ca.crt"' if it.secure else "insecure = true" }}
END
mv "$FLWR_HOME/config.toml.$$" "$FLWR_HOME/config.toml"
exec flwr "$@"
