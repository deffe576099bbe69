"""The report page for trained runs and for hand-made folders, also tested in a real browser."""

import base64
import io
import json
import re
import warnings
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib import rc_context
from PIL import Image
from typer.testing import CliRunner

from helpers.browser import CHROMIUM, Browser
from hetero_ssfl.cli import app
from hetero_ssfl.config import load_config
from hetero_ssfl.errors import ConfigError, RunError
from hetero_ssfl.federation.start import start
from hetero_ssfl.methods import FedAvg
from hetero_ssfl.report import plots
from hetero_ssfl.report.blocks import Figures, Folded
from hetero_ssfl.report.gallery import Pictures, View, maps, neighbours, similarity
from hetero_ssfl.report.page import render, write_report
from hetero_ssfl.report.rad_features import RadFeatures, left_out, plane, thumbnail
from hetero_ssfl.report.reported_run import read_runs, short_names
from hetero_ssfl.report.tables import without_folders
from hetero_ssfl.runs.files import save_tensors
from hetero_ssfl.runs.folder import RunFolder
from hetero_ssfl.use.encoders import read_rad_features

SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
HOSTILE = "<script>window.hit=1</script>\"'><img src=x onerror=window.hit=1>\ud800"
SMALL = ["rounds=1", "evaluation.epochs=2", "evaluation.probes=['linear']"]


