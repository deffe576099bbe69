{% include "header.sh" %}
# Register the nodes whose public keys are in node-keys/. Running it twice is safe.
for key in "$here"/node-keys/*.pub; do
    [ -e "$key" ] || continue
    name=$(basename "$key" .pub)
    answer=$("$here/flwr.sh" supernode register "$key" hetero-ssfl --name "$name" --format json 2>&1) || true
    case "$answer" in
        *'"success": true'*) echo "$name: registered" ;;
        *already*) echo "$name: was registered before" ;;
        *) echo "$name: not registered: $answer" >&2; failed=1 ;;
    esac
done
exit "${failed:-0}"
