"""A run's figures for TensorBoard, in RUN/tensorboard: the numbers of events.jsonl as points, one per round.

All points are rewritten when a run continues, so that after a crash no point is missing and none is left of an
unfinished round.
"""

import shutil
from typing import Any

from ...runs.events import Event, Finished, RoundDone, Started
from ...runs.folder import RunFolder
from .points import NewEvents, points

TOGETHER = ("loss_ssl", "loss_alignment", "spread", "effective_rank", "validation_linear_all")
"""Shown as one chart with a line per client, on the page "Custom scalars"."""


class TensorBoard:
    def __init__(self, folder: RunFolder, package: Any) -> None:
        self.package, self.place, self.new = package, folder.path / "tensorboard", NewEvents(folder)
        self.writer: Any = None

    def event(self, event: Event) -> None:
        if isinstance(event, Started):
            shutil.rmtree(self.place, ignore_errors=True)
            self.writer = self.package.SummaryWriter(str(self.place), purge_step=0)  # also clears a viewer that is open
            self.writer.add_custom_scalars({"clients": {key: ["Multiline", [f"{key}/.*"]] for key in TOGETHER}})
        for point in (point for each in self.new.after(event) for point in points(each)):
            self.writer.add_scalar(*point)
        if isinstance(event, Started | RoundDone | Finished):
            self.writer.flush()
        if isinstance(event, Finished):
            self.writer.close()
