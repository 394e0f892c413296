"""One worker: the process (or thread) that stands for a device. Holds state, joins groups, computes what it is told.

    driver --calls--> Worker --owns--> seats: (epoch, model-stage) -> groups, engines
                                       residents: (epoch, holder) -> state, and how it moves

A seat is this device's place in one model-stage under one epoch; two epochs can be seated at once. A
model-stage that shares its role's training parameters sits on the state of the training model-stage (its holder).
The worker knows nothing of steps or of the algorithm and starts no thread: the pool calls one method at a time.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch

from nereus.algorithms.base import Objective
from nereus.algorithms.buffer import RolloutBatch
from nereus.algorithms.types import OutputKind
from nereus.checkpoint.hf import load_unit
from nereus.checkpoint.store import Manifest, SavedState, restore_rank, save_rank
from nereus.comm.groups import BackendName, connect_store
from nereus.engine_facts import MICRO_BATCH, NUM_SEQS
from nereus.engines.by_name import ENGINES
from nereus.engines.gauge import MemoryGauge
from nereus.engines.infer import score
from nereus.engines.meter import Meter, Totals
from nereus.engines.pipeline import Pipeline
from nereus.engines.rollout import Completion, Request, RolloutEngine, in_order
from nereus.engines.sampling import SamplingParams
from nereus.engines.train import AdamW, RankGroups, Trainer, UpdateResult
from nereus.engines.transformer import StageModel
from nereus.errors import UpdateAborted
from nereus.model import ModelSpec
from nereus.moving.commands import BufferKey, DeviceDigests, DeviceOrder, Export, Receipt
from nereus.moving.resident import Residents
from nereus.plan import ModelStage, Plan, Recompute, Role, Stage, StagePlan
from nereus.runtime.ranks import join_groups, rank_group_specs
from nereus.shards.state import Counters, RankState, state_dtypes


@dataclasses.dataclass(frozen=True, slots=True)
class RoleSetup:
    """What a role of the job is.

    folder: HF folder its weights start from; fresh_head: its scalar head is new.
    max_tokens: longest prompt and response together; temperature: what logits are divided by; engine: name of what
    generates responses.
    """

    spec: ModelSpec
    dtype: torch.dtype
    folder: Path
    max_tokens: int
    optimizer: AdamW | None = None
    fresh_head: bool = False
    temperature: float = 1.0
    engine: str = "native"


@dataclasses.dataclass(slots=True)
class Seat:
    """A device's place in one model-stage under one epoch. stage_plan: with its settings.

    Engines are made when first used, and dropped when the state goes that they were made on.
    """

    holder: ModelStage
    state: RankState
    groups: RankGroups
    setup: RoleSetup
    stage_plan: StagePlan
    meter: Meter | None
    trainer: Trainer | None = None
    model: StageModel | None = None
    generator: RolloutEngine | None = None

    def drop_engines(self) -> None:
        self.trainer = self.model = self.generator = None

    @property
    def reports(self) -> bool:
        """Whether this rank returns what the unit computed: the first of the last pipeline stage."""
        layout, rank = self.state.layout, self.state.rank
        return layout.pp_rank(rank) == layout.pp - 1 and layout.tp_rank(rank) == 0

    def inference_model(self) -> StageModel:
        if self.model is None:
            self.model = StageModel(self.state, tp=self.groups.tp)
            self.model.meter = self.meter
        return self.model


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker is told when it starts. `store`: host and port of the store its groups meet at.

    owns_process: no other worker shares its process, so what the process holds is the worker's.
    """

    store: tuple[str, int]
    timeout: timedelta
    device: str = "cpu"
    num_threads: int = 1
    memory_bytes: int | None = None
    owns_process: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Observed:
    """What a worker measured over a step: operation classes, most memory held as sampled, what engines hold beside the
    state now."""

    operations: Totals
    peak_bytes: int
    engine_bytes: int


