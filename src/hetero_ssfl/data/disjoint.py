"""The paper's partition as a flwr-datasets Partitioner, for users who load their data with that library.

It is separate from partition.py because importing flwr-datasets takes longer than the rest of a run's startup.
"""

import torch
from datasets import Dataset
from flwr_datasets.partitioner import Partitioner

from ..seeding import rng_for
from .partition import assign_classes, divide_by_class


class DisjointClassPartitioner(Partitioner):  # type: ignore[misc]
    """Give few clients disjoint groups of classes; let many clients sample classes and divide their images."""

    def __init__(
        self, num_partitions: int, partition_by: str = "label", classes_per_partition: int | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        self._count, self._column, self._per_client, self._seed = (
            num_partitions,
            partition_by,
            classes_per_partition,
            seed,
        )
        self._rows: list[torch.Tensor] | None = None

    @property
    def num_partitions(self) -> int:
        return self._count

    def load_partition(self, partition_id: int) -> Dataset:
        if self._rows is None:
            labels = torch.tensor(self.dataset[self._column])
            holders = assign_classes(int(labels.max()) + 1, self._count, self._per_client, self._seed)
            self._rows = divide_by_class(labels, holders, rng_for(self._seed, "partition"))
        return self.dataset.select(self._rows[partition_id].tolist())
