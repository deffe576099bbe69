need_nginx
# The port is written in one place only: `listen` in forwarder.conf.
superlink=$(sed -n 's/^ *listen \([^ ]*\) ssl;.*/\1/p' "$here/forwarder.conf")
keep_running {forwarder} &
forwarder=$!
keep_running {supernode}
kill "$forwarder" 2>/dev/null || true  # only now: the SuperNode signs off through it
wait "$forwarder" || true
