"""Named configs, one TOML file each: `hetero-ssfl run NAME`."""
