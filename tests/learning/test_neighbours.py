import torch

from hetero_ssfl.learning.features import nearest


def test_neighbours_are_ordered_by_angle_and_exclude_the_query() -> None:
    degrees = torch.tensor([0.0, 10.0, 30.0, 100.0, 190.0]).deg2rad()
    lengths = torch.tensor([[1.0], [50.0], [0.1], [3.0], [1.0]])  # cosine ignores lengths
    features = torch.stack([degrees.cos(), degrees.sin()], 1) * lengths
    rows, similarities = nearest(features, torch.tensor([0, 2]), 3)
    assert rows.tolist() == [[1, 2, 3], [1, 0, 3]]
    torch.testing.assert_close(similarities[0], torch.tensor([10.0, 30.0, 100.0]).deg2rad().cos())


def test_a_duplicate_of_the_query_is_found() -> None:
    features = torch.eye(4)[[0, 1, 0, 2]]
    rows, similarities = nearest(features, torch.tensor([2]), 9)
    assert rows[0, 0] == 0
    assert similarities[0, 0] == 1
    assert rows.shape == (1, 3)
