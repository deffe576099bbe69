"""The rooms of docs/design.md: a room may import every room above it in this list and none below."""

import ast
from collections.abc import Iterator
from pathlib import Path

import hetero_ssfl

ROOT = Path(hetero_ssfl.__file__).parent
ROOMS = (
    *("errors", "seeding", "plugins", "terminal", "presets"),
    *("config", "data", "kernels", "learning", "privacy", "methods", "runs"),
    *("federation", "report", "use", "studies", "deploy", "api", "cli"),
)


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (room, "") or ("", external package) for every import of a file, wherever it stands."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (("", alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield "", (node.module or "").split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1], *(node.module.split(".") if node.module else [])]
            yield from (((base or [alias.name])[0], "") for alias in node.names)


def test_a_room_imports_only_rooms_above_it() -> None:
    for path in sorted(ROOT.rglob("*.py")):
        own = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if own not in ROOMS:  # __init__, which imports on first use
            continue
        below = {room for room, _ in imports(path) if room in ROOMS[ROOMS.index(own) + 1 :]}
        assert not below, f"{path.relative_to(ROOT)} imports {sorted(below)}, which are below it"


def test_only_one_module_imports_the_console_of_rich() -> None:
    """The others use ours, which escapes control characters."""
    for path in ROOT.rglob("*.py"):
        assert path == ROOT / "terminal.py" or "rich.console" not in path.read_text(), path


def test_only_federation_imports_flower() -> None:
    for path in ROOT.rglob("*.py"):
        if "flwr" in {name for _, name in imports(path)}:
            assert path.relative_to(ROOT).parts[0] == "federation", path


def test_nothing_is_ever_unpickled() -> None:
    for path in ROOT.rglob("*.py"):
        assert not {name for _, name in imports(path)} & {"pickle", "dill", "cloudpickle", "joblib", "shelve"}, path
        assert "torch.load" not in path.read_text(), path
        assert "allow_pickle=True" not in path.read_text(), path
