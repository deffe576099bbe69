"""A run's figures for TensorBoard, in RUN/tensorboard: the numbers of events.jsonl as points, one per round.

All points are rewritten when a run continues, so that after a crash no point is missing and none is left of an
unfinished round.
"""

import shutil
from collections.abc import Iterator
from typing import Any

from ...config import Config
from ...errors import RunError
from ...plugins import install_command, load_module
from ...runs.events import ClientTrained, Evaluated, Event, Finished, Listener, RoundDone, Started, from_lines
from ...runs.folder import RunFolder

TOGETHER = ("loss_ssl", "loss_alignment", "spread", "effective_rank", "validation_linear_all")
"""Shown as one chart with a line per client, on the page "Custom scalars"."""


def check_tracking(config: Config) -> Any:
    """Import and return torch.utils.tensorboard if the config asks for it. Raise ConfigError if it is missing."""
    if not config.tracking.tensorboard:
        return None
    return load_module("torch.utils.tensorboard", f"Install it: {install_command('tensorboard')}")


def tracking(folder: RunFolder, listen: Listener) -> Listener:
    """Wrap a listener: write points if the config asks for them, and pass every event on."""
    package = check_tracking(folder.read_config())
    if package is None:
        return listen
    place, lines = folder.path / "tensorboard", folder.path / "events.jsonl"
    writer: Any = None
    read = 0  # bytes of events.jsonl that have been converted to points

    def track(event: Event) -> None:
        nonlocal writer, read
        written: list[Event] = []
        try:
            if isinstance(event, Started):
                shutil.rmtree(place, ignore_errors=True)
                read = 0  # the run may have gone back a round
                writer = package.SummaryWriter(str(place), purge_step=0)  # also clears a viewer that is open
                writer.add_custom_scalars({"clients": {key: ["Multiline", [f"{key}/.*"]] for key in TOGETHER}})
            if isinstance(event, Started | RoundDone) and lines.exists():
                content = lines.read_bytes()
                written, read = from_lines(content[read:].splitlines()), len(content)
            if isinstance(event, Finished):
                written = [Evaluated(event.round, "test", event.results["clients"], event.results["mean"])]
            for point in (point for each in written for point in points(each)):
                writer.add_scalar(*point)
            if isinstance(event, Started | RoundDone | Finished):
                writer.flush()
            if isinstance(event, Finished):
                writer.close()
        except OSError as error:
            raise RunError(f"cannot write in '{place}': {error.strerror}. Free some disk space and resume.") from None
        listen(event)

    return track


def points(event: Event) -> Iterator[tuple[str, float, int]]:
    """Yield tag, value and round of each number: FIGURE/CLIENT, SPLIT_PROBE/CLIENT (or mean) and round/FIGURE."""
    if isinstance(event, Evaluated):
        for client, scores in [*event.clients.items(), ("mean", event.mean)]:
            yield from ((f"{event.split}_{key}/{client}", value, event.round) for key, value in scores.items())
    if isinstance(event, ClientTrained | RoundDone):
        for key, value in event.to_json().items():
            if type(value) in (int, float) and key != "round":
                tag = f"{key}/{event.client}" if isinstance(event, ClientTrained) else f"round/{key}"
                yield tag, value, event.round
