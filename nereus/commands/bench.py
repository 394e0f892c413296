"""`nereus bench`: measure and print one table."""

import importlib.util
import sys
from pathlib import Path
from typing import Annotated

import typer

from nereus.commands.output import Json, check_destination, write_json
from nereus.errors import InputError

BENCHMARKS = ("generate", "reshard", "planner", "costmodel", "coordination", "dag", "driver")


def bench(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(BENCHMARKS)}.")],
    quick: Annotated[bool, typer.Option("--quick", help="A form that ends within a minute.")] = False,
    json_file: Json = None,
) -> None:
    """Measure and print one table."""
    check_destination(json_file)
    if name not in BENCHMARKS:
        raise InputError(f"no benchmark {name!r}; there are {', '.join(BENCHMARKS)}")
    path = Path(__file__).resolve().parents[2] / "benchmarks" / f"{name}.py"
    if not path.is_file():
        raise InputError(f"{path} not found: benchmarks run from a checkout of the repository")
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", path)
    assert spec is not None and spec.loader is not None
    sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    write_json(module.run(quick=quick), json_file)
