"""The benchmarks of views and training compare equal work, and `--quick` writes no files."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from hetero_ssfl.config import ViewsConfig

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    """Import a script of benchmarks/ by name, and restore the number of threads afterwards."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    threads = torch.get_num_threads()
    yield importlib.import_module
    torch.set_num_threads(threads)


def test_pil_views_follow_the_settings(benchmark):
    pil_view = benchmark("per_image").pil_view
    image = Image.effect_noise((32, 32), 80).convert("RGB")
    red = Image.merge("RGB", (image.getchannel(0), *[Image.new("L", (32, 32))] * 2))
    whole: dict[str, Any] = {"crop": (1.0, 1.0), "jitter": 0.0, "grayscale": 0.0}
    plain, mirrored = (pil_view(red, ViewsConfig(flip=flip, **whole)) for flip in (0.0, 1.0))
    assert torch.equal(mirrored, plain.flip(-1))
    assert not torch.equal(mirrored, plain)
    grey = pil_view(red, ViewsConfig(grayscale=1.0))
    assert torch.equal(grey[0], grey[1])
    assert not torch.equal(plain[0], plain[1])
    assert not torch.equal(pil_view(red, ViewsConfig(jitter=1.0)), pil_view(red, ViewsConfig(jitter=1.0)))


def test_every_loop_completes_its_steps(benchmark):
    training = benchmark("training")
    task = training.Task("resnet8(width=4)", steps=1, batch=4)
    assert all(rate > 0 for rate in (training.ours(task), training.limit(task), training.obvious(task, 0)))


def test_a_quick_run_writes_nothing(benchmark, monkeypatch, tmp_path, capsys):
    views = benchmark("views")
    monkeypatch.setattr(benchmark("measuring"), "RESULTS", tmp_path / "results")
    monkeypatch.setattr(sys, "argv", ["views.py", "--quick"])
    monkeypatch.setattr(views, "BATCH", 8)
    views.main()
    assert "PIL, image by image" in capsys.readouterr().out
    assert not (tmp_path / "results").exists()
