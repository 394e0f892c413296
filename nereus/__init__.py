"""Nereus keeps RL post-training of language models on the best parallel plan while everything drifts.

`train` and `plan` are the Python interface; the commands only print what they return. Importing this package loads
neither torch nor Ray.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nereus.plan  # noqa: F401  the function below takes the module's place as an attribute, not in imports

if TYPE_CHECKING:
    from nereus.cluster import Cluster
    from nereus.launch.training import TrainResult
    from nereus.planner.api import PlanResult

__all__ = ["plan", "train"]
__version__ = "0.1.0"


def train(recipe: str | Path, overrides: Sequence[str] = ()) -> "TrainResult":
    """Run a recipe with `key=value` overrides and return what it came to.

    Prints one line a step. Raises InputError before any worker starts where the input is wrong.
    """
    from rich.console import Console

    from nereus.launch.training import run_training
    from nereus.recipe.config import load_config
    from nereus.reports.view import Lines

    return run_training(load_config(Path(recipe), list(overrides)), Lines(Console()))


def plan(model: str, cluster: "str | Cluster", **options: Any) -> "PlanResult":
    """The fastest plan of a job on a cluster that fits, or why there is none; options as in `nereus.planner.api.plan`.

    model: HF folder, config.json or built-in name; cluster: `8x8xh200`, a YAML file, `local` (what this machine has),
    `ray` (the running Ray cluster), `ray:HOST:PORT` or `ray://HOST:PORT`.
    """
    from nereus.launch.discovery import find_cluster
    from nereus.planner.api import plan as find_plan

    return find_plan(model, find_cluster(cluster) if isinstance(cluster, str) else cluster, **options)
