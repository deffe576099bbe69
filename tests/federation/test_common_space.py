"""Probes of the vectors that heads predict, in the space that all clients share."""

from pathlib import Path

import pytest

from helpers.whole_runs import run
from hetero_ssfl.federation.client.scoring import open_probing
from hetero_ssfl.federation.participants import LocalSite
from hetero_ssfl.learning.features import extract_features
from hetero_ssfl.learning.probes import Labeled, probe

SHORT = ("rounds=1", "local_epochs=1", "engine.workers=1", "evaluation.every=0", "evaluation.probes=['linear', 'knn']")
COORDINATES = ("alignment.distance=coordinates", "alignment.coordinates=8", "evaluation.common_space=true")


def test_probes_see_what_the_head_makes_of_the_features(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", *SHORT, *COORDINATES)
    config = folder.read_config()
    participant = LocalSite().participant(folder, 1, config)
    learner, probing = participant.newest(), open_probing(participant, "test")
    assert learner.head is not None
    assert probing is not None
    weight, bias = learner.head.weight.detach(), learner.head.bias.detach()
    f, t = (
        extract_features(learner.encoder, images.pixels) @ weight.T + bias for images in (probing.train, probing.test)
    )
    assert t.shape[1] == 8
    expected = probe(Labeled(f, probing.train_labels), Labeled(t, probing.test_labels), config.evaluation, config.seed)
    scores = folder.read_json("results.json")["clients"]["client-001"]
    assert {name: scores[f"{name}_common"] for name in expected} == pytest.approx(expected, abs=0.5)
    assert scores["linear_common"] != scores["linear_all"]


@pytest.mark.parametrize("other", [("method=local",), ("alignment.distance=cka",), ("evaluation.common_space=false",)])
def test_without_a_head_or_unless_asked_there_is_no_common_space(tmp_path: Path, other: tuple[str, ...]) -> None:
    folder = run(tmp_path / "run", *SHORT, *COORDINATES, *other)
    assert not [name for name in folder.read_json("results.json")["mean"] if name.endswith("common")]
