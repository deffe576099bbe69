"""A pretend accelerator: the device `pretend:0`, whose tensors are on the CPU but cannot be mixed with CPU tensors.

It computes real results, raises an error like CUDA's when tensors of two devices are mixed, and counts operations that
would make the program wait for a real accelerator.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend


class Module(_DummyBackendModule):
    """The functions that torch requires of a device module."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_setup_privateuseone_for_python_backend("pretend", Module())
DEVICE = torch.device("pretend:0")


class Remote(Tensor):
    """A tensor that reports the accelerator as its device."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> "Remote":
        offset = here.storage_offset()
        made = Tensor._make_wrapper_subclass(
            cls, here.shape, strides=here.stride(), storage_offset=offset, dtype=here.dtype, device=DEVICE
        )
        made.here = here
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func} outside of `with Accelerator()`")


class Accelerator(TorchDispatchMode):
    """Makes `.to("pretend")` work within its context. `waits` counts by name the operations that would synchronize."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        remote = [t for t in tensors if isinstance(t, Remote)]
        if name == "copy_":
            self.note_copy(isinstance(args[1], Remote), isinstance(args[0], Remote), _blocking(args[2:], kwargs))
            args[0].here.copy_(_here(args[1])) if isinstance(args[0], Remote) else args[0].copy_(_here(args[1]))
            return args[0]
        if kwargs.get("device") is not None:
            there = torch.device(kwargs["device"]).type == DEVICE.type
            kwargs["device"] = torch.device("cpu") if there else kwargs["device"]
            if name == "_to_copy":
                self.note_copy(bool(remote), there, _blocking((), kwargs))
        else:
            there = bool(remote)
            self.check_devices(name, tensors, remote)
        if remote and name in ("_local_scalar_dense", "equal", "nonzero", "_unique2", "masked_select"):
            self.waits[name] += 1
        out = func(*tree_map(_here, args), **tree_map(_here, kwargs))
        known = {id(t.here): t for t in remote}  # an in-place operation returns its argument
        wrap = known | {id(t): Remote(t) for t in tree_flatten(out)[0] if isinstance(t, Tensor) and id(t) not in known}
        return tree_map(lambda t: wrap[id(t)] if isinstance(t, Tensor) else t, out) if there else out

    def check_devices(self, name: str, tensors: list[Tensor], remote: list[Remote]) -> None:
        """As with CUDA, scalars and index tensors may be on the CPU."""
        strays = [t for t in tensors if not isinstance(t, Remote) and t.ndim and name not in ("index", "index_put_")]
        if remote and strays:
            shapes = [(str(t.device), tuple(t.shape)) for t in tensors]
            raise RuntimeError(f"expected all tensors of {name} on one device, found {shapes}")
        if remote and name in ("index", "index_put_") and any(t.ndim and not isinstance(t, Remote) for t in tensors):
            self.waits["rows from the CPU"] += 1

    def note_copy(self, from_there: bool, there: bool, blocking: bool) -> None:
        if from_there and not there:
            self.waits["copy to the CPU"] += 1
        elif there and not from_there and blocking:
            self.waits["blocking copy to the accelerator"] += 1


def _here(value: Any) -> Any:
    return value.here if isinstance(value, Remote) else value


def _blocking(rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return not (rest[0] if rest else kwargs.get("non_blocking", False))
