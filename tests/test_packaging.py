"""The wheel and the source distribution, installed in a virtual environment outside the repository."""

import json
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

import hetero_ssfl
from helpers.blocks import ROOT, blocks_of, shortened
from helpers.commands import words
from helpers.pictures import write_folders


def run(*command: object, cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    parts = [str(part) for part in command]
    done = subprocess.run(parts, cwd=cwd, input=stdin, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done


def build(target: Path, *options: str) -> Path:
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", target, *options, ROOT, cwd=ROOT)
    return next(target.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build as `python -m build` does: first the source distribution, then the wheel from it."""
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of an environment with this wheel and the other packages of the tests' environment.

    The .pth file adds that environment's packages but not its .pth files, which would point to an editable
    installation: `hetero_ssfl` can only come from the wheel.
    """
    home = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", home, cwd=home)
    places = sysconfig.get_paths(vars={"base": str(home), "platbase": str(home)})
    Path(places["purelib"], "others.pth").write_text("{purelib}\n{platlib}\n".format(**sysconfig.get_paths()))
    pip = [sys.executable, "-m", "pip", "--python", Path(places["scripts"], "python"), "--disable-pip-version-check"]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", wheel, cwd=home)
    return Path(places["scripts"])


def contents(archive: Path) -> dict[str, int]:
    """Return the checksum of each file."""
    with zipfile.ZipFile(archive) as opened:
        return {entry.filename: entry.CRC for entry in opened.infolist()}


def test_flower_builds_its_app_from_the_source(tmp_path: Path) -> None:
    """In the format that Flower Hub takes: the licence as a file, and the version of Flower that it is made for."""
    app = tmp_path / "app"
    shutil.copytree(ROOT / "src", app / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, app / name)
    run(Path(sys.executable).with_name("flwr"), "build", "--app", app, cwd=tmp_path)
    (bundle,) = tmp_path.rglob("*.fab")
    assert {"pyproject.toml", "LICENSE", "src/hetero_ssfl/federation/superlink.py"} <= contents(bundle).keys()
    about = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert about["fab-format-version"] == 1
    assert f"flwr=={about['flwr-version-target']}" in (ROOT / "constraints.txt").read_text().splitlines()


def test_an_old_python_is_found_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")  # what `sys.exit(sys.version_info < (3, 11))` gives there
    old.chmod(0o755)
    done = subprocess.run(["make", "demo", f"PYTHON={old}"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "make demo PYTHON=python3.12" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_the_source_distribution_builds_the_same_wheel_as_the_repository(wheel: Path, tmp_path: Path) -> None:
    assert contents(wheel) == contents(build(tmp_path, "--wheel"))


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    package = ROOT / "src"
    wanted = {str(p.relative_to(package)) for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    found = {name for name in contents(wheel) if ".dist-info/" not in name}
    assert found == {name for name in wanted if ".egg-info/" not in name}
    assert "hetero_ssfl/presets/smoke.toml" in found
    assert "hetero_ssfl/py.typed" in found


def test_the_installed_command_runs_outside_the_repository(installed: Path, tmp_path: Path) -> None:
    home = run(installed / "python", "-c", "import hetero_ssfl; print(hetero_ssfl.__file__)", cwd=tmp_path).stdout
    assert installed.parent in Path(home.strip()).parents
    shown = run(installed / "hetero-ssfl", "--version", cwd=tmp_path).stdout
    assert shown == f"hetero-ssfl {hetero_ssfl.__version__}\n"


FOLLOW = """
import json, sys
from hetero_ssfl.cli import app
for kind, content in json.loads(sys.stdin.read()):
    if kind == "python":
        exec(content, {"__name__": "__main__"})
    else:
        assert not app(content, standalone_mode=False), content  # the exit code
"""


COMPARE = """# the ONNX file needs neither torch nor this package, and gives the features of `embed`
import numpy, onnxruntime, pandas
from PIL import Image, ImageOps

table = pandas.read_parquet("features.parquet")
session = onnxruntime.InferenceSession("encoder.onnx")
_, channels, side, _ = session.get_inputs()[0].shape
pictures = [Image.open(f"images/{path}").convert("L" if channels == 1 else "RGB") for path in table["path"]]
arrays = [numpy.array(ImageOps.fit(picture, (side, side))).reshape(side, side, channels) for picture in pictures]
images = numpy.stack(arrays).transpose(0, 3, 1, 2).astype("float32") / 255
features = session.run(None, {"images": images})[0]
assert abs(features - numpy.stack(table["feature"])).max() < 1e-4
"""


def test_the_commands_of_the_readme_work_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    """Run all code blocks of README.md in order, in a folder with unlabeled images.

    They run in one process, because each new one imports torch for seconds.
    """
    write_folders(tmp_path)
    steps: list[tuple[str, str | list[str]]] = []
    for block in blocks_of(ROOT / "README.md"):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
        elif block.language == "python":
            steps.append((block.language, shortened(block.text)))
        elif block.language == "sh":
            commands = [words(command) for command in block.commands]
            assert {program for program, *_ in commands} <= {"make", "hetero-ssfl"}
            steps += [("sh", arguments) for program, *arguments in commands if program != "make"]  # in the repository
    steps.append(("python", COMPARE))
    run(installed / "python", "-c", FOLLOW, cwd=tmp_path, stdin=json.dumps(steps))
    made = {path.name for path in tmp_path.iterdir()}
    assert {"my_encoder.py", "report.html", "features.parquet", "encoder.onnx"} <= made
    config = (tmp_path / "runs" / "mine" / "config.toml").read_text()
    assert "my_encoder:MyEncoder" in config