class Page(HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data + " "

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def make(path: Path, scores: dict[str, float], *overrides: str, **more: Any) -> Path:
    """Write a finished run without encoders, like that of a server whose participants are on other machines."""
    folder = RunFolder.create(path, load_config("smoke", list(overrides)), lambda _: None)
    facts = {"site": "nodes", "rad_digest": "0" * 64, "skipped_images": 0, **more.get("facts", {})}
    folder.write_json("facts.json", facts)
    models = {name: {"encoder": more.get("encoder", "resnet8"), "parameters": 7} for name in scores}
    clients = {name: {"linear_all": score} for name, score in scores.items()} if more.get("labels", True) else {}
    folder.write_json("results.json", {"clients": clients, "models": models, "mean": {}, "untrained": {}})
    names = list(scores)
    events = [
        {"event": "client", "round": 1, "client": n, "bytes_up": 5000, "bytes_down": 9, "loss_ssl": 1.0} for n in names
    ]
    events += [{"event": "round", "round": 1, "replies": len(names), "seconds": 2.0}]
    lines = [json.dumps(event) + "\n" for event in events + more.get("events", [])]
    (path / "events.jsonl").write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Train two tiny runs."""
    root = tmp_path_factory.mktemp("runs")
    runs = {"alone": ["method=local"], "together": []}
    return {
        run: start(load_config("smoke", [*SMALL, *settings]), root / run, lambda _: None).path
        for run, settings in runs.items()
    }


@pytest.fixture(scope="module")
def pages(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pages")
    hostile = make(
        root / "runs" / "a<b>&'\"",
        {HOSTILE: 50.0, "b": 40.0},
        encoder=HOSTILE,
        facts={"classes": [HOSTILE, "y"], "holdings": {HOSTILE: [3, 0], "b": [0, 2]}},
        events=[
            {"event": "client", "round": 1, "client": HOSTILE, "excluded": HOSTILE, HOSTILE: 3.0},
            {"event": "kernels", "round": 1, "clients": [HOSTILE, "b"], "mutual_cka": [[1, 0.5], [0.5, 1]]},
        ],
    )
    written = {"one": [runs["together"]], "several": [runs["alone"], runs["together"]], "hostile": [hostile]}
    for name, paths in written.items():
        write_report(paths, root / f"{name}.html", read_rad_features)
    return {name: root / f"{name}.html" for name in written}


# --- the content of the page -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["one", "several", "hostile"])
def test_a_page_is_one_file_that_loads_nothing(pages: dict[str, Path], name: str) -> None:
    text = pages[name].read_text()
    page = Page(text)
    assert len(text) < 3_000_000
    addresses = [
        a[key] for _, a in page.elements for key in ("href", "src", "xlink:href", "srcset", "action") if key in a
    ]
    assert addresses
    assert all(str(address).startswith(("#", "data:")) for address in addresses)
    assert not page.all("script")
    assert "url(" not in text
    assert "@import" not in text
    assert not re.search(r"(https?|file|ftp)://", text)


@pytest.mark.parametrize("name", ["one", "several", "hostile"])
def test_a_page_is_accessible_to_screen_readers(pages: dict[str, Path], name: str) -> None:
    page = Page(pages[name].read_text())
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("title")) > 1  # the page's title and tooltips in charts
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))
    drawings = [a for a in page.all("svg") if a.get("aria-hidden") != "true"]
    assert all(a["role"] == "img" and len(a["aria-label"] or "") > 5 for a in drawings)
    assert len(page.all("figure")) == len(page.all("figcaption"))
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))
    targets = {str(a["href"])[1:] for a in [*page.all("a"), *page.all("use")]}
    assert targets <= set(ids)


def test_one_run_shows_untrained_and_trained(pages: dict[str, Path], runs: dict[str, Path]) -> None:
    page = Page(pages["one"].read_text())
    results = json.loads((runs["together"] / "results.json").read_text())
    for client, scores in results["clients"].items():
        assert client in page.words
        assert f" {scores['linear_all']:.1f} " in page.words
        assert f" {results['untrained'][client]['linear_all']:.1f} " in page.words
    assert re.search(r"different encoders\s+3\s", page.words)
    assert "[alignment]" in page.words
    assert "Python" in page.words


def test_the_kernels_at_the_server_are_drawn_for_each_round(pages: dict[str, Path]) -> None:
    labels = [a.get("aria-label") or "" for a in Page(pages["several"].read_text()).all("svg")]
    maps = [label for label in labels if label.startswith("Mutual CKA of 3 clients")]
    assert [label.split(", ")[1].split(".")[0] for label in maps] == [
        "untrained",
        "alone",
        "together",
        "round 0",
        "round 1",
    ]
    assert "Spectrum of the consensus, together" in labels


def test_pictures_are_stored_once_and_shown_often(pages: dict[str, Path]) -> None:
    page = Page(pages["one"].read_text())
    held = page.all("image")
    assert 30 < len(held) <= 64
    assert len(page.all("use")) > 5 * len(held)
    nearest = [a for a in page.all("svg") if (a.get("aria-label") or "").startswith("nearest for client-000")]
    assert len(nearest) == 2 * 4  # before and after, for each of four images


def test_several_runs_are_compared_client_by_client(tmp_path: Path) -> None:
    first = make(tmp_path / "alone", {"a": 10.0, "b": 20.0}, "method=local")
    second = make(tmp_path / "together", {"a": 25.0, "b": 19.0})
    words = Page(render([first, second], read_rad_features)).words
    assert "+15.0" in words
    assert "-1.0" in words
    assert re.search(r"mean accuracy\s+15\.0 % \(linear probe, all classes, test images\)\s+22\.0 %", words)
    assert re.search(r"difference to alone\s+-\s+\+7\.0, higher for 1 of 2 clients", words)
    assert re.search(r"method\s+local\s+hetero-ssfl", words)  # the setting in which they differ


def test_runs_that_differ_in_the_seed_are_grouped(tmp_path: Path) -> None:
    paths = [make(tmp_path / f"seed{s}", {"a": 10.0 + 2 * s}, f"seed={s}") for s in (0, 1)]
    words = Page(render(paths, read_rad_features)).words
    assert "Over seeds" in words
    assert re.search(r"0, 1\s+11\.0\s+1\.4", words)


def test_text_from_other_machines_is_escaped(pages: dict[str, Path]) -> None:
    page = Page(pages["hostile"].read_text())
    assert not page.all("script")
    assert not page.all("img")
    assert not [a for _, a in page.elements if any(key.startswith("on") for key in a)]
    shown = "<script>window.hit=1</script>\"'><img src=x onerror=window.hit=1>"
    assert page.words.count(shown) >= 4


def test_a_page_without_labels_says_so(tmp_path: Path) -> None:
    words = Page(render([make(tmp_path / "a", {"x": 1.0}, labels=False)], read_rad_features)).words
    assert re.search(r"mean accuracy\s+unknown: the data have no labels", words)
    assert "Accuracy and classes" not in words
    assert "None" not in words.replace("None: every reply", "")


def test_without_labels_the_page_begins_with_what_the_encoders_agree_on(tmp_path: Path) -> None:
    names = ["university-hospital-north", "clinic-b"]

    def features(folder: RunFolder, trained: bool) -> RadFeatures:
        z = torch.randn(12, 4, generator=torch.Generator().manual_seed(int(trained)))
        return RadFeatures(names, [z, z] if trained else [z, z.flip(0)])

    events = [
        {"event": "client", "round": r, "client": c, "loss_ssl": 1.0 + k, "examples": 9}
        for r in (1, 2)
        for k, c in enumerate(names)
    ]
    run = make(tmp_path / "a", dict.fromkeys(names, 1.0), labels=False, events=events)
    page = Page(render([run], features))
    words = page.words
    assert "agreement of the clients (mutual CKA), a 1.00" in " ".join(words.split())
    assert "of 5 nearest images that two clients have in common, a 5.0" in " ".join(words.split())
    places = [words.index(title) for title in ("Nearest neighbours", "Similarity of the clients", "Round by round")]
    assert places == sorted(places)
    names_drawn = [words.index(name) for name in ("1 clinic-b", "2 university-hospital-north")]
    assert names_drawn == sorted(names_drawn)
    assert "clinic-b, round 2: 2" in words  # the tooltip at the end of a client's line


def test_faults_are_listed_with_their_reasons(tmp_path: Path) -> None:
    events = [
        {"event": "client", "round": 1, "client": "b", "excluded": "b sent NaN from /home/me/x/file.bin."},
        {"event": "client", "round": 1, "client": "a", "warning": "features have collapsed"},
        {"event": "round", "round": 1, "seconds": 1.0, "away": ["c", "d"]},
    ]
    words = Page(render([make(tmp_path / "a", {"a": 1.0, "b": 2.0}, events=events)], read_rad_features)).words
    assert re.search(r"replies left out\s+1\s", words)
    assert "b sent NaN from file.bin." in words
    assert "features have collapsed" in words
    assert "c, d" in words
    assert "Total: left out 1, warning 1, away 1." in words


def test_a_page_without_encoders_lacks_only_their_sections(tmp_path: Path) -> None:
    words = Page(render([make(tmp_path / "server", {"a": 50.0})], read_rad_features)).words
    assert "on other machines" in words
    assert "50.0" in words
    assert str(tmp_path) not in words


def test_an_unfinished_run_has_a_page(tmp_path: Path) -> None:
    evaluation = {"event": "evaluation", "round": 1, "split": "validation", "clients": {"a": {"linear_all": 61.5}}}
    path = make(tmp_path / "a", {"a": 1.0}, events=[evaluation])
    (path / "results.json").unlink()
    words = Page(render([path], read_rad_features)).words
    assert re.search(r"rounds done\s+1 of 2\s", words)
    assert "61.5 % (linear probe, all classes, validation images)" in words


def test_finished_and_unfinished_runs_are_compared_on_the_same_images(tmp_path: Path) -> None:
    def probed(score: float) -> list[dict[str, Any]]:
        return [{"event": "evaluation", "round": 1, "split": "validation", "clients": {"a": {"linear_all": score}}}]

    done = make(tmp_path / "done", {"a": 90.0}, "method=local", events=probed(50.0))
    going = make(tmp_path / "going", {"a": 1.0}, events=probed(61.5))
    (going / "results.json").unlink()
    words = Page(render([done, going], read_rad_features)).words
    assert re.search(r"50\.0 % \(linear probe, all classes, validation images\)\s+61\.5 %", words)
    assert re.search(r"difference to done\s+-\s+\+11\.5", words)
    assert "90.0" not in words
    assert read_runs([going, done])[1].encoder("a") == "resnet8"


def test_a_run_without_events_has_a_page(tmp_path: Path) -> None:
    path = make(tmp_path / "a", {"a": 1.0})
    (path / "results.json").unlink()
    (path / "events.jsonl").unlink()
    assert "No round has been finished yet" in Page(render([path], read_rad_features)).words


def test_extreme_values_are_not_drawn(tmp_path: Path) -> None:
    events = [
        {"event": "client", "round": r, "client": "a", "loss_ssl": v} for r, v in ((2, 1e308), (3, -1e308), (4, 1.5))
    ]
    text = render([make(tmp_path / "a", {"a": 1.0}, events=events)], read_rad_features)
    assert "nan" not in text
    assert "inf" not in Page(text).words
    assert "round 4: 1.5" in Page(text).words


def test_samples_that_are_not_images_are_drawn_as_dots(tmp_path: Path, runs: dict[str, Path]) -> None:
    path = make(tmp_path / "sensors", {"a": 1.0})
    save_tensors(path / "rad.safetensors", {"pixels": torch.randn(20, 3, 50)})
    (run,) = read_runs([path])
    view = View("trained", "c0", run, RadFeatures(["a"], [torch.randn(20, 4)]))
    pictures = Pictures(run)
    block = maps([view], pictures, "pca", "").blocks[0]
    assert isinstance(block, Figures)
    drawing = str(block.figures[0].drawing)
    assert drawing.count("<title>") == 20
    assert "not images" in neighbours([view], pictures, "").intro
    assert not pictures.urls


def words_of_federate(path: Path, rad: torch.Tensor, *overrides: str) -> str:
    """Return the text of a page about a run of `federate`."""
    facts = {"site": "python", "given": {"a": {}}, "classes": ["x"], "holdings": {"a": [3]}}
    make(path, {"a": 50.0}, "data.source=given", *overrides, facts=facts)
    save_tensors(path / "rad.safetensors", {"pixels": rad})
    return Page(render([path], read_rad_features)).words


def test_data_passed_from_python_are_called_samples_unless_they_are_images(tmp_path: Path) -> None:
    words = words_of_federate(tmp_path / "sensors", torch.randn(20, 3, 50))
    assert re.search(r"trained on\s+unlabeled samples of their own", words)
    assert "images of given" not in words
    assert "50.0 % (linear probe, all classes, test samples)" in words
    assert "3 samples; the area" in words
    assert "loss on own samples" in words
    assert "Similarity of the clients on the shared samples" in words
    assert "shared images" not in words
    words = words_of_federate(tmp_path / "photos", torch.zeros(20, 3, 8, 8, dtype=torch.uint8))
    assert re.search(r"trained on\s+unlabeled images of their own", words)


def test_the_instructions_to_repeat_a_run_depend_on_its_site(tmp_path: Path) -> None:
    words = words_of_federate(tmp_path / "a", torch.randn(20, 3, 50))
    assert "Clients do not send weights, nor samples that are not in the RAD." in words  # the RAD may be theirs
    assert "Call federate(...) again with the same clients, RAD and settings" in words
    assert "hetero-ssfl run settings.toml" not in words
    assert (
        "save these settings as federation.toml"
        in Page(render([make(tmp_path / "server", {"a": 1.0})], read_rad_features)).words
    )
    nodes = make(tmp_path / "nodes", {"a": 1.0}, facts={"nodes": [str(tmp_path / "node.toml")]})
    assert "hetero-ssfl run settings.toml --node NODE.toml" in Page(render([nodes], read_rad_features)).words


def test_a_simulated_run_is_repeated_from_its_settings(pages: dict[str, Path]) -> None:
    words = Page(pages["one"].read_text()).words
    assert "start: hetero-ssfl run settings.toml " in words
    assert re.search(r"trained on\s+unlabeled images of digits", words)


class Taught(FedAvg):
    """A user's subclass of a method that uses labels."""


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ("fedavg", "labeled data"),
        ("fedbyol", "unlabeled data"),
        (f"{__name__}:Taught", "labeled data"),
        ("gone_from_here:Method", "data"),
    ],
)
def test_a_page_says_whether_the_method_uses_labels_if_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, sentence: str
) -> None:
    monkeypatch.setenv("HETERO_SSFL_TRUST", f"{__name__},gone_from_here")
    holdings = {"classes": ["x"], "holdings": {"a": [3]}}
    words = Page(
        render([make(tmp_path / "a", {"a": 1.0}, f"method={method}", facts=holdings)], read_rad_features)
    ).words
    assert re.search(rf"trained on\s+{sentence.replace('data', 'images of their own')}", words)
    assert ("no loss uses them" in words) == ("unlabeled" in sentence)


