# Flower needs the absolute path of the certificate, and this folder may have been moved.
mkdir -p "$FLWR_HOME"
cat > "$FLWR_HOME/config.toml.$$" <<END
{connection}
END
mv "$FLWR_HOME/config.toml.$$" "$FLWR_HOME/config.toml"
exec flwr "$@"
