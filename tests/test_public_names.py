import ast
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import hetero_ssfl


def test_every_public_name_exists() -> None:
    assert all(getattr(hetero_ssfl, name) is not None for name in hetero_ssfl.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hetero_ssfl.nothing  # noqa: B018


def test_type_checkers_see_the_same_names_in_the_same_places() -> None:
    tree = ast.parse(Path(hetero_ssfl.__file__).read_text())
    seen = {(node.module, a.name) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for a in node.names}
    assert {(home, name) for name, home in hetero_ssfl._HOME.items()} <= seen


def test_importing_the_package_does_not_load_torch() -> None:
    code = "import sys, hetero_ssfl, hetero_ssfl.cli; print('torch' in sys.modules, 'flwr' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() == ["False"] * 2


def test_the_version_is_the_same_everywhere() -> None:
    assert metadata.version("hetero-ssfl") == hetero_ssfl.__version__
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert f'\nversion = "{hetero_ssfl.__version__}"' in text
