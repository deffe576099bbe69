"""A federation on several machines: `init` writes the files of each machine, `local` rehearses it on this one."""
