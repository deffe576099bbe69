"""The module arrows of docs/design.md: who may import whom."""

import ast
from pathlib import Path

import hetero_ssfl

ROOT = Path(hetero_ssfl.__file__).parent
BASE = {"errors", "config", "seeding", "plugins"}
CORE = BASE | {"data", "models", "objectives", "consensus", "optimisers", "training", "methods"}

MAY_IMPORT: dict[str, set[str]] = {
    "__init__": CORE | {"api", "evaluation", "federation", "finished", "runs"},  # when a name is first used
    "errors": set(),
    "seeding": set(),
    "plugins": {"errors"},
    "config": {"errors"},
    "presets": set(),
    "data": BASE,
    "models": BASE,
    "objectives": BASE | {"models"},
    "consensus": BASE | {"objectives"},
    "optimisers": BASE,
    "training": BASE | {"data", "models", "objectives", "consensus", "optimisers"},
    "methods": BASE | {"data", "models", "objectives", "consensus", "training"},
    "evaluation": BASE | {"data", "models", "objectives"},
    "runs": BASE,
    "federation": CORE | {"__init__", "evaluation", "runs"},
    "report": BASE | {"consensus", "evaluation", "federation", "methods", "runs"},
    "use": BASE | {"data", "models", "evaluation", "federation", "plugins", "report", "runs"},
    "progress": set(),
    "doctor": set(),
    "deploy": BASE | {"progress"},
    "api": CORE | {"federation", "finished", "progress", "runs"},
    "finished": BASE | {"federation", "plugins", "report", "runs"},
    "demo": BASE | {"federation", "report", "progress", "runs"},
    "paper": BASE | {"federation", "report", "progress", "runs"},
    "costs": CORE | {"federation"},
    "sweep": BASE | {"federation", "report", "progress"},
    "terminal": {"config"},
    "studies": {"errors", "terminal", "runs", "report", "demo", "paper", "costs", "sweep"},
    "cli": BASE
    | {"__init__", "data", "federation", "report", "progress", "runs"}
    | {"doctor", "deploy", "use", "studies", "terminal"},
}


def imports(path: Path) -> set[tuple[str, str]]:
    """(top-level module of ours or '', name of an outside package or '') for every import in a file."""
    package = path.relative_to(ROOT).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {("", alias.name.split(".")[0]) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(("", (node.module or "").split(".")[0]))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1]
            targets = [node.module.split(".")] if node.module else [[alias.name] for alias in node.names]
            for target in targets:
                whole = [*base, *target]
                found.add((whole[0] if whole[0] in MAY_IMPORT else "__init__", ""))
    return found


def test_every_module_imports_only_what_the_design_allows() -> None:
    for path in sorted(ROOT.rglob("*.py")):
        module = path.relative_to(ROOT).parts[0].removesuffix(".py")
        allowed = MAY_IMPORT[module] | {module}
        ours = {name for name, _ in imports(path) if name}
        assert ours <= allowed, f"{path.relative_to(ROOT)} imports {sorted(ours - allowed)}"


def test_only_federation_knows_flower() -> None:
    for path in ROOT.rglob("*.py"):
        if "flwr" in {name for _, name in imports(path)}:
            assert path.relative_to(ROOT).parts[0] == "federation", path


def test_nothing_is_ever_unpickled() -> None:
    for path in ROOT.rglob("*.py"):
        assert not {name for _, name in imports(path)} & {"pickle", "dill", "cloudpickle", "joblib", "shelve"}, path
        assert "torch.load" not in path.read_text(), path
        assert "allow_pickle=True" not in path.read_text(), path
