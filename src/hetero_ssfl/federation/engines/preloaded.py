"""All that a worker imports before its first step; the fork server imports it once for all of them."""

import gc

gc.disable()  # imports leave no garbage worth looking for: a seventh of their time

from ..client import app  # noqa: E402, F401

gc.freeze()  # a collection in a worker would touch, and so copy, every page it shares with the others
gc.enable()
