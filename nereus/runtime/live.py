"""The real job: RL steps and transitions on the workers of a pool.

    Controller --> LiveRuntime --run_step--> Loop (what a step does) --> LiveStages (who does it) --> Pool
                              +--transition--> executor (state), seats (groups), one commit point --> Pool

An epoch is allocated, filled, seated and then committed by changing one value on the driver; until that
instant every call goes to the old epoch, which is whole.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import torch

from nereus.algorithms.base import Algorithm, Objective
from nereus.algorithms.buffer import RolloutBatch, shares
from nereus.algorithms.loop import Loop, Score, Stages
from nereus.algorithms.progress import StepProgress, Update
from nereus.algorithms.types import OutputKind, Sample
from nereus.checkpoint.store import CheckpointStore, Manifest, SavedState
from nereus.cluster import Cluster
from nereus.data.prompts import Prompt, PromptOrder
from nereus.engines.rollout import Completion, Request
from nereus.engines.sampling import SamplingParams
from nereus.engines.train import UpdateResult
from nereus.errors import ClusterError, NereusError, TransitionAborted
from nereus.moving.commands import MoveOrder, StageKinds
from nereus.moving.executor import Execution, OperationEnd, run_move, survey
from nereus.moving.ledger import Ledger
from nereus.plan import ACTOR_GENERATION, ModelStage, Plan, Role, Stage
from nereus.runtime.movers import PoolMovers, node_finder, nodes_of
from nereus.runtime.seam import Pool, Runtime, StepReport, gather
from nereus.runtime.worker import Observed, RoleSetup, Worker
from nereus.shards.moves import Holding
from nereus.shards.state import state_dtypes
from nereus.transition.judged import Transition
from nereus.transition.operations import TransitionReport
from nereus.transition.remains import PlanBroken
from nereus.workflow import Workflow

P = ParamSpec("P")
T = TypeVar("T")

VALIDATION_SEED = 0x5EED
"""Added to the seed for held-out prompts, whose places overlap those of training prompts."""
GRACE = timedelta(seconds=2)
"""How long after the first error of a task the other ranks may take to answer; then they are called late."""


@dataclasses.dataclass(frozen=True, slots=True)
class JobSetup:
    """Everything a job is besides its plan and its workers.

    batch: prompts a step; timeout: how long any call of the driver may take; checkpoints: where saved state goes.
    """

    workflow: Workflow
    algorithm: Algorithm
    roles: Mapping[Role, RoleSetup]
    prompts: Sequence[Prompt]
    val_prompts: Sequence[Prompt]
    order: PromptOrder
    batch: int
    score: Score
    sampling: SamplingParams
    seed: int
    timeout: timedelta
    checkpoints: Path


class LiveStages(Stages):
    """Calls the units of each model-stage under the epoch in force."""

    def __init__(self, pool: Pool, setup: JobSetup) -> None:
        self._pool, self._setup = pool, setup
        self.plan, self.epoch = Plan(()), -1

    def devices(self, model_stage: ModelStage) -> tuple[int, ...]:
        return self.plan[model_stage].devices

    def generate(self, prompts: Sequence[Prompt], *, first_place: int, validation: bool) -> list[Sample]:
        asked = self._setup.algorithm.sampling
        num, seed = (1, self._setup.seed + VALIDATION_SEED) if validation else (asked.num_sampled, self._setup.seed)
        params = dataclasses.replace(self._setup.sampling, seed=seed)
        requests = [
            Request(first_place + place, index, prompt.tokens)
            for place, prompt in enumerate(prompts)
            for index in range(num)
        ]
        units = self.plan[ACTOR_GENERATION].units
        calls: dict[int, Future[tuple[list[Completion], int] | None]] = {}
        for unit, share in zip(units, shares(len(requests), len(units)), strict=True):
            piece = self._pool.share(requests[share.start : share.stop])
            for device in unit:
                calls[device] = self._pool.call(device, Worker.generate, self.epoch, ACTOR_GENERATION, piece, params)
        results = gather(calls, f"{ACTOR_GENERATION}", timeout=self._setup.timeout, grace=GRACE)
        tokens = {(r.place, r.index): tuple(r.tokens) for r in requests}
        return [
            Sample(c.place, c.index, tokens[c.place, c.index], c.tokens, c.finished, version)
            for completions, version in filter(None, results.values())
            for c in completions
        ]

    def output(self, model_stage: ModelStage, batch: RolloutBatch, kind: OutputKind) -> torch.Tensor:
        units = self.plan[model_stage].units
        results = self._on_units(
            model_stage, batch, lambda device, piece: self._pool.call(
                device, Worker.output, self.epoch, model_stage, piece, kind
            )
        )  # fmt: skip
        parts = [next(r for device in unit if (r := results[device]) is not None) for unit in units]
        return torch.cat(parts)

    def update(self, model_stage: ModelStage, batch: RolloutBatch, objective: Objective) -> Update:
        shared = self._pool.share(objective)
        results = self._on_units(
            model_stage, batch, lambda device, piece: self._pool.call(
                device, Worker.update, self.epoch, model_stage, piece, shared
            )
        )  # fmt: skip
        return _joined(list(results.values()))

    def _on_units(
        self, model_stage: ModelStage, batch: RolloutBatch, call: Callable[[int, RolloutBatch], Future[T]]
    ) -> dict[int, T]:
        """Call every rank of every unit with its unit's share of the batch."""
        units = self.plan[model_stage].units
        calls: dict[int, Future[T]] = {}
        for unit, piece in zip(units, batch.shares(len(units)), strict=True):
            shared = self._pool.share(piece)
            for device in unit:
                calls[device] = call(device, shared)
        return gather(calls, f"{model_stage}", timeout=self._setup.timeout, grace=GRACE)


