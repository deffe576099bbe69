{% include "header.sh" %}
{% set bind = it.loopback if it.secure else "${BIND:-" ~ it.bind ~ "}" %}
{% set tls = '--ssl-ca-certfile "$here/ca.crt" --ssl-certfile "$here/server.crt" --ssl-keyfile "$here/server.key"' %}
# Run the SuperLink, which carries all messages. Its database lets it continue after a crash.
# The server app runs in a separate process, not as a child of the SuperLink, so that it survives the SuperLink.
keep_running flower-superlink --host "{{ bind }}" --port {{ writer.superlink_port }} --database "$here/superlink.db" \
    --isolation process --superexec-auth-secret-file "$here/superexec.secret" \
    --disable-runtime-dependency-installation {{ tls ~ " --enable-supernode-auth" if it.secure else "--insecure" }}
