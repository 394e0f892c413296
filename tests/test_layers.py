"""Imports run one way: what decides knows nothing of what executes, and only the runtime knows Ray."""

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nereus

PACKAGE = Path(nereus.__file__).parent
MODULES = {
    ".".join(("nereus", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

ROOMS = (
    "errors", "engine_facts", "plan", "model", "hf_config", "known_models", "cluster", "workflow",
    "shards", "comm", "recipe", "supply",
    "planner.placement", "planner.workload", "planner.space", "planner.prices", "planner.problem", "planner.search",
    "planner.evaluate", "planner.api", "planner.report",
    "transition", "data", "algorithms", "engines", "checkpoint", "moving", "runtime",
    "decide.admission", "reports", "decide", "controller",
    "baselines", "examples", "launch", "commands", "cli",
)  # fmt: skip
"""The rooms of the house from the ground up; each imports from itself and from those before it."""
PURE = tuple(f"nereus.{room}" for room in ("planner", "transition", "decide", "supply", "recipe", "shards.boxes"))
"""What decides."""
HEAVY = ("torch", "ray", "transformers")


def imported(path: Path) -> Iterator[str]:
    """Full names a module imports when it is loaded or when its functions run; for type checking only left out."""

    def visit(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module is not None:
                yield from (
                    full if (full := f"{child.module}.{alias.name}") in MODULES else child.module
                    for alias in child.names
                )
            yield from visit(child)

    return visit(ast.parse(path.read_text()))


def room(module: str) -> int:
    """Number of the room that a module belongs to; -1 for the package and its folders themselves."""
    name = module.removeprefix("nereus").removeprefix(".")
    found = [number for number, room in enumerate(ROOMS) if name == room or name.startswith(f"{room}.")]
    assert found or name in ("", "planner"), f"{module} belongs to no room"
    return found[0] if found else -1


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_one_way(module: str) -> None:
    for name in imported(MODULES[module]):
        if name == "ray" or name.startswith("ray."):
            assert module in ("nereus.runtime.ray_pool", "nereus.launch.discovery"), f"{module} imports {name}"
        if name.startswith("nereus.") and module != "nereus":
            assert room(name) <= room(module), f"{module} imports {name}, which stands above it"


def test_every_room_is_there() -> None:
    for name in ROOMS:
        assert any(module == f"nereus.{name}" or module.startswith(f"nereus.{name}.") for module in MODULES), name


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith(PURE)])
def test_what_decides_imports_neither_torch_nor_ray(module: str) -> None:
    for name in imported(MODULES[module]):
        assert name.partition(".")[0] not in HEAVY, f"{module} imports {name}"


@pytest.mark.parametrize(
    "modules",
    [("nereus",), tuple(name for name in MODULES if name.startswith(PURE)), ("nereus.recipe.config", "nereus.cli")],
    ids=["the package", "what decides", "the command's start"],
)
def test_loading_it_brings_no_torch(modules: tuple[str, ...]) -> None:
    """In a process of its own, imports of imports included."""
    script = "import importlib, sys\n"
    script += f"[importlib.import_module(name) for name in {modules!r}]\n"
    script += f"print(*[name for name in {HEAVY!r} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.split() == []


@pytest.mark.parametrize("name", [info.name for info in pkgutil.walk_packages(nereus.__path__, "nereus.")])
def test_what_a_module_offers_is_there_and_sorted(name: str) -> None:
    module = importlib.import_module(name)
    offered = getattr(module, "__all__", None)
    if offered is not None:
        assert offered == sorted(offered) and all(hasattr(module, entry) for entry in offered)


def test_no_module_grows_beyond_its_limits() -> None:
    for module, path in MODULES.items():
        text = path.read_text()
        assert len(text.splitlines()) <= 550, f"{module} should be split"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 80, f"{module}.{node.name} should be split"


def test_nothing_is_called_utils() -> None:
    names = {entry for module in MODULES for entry in module.split(".")}
    assert not names & {"utils", "util", "common", "core", "helpers", "misc"}


def test_the_architecture_page_names_every_room() -> None:
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    missing = [room for room in ROOMS if f"`{room.partition('.')[0]}" not in page and f"{room}.py" not in page]
    assert not missing