def test_a_page_says_what_is_left_out(tmp_path: Path) -> None:
    assert left_out(24, 512) == ""
    assert "the first 24 of 25 clients" in left_out(25, 512)
    assert "512 of 513 rows of the RAD" in left_out(24, 513)
    names = [f"c{k}" for k in range(9)]
    path = make(tmp_path / "a", dict.fromkeys(names, 1.0))
    save_tensors(path / "rad.safetensors", {"pixels": torch.zeros(160, 1, 8, 8, dtype=torch.uint8)})
    (run,) = read_runs([path])
    torch.manual_seed(0)
    view = View("trained", "c0", run, RadFeatures(names, [torch.randn(160, 4) for _ in names], left_out(9, 600)))
    pictures = Pictures(run)
    assert "512 of 600 rows" in similarity([run], [view], "").intro
    assert "Shown for the first 8 of 9 clients." in neighbours([view], pictures, "").intro
    section = maps([view], pictures, "pca", "")
    assert "150 of 160 are drawn." in section.intro
    folded = section.blocks[1]
    assert isinstance(folded, Folded)
    assert "first 8 of 9 clients" in folded.title
    fewer = View("trained", "c0", run, RadFeatures(names[:8], view.features.features[:8]))
    assert "Shown for" not in neighbours([fewer], pictures, "").intro


