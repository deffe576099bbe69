for key in "$here"/node-keys/*.pub; do
    [ -e "$key" ] || continue
    name=$(basename "$key" .pub)
    answer=$({register} 2>&1) || true
    case "$answer" in
        *'"success": true'*) echo "$name: registered" ;;
        *already*) echo "$name: was registered before" ;;
        *) echo "$name: not registered: $answer" >&2; failed=1 ;;
    esac
done
exit "${{failed:-0}}"
