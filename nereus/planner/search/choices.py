"""A choice of one candidate per model-stage, whole or partial, and the rule for who may share devices."""

import dataclasses

import numpy as np

from nereus.plan import ModelStage
from nereus.planner.prices.syncs import Pair
from nereus.planner.search.bounds import step_of
from nereus.planner.space.arrays import Floats
from nereus.planner.space.candidates import Candidate
from nereus.planner.space.line import Block


@dataclasses.dataclass(frozen=True, slots=True)
class Combination:
    """The chosen candidate and [start, end) of each model-stage, and what a step takes.

    shared: model-stages that use the parameters of their role's training model-stage in place.
    overlapped: generation runs beside the other waves.
    """

    chosen: dict[ModelStage, Candidate]
    spans: dict[ModelStage, tuple[int, int]]
    shared: frozenset[ModelStage]
    wave_seconds: tuple[float, ...]
    sync_seconds: dict[Pair, float]
    overlapped: bool = False

    @property
    def step_seconds(self) -> float:
        waves = step_of(np.array(self.wave_seconds), overlapped=self.overlapped)
        return float(waves) + sum(self.sync_seconds.values())


@dataclasses.dataclass(slots=True)
class Part:
    """A partial choice. blocks[i] holds the model-stages in members[i].

    waves: seconds of the chosen, by wave, without waiting for the crosser. floor: what no completion undercuts.
    """

    waves: Floats
    floor: Floats
    sync: dict[Pair, float]
    rows: dict[ModelStage, int]
    blocks: tuple[Block, ...]
    members: tuple[tuple[ModelStage, ...], ...]
    shared: frozenset[ModelStage] = frozenset()
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def sync_seconds(self) -> float:
        return sum(self.sync.values())
