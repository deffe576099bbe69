# Run the SuperLink, which carries all messages. Its database lets it continue after a crash.
# The server app runs in a separate process, not as a child of the SuperLink, so that it survives the SuperLink.
keep_running flower-superlink --host "{bind}" --port {port} --database "$here/superlink.db" \
    --isolation process --superexec-auth-secret-file "$here/superexec.secret" \
    --disable-runtime-dependency-installation {trust}
