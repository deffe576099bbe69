"""A federation on several machines: `init` writes the files of each machine, `local` tests them on this one."""
