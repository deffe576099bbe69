"""`hetero-ssfl neighbours`: one self-contained page of nearest images."""

import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from PIL import Image

from hetero_ssfl.learning.features import extract_features
from hetero_ssfl.runs.files import load_tensors
from hetero_ssfl.use.models import find_models

Call = Callable[..., tuple[int, str, str]]


class Page(HTMLParser):
    """The headings, and the alt texts of the pictures below each."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags = [""]
        self.addresses: list[str] = []
        self.headings: list[str] = []
        self.alts: list[list[str]] = []
        self.feed(path.read_text())
        assert not {"script", "iframe", "object"} & set(self.tags)
        assert all(address.startswith("data:") for address in self.addresses)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = dict(attributes)
        self.addresses += [str(found[key]) for key in ("src", "href") if key in found]
        if tag in ("h2", "h3"):
            self.headings.append("")
            self.alts.append([])
        if tag == "img":
            assert str(found["src"]).startswith("data:image/")
            self.alts[-1].append(str(found["alt"]))

    def handle_data(self, data: str) -> None:
        if self.tags[-1] in ("h2", "h3") and not self.headings[-1]:
            self.headings[-1] = data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, run: Path) -> Path:
    """Write the RAD to files, one with a name that must be escaped in HTML."""
    path = tmp_path_factory.mktemp("images")
    for row, image in enumerate(load_tensors(run / "rad.safetensors")[0]["pixels"]):
        name = '<b>"&amp;.png' if row == 3 else f"{row:02d}.png"
        Image.fromarray(image[0].numpy()).save(path / name)
    return path


def test_by_default_all_clients_answer_random_queries_on_the_rad(run: Path, tmp_path: Path, call: Call) -> None:
    assert call("neighbours", run, "-o", tmp_path / "a.html")[0] == 0
    page = Page(tmp_path / "a.html")
    assert len(page.headings) == 4 * (1 + 3)
    assert page.headings[1:4] == [
        "client-000, resnet8(width=8)",
        "client-001, mobilenet(width=8, depth=1)",
        "client-002, vit(width=32, depth=1, heads=2)",
    ]
    assert [len(alts) for alts in page.alts] == [1, 8, 8, 8] * 4
    call("neighbours", run, "-o", tmp_path / "again.html")
    assert (tmp_path / "again.html").read_bytes() == (tmp_path / "a.html").read_bytes()
    call("neighbours", run, "--seed", "1", "-o", tmp_path / "other.html")
    assert Page(tmp_path / "other.html").headings != page.headings


def test_several_clients_can_be_chosen(run: Path, tmp_path: Path, call: Call) -> None:
    chosen = ["--client", "2", "--client", "client-000", "--query", "5"]
    assert call("neighbours", run, *chosen, "-o", tmp_path / "a.html")[0] == 0
    assert [name.partition(",")[0] for name in Page(tmp_path / "a.html").headings[1:]] == ["client-002", "client-000"]


def test_the_pictures_are_the_nearest_by_the_encoders_features(run: Path, tmp_path: Path, call: Call) -> None:
    assert call("neighbours", run, "--client", "2", "--query", "5", "-k", "3", "-o", tmp_path / "a.html")[0] == 0
    page = Page(tmp_path / "a.html")
    features = extract_features(find_models(run, "2")[0].load(), load_tensors(run / "rad.safetensors")[0]["pixels"])
    cosine = torch.cosine_similarity(features[5], features)
    order = [row for row in cosine.argsort(descending=True).tolist() if row != 5][:3]
    assert page.alts == [["query: image 5"], [f"image {row}, similarity {cosine[row]:.3f}" for row in order]]


def test_a_query_is_the_path_of_an_image_or_another_file(run: Path, folder: Path, tmp_path: Path, call: Call) -> None:
    shutil.copy(folder / "07.png", tmp_path / "guest.png")
    command = ["neighbours", run, "--client", "0", "--images", folder, "-k", "2", "-o", tmp_path / "a.html"]
    assert call(*command, "--query", "07.png", "--query", tmp_path / "guest.png")[0] == 0
    known, guest = Page(tmp_path / "a.html").alts[1::2]
    assert not known[0].startswith("07.png")
    assert guest[0] == "07.png, similarity 1.000"
    assert guest[1] == known[0]


def test_names_are_escaped_in_the_page(run: Path, folder: Path, tmp_path: Path, call: Call) -> None:
    command = ["neighbours", run, "--client", "0", "--images", folder, "-k", "40", "-o", tmp_path / "a.html"]
    assert call(*command, "--query", "00.png")[0] == 0
    page = Page(tmp_path / "a.html")
    assert len(page.alts[1]) == 31  # all others, although more are requested
    assert any(alt.startswith('<b>"&amp;.png, similarity') for alt in page.alts[1])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-o", "a.pdf"], "must end in .html"),
        (["-o", "a.html", "--query", "99"], "--query '99' is neither a file"),
        (["-o", "a.html", "--query", "cat.png"], "--query 'cat.png' is neither a file"),
        (["-o", "a.html", "--client", "5"], "there is no client '5'"),
        (["-o", "a.html", "--images", "one"], "there is only one image"),
    ],
)
def test_wrong_arguments_give_a_one_line_error(
    arguments: list[str], sentence: str, run: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("one").mkdir()
    Image.new("L", (16, 16)).save("one/a.png")
    code, _, said = call("neighbours", run, *arguments)
    assert code == 2
    assert sentence in said
    assert len(said.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_model_without_its_run_needs_images_to_search(run: Path, folder: Path, tmp_path: Path, call: Call) -> None:
    alone = tmp_path / "model"
    shutil.copytree(run / "models" / "client-001", alone)
    assert "Name other --images" in call("neighbours", alone, "-o", tmp_path / "a.html")[2]
    assert call("neighbours", alone, "--images", folder, "-o", tmp_path / "a.html")[0] == 0
