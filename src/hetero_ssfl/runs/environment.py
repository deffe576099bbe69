"""This machine: what a result was computed with, what is installed, what is missing and how to get it."""

import importlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ..plugins import install_command

REQUIRED = ("torch", "flwr", "datasets", "flwr-datasets", "safetensors", "pydantic", "scikit-learn", "matplotlib")
TESTED = {"torch": "2.13.0", "flwr": "1.41.0"}  # as in constraints.txt
OPTIONAL = {
    "ray": ("simulation", "run on many machines with Flower's Simulation Engine"),
    "timm": ("timm", "use encoders by name from timm"),
    "tensorboard": ("tensorboard", "watch runs in TensorBoard"),
    "pydicom": ("medical", "read DICOM files"),
    "nibabel": ("medical", "read NIfTI files"),
    "onnx": ("onnx", "export encoders to ONNX"),
}
RECORDED = ("hetero-ssfl", "torch", "flwr", "datasets", "flwr-datasets", "safetensors", "pydantic", "numpy")

CHECKED_MEMORY = {"MALLOC_CHECK_": "3", "LD_PRELOAD": "libc_malloc_debug.so.0", "OMP_NUM_THREADS": "1"}
"""Environment in which glibc aborts the process when it frees a block that was written past its end."""

STRIDED_CONVOLUTIONS = """
import torch
from hetero_ssfl.learning.encoders.onednn import guard_convolutions
for channels in range(2, 8):
    layer = torch.nn.Conv2d(channels, 8, 1, 2, bias=False).to(memory_format=torch.channels_last)
    if {guarded}:
        guard_convolutions(layer)
    for _ in range(25):
        x = torch.randn(24, channels, 8, 8).contiguous(memory_format=torch.channels_last)
        y = layer(x)
        y.backward(torch.randn_like(y))
"""
"""Program that crashes if oneDNN has the bug described in `learning/encoders/onednn.py`."""


def environment() -> dict[str, Any]:
    """Return the versions, machine, commit and command that produce a result."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": {name: _version(name) for name in RECORDED},
        "commit": _commit(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of this code if it runs from a checkout."""
    command = ["git", "rev-parse", "HEAD"]
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5)
        return done.stdout.strip() or None
    return None


@dataclass(frozen=True)
class Finding:
    """What a check of this machine, a run folder or a deployment says about one part of it."""

    what: str
    ok: bool
    text: str
    required: bool = False
    """Whether nothing works, or a run cannot start, while it is not ok."""
    who: str = ""
    """The machine that it is about, if not this one."""
    checked: bool = True
    """False for a part that could not be checked."""

    @property
    def level(self) -> str:
        return "ok" if self.ok else "stops" if self.required else "warning"


def diagnose() -> Iterator[Finding]:
    python = f"{platform.python_version()} (3.11 or newer is needed)"
    yield Finding("python", sys.version_info >= (3, 11), python, True)
    for name in REQUIRED:
        version, tested = _version(name), TESTED.get(name)
        if version and tested and version.partition("+")[0] != tested:
            text = f"{version}; hetero-ssfl was tested with {tested}. Remedy: pip install {name}=={tested}"
            yield Finding(name, False, text)
            continue
        yield Finding(name, bool(version), version or f"not installed. Remedy: pip install {name}", True)
    for module, (extra, purpose) in OPTIONAL.items():
        try:
            importlib.import_module(module)
            yield Finding(module, True, f"{metadata.version(module)}: {purpose}")
        except Exception as error:  # a broken optional package must not stop the other checks
            remedy = install_command(extra)
            reason = "not installed" if isinstance(error, ModuleNotFoundError) else str(error).splitlines()[0]
            yield Finding(module, False, f"{reason}; needed to {purpose}. Remedy: {remedy}")
    import torch

    yield Finding("cpu", True, f"{os.cpu_count()} cores: engine.workers = 0 starts so many worker processes")
    names = ", ".join(torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count()))
    missing = "not available to this torch; training runs on the CPU"
    yield Finding("gpu", bool(names), f"{names}: set engine.device = 'cuda'" if names else missing)
    yield check_instructions()
    yield _check_data(os.environ.get("HETERO_SSFL_DATA"))
    free = shutil.disk_usage(".").free / 2**30
    yield Finding("disk", free > 1, f"{free:.0f} GiB free in this folder")


def _check_data(folder: str | None) -> Finding:
    if not folder:
        text = "HETERO_SSFL_DATA is not set; cifar10, cifar100 and tiny-imagenet are downloaded from the hub"
        return Finding("local data", False, f"{text}. Remedy: set it to a folder that contains them")
    names = sorted(p.name for p in Path(folder).iterdir() if p.is_dir()) if Path(folder).is_dir() else []
    return Finding("local data", bool(names), f"{folder}: {', '.join(names) or 'contains no data sets'}")


def check_instructions() -> Finding:
    """Report oneDNN's instruction set, and test whether its convolutions corrupt memory, without and with our guard."""
    plain = try_convolutions(guarded=False)
    name = next((line.partition(",isa:")[2] for line in plain.stdout.splitlines() if ",isa:" in line), "oneDNN")
    if plain.returncode >= 0:
        return Finding("instructions", True, f"{name}: convolutions do not corrupt memory")
    fault = f"{name}: oneDNN writes past the end of its memory in strided 1x1 convolutions"
    if try_convolutions(guarded=True).returncode >= 0:
        return Finding("instructions", True, f"{fault}; hetero-ssfl guards against it")
    remedy = "Remedy: set ONEDNN_MAX_CPU_ISA=AVX in the environment"
    return Finding("instructions", False, f"{fault}, and the guard does not help. {remedy}")


def try_convolutions(guarded: bool) -> "subprocess.CompletedProcess[str]":
    """Train the layers in a child process that dies if memory is corrupted."""
    program = [sys.executable, "-c", STRIDED_CONVOLUTIONS.format(guarded=guarded)]
    environment = {**os.environ, **CHECKED_MEMORY, "ONEDNN_VERBOSE": "1"}
    return subprocess.run(program, env=environment, capture_output=True, text=True)