# --- the encoders' features ---------------------------------------------------------------------------


def test_neighbours_point_in_the_same_direction() -> None:
    angles = torch.tensor([0.0, 0.1, 3.0, 3.1, 1.5, 1.6])
    features = torch.stack([angles.cos(), angles.sin()], 1)
    look = RadFeatures(["a", "b"], [features, 5 * features @ torch.tensor([[0.0, 1.0], [-1.0, 0.0]])])
    assert [row[0] for row in look.neighbours(1)[0].tolist()] == [1, 0, 3, 2, 5, 4]
    assert look.shared_neighbours(1) == 1.0
    assert RadFeatures(["a", "b"], [features, features.flip(0)[[3, 0, 4, 1, 5, 2]]]).shared_neighbours(1) == 0.0
    assert RadFeatures(["a"], [features]).shared_neighbours(1) is None


def test_neighbours_are_ordered_by_cosine() -> None:
    features = torch.tensor([[9.0, 0.0], [9.0, 1.0], [8.0, -0.5], [7.0, 2.0], [10.0, 1.5]])  # all on one side
    cosine = torch.cosine_similarity(features[:, None], features, dim=2).fill_diagonal_(-2)
    assert torch.equal(RadFeatures(["a"], [features]).neighbours(2)[0], cosine.topk(2).indices)


