"""The algorithms, by how they estimate advantages."""

from nereus.algorithms.base import Algorithm
from nereus.algorithms.ppo import PPO

__all__ = ["ALGORITHMS"]

ALGORITHMS: dict[str, type[Algorithm]] = {"gae": PPO}
"""{`algorithm.adv_estimator` of a recipe: the class}."""
