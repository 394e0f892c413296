"""Nereus keeps RL post-training of language models on the best parallel plan while everything drifts."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nereus.training import TrainResult

__all__ = ["train"]
__version__ = "0.1.0"


def train(recipe: str | Path, overrides: Sequence[str] = ()) -> "TrainResult":
    """Run a recipe with `key=value` overrides and return what it came to.

    Prints one line a step. Raises InputError before any worker starts where the input is wrong.
    """
    from rich.console import Console

    from nereus.config import load_config
    from nereus.reports.view import Lines
    from nereus.training import run_training

    return run_training(load_config(Path(recipe), list(overrides)), Lines(Console()))