def test_the_map_of_two_dimensional_features_keeps_distances() -> None:
    torch.manual_seed(0)
    features = torch.randn(30, 2).double()
    centred = features - features.mean(0)
    places, words = plane(centred @ centred.T, "pca")
    there = torch.tensor(places).double()
    assert torch.allclose(torch.cdist(there, there), torch.cdist(features, features))
    assert sum(map(int, re.findall(r"(\d+)%", words))) == pytest.approx(100, abs=1)


def test_tsne_separates_two_clusters() -> None:
    torch.manual_seed(0)
    features = torch.cat([torch.randn(15, 3), torch.randn(15, 3) + 20])
    centred = features - features.mean(0)
    places, words = plane((centred @ centred.T).double(), "tsne")
    distance = torch.cdist(torch.tensor(places), torch.tensor(places)).fill_diagonal_(torch.inf)
    assert words == "t-SNE"
    assert all((row.argmin() < 15) == (k < 15) for k, row in enumerate(distance))


@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 16, 16)])
def test_small_images_are_kept_exactly(shape: tuple[int, int, int]) -> None:
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8)
    content = base64.b64decode(thumbnail(pixels).partition("base64,")[2])
    kept = torch.tensor(list(Image.open(io.BytesIO(content)).tobytes()), dtype=torch.uint8)
    assert torch.equal(kept, pixels.permute(1, 2, 0).flatten())


def test_thumbnails_of_large_images_are_small() -> None:
    assert len(thumbnail(torch.randint(0, 256, (3, 96, 96), dtype=torch.uint8))) < 4000


# --- charts ----------------------------------------------------------------------------------------


def test_a_curve_is_drawn_at_its_values() -> None:
    line = plots.Line("c0", [(0, 0.0, "low"), (1, 10.0, "high")])
    text = str(plots.line_chart([line], "round", "words"))
    (x0, y0), (x1, y1) = [tuple(map(float, found)) for found in re.findall(r"translate\(([\d.]+) ([\d.]+)\)", text)]
    assert x0 < x1
    assert y0 > y1  # y grows downwards in SVG
    ticks = {float(v): float(y) for y, v in re.findall(r' y="([\d.]+)"[^>]*>([\d.]+)<', text)}
    assert ticks[0] - ticks[10] == pytest.approx(y0 - y1, abs=0.2)


