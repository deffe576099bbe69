# Read by the scripts beside it. FLOWER_BIN names the folder of Flower's programs if they are not on the PATH.
[ -z "${{FLOWER_BIN:-}}" ] || PATH="$FLOWER_BIN:$PATH"
FLWR_HOME="$here/flower-home"
export PATH FLWR_HOME
{environment}
cd "$here"

# Start a program again whenever it ends, until this script is stopped. After a crash the SuperLink refuses a node
# until its heartbeat has lapsed, about a minute later: the pause and another try are all it takes.
keep_running() {{
    child=; stopped=
    trap 'stopped=yes; [ -z "$child" ] || kill "$child" 2>/dev/null' INT TERM HUP
    while [ -z "$stopped" ]; do
        "$@" &
        child=$!
        code=0; wait "$child" || code=$?
        [ -z "$stopped" ] || break
        echo "$1 ended with code $code; it starts again in ${{PAUSE:-10}} s. Ctrl-C ends this." >&2
        sleep "${{PAUSE:-10}}" &
        child=$!
        wait "$child" || true
    done
    wait || true  # a program that was told to stop still puts things in order
}}
