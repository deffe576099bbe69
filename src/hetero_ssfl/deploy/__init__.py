"""A federation between machines: `init` writes what each of them needs, `local` rehearses it on this one."""
