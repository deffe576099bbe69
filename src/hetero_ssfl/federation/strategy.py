"""Hetero-SSFL as a Flower Strategy, for existing Flower projects. See examples/flower_project.py.

The project's ClientApp trains in its own way and replies with
`contribution(representations of the RAD, alignment).arrays`. In the next round it receives the factor of the mean
kernel, for `alignment_distance`. Sampling is FedAvg's.
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
            raise ConfigError(
                f"alignment has form = '{alignment.form}' and leave_one_out = {alignment.leave_one_out}, expected "
                "'factor' and False, because a Strategy sends the same arrays to all nodes. "
                "Use hetero-ssfl's own server for other values."
            )
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
                updates[name] = self._read(name, reply, used)
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
        return ArrayRecord({"factor": Array(self.state.shared["factor"].numpy())}), metrics

    def _read(self, name: str, reply: Message, others: Sequence[RecordDict]) -> Update:
        examples = _figures(reply.content).get(self.weighted_by_key)
        if not isinstance(examples, int) or examples < 1:
            raise ProtocolError(
                f"{name} reports '{self.weighted_by_key}' = {str(examples)[:40]}, expected an integer of at least 1."
            )
        if others and _kinds(reply.content) != _kinds(others[0]):
            raise ProtocolError(
                f"{name} sent different figures from the other nodes, expected {sorted(_kinds(others[0]))}."
            )
        update = Update(examples, arrays_of(reply.content, self.arrayrecord_key))
        self.method.check(self.state, name, update)
        return update


def _figures(content: RecordDict) -> Mapping[str, object]:
    return next(iter(content.metric_records.values()), {})


def _kinds(content: RecordDict) -> dict[str, bool]:
    """Return the names of the figures and whether each is a list. Only replies with equal kinds can be averaged."""
    return {name: isinstance(value, list) for name, value in _figures(content).items()}
