"""One optimizer update of one rank: reduce, vote, apply. The unit of commitment.

    micro-batches forward and backward -> sum partial gradients over tp, tied embeddings over the pipeline's ends,
    everything over dp -> one collective carries the squared norm and each rank's vote -> all apply, or none does

Parameters, moments and counters change after the vote only; what happens before leaves them as they were.
"""

import dataclasses
import math
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.optim.adamw import adamw

from nereus.algorithms.base import Objective
from nereus.algorithms.buffer import RolloutBatch
from nereus.comm.groups import Group
from nereus.engines.infer import by_length, compute_outputs
from nereus.engines.pipeline import MicroBatch, Pipeline
from nereus.engines.transformer import StageModel
from nereus.errors import GroupError, UpdateAborted
from nereus.model import Axis
from nereus.plan import Recompute
from nereus.shards.boxes import Shard, axis_range
from nereus.shards.state import Counters, RankState, StateKind, shard_view

LATE_VOTE = timedelta(seconds=1)
"""How long a rank waits in the vote that has already waited for a peer in vain."""


@dataclasses.dataclass(frozen=True, slots=True)
class RankGroups:
    """The groups of one rank of a model-stage in one epoch.

    tp: its unit and pipeline stage; pp: its unit and tensor-parallel position; dp: its position in every unit;
    tie: first and last stage that share an embedding (size 1 elsewhere); all: every rank of the model-stage.
    """

    tp: Group
    pp: Group
    dp: Group
    tie: Group
    all: Group

    def close(self) -> None:
        for group in (self.tp, self.pp, self.dp, self.tie, self.all):
            group.close()


@dataclasses.dataclass(frozen=True, slots=True)
class AdamW:
    """Settings of the optimizer. `learning_rate`: a pure function of the number of updates already applied."""

    learning_rate: Callable[[int], float]
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_norm: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class UpdateResult:
    """`metrics`: this rank's additive parts, on one rank of each unit only; `applied` is False where the norm was not
    finite, which leaves the state unchanged."""

    applied: bool
    grad_norm: float
    learning_rate: float
    metrics: dict[str, float]


