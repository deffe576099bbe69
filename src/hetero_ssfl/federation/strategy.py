"""Hetero-SSFL as a Flower Strategy, for existing Flower projects. See examples/flower_project.py.

The project's ClientApp trains in its own way and replies with
`contribution(representations of the RAD, alignment).arrays`. In the next round it receives what `alignment_distance`
compares with: the factor of the mean kernel, or its coordinates. Sampling is FedAvg's.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from ..config import AlignmentConfig, Config, RadConfig
from ..errors import ConfigError, ProtocolError
from ..methods import ServerState, Update
from ..methods.hetero import HeteroSSFL
from .wire import arrays_of

log = logging.getLogger(__name__)


class HeteroSSFLStrategy(FedAvg):
    """Sample clients as FedAvg does, and aggregate their kernels on `rad_size` shared images instead of weights."""

    def __init__(self, rad_size: int, alignment: AlignmentConfig | None = None, **sampling: Any) -> None:
        super().__init__(**sampling)
        alignment = alignment or AlignmentConfig(rad_batch=0)
        if alignment.form != "factor" or alignment.leave_one_out:
            asked = f"form = '{alignment.form}' and leave_one_out = {alignment.leave_one_out}"
            raise ConfigError(f"alignment has {asked}, expected 'factor' and False: all nodes get the same arrays.")
        config = Config(rad=RadConfig(size=rad_size), alignment=alignment)
        self.method, self.state = HeteroSSFL(config), ServerState(0, ())

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the latest kernel of every node that has ever replied. Unusable replies are left out."""
        arrived, _ = self._check_and_log_replies(replies, is_train=True, validate=False)
        updates: dict[str, Update] = {}
        used: list[RecordDict] = []
        for reply in sorted(arrived, key=lambda reply: reply.metadata.src_node_id):
            name = f"node {reply.metadata.src_node_id}"
            try:
                updates[name] = self._read(name, reply.content, used)
            except ProtocolError as error:
                log.warning("round %d continues without a reply: %s", server_round, error)
                continue
            used.append(reply.content)
        if not updates:
            return None, None
        metrics = self.train_metrics_aggr_fn(used, self.weighted_by_key)
        newcomers = tuple(name for name in updates if name not in self.state.roster)
        state = replace(self.state, roster=self.state.roster + newcomers)
        self.state = self.method.aggregate(state, updates)
        for key, value in self.method.metrics(self.state).items():
            metrics[key] = value
        name = self.method.sends
        return ArrayRecord({name: Array(self.state.shared[name].numpy())}), metrics

    def _read(self, name: str, content: RecordDict, others: Sequence[RecordDict]) -> Update:
        figures: Mapping[str, object] = next(iter(content.metric_records.values()), {})
        examples = figures.get(self.weighted_by_key)
        if not isinstance(examples, int) or examples < 1:
            key = self.weighted_by_key
            raise ProtocolError(f"{name} reports '{key}' = {str(examples)[:40]}, expected an integer of at least 1.")
        if others and _kinds(content) != _kinds(others[0]):  # only replies with equal kinds can be averaged
            raise ProtocolError(f"{name} sent other figures than the others, expected {sorted(_kinds(others[0]))}.")
        update = Update(examples, arrays_of(content, self.arrayrecord_key))
        self.method.check(self.state, name, update)
        return update


def _kinds(content: RecordDict) -> dict[str, bool]:
    """Return the names of the figures and whether each is a list."""
    figures: Mapping[str, object] = next(iter(content.metric_records.values()), {})
    return {name: isinstance(value, list) for name, value in figures.items()}
