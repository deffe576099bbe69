"""Attacks on kernels: on constructed clients whose answer is known, and on a run."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from helpers.whole_runs import run, tiny
from hetero_ssfl.config import Config
from hetero_ssfl.data import to_input
from hetero_ssfl.federation.start import torch_threads
from hetero_ssfl.kernels.cka import factor_cka
from hetero_ssfl.kernels.consensus import Averaging
from hetero_ssfl.kernels.contribution import packed
from hetero_ssfl.kernels.factor import kernel_factor
from hetero_ssfl.learning.learner import Learner
from hetero_ssfl.runs.folder import RunFolder
from hetero_ssfl.seeding import rng_for
from hetero_ssfl.studies.audit.attacks import (
    agreement,
    area_under_curve,
    class_features,
    class_scores,
    guessed,
    held_classes,
    hit_rate,
    hit_rate_of_chance,
    standardised,
    steal,
    true_positive_rate,
    true_positive_rate_of_chance,
    undone,
)
from hetero_ssfl.studies.audit.measure import results
from hetero_ssfl.studies.audit.scene import OWN, UNTRAINED, Compared, recovered
from hetero_ssfl.studies.audit.tables import client_rows, rows
from hetero_ssfl.studies.audit.views import View, noisy, seen, views

Call = Callable[..., tuple[int, str, str]]
CLASSES = 6
LABELS = torch.arange(60) % CLASSES


def random(*shape: int, scope: str = "") -> Tensor:
    return torch.randn(*shape, generator=rng_for(0, "test audit", scope, *shape))


def cka(a: Tensor, b: Tensor) -> float:
    return float(factor_cka(a.detach().double(), b.detach().double()))


# --- views ---


def test_a_run_has_the_views_that_its_size_allows() -> None:
    assert [str(view) for view in views(clients=5, rows=100)] == [
        *("as sent", "sketch of rank 8", "sketch of rank 32", "sum of 3", "sum of 5", "noise 0.3", "noise 1", "noise 3")
    ]
    assert View("sum", 10) in views(clients=10, rows=100)


def test_a_sketch_wider_than_the_kernel_hides_nothing_and_a_narrow_one_hides_something() -> None:
    factors = [random(60, 20)]
    kernel = factors[0] @ factors[0].T
    wide, narrow = (seen(View("sketch", rank), factors, [1.0], 0, seed=0) for rank in (30, 8))
    assert torch.allclose(wide @ wide.T, kernel, rtol=1e-3, atol=1e-3)
    assert narrow.shape[1] <= 8
    assert cka(narrow, factors[0]) < 0.9


def test_a_sum_is_the_weighted_mean_kernel_of_the_client_and_those_that_follow() -> None:
    factors = [random(12, 3, scope=str(k)) for k in range(4)]
    found = seen(View("sum", 3), factors, [1.0, 2.0, 3.0, 4.0], 2, seed=0)
    expected = (3 * factors[2] @ factors[2].T + 4 * factors[3] @ factors[3].T + factors[0] @ factors[0].T) / 8
    assert torch.allclose(found @ found.T, expected, atol=1e-5)


def test_more_noise_leaves_less_of_a_kernel() -> None:
    factor = random(200, 10)
    left = [cka(noisy(factor, ratio, rng_for(0)), factor) for ratio in (0.01, 1.0, 3.0, 100.0)]
    assert left == sorted(left, reverse=True)
    assert left[0] > 0.999
    assert left[-1] < 0.1


def test_the_attacker_undoes_what_noise_adds_to_the_eigenvalues() -> None:
    """The kernel of one direction with eigenvalue 1 and noise of norm 3: E has an edge of 3 sqrt(2 / n)."""
    n = 400
    factor = torch.ones(n, 1) / n**0.5
    found = [float(noisy(factor, 3.0, rng_for(k)).square().sum()) for k in range(8)]
    assert sum(found) / len(found) == pytest.approx(1.0, abs=0.05)  # without shrinkage 1.045


# --- class mix ---


def client_kernel(held: list[int], strength: float, scope: str) -> Tensor:
    """Return features in which the images of held classes point to one direction for each class, and noise."""
    one_hot = torch.eye(CLASSES)[LABELS] * torch.isin(LABELS, torch.tensor(held))[:, None]
    return strength * torch.cat([one_hot, torch.zeros(60, 10)], 1) + random(60, CLASSES + 10, scope=scope)


def guess(strength: float, count: int = 40) -> float:
    """Return the hit rate on `count` clients with two classes each, after as many shadow clients."""
    drawn = torch.stack([torch.randperm(CLASSES, generator=rng_for(0, "drawn", k))[:2] for k in range(2 * count)])
    figures = torch.stack(
        [class_features(client_kernel(own.tolist(), strength, f"{k}"), LABELS, CLASSES) for k, own in enumerate(drawn)]
    )
    held = torch.zeros(2 * count, CLASSES).scatter_(1, drawn, 1)
    scores = class_scores(figures[:count], held[:count], figures[count:])
    return hit_rate([guessed(row, 2) for row in scores], drawn[count:].tolist())


def test_classes_that_the_kernel_shows_are_all_guessed() -> None:
    assert guess(strength=30.0) == 1.0


def test_from_random_kernels_the_guesses_are_as_good_as_chance() -> None:
    assert guess(strength=0.0) == pytest.approx(2 / CLASSES, abs=0.12)  # 80 guesses: two standard deviations are 0.1


def test_chance_is_the_mean_over_random_guesses() -> None:
    mean, limit = hit_rate_of_chance([[0, 1], [2, 3]], 10, rng_for(0))
    assert mean == pytest.approx(0.2)
    assert limit == 0.5  # at least 3 of 4 right: 0.1 %; at least 2 of 4: about 15 %
    assert hit_rate_of_chance([[0, 1, 2]], 3, rng_for(0)) == (1.0, 1.0)


def test_a_class_with_a_few_images_is_not_held() -> None:
    assert held_classes([50, 1, 0, 49]) == [0, 3]
    assert held_classes([10, 10]) == [0, 1]


# --- membership ---


def test_the_true_positive_rate_counts_members_above_the_allowed_false_positives() -> None:
    others = torch.arange(200.0)  # 1 % are 198 and 199, so the threshold is 197
    members = torch.tensor([100.0, 197.0, 197.5, 198.0, 300.0])
    assert true_positive_rate(members, others) == pytest.approx(3 / 5)
    assert true_positive_rate(members, torch.arange(99.0)) == 1.0  # no false positive allowed: above 98
    assert true_positive_rate(torch.tensor([98.0]), torch.arange(99.0)) == 0.0


def test_the_area_under_the_curve_counts_pairs_and_half_of_the_ties() -> None:
    assert area_under_curve(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 1.0, 2.0])) == pytest.approx(4.5 / 6)


def test_scores_without_information_stay_within_the_range_of_chance() -> None:
    limit = true_positive_rate_of_chance(200, 300, rng_for(0))
    rates = [true_positive_rate(random(200, scope=f"m{k}"), random(300, scope=f"o{k}")) for k in range(200)]
    assert sum(rate > limit for rate in rates) <= 20
    assert 0.01 < limit < 0.06


def test_pooling_clients_does_not_mix_their_scales() -> None:
    members, others = torch.tensor([3.0, 5.0]), torch.tensor([1.0, 2.0, 4.0])
    plain, moved = standardised(members, others), standardised(100 * members + 7, 100 * others + 7)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(plain, moved, strict=True))


def test_agreement_is_the_mean_cosine_over_pairs_of_views() -> None:
    features = [random(5, 4, scope=str(k)) for k in range(3)]
    pairs = [torch.cosine_similarity(features[i], features[j], dim=1) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert torch.allclose(agreement(features).float(), torch.stack(pairs).mean(0), atol=1e-6)


# --- stealing ---


class Flat(nn.Module):
    """A linear encoder of images."""

    def __init__(self, scope: str) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)
        with torch.no_grad():
            self.layer.weight.copy_(0.02 * random(4, 16, scope=scope))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.mean(1).flatten(1))
        return out


def stolen_cka(config: Config, ratio: float, steps: int = 200) -> float:
    """Steal a linear encoder from its kernel on 200 images of noise; return the CKA on other images."""
    pixels = torch.randint(0, 256, (400, 1, 4, 4), generator=rng_for(0, "pixels")).to(torch.uint8)
    rad, other = pixels[:200], pixels[200:]
    client, thief = Flat("client"), Learner(Flat("thief"), 4, config.clients.models[0], config.ssl)
    factor = kernel_factor(client(to_input(rad)).detach(), config.alignment)
    assert cka(client(to_input(other)), thief.encoder(to_input(other))) < 0.4
    steal(thief, rad, seen(View("noise", ratio), [factor], [1.0], 0, 0) if ratio else factor, config, steps)
    return cka(client(to_input(other)), thief.encoder(to_input(other)))


def test_a_linear_encoder_is_stolen_from_its_kernel_and_noise_prevents_it() -> None:
    config = tiny("views.rotate=0", "views.translate=0", "views.shear=0", "views.crop=[1.0, 1.0]", "views.jitter=0")
    with torch_threads(1):
        assert stolen_cka(config, 0) > 0.95
        assert stolen_cka(config, 100.0) < 0.4


def test_the_power_of_the_spectrum_is_undone() -> None:
    alignment = tiny().alignment
    assert alignment.power == 0.5
    features = random(50, 6) * torch.tensor([9.0, 5.0, 3.0, 1.0, 0.5, 0.1])
    units = features / features.norm(dim=1, keepdim=True)
    assert cka(kernel_factor(features, alignment), units) < 0.98
    assert cka(undone(kernel_factor(features, alignment), alignment), units) == pytest.approx(1.0, abs=1e-5)


def test_the_server_recovers_a_kernel_from_a_sketch() -> None:
    config = tiny("alignment.form=sketch")
    factor = kernel_factor(random(32, 10), config.alignment)
    averaging = Averaging(config.alignment, config.rad.size, config.seed)
    sent = packed(factor, config.alignment, config.seed)
    assert cka(recovered(sent, averaging), factor) == pytest.approx(1.0, abs=1e-4)


# --- the command ---


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return run(tmp_path_factory.mktemp("audit") / "run", "rounds=1", "evaluation.every=0")


def digests(folder: Path) -> dict[str, str]:
    return {str(f): hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.rglob("*") if f.is_file()}


def test_the_command_measures_all_views_and_only_adds_what_a_report_shows(
    finished: RunFolder, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero_ssfl.studies.audit.scene.VIEWS_PER_CANDIDATE", 2)
    monkeypatch.setattr("hetero_ssfl.studies.audit.views.NOISE", (1.0,))
    path = Path(shutil.copytree(finished.path, tmp_path / "run"))
    before = digests(path)
    code, shown, _ = call("audit", path, "--steps", 2, "--shadows", 3, "--workers", 1, "--json", "--quiet")
    after = digests(path)
    assert after.pop(str(path / "audit.json"))
    assert (code, after) == (0, before)
    found = json.loads(shown)
    names = [row["view"] for row in found["views"]]
    assert names[:3] == ["the client's own encoder", "its initial weights only", "as sent"]
    assert names[3:] == ["sketch of rank 8", "sum of 3", "noise 1"]
    own, untrained, sent = found["views"][:3]
    assert own["cka"] == pytest.approx(1.0)
    assert untrained["cka"] < own["cka"]
    assert 0 <= sent["class_hits"] <= 1
    results = finished.read_json("results.json")["clients"]
    for name, client in found["clients"].items():  # the same probe as the run's own
        assert client["the client's own encoder"]["probe"] == pytest.approx(results[name]["linear_all"])
        assert len(client["views"]["as sent"]["guessed"]) == len(client["holds"])
    page = tmp_path / "page.html"
    assert call("report", path, "-o", page)[0] == 0
    section = page.read_text().partition('id="audit"')[2].partition("</section>")[0]
    assert all(
        text in section for text in ("sketch of rank 8", "client-002", "not bounds", "no client helps it", "<svg")
    )
    RunFolder(path).write_json("audit.json", {"section": {"title": 1}})
    code, _, said = call("report", path, "-o", page)
    assert (code, "section.title = 1" in said.replace("\n", " ")) == (2, True)


def chance(hits: float | None, hits_95: float | None, members_95: float) -> dict[str, float | None]:
    limits = {"class_hits_95": hits_95, "members_found_95": members_95}
    return {"class_hits": hits, "members_found": 0.01, "auc": 0.5, **limits}


def test_clients_with_all_classes_give_nothing_to_guess() -> None:
    same = Compared(0.5, 60.0, torch.arange(10.0), torch.arange(10.0))
    scores = {"client": dict.fromkeys((OWN, UNTRAINED, "as sent"), same)}
    content = {**results(scores, [[0, 1]], {}, ["as sent"], ("a", "b")), "chance": chance(None, None, 0.02)}
    assert [row[1] for row in rows(content)] == ["-", "-", "-", "-"]
    assert content["views"][0]["auc"] == pytest.approx(0.5)


def test_rows_show_what_was_guessed_beside_chance() -> None:
    found = Compared(0.9, 80.0, torch.arange(10.0) + 5, torch.arange(10.0))
    views = ["as sent", "sum of 3"]
    scores = {"client": dict.fromkeys((OWN, UNTRAINED, *views), found)}
    guesses = {"as sent": [[0, 1]], "sum of 3": [[2, 3]]}
    content = {**results(scores, [[0, 1]], guesses, views, tuple("abcd")), "chance": chance(0.5, 0.9, 0.4)}
    by_view = {row[0]: row[1:3] for row in rows(content)}
    assert by_view["as sent"] == ["100.0 %", "50.0 %"]
    assert by_view["sum of 3"] == ["0.0 %", "50.0 %"]
    assert rows(content)[-1][1:3] == ["50.0 % (90.0 %)", "1.0 % (40.0 %)"]
    assert client_rows(content, "sum of 3")[0][:3] == ["client", "a, b", "c, d"]


def test_runs_that_cannot_be_audited_are_refused_in_a_sentence(finished: RunFolder, tmp_path: Path, call: Call) -> None:
    path = Path(shutil.copytree(finished.path, tmp_path / "other"))
    RunFolder(path).write_config(tiny("method=fedbyol", "clients.models=['resnet8']"))
    code, _, said = call("audit", path)
    assert (code, "trained with method 'fedbyol'" in said.replace("\n", " ")) == (2, True)
    RunFolder(path).write_config(tiny("privacy.secure=true", "alignment.form=sketch"))
    code, _, said = call("audit", path)
    assert (code, "has no single contribution" in said.replace("\n", " ")) == (2, True)
    RunFolder(path).write_config(finished.read_config())
    for file in ("server.safetensors", "server-before.safetensors"):
        (path / file).unlink()
    code, _, said = call("audit", path)
    assert (code, "has not finished a round of training" in said.replace("\n", " ")) == (2, True)
    RunFolder(path).write_json("facts.json", {**finished.read_json("facts.json"), "site": "nodes"})
    code, _, said = call("audit", path)
    assert (code, "not a split of one data set" in said.replace("\n", " ")) == (2, True)
