{% include "header.sh" %}
# Install the programs of this folder as services of this account, with systemd. Run it again after moving the folder.
case "$here$PATH" in
    *[\"\\\&\|%\$]*) echo "systemd needs a folder and a PATH without any of \" \\ & | % \$." >&2; exit 2 ;;
esac
units="${XDG_CONFIG_HOME:-$HOME/.config}/systemd/user"
mkdir -p "$units"
for unit in "$here"/systemd/*.service; do
    sed -e "s|@here@|$here|" -e "s|@path@|$PATH|" "$unit" > "$units/$(basename "$unit")"
done
systemctl --user daemon-reload
systemctl --user enable --now {{ services }}
echo "Started {{ services }}. Run this once so that they also run while nobody is logged in: loginctl enable-linger"
