"""A notebook in a real kernel: live progress, and the display of a Run."""

import re
from base64 import b64decode
from pathlib import Path

import pytest

nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")

CELLS = [
    """
import numpy as np
from torch import nn
from hetero_ssfl import Client, federate

class Mine(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 8))

    def forward(self, x):
        return self.layers(x)
""",
    """
images = np.random.default_rng(0).integers(0, 255, (120, 8, 8), dtype=np.uint8)
clients = [Client(images[:60], Mine(16), "left"), Client(images[60:], Mine(24), "right")]
run = federate(clients, 20, config="smoke", settings={"local_epochs": 200})
""",
    "run",
    "run.encoder('left'), federate(clients, 20, config='smoke', settings={'local_epochs': 200}, run_dir=run.path).path",
    "import matplotlib; matplotlib.get_backend()",
    "federate(clients, 20, config='smoke', settings={'rouns': 3})",
    "run.encoder('nobody')",
]


updates: list[str] = []
"""What replaced an output while a cell was running."""


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict]]:
    """The output of each cell."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    folder: Path = tmp_path_factory.mktemp("notebook")
    where = {"metadata": {"path": str(folder)}}
    updates.clear()
    client = nbclient.NotebookClient(book, timeout=120, resources=where, allow_errors=True)
    usual = client.process_message

    def noted(message: dict, cell: dict, index: int) -> object:
        if message["msg_type"] == "update_display_data":
            updates.append(message["content"]["data"]["text/html"])
        return usual(message, cell, index)

    client.process_message = noted
    client.execute()
    return [cell["outputs"] for cell in book.cells]


def shown(outputs: list[dict]) -> str:
    return "".join(o.get("text", "") + o.get("data", {}).get("text/plain", "") for o in outputs)


def test_every_round_is_shown_when_it_ends(cells: list[list[dict]]) -> None:
    text = shown(cells[1])
    assert re.search(r"round 1/2 .*ssl", text)
    assert re.search(r"round 2/2 .*ssl", text)
    assert "ipywidgets" not in text


def test_a_run_is_displayed_as_a_table_and_a_plot(cells: list[list[dict]]) -> None:
    (output,) = cells[2]
    page = output["data"]["text/html"]
    assert "<th>left</th>" in page
    assert "<td>Mine</td>" in page
    alt, source = re.findall(r'<img alt="([^"]+)" src="data:image/png;base64,([^"]+)">', page)[0]
    assert "mutual CKA" in alt
    assert b64decode(source).startswith(b"\x89PNG")
    assert "http:" not in page  # the picture's base64 may hold the four letters, but no colon
    assert "https:" not in page


def test_encoders_defined_in_the_notebook_are_trained(cells: list[list[dict]]) -> None:
    assert "Mine(" in shown(cells[3])
    assert "smoke-hetero-ssfl-seed0" in shown(cells[3])


def test_the_notebooks_own_plots_are_unchanged(cells: list[list[dict]]) -> None:
    assert "inline" in shown(cells[4])


def test_a_bar_moves_within_a_round_and_leaves_nothing(cells: list[list[dict]]) -> None:
    parts = [float(part) for part in re.findall(r'value="([^"]+)"', " ".join(updates))]
    assert len(set(parts)) > 1
    assert parts == sorted(parts)
    assert [part for part in parts if 2 * part % 1]  # of two rounds
    assert any("left" in update for update in updates)
    assert updates[-1] == ""


@pytest.mark.parametrize("cell", [5, 6])
def test_an_error_is_one_sentence_without_frames_of_the_package(cell: int, cells: list[list[dict]]) -> None:
    (error,) = [output for output in cells[cell] if output["output_type"] == "error"]
    assert error["ename"] in ("ConfigError", "RunError")
    frames = [line for line in error["traceback"] if re.search(r"File .*hetero_ssfl", line)]
    assert len(frames) == 1
    assert "short_errors.py" in frames[0]
