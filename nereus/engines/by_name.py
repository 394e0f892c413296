"""Rollout engines by the names of the recipe's `rollout.engine`."""

from nereus.engines.generate import Generator
from nereus.engines.rollout import RolloutEngine

ENGINES: dict[str, type[RolloutEngine]] = {"native": Generator}
