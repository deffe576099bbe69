"""The module dependencies of docs/design.md: which module may import which."""

import ast
from collections.abc import Sequence
from pathlib import Path

import hetero_ssfl

ROOT = Path(hetero_ssfl.__file__).parent
BASE = {"errors", "config", "seeding", "plugins", "screen"}
CORE = BASE | {"data", "models", "objectives", "consensus", "optimisers", "training", "methods"}
RECORDS, SUMS, SITES, CLIENT, SERVER, ENGINES, RUNNING = (
    f"federation.{layer}" for layer in ("records", "sum_records", "sites", "client", "server", "engines", "running")
)

MAY_IMPORT: dict[str, set[str]] = {
    "__init__": (CORE - {"optimisers"})
    | {"api", "evaluation", "federation", "federation.strategy", "runs"},  # imported on first use
    "errors": set(),
    "seeding": set(),
    "screen": set(),
    "events": set(),
    "plugins": {"errors"},
    "config": {"errors"},
    "presets": set(),
    "secure": {"errors"},
    "noise": set(),
    "data": BASE,
    "models": BASE,
    "objectives": BASE | {"models"},
    "consensus": BASE | {"objectives"},
    "optimisers": BASE,
    "training": BASE | {"data", "models", "objectives", "consensus", "optimisers"},
    "methods": BASE | {"data", "models", "noise", "objectives", "consensus", "secure", "training"},
    "evaluation": BASE | {"data"},
    "sealing": {"errors"},
    "run_files": {"errors"},
    "saved_files": {"errors", "sealing"},
    "environment": set(),
    "runs": BASE | {"environment", "events", "run_files", "saved_files", "sealing"},
    # The federation, from messages up to starting a run.
    RECORDS: {"errors", "events", "methods"},
    "federation.logs": set(),
    SUMS: {"errors", "secure", RECORDS},
    SITES: BASE
    | {
        "__init__",
        "data",
        "methods",
        "models",
        "objectives",
        "runs",
        "saved_files",
        "secure",
        RECORDS,
    },  # __init__: the version
    CLIENT: BASE
    | {"__init__", "data", "evaluation", "methods", "models", "noise", "runs", "saved_files", "secure", "training"}
    | {RECORDS, SUMS, SITES, "federation.logs"},
    SERVER: BASE | {"events", "methods", "runs", "saved_files", "sealing", "secure", RECORDS, SUMS},
    ENGINES: {"config", "errors", "runs", RECORDS, SITES, CLIENT},
    RUNNING: BASE
    | {"consensus", "data", "evaluation", "events", "methods", "runs", RECORDS, SITES, CLIENT, SERVER, ENGINES}
    | {"federation.continuing", "saved_files"},  # who may join can change when a run is opened
    "federation.superlink": {"config", "data", "errors", "events", "federation.logs", SITES, RUNNING},
    "federation.strategy": {"config", "errors", "methods", RECORDS},
    "federation.continuing": BASE | {"methods", "runs"},
    "federation": {RUNNING, ENGINES, "federation.continuing"},
    # User interfaces.
    "report": BASE
    | {
        "consensus",
        "data",
        "evaluation",
        "events",
        "methods",
        "runs",
        "saved_files",
        "audit.words",
        "theory_words",
    },  # no encoders
    "use": BASE
    | {"data", "models", "evaluation", "events", "federation", SITES, "report", "runs", "saved_files", "sealing"},
    "progress": {"events", "screen"},
    "doctor": set(),
    "checkup": {"doctor", "errors", "runs", "saved_files"},
    "deploy": BASE | {"data", "events", "models", "progress", SITES},  # `deploy check` asks a node's own checks
    "api": BASE
    | {"data", "events", "federation", RECORDS, RUNNING, SITES, "methods", "models", "objectives", "progress"}
    | {"report", "runs", "use"},  # Run.embed, .export and .report are the commands' functions
    "describe": {"config", "data", "runs", SITES},
    "demo": BASE | {"federation", SITES, "report", "progress"},
    "paper": BASE | {"events", "federation", "report", "progress", "runs"},
    "costs": BASE | {"data", "methods", "models", "training", RECORDS, RUNNING},
    "sweep": BASE | {"federation", "report", "progress"},
    "theory": {"config"},
    "measured_theory": BASE
    | {"data", "models", "objectives", "training", "methods", "runs", "saved_files", RUNNING, SITES, "theory"},
    "theory_words": {"measured_theory"},  # its types only
    "audit": BASE
    | {
        "consensus",
        "data",
        "evaluation",
        "models",
        "objectives",
        "training",
        "methods",
        "runs",
        "federation",
        RUNNING,
        SITES,
    }
    | {"measured_theory"},  # which reads the server's saved state
    "audit.words": {"audit"},  # its types, and pooled figures
    "cli": BASE
    | {"__init__", "federation", ENGINES, "report", "progress", "runs", "use"}
    | {"checkup", "doctor", "deploy", "describe", "demo", "paper", "costs", "sweep"}
    | {"audit", "audit.words", "theory", "measured_theory", "theory_words"},
}


def layer(parts: Sequence[str]) -> str:
    """Return the table entry of a module: its package or, within the federation, its layer."""
    inner = ".".join(parts[:2])
    return inner if inner in MAY_IMPORT else parts[0] if parts[0] in MAY_IMPORT else "__init__"


def imports(path: Path) -> set[tuple[str, str]]:
    """Yield (our layer or '', external package or '') for every import in a file."""
    package = path.relative_to(ROOT).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {("", alias.name.split(".")[0]) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(("", (node.module or "").split(".")[0]))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1]
            named = node.module.split(".") if node.module else []
            for alias in node.names:  # a name may be a module with a layer of its own
                found.add((layer([*base, *named, alias.name]), ""))
    return found


def test_every_module_imports_only_what_the_design_allows() -> None:
    for path in sorted(ROOT.rglob("*.py")):
        own = layer([part.removesuffix(".py") for part in path.relative_to(ROOT).parts])
        ours = {name for name, _ in imports(path) if name}
        allowed = MAY_IMPORT[own] | {own}
        assert ours <= allowed, f"{path.relative_to(ROOT)} imports {sorted(ours - allowed)}"


def test_the_table_lists_no_arrow_that_nobody_uses() -> None:
    """The base layers are free for everyone; every other arrow must be drawn by some import."""
    used: dict[str, set[str]] = {}
    for path in ROOT.rglob("*.py"):
        own = layer([part.removesuffix(".py") for part in path.relative_to(ROOT).parts])
        used.setdefault(own, set()).update(name for name, _ in imports(path) if name)
    unused = {own: sorted(allowed - used.get(own, set()) - BASE) for own, allowed in MAY_IMPORT.items()}
    assert not {own: names for own, names in unused.items() if names}


def test_only_one_module_imports_the_console_of_rich() -> None:
    """The others use ours, which escapes control characters."""
    for path in ROOT.rglob("*.py"):
        assert path.name == "screen.py" or "rich.console" not in path.read_text(), path


def test_only_federation_imports_flower() -> None:
    for path in ROOT.rglob("*.py"):
        if "flwr" in {name for _, name in imports(path)}:
            assert path.relative_to(ROOT).parts[0] == "federation", path


def test_nothing_is_ever_unpickled() -> None:
    for path in ROOT.rglob("*.py"):
        assert not {name for _, name in imports(path)} & {"pickle", "dill", "cloudpickle", "joblib", "shelve"}, path
        assert "torch.load" not in path.read_text(), path
        assert "allow_pickle=True" not in path.read_text(), path
