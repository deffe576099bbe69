# Flower wants the absolute path of a certificate, and this folder may have moved.
mkdir -p "$FLWR_HOME"
cat > "$FLWR_HOME/config.toml.$$" <<END
{connection}
END
mv "$FLWR_HOME/config.toml.$$" "$FLWR_HOME/config.toml"
exec flwr "$@"