class Trainer:
    """Updates one rank's shards. Owns the flat gradients, not the state."""

    def __init__(
        self,
        state: RankState,
        groups: RankGroups,
        optimizer: AdamW,
        *,
        recompute: Recompute = Recompute.NONE,
        temperature: float = 1.0,
    ):
        self.state, self._groups, self._optimizer = state, groups, optimizer
        self._temperature = temperature
        wide = state.flats[StateKind.EXP_AVG].dtype
        self.grads = torch.zeros_like(state.flats[StateKind.PARAM], dtype=wide)
        self.model = StageModel(state, tp=groups.tp, grads=self.grads, recompute=recompute)
        self._pipeline = Pipeline(self.model, groups.pp)
        self._partial = [shard for shard in state.shards if self._is_partial(shard)]
        self._wide_kind = StateKind.MASTER if StateKind.MASTER in state.flats else StateKind.PARAM

    def update(self, batch: RolloutBatch, objective: Objective, *, micro_batch: int) -> UpdateResult:
        """Update from this unit's share of the mini-batch; every rank of the model-stage calls it.

        Raises UpdateAborted on every rank, state unchanged, where any rank failed before the vote. The groups may then
        be out of step with each other: update again with a trainer on new groups.
        """
        failure: Exception | None = None
        metrics: dict[str, float] = {}
        try:
            self.grads.zero_()
            metrics = self._accumulate(batch, objective, micro_batch)
            self._reduce()
        except Exception as error:  # whatever it is, the peers must hear of it; the vote raises it
            failure = error
        norm = self._vote(failure)
        return self._apply(norm, metrics)

    def _accumulate(self, batch: RolloutBatch, objective: Objective, micro_batch: int) -> dict[str, float]:
        totals: dict[str, torch.Tensor] = {}

        def loss(hidden: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
            outputs = compute_outputs(
                self.model,
                hidden,
                micro.batch,
                objective.output,
                with_entropy=objective.needs_entropy,
                temperature=self._temperature,
            )
            value, parts = objective(outputs, micro.batch)
            for name, part in parts.items():
                totals[name] = totals[name] + part.detach() if name in totals else part.detach()
            return value

        pieces = by_length(batch, micro_batch)
        self._pipeline.forward_backward([MicroBatch.of(batch.select(piece), self.model) for piece in pieces], loss)
        reports = self.model.is_last and self.model.tp_rank == 0
        return {name: float(value) for name, value in totals.items()} if reports else {}

    def _is_partial(self, shard: Shard) -> bool:
        """Whether tensor-parallel replicas of this shard hold parts of its gradient that must be summed."""
        spec, tp = self.state.spec, self.state.layout.tp
        if tp == 1 or not shard.param.partial:
            return False
        if shard.param.axis is not Axis.KV_HEADS:
            return True
        return sum(len(axis_range(spec, Axis.KV_HEADS, tp, r)) for r in range(tp)) > spec.num_kv_heads

    def _reduce(self) -> None:
        """Make every replica's gradient whole: over tp, over tied embeddings, over dp."""
        if self._partial:
            whole = torch.zeros(
                sum(s.param.numel for s in self._partial), dtype=self.grads.dtype, device=self.grads.device
            )
            parts = torch.split(whole, [s.param.numel for s in self._partial])
            views = [part.view(s.param.shape)[_slices(s)] for part, s in zip(parts, self._partial, strict=True)]
            for view, shard in zip(views, self._partial, strict=True):
                view.copy_(shard_view(self.grads, shard))
            self._groups.tp.all_reduce(whole)
            for view, shard in zip(views, self._partial, strict=True):
                shard_view(self.grads, shard).copy_(view)
        if self._groups.tie.size > 1:
            self._groups.tie.all_reduce(shard_view(self.grads, self.state.shard("model.embed_tokens.weight")))
        self._groups.dp.all_reduce(self.grads)

    def _vote(self, failure: Exception | None) -> float:
        """The global gradient norm, once every rank of the model-stage has come this far without a failure."""
        squared = self._owned_squares() if failure is None and self._groups.dp.rank == 0 else 0.0
        ballot = torch.tensor([squared, float(failure is not None)], dtype=torch.float64, device=self.grads.device)
        limit = LATE_VOTE if isinstance(failure, GroupError) else None  # the peers it waited for had their time
        try:
            self._groups.all.all_reduce(ballot, timeout=limit)
        except GroupError as error:
            raise UpdateAborted(f"vote: {failure or error}") from (failure or error)
        if failure is not None:
            raise UpdateAborted(f"this rank: {failure}") from failure
        if ballot[1] > 0:
            raise UpdateAborted(f"{int(ballot[1])} of {self._groups.all.size} ranks failed before the vote")
        return math.sqrt(float(ballot[0]))

    def _owned_squares(self) -> float:
        """Sum of squares over what this rank counts for; over a unit each gradient element counts once."""
        total = torch.zeros((), dtype=torch.float64, device=self.grads.device)
        for shard in self.state.shards:
            if shard.owned is not None:
                part = shard_view(self.grads, shard)[shard.owned.within(shard.box)]
                total += torch.linalg.vector_norm(part, dtype=torch.float64) ** 2
        return float(total)

    def _apply(self, norm: float, metrics: dict[str, float]) -> UpdateResult:
        optimizer, counters, flats = self._optimizer, self.state.counters, self.state.flats
        rate = optimizer.learning_rate(counters.updates)
        if not math.isfinite(norm):
            return UpdateResult(False, norm, rate, metrics)
        self.grads.mul_(min(1.0, optimizer.max_norm / (norm + 1e-6)))
        adamw(
            [flats[self._wide_kind]],
            [self.grads],
            [flats[StateKind.EXP_AVG]],
            [flats[StateKind.EXP_AVG_SQ]],
            [],
            [torch.tensor(float(counters.updates), device=self.grads.device)],
            fused=True,
            amsgrad=False,
            beta1=optimizer.betas[0],
            beta2=optimizer.betas[1],
            lr=rate,
            weight_decay=optimizer.weight_decay,
            eps=optimizer.eps,
            maximize=False,
        )
        if self._wide_kind is StateKind.MASTER:
            flats[StateKind.PARAM].copy_(flats[StateKind.MASTER])
        self.state.counters = Counters(updates=counters.updates + 1, version=counters.version + 1)
        return UpdateResult(True, norm, rate, metrics)


def vote_timeout(timeout: timedelta) -> timedelta:
    """How long the vote waits: a rank that ran into a group's time-out still has time to say so."""
    return 2 * timeout + timedelta(seconds=5)


def _slices(shard: Shard) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(shard.box.start, shard.box.stop, strict=True))
