"""Named settings, one TOML file each: `hetero-ssfl run NAME`."""
