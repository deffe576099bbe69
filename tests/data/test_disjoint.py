from datasets import Dataset

from hetero_ssfl.data.disjoint import DisjointClassPartitioner


def test_the_papers_partition_works_as_a_flower_partitioner() -> None:
    table = Dataset.from_dict({"label": [k % 6 for k in range(60)], "row": list(range(60))})
    partitioner = DisjointClassPartitioner(num_partitions=3, seed=1)
    partitioner.dataset = table
    parts = [partitioner.load_partition(k) for k in range(3)]
    assert sorted(row for part in parts for row in part["row"]) == list(range(60))
    classes = [set(part["label"]) for part in parts]
    assert [len(c) for c in classes] == [2, 2, 2]
    assert not classes[0] & classes[1] | classes[1] & classes[2] | classes[0] & classes[2]