class Worker:
    """The device's end of every call of the driver."""

    def __init__(self, device: int, settings: WorkerSettings) -> None:
        torch.set_num_threads(settings.num_threads)
        self.device, self._settings = device, settings
        self._store = connect_store(*settings.store, timeout=settings.timeout)
        self._seats: dict[tuple[int, ModelStage], Seat] = {}
        self._orders: dict[str, DeviceOrder] = {}
        self.residents = Residents(device, torch.device(settings.device))
        self._gauge = MemoryGauge(
            torch.device(settings.device),
            limit_bytes=settings.memory_bytes,
            shared_bytes=lambda: self.residents.memory.num_bytes,
            owns_process=settings.owns_process,
        )
        self._meter = Meter(self._gauge)
        self._model_meter = self._meter if settings.device == "cpu" else None

    def allocate(self, epoch: int, plan: Plan, roles: Mapping[Role, RoleSetup]) -> None:
        """Zeroed state for every model-stage of the plan that holds parameters on this device."""
        for model_stage, stage_plan in plan.stages:
            position = stage_plan.position(self.device)
            if position is None or plan.shares_weights(model_stage):
                continue
            setup = roles[model_stage.role]
            self.residents.allocate(
                epoch,
                model_stage,
                setup.spec,
                stage_plan.layout,
                position[1],
                state_dtypes(setup.dtype, trains=model_stage.stage is Stage.TRAINING),
            )

    def seat(self, epoch: int, plan: Plan, roles: Mapping[Role, RoleSetup], nodes: Mapping[int, str]) -> None:
        """Join the groups of an epoch; every device of the plan calls it at the same time."""
        backend: BackendName = "nccl" if self._settings.device == "cuda" else "gloo"
        for model_stage, stage_plan in plan.stages:
            if stage_plan.position(self.device) is None:
                continue
            setup = roles[model_stage.role]
            specs = rank_group_specs(setup.spec, model_stage, stage_plan, self.device, epoch=epoch)
            trains = model_stage.stage is Stage.TRAINING
            groups = join_groups(
                specs,
                self._store,
                self.device,
                timeout=self._settings.timeout,
                backend=backend,
                trains=trains,
                meter=self._meter,
                nodes=nodes,
            )
            holder = plan.holder(model_stage)
            state = self.residents.state(epoch, holder)
            self._seats[epoch, model_stage] = Seat(holder, state, groups, setup, stage_plan, self._model_meter)

    def load(self, epoch: int) -> None:
        """Fill the parameters of an epoch from each role's folder, reading only this rank's boxes."""
        for (of, model_stage), seat in self._seats.items():
            if of == epoch and self.residents.holds(epoch, model_stage):
                load_unit(seat.setup.folder, seat.setup.spec, seat.state, fresh_score=seat.setup.fresh_head)

    def save(self, epoch: int, model_stage: ModelStage, folder: Path) -> SavedState:
        """Write the state this device holds of a model-stage into a checkpoint's folder."""
        state = self.residents.state(epoch, model_stage)
        return SavedState(save_rank(folder, model_stage, state), {model_stage.name: state.counters})

    def restore(self, epoch: int, folder: Path, manifest: Manifest) -> None:
        """Fill the trained state of an epoch from a checkpoint, whatever layout it was saved under."""
        for of, model_stage in self._seats:
            if of == epoch and model_stage.stage is Stage.TRAINING:
                restore_rank(folder, manifest, model_stage, self.residents.state(epoch, model_stage))

    def generate(
        self, epoch: int, model_stage: ModelStage, requests: Sequence[Request], params: SamplingParams
    ) -> tuple[list[Completion], int] | None:
        """The unit's completions and their policy version, on the rank that reports."""
        seat = self._seat(epoch, model_stage)
        if seat.generator is None:
            seat.generator = ENGINES[seat.setup.engine](
                seat.inference_model(),
                tp=seat.groups.tp,
                pp=seat.groups.pp,
                max_slots=seat.stage_plan.max_num_seqs or NUM_SEQS,
                max_length=seat.setup.max_tokens,
                cache_bytes=seat.stage_plan.cache_bytes,
            )
        seat.generator.load()
        held, ended = 0, []
        for completion in seat.generator.stream(requests, params):
            held = max(held, self._gauge.note())  # now: the cache shrinks as sequences end
            ended.append(completion)
        self._gauge.check(held)  # not before: peers wait for this rank's part
        completions = in_order(requests, ended)
        seat.generator.release()  # what runs next on this device needs the cache's memory
        return (completions, seat.state.counters.version) if seat.reports else None

    def output(self, epoch: int, model_stage: ModelStage, batch: RolloutBatch, kind: OutputKind) -> torch.Tensor | None:
        """Forward only over the unit's share: [T] or [N] in its order, on the rank that reports."""
        seat = self._seat(epoch, model_stage)
        model = seat.inference_model()
        pipeline = Pipeline(model, seat.groups.pp)
        local, micro_batch = batch.to(self._settings.device), seat.stage_plan.micro_batch or MICRO_BATCH
        result = score(model, pipeline, local, kind, micro_batch=micro_batch, temperature=seat.setup.temperature)
        return result.cpu() if result is not None and seat.reports else None

    def update(self, epoch: int, model_stage: ModelStage, batch: RolloutBatch, objective: Objective) -> UpdateResult:
        """This rank's part in one update of the model-stage."""
        seat = self._seat(epoch, model_stage)
        if seat.trainer is None:
            assert seat.setup.optimizer is not None, f"{model_stage} has no optimizer"
            seat.trainer = Trainer(
                seat.state,
                seat.groups,
                seat.setup.optimizer,
                recompute=seat.stage_plan.recompute or Recompute.NONE,
                temperature=seat.setup.temperature,
            )
            seat.trainer.model.meter = seat.meter
        try:
            micro_batch = seat.stage_plan.micro_batch or MICRO_BATCH
            return seat.trainer.update(batch.to(self._settings.device), objective, micro_batch=micro_batch)
        except UpdateAborted as error:
            raise UpdateAborted(f"worker {self.device}, update of {model_stage}: {error}") from error

    def _seat(self, epoch: int, model_stage: ModelStage) -> Seat:
        """The seat with the state it computes on now: a refill after an abort puts another in its place."""
        seat = self._seats[epoch, model_stage]
        state = self.residents.state(epoch, seat.holder)
        if state is not seat.state:
            seat.drop_engines()
            seat.state = state
        return seat

    def observed(self) -> Observed:
        """What was measured since the last call."""
        beside = self._gauge.beside_state()
        return Observed(self._meter.drain(), self._gauge.drain(), beside)

    @property
    def seats(self) -> tuple[tuple[int, ModelStage], ...]:
        """(epoch, model-stage) of every seat, in the order they were taken."""
        return tuple(self._seats)

    def prepare(self, order: DeviceOrder) -> Export | None:
        """First call of a move: allocate the target, export the source. The order is kept for the calls that follow."""
        self._orders[order.key] = order
        return self.residents.prepare(order)

    def move(self, key: str, exports: Mapping[int, Export], counters: Counters) -> Receipt:
        """Second call of a move: fill the target, serve peers of other nodes."""
        order = self._orders[key]
        return self.residents.move(order, exports, counters, store=self._store, timeout=self._settings.timeout)

    def digests(self, key: str) -> DeviceDigests:
        """Third call of a move: what was sent and received, as memory has it now."""
        return self.residents.digests(self._orders.pop(key))

    def release(self, keys: tuple[BufferKey, ...]) -> None:
        """Free buffers and every engine made on them."""
        going = {id(self.residents.buffer(key)) for key in keys if key in self.residents.keys}
        for seat in self._seats.values():
            if id(seat.state) in going:
                seat.drop_engines()
        self.residents.release(keys)

    def settle(self, keys: tuple[BufferKey, ...]) -> None:
        """Last call of a move: what was received has been verified."""
        self.residents.settle(keys)

    def whole_keys(self) -> tuple[BufferKey, ...]:
        """Every buffer that can be relied on."""
        return self.residents.whole_keys

    def adopt(self, epoch: int, plan: Plan) -> None:
        """Name the staged buffers of an epoch."""
        self.residents.adopt(epoch, plan)

    def unseat(self, epoch: int) -> None:
        """Give up the groups, engines and state of an epoch."""
        for key in [key for key in self._seats if key[0] == epoch]:
            self._seats.pop(key).groups.close()
        self._orders.clear()
        self.residents.free(epoch)

    def close(self) -> None:
        """Give up everything."""
        for epoch in {key[0] for key in self._seats}:
            self.unseat(epoch)