def _joined(results: Sequence[UpdateResult]) -> Update:
    """One update of its ranks' results: their metrics are parts that add up."""
    metrics: dict[str, float] = {}
    for result in results:
        for name, value in result.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + value
    first = results[0]
    return Update(first.grad_norm, first.learning_rate, first.applied, metrics)


def _operations(observed: Iterable[Observed]) -> dict[str, tuple[float, float]]:
    """{class: (work, seconds)} of a step, summed over the workers."""
    totals: dict[str, tuple[float, float]] = {}
    for found in observed:
        for name, (work, _, seconds) in found.operations.items():
            before = totals.get(name, (0.0, 0.0))
            totals[name] = (before[0] + work, before[1] + seconds)
    return totals


class LiveRuntime(Runtime):
    """A job on the workers of a pool. `start` before anything else.

    An epoch's number is never used twice, not even after an abort: groups are named after it.
    """

    def __init__(
        self, pool: Pool, setup: JobSetup, plan: Plan, *, on_operation: Callable[[OperationEnd], None] | None = None
    ) -> None:
        """on_operation: told of every operation of a transition as it ends."""
        self._on_operation = on_operation
        self._pool, self._setup = pool, setup
        self._checkpoints = CheckpointStore(setup.checkpoints)
        self._stages = LiveStages(pool, setup)
        self._loop = Loop(setup.workflow, setup.algorithm, self._stages, setup.score, seed=setup.seed)
        self._initial, self._epochs = plan, 0
        self._unretired: set[int] = set()
        self._saved_step: int | None = None
        self._progress: StepProgress | None = None
        self._saved_progress: StepProgress | None = None
        self._movers = PoolMovers(pool, setup.roles, timeout=setup.timeout)

    def start(self) -> None:
        """Start the workers of the initial plan and load every model's weights."""
        self._raise(self._initial, self._epochs)

    def _raise(self, plan: Plan, epoch: int, saved: tuple[Path, Manifest] | None = None) -> None:
        """Build a whole job on workers that hold nothing yet: from the folders, trained state from a checkpoint."""
        self._setup.workflow.check_plan(plan)
        self._pool.start(plan.devices)
        self._on(plan.devices, Worker.allocate, epoch, plan, self._setup.roles)
        self._on(plan.devices, Worker.seat, epoch, plan, self._setup.roles, nodes_of(self._pool))
        self._on(plan.devices, Worker.load, epoch)
        if saved is not None:
            self._on(plan.devices, Worker.restore, epoch, *saved)
        self._stages.plan, self._stages.epoch = plan, epoch
        if saved is not None:
            self._synchronize()

    def suspend(self, step: int) -> None:
        plan, epoch = self.plan, self._stages.epoch
        trained = [model_stage for model_stage in plan.model_stages if model_stage.stage is Stage.TRAINING]
        folder = self._checkpoints.begin(step)
        parts: list[SavedState] = []
        for model_stage in trained:
            parts += self._on(plan[model_stage].units[0], Worker.save, epoch, model_stage, folder).values()
        manifest = Manifest.joined(step, parts)
        self._checkpoints.commit(manifest, {m: self._setup.roles[m.role].spec for m in trained})
        self._saved_step, self._saved_progress = step, self._progress
        self._give_all_back()

    def _give_all_back(self) -> None:
        self._pool.stop(self._pool.devices)
        self._stages.plan = Plan(())
        self._unretired.clear()

    @property
    def saved_step(self) -> int | None:
        return self._saved_step

    def resume(self, plan: Plan) -> None:
        self._give_all_back()
        folder, manifest, _ = self._checkpoints.latest()
        self._epochs += 1
        self._raise(plan, self._epochs, (folder, manifest))
        self._progress = self._saved_progress  # what the restored state has done, not what the lost one had

    @property
    def plan(self) -> Plan:
        return self._stages.plan

    @property
    def cluster(self) -> Cluster:
        return self._pool.cluster

    def run_step(self, step: int) -> StepReport:
        started = time.perf_counter()
        learned = self._loop.run(self._under_way(step), self._keep)
        sync_s, sync_bytes = self._synchronize()
        step_s = time.perf_counter() - started
        observed = self._on(self.plan.devices, Worker.observed)
        lengths, task_s = learned.lengths, learned.task_s
        self._progress = None
        num_tokens = lengths.mean + lengths.prompt_mean
        samples = self._setup.batch * self._setup.algorithm.sampling.num_sampled
        metrics = {
            **learned.metrics,
            "timing_s/gen": task_s[ACTOR_GENERATION],
            "timing_s/sync": sync_s,
            "perf/total_num_tokens": num_tokens * samples,
            "perf/throughput": num_tokens * samples / step_s,
            **{f"timing_s/{model_stage.name}": seconds for model_stage, seconds in task_s.items()},
        }
        return StepReport(
            step,
            self._stages.epoch,
            metrics,
            step_s,
            task_s,
            lengths,
            sync_s=sync_s,
            sync_bytes=sync_bytes,
            reward_problem=learned.reward_problem,
            operations=_operations(observed.values()),
            peak_bytes={device: found.peak_bytes for device, found in observed.items()},
            engine_bytes={device: found.engine_bytes for device, found in observed.items()},
        )

    def _under_way(self, step: int) -> StepProgress:
        """What step `step` has done by now: nothing, unless an earlier try of it failed."""
        if self._progress is None or self._progress.step != step:
            first_place = (step - 1) * self._setup.batch
            places = self._setup.order.take(first_place, self._setup.batch)
            self._progress = StepProgress(step, tuple(self._setup.prompts[i] for i in places), first_place)
        return self._progress

    def _keep(self, progress: StepProgress) -> None:
        self._progress = progress

    def evaluate(self) -> Mapping[str, float]:
        return self._loop.evaluate(self._setup.val_prompts)

    def transition(self, transition: Transition) -> TransitionReport:
        begun, current, target = time.perf_counter(), self.plan, transition.target
        if transition.current != current:
            raise TransitionAborted("plan", "the transition was judged from another plan than the one in force")
        self._setup.workflow.check_plan(target)
        started = [device for device in target.devices if device not in self._pool.devices]
        self._sweep()
        self._epochs += 1
        epoch = self._epochs
        execution = Execution(
            transition.dag,
            self._movers,
            states=self._state_kinds,
            epoch=epoch,
            current_epoch=self._stages.epoch,
            node_of=node_finder(self._pool),
            table=transition.table,
            on_operation=self._on_operation,
        )
        try:
            self._pool.start(started)
            report = execution.run(lambda: self._commit(target, epoch))
        except PlanBroken:
            raise  # any worker may hold what is left
        except (TransitionAborted, ClusterError):
            self._end_workers(started)
            raise
        finally:
            self._unretired |= execution.unretired
        self._pool.stop([device for device in current.devices if device not in target.devices])
        return dataclasses.replace(report, seconds=time.perf_counter() - begun)

    def fall_back(self, plan: Plan, *, lost: Collection[int]) -> None:
        self._end_workers(lost)
        self._epochs += 1
        epoch = self._epochs
        try:
            self._movers.seat(epoch, plan)
        except NereusError as error:
            self._unretired.add(epoch)
            remains = survey(self._movers, Ledger(plan), devices=plan.devices, problems=[error])
            if remains.is_whole:
                raise
            raise PlanBroken(f"fall back to epoch {epoch}", str(error), remains) from error
        self._unretired.add(self._stages.epoch)
        self._commit(plan, epoch)
        self._end_workers(set(self._pool.devices).difference(plan.devices))
        self._sweep()

    def _sweep(self) -> None:
        """Free what earlier epochs left over where a worker failed to; raises TransitionAborted if one does again."""
        for epoch in sorted(self._unretired):
            try:
                self._movers.retire(epoch)
            except NereusError as error:
                raise TransitionAborted(f"clean up epoch {epoch}", str(error)) from error
            self._unretired.discard(epoch)

    def _end_workers(self, devices: Iterable[int]) -> None:
        self._pool.stop([device for device in devices if device in self._pool.devices])

    def _commit(self, target: Plan, epoch: int) -> None:
        """The commit point: calls made from here on go to the new epoch."""
        self._stages.plan, self._stages.epoch = target, epoch

    def close(self) -> None:
        self._pool.close()

    def _synchronize(self) -> tuple[float, int]:
        """Bring every copy of trained parameters up to date; (seconds, bytes that crossed between devices)."""
        seconds, num_bytes = 0.0, 0
        plan, epoch, node_of = self.plan, self._stages.epoch, node_finder(self._pool)
        for source, target in self._setup.workflow.syncs_under(plan):
            order = MoveOrder.plan(
                f"e{epoch}/sync/{target}",
                self._state_kinds[target],
                source,
                Holding.of(plan[source]),
                target,
                Holding.of(plan[target]),
                node_of=node_of,
                allocates=False,
                keeps_group=True,
            )
            report = run_move(self._movers, order)
            seconds += report.seconds + report.verify_s
            num_bytes += report.bytes_moved
        return seconds, num_bytes

    @functools.cached_property
    def _state_kinds(self) -> dict[ModelStage, StageKinds]:
        """What each model-stage holds where it has parameters of its own."""
        roles = self._setup.roles
        return {
            m: StageKinds(
                roles[m.role].spec, tuple(state_dtypes(roles[m.role].dtype, trains=m.stage is Stage.TRAINING).items())
            )
            for m in self._setup.workflow.model_stages
        }

    def _on(
        self, devices: Sequence[int], method: Callable[Concatenate[Worker, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> dict[int, T]:
        """Call a method on several workers at once and wait for all."""
        calls = {device: self._pool.call(device, method, *args, **kwargs) for device in devices}
        return gather(calls, method.__name__, timeout=self._setup.timeout)
