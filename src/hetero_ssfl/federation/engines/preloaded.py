"""Everything that a worker imports before its first step. The fork server imports it once for all workers."""

import gc

gc.disable()  # imports leave hardly any garbage, and collecting takes a seventh of their time

from ..client import app  # noqa: E402, F401

gc.freeze()  # a collection in a worker would write to, and so copy, every page shared with the others
gc.enable()
