"""Find convolutions for which this version of torch writes outside its buffers.

    python tests/survey/convolutions.py              # all shapes, AVX2 and the machine's own instruction set
    python tests/survey/convolutions.py --quick      # a few hundred shapes, for a first look

Each shape runs forward and the gradients of input and weights in a child process under glibc's malloc checking, which
aborts when a freed block was written past its end. The shapes of a crashed child are run again one by one and gradient
by gradient, so that the list names exactly what corrupts memory. Needs Linux with glibc 2.34 or newer.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hetero_ssfl.runs.environment import CHECKED_MEMORY

LAYERS: dict[str, type[nn.Module]] = {
    "conv": nn.Conv2d,
    "transposed": nn.ConvTranspose2d,
    "conv1d": nn.Conv1d,
    "conv3d": nn.Conv3d,
    "linear": nn.Linear,
}
GRADIENTS = ("forward", "input", "weight")


class Case(NamedTuple):
    layer: str
    inputs: int
    outputs: int
    kernel: int = 1
    stride: int = 1
    groups: int = 1
    padding: int = 0
    layout: str = "contiguous"
    dtype: str = "float32"
    images: int = 24
    side: int = 8


def all_cases(widths: range) -> Iterator[Case]:
    """Return the shapes of the survey, most of them 2-d convolutions."""
    pairs = list(itertools.product(widths, widths))
    grid = itertools.product((1, 3, 5, 7), (1, 2, 3), ("channels-last", "contiguous"))
    for kernel, stride, layout in grid:
        padding = kernel // 2
        for a, b in pairs:
            yield Case("conv", a, b, kernel, stride, 1, padding, layout, images=4)
            if (a + b) % 5 == 0:  # a fifth of them, including all widths
                yield Case("transposed", a, b, kernel, stride, 1, padding, layout, images=4)
            if a % 2 == b % 2 == 0 and b <= 8:
                yield Case("conv", a, b, kernel, stride, 2, padding, layout, images=4)
            if (a + b) % 10 == 0:
                yield Case("conv", a, b, kernel, stride, 1, padding, layout, "bfloat16", images=4)
        for a in widths:
            yield Case("conv", a, a, kernel, stride, a, padding, layout, images=4)  # depthwise
            for per_group in (2, 3, 4, 6):
                yield Case("conv", per_group * a, 2 * a, kernel, stride, a, padding, layout, images=4)
            for images, side in ((1, 8), (24, 8), (24, 7), (5, 16)):  # the bug may depend on the amount of work
                yield Case("conv", a, 8, kernel, stride, 1, padding, layout, "float32", images, side)
            yield Case("conv", a, 8, kernel, stride, 1, padding + 1, layout)
            yield Case("conv1d", a, 8, kernel, stride, 1, padding)
            if kernel < 5:
                yield Case("conv3d", a, 8, kernel, stride, 1, padding, layout, images=2)
    for a, b in pairs:
        yield Case("linear", a, b)


def run(case: Case, gradients: tuple[str, ...] = GRADIENTS, repeats: int = 2) -> None:
    """Run the layer's forward pass and the named gradients, and free everything at the end."""
    dimensions = {"conv1d": 1, "conv3d": 3, "linear": 0}.get(case.layer, 2)
    if case.layer == "linear":
        layer: nn.Module = nn.Linear(case.inputs, case.outputs)
    else:
        shape = {"kernel_size": case.kernel, "stride": case.stride, "padding": case.padding, "groups": case.groups}
        layer = LAYERS[case.layer](case.inputs, case.outputs, **shape)
    layout = torch.contiguous_format
    if case.layout == "channels-last":
        layout = torch.channels_last_3d if dimensions == 3 else torch.channels_last
    dtype: torch.dtype = getattr(torch, case.dtype)
    layer = layer.to(dtype=dtype, memory_format=layout) if dimensions > 1 else layer.to(dtype)  # type: ignore[call-overload]
    for parameter in layer.parameters():
        parameter.requires_grad_("weight" in gradients)
    for _ in range(repeats):
        x = torch.randn(case.images, case.inputs, *[case.side] * dimensions).to(dtype).contiguous(memory_format=layout)
        out: Tensor = layer(x.requires_grad_("input" in gradients))
        if out.requires_grad:
            out.backward(torch.randn_like(out))
        layer.zero_grad(set_to_none=True)
        del x, out


def signal_of(work: Callable[[], None]) -> int:
    """Return the signal that kills a fork of this process doing `work`, or 0 if it exits normally."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hide glibc's error messages, which are expected here
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) * -1


def survey(cases: list[Case], together: int = 200) -> Iterator[dict[str, object]]:
    """Return the cases that crash a process, with the responsible gradients and the signal."""
    torch.set_num_threads(1)
    run(Case("conv", 16, 16))  # the first use is slow; forks inherit what it loads
    for start in range(0, len(cases), together):
        chunk = cases[start : start + together]

        def run_chunk(some: list[Case] = chunk) -> None:
            for case in some:
                run(case)

        if signal_of(run_chunk):
            if together > 1:
                yield from survey(chunk, together // 10 or 1)
                continue
            case = chunk[0]
            died = {g: signal_of(lambda c=case, g=g: run(c, (g,), repeats=25)) for g in GRADIENTS}  # type: ignore[misc]
            names = {g: signal.Signals(number).name for g, number in died.items() if number}
            yield {**case._asdict(), "corrupts": names or "only together with others"}


def in_child(isa: str | None, arguments: list[str]) -> list[dict[str, Any]]:
    environment = {**os.environ, **CHECKED_MEMORY}
    environment.pop("ONEDNN_MAX_CPU_ISA", None)
    if isa:
        environment["ONEDNN_MAX_CPU_ISA"] = isa
    command = [sys.executable, __file__, "--child", *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def by_kind(found: list[dict[str, Any]]) -> dict[str, set[int]]:
    """Group the input channels by kind of layer, over all output channels and image sizes."""
    kinds: dict[str, set[int]] = {}
    for case in found:
        names = ("layer", "kernel", "stride", "groups", "padding", "layout", "dtype")
        kinds.setdefault(", ".join(f"{name} {case[name]}" for name in names), set()).add(case["inputs"])
    return kinds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="channels 1 to 8 only")
    parser.add_argument("--isa", action="append", help="ONEDNN_MAX_CPU_ISA; by default AVX2 and the machine's own")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    cases = list(all_cases(range(1, 9) if wanted.quick else range(1, 41)))
    if wanted.child:
        for case in survey(cases):
            print(json.dumps(case), flush=True)
        return
    print(f"torch {torch.__version__}: {len(cases)} shapes")
    for isa in wanted.isa or ["AVX2", None]:
        found = in_child(isa, ["--quick"] if wanted.quick else [])
        print(f"{isa or 'own instruction set'}: {len(found)} shapes corrupt memory")
        for kind, inputs in by_kind(found).items():
            print(f"  {kind}: {', '.join(map(str, sorted(inputs)))} input channels")


if __name__ == "__main__":
    main()
