# The scripts in this folder source this file. FLOWER_BIN names the folder of Flower's programs if they are not on the PATH.
if [ "$(id -u)" -eq 0 ] && [ "${ALLOW_ROOT:-}" != yes ]; then
    echo "Do not run $(basename "$0") as root: use an ordinary account (or ALLOW_ROOT=yes inside a container)." >&2
    exit 2
fi
umask 077  # databases, logs and states are for this account only
[ -z "${FLOWER_BIN:-}" ] || PATH="$FLOWER_BIN:$PATH"
PATH="$PATH:{{ nginx.SYSTEM_FOLDERS | join(":") }}"  # where nginx is
FLWR_HOME="$here/flower-home"
export PATH FLWR_HOME
export FLWR_TELEMETRY_ENABLED=0
export FLWR_DISABLE_UPDATE_CHECK=1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1  # nodes run the code that they installed themselves
cd "$here"

need_nginx() {
    command -v nginx >/dev/null && return
    echo "nginx is not installed. Install it ({{ nginx.INSTALL }}) and turn its own service off: README.md, section nginx." >&2
    exit 2
}

# End the nginx of this folder that an earlier, killed script left behind: it would keep the port.
end_orphan() {
    pid=$(cat "$here/$1.pid" 2>/dev/null) || return 0
    for second in 1 2 3 4 5 6 7 8 9 10; do
        case "$(ps -ww -o args= -p "${pid:-0}" 2>/dev/null)" in
            *nginx*" -c $here/$1.conf"*) kill "$pid" 2>/dev/null; sleep 1;;
            *) return 0;;
        esac
    done
}

# Restart a program whenever it ends, until this script is stopped. After a crash, the SuperLink refuses a node until its
# heartbeat has expired, about a minute later. Pausing and trying again is enough.
keep_running() {
    child=; stopped=
    trap 'stopped=yes; [ -z "$child" ] || kill "$child" 2>/dev/null' INT TERM HUP
    while [ -z "$stopped" ]; do
        "$@" &
        child=$!
        code=0; wait "$child" || code=$?
        [ -z "$stopped" ] || break
        echo "$1 ended with code $code; it starts again in ${PAUSE:-10} s. Press Ctrl-C to stop." >&2
        sleep "${PAUSE:-10}" &
        child=$!
        wait "$child" || true
    done
    wait "$child" || true  # wait for the program to shut down cleanly
}
