"""Mistakes of users, as command lines and Python calls: one sentence, exit code 2, and nothing is written.

The sentence has the value found, what was expected, and a remedy. tests/api/test_wrong_arguments.py has those that only
`federate` can get.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from PIL import Image

from helpers.pieces import WRONG_ENCODERS
from hetero_ssfl import Client, federate
from hetero_ssfl.config import load_config
from hetero_ssfl.errors import HeteroSSFLError
from hetero_ssfl.federation.start import start

Call = Callable[..., tuple[int, str, str]]

CODE = f"""{WRONG_ENCODERS}
class NotFinite(nn.Conv2d):
    def __init__(self):
        super().__init__(1, 4, 8)

    def forward(self, x):
        return super().forward(x).flatten(1) / 0 * 0

def number(a, b):
    return 1.0

def failing(a, b):
    raise ValueError("no such kernel")

def half(batch, rng):
    return batch[: len(batch) // 2]
"""

SMALL = {
    "data.source": "good",
    "data.side": "8",
    "data.limit": "40",
    "data.validation": "0",
    "partition.kind": "iid",
    "rad.size": "8",
    "clients.count": "2",
    "clients.models": "['resnet8(width=4)']",
    "rounds": "1",
    "local_epochs": "1",
}


def train(config: str = "smoke", run_dir: str = "new", **changes: str) -> list[str]:
    """Return a command that would train for a second, with `section__key` changed."""
    settings = {**SMALL, **{key.replace("__", "."): value for key, value in changes.items()}}
    return ["run", config, *(w for k, v in settings.items() for w in ("--set", f"{k}={v}")), "--run-dir", run_dir]


def from_python(*arrays: Any, rad: Any = 8, **options: Any) -> None:
    federate([Client(a, "resnet8(width=4)") for a in arrays], rad, run_dir="new", rounds=1, progress=False, **options)


def floats(scale: float = 1.0, low: float = 0.0) -> Any:
    return np.random.default_rng(0).uniform(low, scale, (30, 3, 8, 8)).astype("float32")


PLACE = "Choose a place where you may write"
EMBED = ["embed", "run", "--images", "good", "-o", "new.npy"]
MOVED = r"the images of the run in 'run' are not at 'photos' any more. Move them back, or .* evaluate run --images"

WRONG: dict[str, tuple[list[str] | Callable[[], None], str]] = {
    # --- configs and settings ---
    "unknown preset": (["run", "smok"], r"unknown preset 'smok', expected 'smoke' .*or a path that ends in .toml"),
    "a file that does not exist": (["run", "unequal.tml"], "'unequal.tml', expected 'unequal.toml'"),
    "node folder without settings": (
        ["run", "smoke", "--node", "empty"],
        "cannot read node settings 'empty/node.toml'",
    ),
    "preset with brackets": (["run", "smo[/k]"], r"unknown preset 'smo\[/k\]', expected"),
    "missing config": (["run", "missing.toml"], "cannot read config 'missing.toml': No such file.*Check the path"),
    "folder as config": (["run", "good"], "cannot read config 'good': Is a directory. Check the path"),
    "image as config": (["run", "good/00.png"], "cannot read config 'good/00.png': not a text file"),
    "invalid TOML": (["run", "bad.toml"], r"bad.toml is not valid TOML: .*line 1.* Fix that line"),
    "unknown key": (train(alignment__muu="1"), "unknown key 'alignment.muu', expected 'mu'"),
    "no equals sign": (["run", "smoke", "--set", "rounds"], "override 'rounds' has no '=', expected key=value"),
    "negative number": (train(alignment__mu="-1"), "alignment.mu = -1 is not possible: it should be greater than"),
    "word for a number": (train(alignment__mu="many"), "alignment.mu = 'many' is not possible: it should be a valid n"),
    "not a number": (train(optim__lr="nan"), "optim.lr = nan is not possible: it should be a finite number"),
    "no rounds": (train(rounds="0"), "rounds = 0 is not possible: it should be greater than 0"),
    "huge images": (train(data__side="100000"), "data.side = 100000 is not .*should be less than or equal to 4096"),
    "no models": (
        train(clients__models="[]"),
        r"clients.models = \[\] is not possible: it should have at least 1 item",
    ),
    "unknown method": (train(method="heterossfl"), "unknown method 'heterossfl', the nearest is 'hetero-ssfl'"),
    "unequal models": (
        train(method="fedbyol", clients__models="['resnet8', 'mobilenet']"),
        "Use one model, or use method = 'hetero-ssfl'",
    ),
    "missing device": (
        train(engine__device="cuda"),
        "engine.device = 'cuda' cannot be used.* Set engine.device = 'cpu'",
    ),
    "unknown setting": (
        ["list", "settings", "alignment.muu"],
        "no setting .* Did you mean 'alignment.mu'",
    ),
    "no encoder to list": (
        ["list", "encoders", "resnet"],
        "none of the encoders matches 'resnet'. Did you mean",
    ),
    "no preset to print": (["preset", "smok"], "unknown preset 'smok', expected 'smoke'"),
    # --- data ---
    "missing folder": (train(data__source="./no/such"), r"no data at './no/such', expected .*Check the path"),
    "missing path of two parts": (
        train(data__source="photos/holiday"),
        r"no file or folder 'photos/holiday' here, and the Hugging Face hub did not find it.*Correct the path",
    ),
    "describe a missing folder": (["data", "describe", "/no/such"], "no data at '/no/such', expected"),
    "describe a text file": (["data", "describe", "notes.txt"], "'notes.txt' is one file, expected a folder"),
    "empty folder": (train(data__source="empty"), "'empty' is empty, expected images.* Put them there"),
    "broken image": (
        train(data__source="broken"),
        r"image \d+ \(notes.png\).* cannot be decoded. Remove.* or skip such images with --on-bad-image skip",
    ),
    "unequal sizes": (["run", "unequal.toml"], r"is (9x9|8x8) pixels, but the first is (8x8|9x9). Set data.side, for"),
    "missing image column": (
        train(data__source="table.parquet"),
        r"'table.parquet' has the columns photo, kind, expected image or img. Set data.image_column",
    ),
    "missing label column": (
        train(data__source="table.parquet", data__image_column="photo", data__label_column="diagnosis"),
        r"has no label column 'diagnosis'. Change data.label_column",
    ),
    "numbers as images": (
        train(data__source="table.parquet", data__image_column="kind"),
        r"column 'kind' of 'table.parquet' holds Value\('int64'\), not images. Set data.image_column",
    ),
    "classes without labels": (train(partition__kind="classes"), "data has no labels. Set partition.kind = 'iid'"),
    "too many clients": (
        train(clients__count="400"),
        "are too few for clients.count = 400, which need 2 each. Change one",
    ),
    "RAD too large": (train(rad__size="5000"), "rad.size = 5000 are too few for clients.count = 2"),
    "RAD too small": (train(rad__size="3"), "3 RAD images is too small, expected at least 4.* Raise"),
    "float images": (
        lambda: from_python(floats()),
        r"are torch.float32, but .* that are square. If they are images, multiply them by 255 and convert",
    ),
    "float images up to 255": (
        lambda: from_python(floats(255.0)),
        "If they are images, convert them to uint8. For other data",
    ),
    "float data": (
        lambda: from_python(floats(3.0, -3.0)),
        r"uint16 images that are square. For other data, pass your own views with views=, a function",
    ),
    "nan in the data": (
        lambda: from_python(floats() * np.nan),
        "client-000 have values that are not finite.* Clean them",
    ),
    "images that are no squares": (
        lambda: from_python(np.zeros((30, 5, 8, 9), np.uint16)),
        r"uint16 of shape \(30, 5, 8, 9\), expected images: .* Crop them to squares",
    ),
    "8 and 16 bits": (
        lambda: from_python(np.zeros((30, 1, 8, 8), np.uint8), rad=np.zeros((8, 1, 8, 8), np.uint16)),
        "type torch.uint8 .*but the RAD, .* has torch.uint16 .*Convert all data to have one shape and type",
    ),
    # --- encoders, kernels and views ---
    "unknown encoder": (train(clients__models="['resnet19']"), "unknown encoder 'resnet19'"),
    "unknown option": (train(clients__models="['resnet8(widht=4)']"), "has no option 'widht', expected one of: width"),
    "missing module": (train(clients__models="['nowhere:Net']"), "cannot import nowhere .* Put it on PYTHONPATH"),
    "missing class": (train(clients__models="['own_parts:Nett']"), "own_parts has no callable 'Nett'. Check the name"),
    "encoder that returns a tuple": (
        train(clients__models="['own_parts:Pair']"),
        r"encoder 'own_parts:Pair' maps a batch of 2 to a tuple, expected a tensor .* Return only its features",
    ),
    "encoder of colour images": (
        train(clients__models="['own_parts:Colour']"),
        r"fails on images of shape \(1, 8, 8\): .* to have 3 channels, but got 1.* set data.side and data.channels",
    ),
    "encoder that returns nan": (
        train(clients__models="['own_parts:NotFinite']"),
        "encoder 'own_parts:NotFinite' returns nan or inf for finite inputs.* Check its forward for divisions by 0",
    ),
    "unknown kernel": (
        train(alignment__kernel="rbff"),
        "alignment.kernel = 'rbff' is not .*should be linear, rbf, poly",
    ),
    "kernel that returns a number": (
        train(alignment__kernel="own_parts:number"),
        r"returned a float for 4 and 4 rows, expected \(4, 4\). Return the kernel between all rows",
    ),
    "kernel that fails": (
        train(alignment__kernel="own_parts:failing"),
        r"kernel = 'own_parts:failing' failed: ValueError: no such kernel \(.*own_parts.py, line 26, in failing\). Fix",
    ),
    "views of half a batch": (
        train(views__function="own_parts:half"),
        "returned 1 rows for a batch of 2, expected a t",
    ),
    # --- runs and places ---
    "resume nothing": (["run", "--resume", "nowhere"], "'nowhere' is not a run folder .* Check the path"),
    "resume with a preset": (
        ["run", "smoke", "--resume", "run"],
        "--resume takes the config of its run. Remove all other arg",
    ),
    "compare nothing": (["compare", "nowhere"], "'nowhere' is not a run folder .* Check the path"),
    "evaluate nothing": (["evaluate", "nowhere"], "'nowhere' is not a run folder .* Check the path"),
    "check nothing": (
        ["check", "run", "nowhere"],
        "there is no folder 'nowhere', expected a run folder",
    ),
    "evaluate moved data": (["evaluate", "run"], MOVED),
    "more rounds on moved data": (["run", "--resume", "run", "--rounds", "9"], MOVED),
    "evaluate other rounds": (["evaluate", "run", "--set", "rounds=3"], r"only evaluation.\* can change .* Remove it"),
    "evaluate without labels": (
        ["evaluate", "run", "--images", "good"],
        "have no labels, but testing needs labels. Us",
    ),
    "missing node settings": (
        ["run", "smoke", "--node", "nowhere.toml"],
        "cannot read node settings 'nowhere.toml': No such file or directory. Check the path",
    ),
    "check of no deployment": (
        ["deploy", "check", "nowhere"],
        "'nowhere' is not part of a deployment.* Check the path",
    ),
    "missing client": ([*EMBED, "--client", "9"], "there is no client '9', expected one of client-000, client-001"),
    "embed with several clients": (EMBED, "'run' has several clients: .* Choose one with --client"),
    "embed to a spreadsheet": (
        [*EMBED[:-1], "new.csv", "--client", "0"],
        "cannot write features to 'new.csv', expected a name that ends in .parquet or .npy",
    ),
    "embed a broken image": (
        ["embed", "run", "--client", "0", "--images", "broken", "-o", "new.npy"],
        r"image \d+ \(notes.png\) of 'broken' cannot be decoded. Remove it",
    ),
    "unknown format": (
        ["export", "run", "--client", "0", "--to", "pickle", "-o", "new"],
        "unknown format 'pickle', expected one of safetensors, torch-export, onnx",
    ),
    "missing query": (
        ["neighbours", "run", "--client", "0", "--query", "999", "-o", "new.html"],
        "--query '999' is neither a file, .* nor a number from 0 to 7",
    ),
    "run in a place that cannot be written": (
        train(run_dir="file/new"),
        "'file/new' cannot be a folder.*Choose another",
    ),
    "report to such a place": (["report", "run", "-o", "file/new.html"], f"cannot write 'file/new.html'.*{PLACE}"),
    "embed to such a place": ([*EMBED[:-1], "file/new.npy", "--client", "0"], f"cannot write 'file/new.npy'.*{PLACE}"),
    "export to such a place": (
        ["export", "run", "--client", "0", "-o", "file/new.safetensors"],
        f"cannot write 'file/new.safetensors'.*{PLACE}",
    ),
    "neighbours to such a place": (
        ["neighbours", "run", "-o", "file/new.html"],
        f"cannot write 'file/new.html'.*{PLACE}",
    ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a user's data, code and a finished run, whose images were moved afterwards."""
    root, rng = tmp_path_factory.mktemp("place"), np.random.default_rng(0)
    for name, sides in {"photos": [8] * 60, "good": [8] * 60, "broken": [8] * 9, "unequal": [8, 9] * 9}.items():
        (root / name).mkdir()
        for k, side in enumerate(sides):
            Image.fromarray(rng.integers(0, 255, (side, side), dtype=np.uint8)).save(root / name / f"{k:02}.png")
    (root / "empty").mkdir()
    (root / "file").touch()  # no folder: root may write everywhere else
    (root / "broken" / "notes.png").write_text("buy milk")
    (root / "notes.txt").write_text("buy milk")
    (root / "own_parts.py").write_text(CODE)
    (root / "bad.toml").write_text("rounds = = 3\n")
    (root / "unequal.toml").write_text('[data]\nsource = "unequal"\n')
    pictures = [Image.open(path) for path in sorted((root / "good").iterdir())[:9]]
    Dataset.from_dict({"photo": pictures, "kind": list(range(9))}).to_parquet(root / "table.parquet")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr("sys.dont_write_bytecode", True)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.syspath_prepend(str(root))
        settings = [f"{key}={value}" for key, value in {**SMALL, "data.source": "photos"}.items()]
        start(load_config("smoke", settings), Path("run"), lambda _: None)
        (root / "photos").rename(root / "moved")
        yield root


def listing(root: Path) -> dict[str, int]:
    return {str(path): path.stat().st_size for path in sorted(root.rglob("*")) if path.name != ".lock"}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_input_gives_one_sentence_and_writes_nothing(what: str, place: Path, call: Call) -> None:
    given, sentence = WRONG[what]
    before = listing(place)
    if callable(given):
        with pytest.raises(HeteroSSFLError) as caught:
            given()
        said = f"error: {caught.value}"
    else:
        code, shown, said = call(*given)
        assert (code, shown) == (2, "")
    said = said.strip()  # a progress bar may have left an empty line
    assert said.startswith("error: ")
    assert len(said.splitlines()) == 1
    assert len(said) < 600
    assert re.search(sentence, said), said
    assert listing(place) == before


def test_there_are_at_least_45() -> None:
    assert len(WRONG) >= 45


def test_a_cache_that_cannot_be_written(place: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_SSFL_CACHE", str(place / "file"))
    before = listing(place)
    code, _, said = call(*train(data__side="7"))
    assert code == 2
    assert re.fullmatch(r"error: cannot write the image cache in '.*/file'.* set HETERO_SSFL_CACHE .*\n", said), said
    assert listing(place) == before