def test_a_chart_has_tooltips_and_colours_of_the_style_sheet_and_shows_text_as_it_is() -> None:
    with rc_context({"text.usetex": True}), warnings.catch_warnings():  # what a user set for other plots
        warnings.simplefilter("error")
        text = str(plots.dot_chart([("$a^2$\ud800\x1b 客户", [("c1", 1.0, "one <b>")])], "$x$", "words"))
    assert "<title>one &lt;b&gt;</title>" in text
    assert "var(--c1)" in text
    assert "$a^2$?? 客户" in text
    assert plots.COLOURS["c1"] not in text
    assert plots.line_chart([plots.Line("c0", [(0, float("nan"), "")])], "round", "words") == ""


def test_numbers_in_a_heat_map_have_enough_contrast() -> None:
    values = torch.linspace(0, 1, 64).view(8, 8).tolist()
    text = str(plots.heat_chart(values, list("abcdefgh"), "words"))
    cells = re.findall(r'd="M[^"]*" style="fill: (#\w{6})"', text)
    inks = re.findall(r'text-anchor: middle(; fill: #ffffff)?;?"[^>]*>\d\.\d\d<', text)
    assert len(cells) == len(inks) == 64
    for cell, white in zip(cells, inks, strict=True):
        channels = [int(cell[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        bright = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
        assert (1.05 / (bright + 0.05) if white else (bright + 0.05) / 0.05) >= 4.4


# --- names, paths, the command ---------------------------------------------------------------------


def test_labels_of_runs_are_short_and_unique() -> None:
    assert short_names([Path("/x/a"), Path("/x/b")]) == ["a", "b"]
    assert short_names([Path("/x/s0/a"), Path("/x/s1/a")]) == ["s0/a", "s1/a"]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("run --run-dir /home/me/runs/a -q", "run --run-dir a -q"),
        ("source = '/data/me/images'", "source = 'images'"),
        ("hub id owner/name, 3/4, ./a/b", "hub id owner/name, 3/4, ./a/b"),
    ],
)
def test_absolute_paths_are_shortened(given: str, kept: str) -> None:
    assert without_folders(given) == kept


def test_the_command_writes_a_page(runs: dict[str, Path], tmp_path: Path) -> None:
    output = tmp_path / "deep" / "a.html"
    done = CliRunner().invoke(app, ["report", str(runs["together"]), "-o", str(output), "--map", "tsne"])
    assert done.exit_code == 0, done.output
    assert "t-SNE" in output.read_text()
    assert str(runs["together"].parent) not in output.read_text()


def test_wrong_input_raises_a_short_error(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must end in \.html"):
        write_report([runs["together"]], tmp_path / "a.pdf", read_rad_features)
    with pytest.raises(RunError, match="is not a run folder"):
        write_report([tmp_path / "nothing"], tmp_path / "a.html", read_rad_features)
    with pytest.raises(RunError, match="listed twice"):
        write_report([runs["together"], runs["together"]], tmp_path / "a.html", read_rad_features)
    assert not list(tmp_path.glob("*.html"))


# --- in a real browser -----------------------------------------------------------------------------

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: run `make browser` as root")

OPEN_ALL = "document.querySelectorAll('details').forEach(d => d.open = true)"
CONTRASTS = """(() => {
  const parse = c => (c.match(/[\\d.]+/g) || []).map(Number);
  const luminance = c => c.slice(0, 3).map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const opaque = c => c.length === 3 || (c.length > 3 && c[3] > 0.99);
  const behind = (x, y) => {
    for (const other of document.elementsFromPoint(x, y)) {
      const style = getComputedStyle(other);
      const inside = other instanceof SVGElement && other.tagName !== 'svg';
      const colour = parse(inside ? style.fill : style.backgroundColor);
      if ((!inside || other.tagName === 'path') && opaque(colour)) return colour;
    }
    return parse(getComputedStyle(document.body).backgroundColor);
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement;
    if (!node.textContent.trim() || element.tagName === 'title') continue;
    const range = document.createRange(); range.selectNodeContents(node);
    const box = range.getClientRects()[0];
    if (!box || box.right > innerWidth || box.left < 0) continue;
    const style = getComputedStyle(element);
    const ink = parse(element instanceof SVGElement ? style.fill : style.color);
    const ground = behind(box.left + box.width / 2, box.top + box.height / 2);
    const [a, b] = [luminance(ink), luminance(ground)].sort((p, q) => q - p);
    found.push([(a + 0.05) / (b + 0.05), node.textContent.trim().slice(0, 40)]);
  }
  return found;
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@needs_browser
@pytest.mark.parametrize("name", ["one", "several", "hostile"])
def test_the_browser_reports_no_errors_and_fetches_nothing(browser: Browser, pages: dict[str, Path], name: str) -> None:
    browser.open(pages[name])
    said = browser.said("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
    assert not said
    assert not browser.said("Page.javascriptDialogOpening")
    fetched = [found["request"]["url"] for found in browser.said("Network.requestWillBeSent")]
    assert [url for url in fetched if not url.startswith("data:")] == [pages[name].as_uri()]
    assert browser.evaluate("window.hit === undefined")


@needs_browser
def test_the_browser_test_detects_errors_and_requests(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        "<script>console.error('x'); window.hit = 1; nothing()</script><img src='http://127.0.0.1:9/x.png'>"
    )
    browser.open(page)
    assert browser.said("Runtime.consoleAPICalled")
    assert browser.said("Runtime.exceptionThrown")
    assert any("127.0.0.1" in found["request"]["url"] for found in browser.said("Network.requestWillBeSent"))
    assert not browser.evaluate("window.hit === undefined")


@needs_browser
@pytest.mark.parametrize("width", [1280, 375])
@pytest.mark.parametrize("name", ["one", "several", "hostile"])
def test_every_drawing_is_visible_and_the_page_fits_the_width(
    browser: Browser, pages: dict[str, Path], name: str, width: int
) -> None:
    browser.open(pages[name], width)
    browser.evaluate(OPEN_ALL)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    sizes = browser.evaluate(
        "[...document.querySelectorAll('svg[role=img], svg[role=img] use')]"
        ".map(e => e.getBoundingClientRect()).map(b => [b.width, b.height])"
    )
    assert len(sizes) > (4 if name == "hostile" else 200)
    assert all(w >= 5 and h >= 5 for w, h in sizes)
    figures = browser.evaluate("[...document.querySelectorAll('figure svg')].map(e => e.getBoundingClientRect().width)")
    assert min(figures) > 200


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["several", "hostile"])
def test_all_text_has_enough_contrast(browser: Browser, pages: dict[str, Path], name: str, dark: bool) -> None:
    browser.open(pages[name], dark=dark)
    browser.evaluate(OPEN_ALL)
    browser.resize(1280, browser.evaluate("document.documentElement.scrollHeight"))
    found = browser.evaluate(CONTRASTS)
    assert len(found) > 100
    assert not [(ratio, words) for ratio, words in found if ratio < 4.5]


@needs_browser
def test_plots_follow_light_and_dark_mode(browser: Browser, pages: dict[str, Path]) -> None:
    script = """['body', '.chart text', 'path[style*="--c0"]', 'path[style*="--c1"]', '.card', '.plane'].map(name => {
        const style = getComputedStyle(document.querySelector(name));
        return [style.backgroundColor, style.fill, style.stroke].join();
    })"""
    seen = []
    for dark in (False, True):
        browser.open(pages["several"], dark=dark)
        seen.append(browser.evaluate(script))
    assert all(light != dark for light, dark in zip(*seen, strict=True))


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (375, False), (375, True)])
def test_a_screenshot_is_saved(browser: Browser, pages: dict[str, Path], width: int, dark: bool) -> None:
    browser.open(pages["several"], width, dark=dark)
    browser.resize(width, browser.evaluate("document.documentElement.scrollHeight"))
    path = SCREENSHOTS / f"report-{width}-{'dark' if dark else 'light'}.png"
    browser.screenshot(path)
    image = Image.open(path).convert("RGB")
    assert image.width == width
    assert len(image.getcolors(1 << 24) or []) > 200
    pixel = image.getpixel((2, 2))
    assert isinstance(pixel, tuple)
    assert (sum(pixel) < 128) == dark
