{% include "header.sh" %}
# Run the SuperExec, which starts the server app of each run.
keep_running flower-superexec --runtime-api-address "{{ writer.superlink }}" \
    --superexec-auth-secret-file "$here/superexec.secret" {{ writer.trust }}
