"""Times and bytes of the engine on this machine against the planner's: two workers, each pinned to a core.

Every stage (generation, inference, training) runs under each plan that two workers admit and several batches; the
calibration sees some of the runs and predicts the others. Peaks of the heap during an update are compared with the
memory model. Nothing goes over Ray: two processes, the project's groups, one batch.
"""

import collections
import ctypes
import dataclasses
import functools
import multiprocessing
import os
import random
import statistics
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from nereus.cluster import ACCELERATORS, uniform_cluster
from nereus.model import ModelSpec
from nereus.plan import ACTOR_GENERATION, ACTOR_TRAINING, REFERENCE_INFERENCE, Layout, ModelStage, StagePlan
from nereus.planner.calibration import Calibration
from nereus.planner.cost import CostModel, Span, TaskCost
from nereus.planner.memory import FP32, Recompute, stage_memory
from nereus.planner.workload import Lengths, Workload
from nereus.workflow import Kind, Task

SPEC = ModelSpec(
    family="qwen2", num_layers=4, hidden=256, num_heads=8, num_kv_heads=4, head_dim=32, ffn=704, vocab=2048,
    qkv_bias=True,
)  # fmt: skip
PROMPT = 32
SAMPLES = 8
TIMEOUT_S = 120.0
WATCH_S = 0.001
"""Between two readings of the heap's counters; the peaks last for tens of milliseconds."""

STAGES: dict[str, tuple[ModelStage, Task]] = {
    "generation": (ACTOR_GENERATION, Task("generate", ACTOR_GENERATION, Kind.GENERATE)),
    "inference": (REFERENCE_INFERENCE, Task("reference", REFERENCE_INFERENCE, Kind.LOGPROBS)),
    "training": (ACTOR_TRAINING, Task("actor_update", ACTOR_TRAINING, Kind.UPDATE)),
}

PLANS = (StagePlan.of(Layout(), (0,)),) + tuple(StagePlan.of(layout, (0, 1)) for layout in (
    Layout(), Layout(tp=2), Layout(pp=2),
))  # fmt: skip

LENGTHS = ((32,) * SAMPLES, (64,) * SAMPLES, (128,) * SAMPLES, (192,) * SAMPLES, (16, 32, 48, 64, 96, 128, 160, 192))
MICRO_BATCHES = (2, 4)


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One run: a stage under a plan with response lengths and a micro-batch (slots, for generation)."""

    stage: str
    plan: StagePlan
    lengths: tuple[int, ...]
    micro_batch: int

    def __str__(self) -> str:
        mean = statistics.fmean(self.lengths)
        return f"{self.stage} {self.plan.shape}, mean length {mean:g}, micro-batch {self.micro_batch}"

    @property
    def workload(self) -> Workload:
        values = tuple(map(float, sorted(self.lengths)))
        return Workload(batch=len(self.lengths), prompt_tokens=PROMPT, response=Lengths(values))


def cases(quick: bool) -> list[Case]:
    """At least 24 plans and lengths for each stage; generation ends by length, so its lengths are equal."""
    result = []
    for stage in STAGES:
        for plan in PLANS:
            for lengths in LENGTHS[2:3] if quick else LENGTHS:
                if stage == "generation" and len(set(lengths)) > 1:
                    continue
                sizes = (4, SAMPLES) if stage == "generation" else MICRO_BATCHES
                result += [Case(stage, plan, lengths, size) for size in sizes]
    return result


def measure(runs: list[Case], *, repetitions: int) -> dict[Case, list[float]]:
    """Seconds of each case and repetition, on the slower of its ranks; repetitions go round a plan's cases in turn.

    One run of each stage warms up a plan and is not counted.
    """
    from nereus.runtime.store import serve_store

    server = serve_store()
    context = multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0))
    pipes, workers = [], []
    for device in range(2):
        ours, theirs = context.Pipe()
        core = cores[device % len(cores)]
        worker = context.Process(target=_work, args=(device, core, server.host, server.port, theirs), daemon=True)
        worker.start()
        pipes.append(ours)
        workers.append(worker)
    try:
        seconds: dict[Case, list[float]] = collections.defaultdict(list)
        for plan_number, plan in enumerate(PLANS):
            own = [case for case in runs if case.plan == plan]
            _ask(pipes, plan, ("join", plan, plan_number))
            for case in {case.stage: case for case in own}.values():
                _ask(pipes, plan, ("run", case))
            for _ in range(repetitions):
                for case in own:
                    seconds[case].append(max(_ask(pipes, plan, ("run", case))))
        return seconds
    finally:
        for pipe in pipes:
            pipe.send(("end",))
        for worker in workers:
            worker.join(10)


def _ask(pipes: list[Connection], plan: StagePlan, message: tuple[Any, ...]) -> list[float]:
    for device in plan.devices:
        pipes[device].send(message)
    return [_reply(pipes[device], message) for device in plan.devices]


def _reply(pipe: Connection, message: tuple[Any, ...]) -> float:
    if not pipe.poll(TIMEOUT_S):
        raise TimeoutError(f"a worker did not answer {message[0]} within {TIMEOUT_S:g} s")
    return float(pipe.recv())


def _work(device: int, core: int, host: str, port: int, pipe: Connection) -> None:
    """One worker: joins the groups of a plan, then runs cases as it is told."""
    import torch

    from nereus.runtime.store import connect_store

    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    store = connect_store(host, port, timeout=timedelta(seconds=TIMEOUT_S))
    rank: _Rank | None = None
    while True:
        message = pipe.recv()
        if message[0] == "end":
            return
        if message[0] == "join":
            rank = _Rank(message[1], device, store, generation=message[2])
            pipe.send(0.0)
        else:
            assert rank is not None
            pipe.send(rank.run(message[1]))


class _Rank:
    """One rank of a plan: its state, engines and groups."""

    def __init__(self, plan: StagePlan, device: int, store: Any, *, generation: int) -> None:
        import torch

        from nereus.engines.meter import Meter
        from nereus.engines.state import UnitState, state_dtypes, zeros_on
        from nereus.engines.train import AdamW, Trainer
        from nereus.runtime.ranks import join_groups, rank_group_specs

        position = plan.position(device)
        assert position is not None
        self.unit, rank = position
        self.dp = plan.dp
        specs = rank_group_specs(SPEC, ACTOR_TRAINING, plan, device, generation=generation)
        self.groups = join_groups(
            specs, store, device, timeout=timedelta(seconds=TIMEOUT_S), backend="gloo", trains=True, meter=Meter(),
            nodes=dict.fromkeys(plan.devices, "node0"),
        )  # fmt: skip
        dtypes = state_dtypes(torch.float32, trains=True)
        self.state = UnitState.allocate(SPEC, plan.layout, rank, dtypes=dtypes, allocator=zeros_on(torch.device("cpu")))
        for flat in self.state.flats.values():
            flat.uniform_(0.001, 0.02)
        self.trainer = Trainer(self.state, self.groups, AdamW(learning_rate=lambda _: 1e-5))
        self.ballot = torch.zeros(1)

    def run(self, case: Case) -> float:
        """Seconds of one case, from the instant at which every rank is ready."""
        work = {"generation": self._generate, "inference": self._score, "training": self._update}[case.stage](case)
        self.groups.all.all_reduce(self.ballot)
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun

    def _update(self, case: Case) -> Callable[[], Any]:
        from nereus.algorithms.objectives import PolicyObjective

        batch = random_batch(case.lengths)
        share = batch.shares(self.dp)[self.unit]
        objective = PolicyObjective(counts=batch.counts)
        return lambda: self.trainer.update(share, objective, micro_batch=case.micro_batch)

    def _score(self, case: Case) -> Callable[[], Any]:
        from nereus.algorithms.types import OutputKind
        from nereus.engines.pipeline import Pipeline
        from nereus.engines.score import score
        from nereus.engines.transformer import StageModel

        model = StageModel(self.state, tp=self.groups.tp)
        share = random_batch(case.lengths).shares(self.dp)[self.unit]
        pipeline = Pipeline(model, self.groups.pp)
        return lambda: score(model, pipeline, share, OutputKind.LOGPROBS, micro_batch=case.micro_batch)

    def _generate(self, case: Case) -> Callable[[], Any]:
        from nereus.engines.generate import Generator, Request
        from nereus.engines.sampling import SamplingParams
        from nereus.engines.transformer import StageModel

        new = case.lengths[0]
        generator = Generator(
            StageModel(self.state, tp=self.groups.tp), tp=self.groups.tp, pp=self.groups.pp,
            max_slots=case.micro_batch, max_length=PROMPT + new,
        )  # fmt: skip
        requests = [Request(place, 0, list(range(PROMPT))) for place in range(len(case.lengths))]
        own = requests[self.unit :: self.dp]
        return lambda: generator.generate(own, SamplingParams(max_new_tokens=new))


def random_batch(lengths: tuple[int, ...], *, prompt: int = PROMPT, vocab: int = SPEC.vocab) -> Any:
    """A rollout batch of random tokens with the columns that the policy's objective reads."""
    import torch

    from nereus.algorithms.buffer import RolloutBatch

    order = list(lengths)
    random.Random(0).shuffle(order)
    responses, prompts = torch.tensor(order), torch.full((len(order),), prompt)
    num_tokens = int(responses.sum())
    generator = torch.Generator().manual_seed(0)
    return RolloutBatch(
        prompt_index=torch.arange(len(order)),
        group_index=torch.zeros(len(order), dtype=torch.int64),
        policy_version=torch.zeros(len(order), dtype=torch.int64),
        finished=torch.ones(len(order), dtype=torch.bool),
        prompt_lengths=prompts,
        response_lengths=responses,
        tokens=torch.randint(0, vocab, (int((prompts + responses).sum()),), generator=generator),
        response_mask=torch.ones(num_tokens, dtype=torch.bool),
        old_logprobs=torch.randn(num_tokens, generator=generator) - 4,
        advantages=torch.randn(num_tokens, generator=generator),
    )


def predicted(case: Case, calibration: Calibration) -> TaskCost:
    """The planner's price of a case."""
    cluster = uniform_cluster(num_nodes=1, devices_per_node=2, accelerator=ACCELERATORS["cpu"], cores_per_node=2)
    model_stage, task = STAGES[case.stage]
    return CostModel(cluster, calibration).stage_seconds(
        model_stage, SPEC, case.plan.layout, dp=case.plan.dp, workload=case.workload, micro_batch=case.micro_batch,
        recompute=Recompute.NONE, precision=FP32, tasks=(task,), accelerator="cpu", span=Span(),
    ).tasks[task.name]  # fmt: skip


def compare(seconds: dict[Case, list[float]], *, seed: int = 0, passes: int = 3) -> dict[str, Any]:
    """Per stage: calibrate on every third case, predict the others; the noise is the spread of repetitions."""
    result: dict[str, Any] = {"mape": {}, "noise": {}, "cases": {}, "rows": []}
    for stage in STAGES:
        own = [case for case in seconds if case.stage == stage]
        chosen = set(random.Random(seed).sample(range(len(own)), max(1, len(own) // 3)))
        calibration = Calibration(forgetting=1.0)
        for index in sorted(chosen) * passes:
            cost, median = predicted(own[index], calibration), statistics.median(seconds[own[index]])
            calibration.observe_total([*cost.work, *cost.bubble], median, accelerator="cpu")
        errors = []
        for index, case in enumerate(own):
            median = statistics.median(seconds[case])
            price = predicted(case, calibration).seconds
            if index not in chosen:
                errors.append(abs(price / median - 1))
            result["rows"].append(
                {"case": str(case), "measured_s": median, "predicted_s": price, "calibrated_on": index in chosen}
            )
        result["mape"][stage] = statistics.fmean(errors)
        result["cases"][stage] = len(errors)
        spreads = [(max(times) - min(times)) / statistics.median(times) for times in map(seconds.__getitem__, own)]
        result["noise"][stage] = statistics.median(spreads)
    return result


class _MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


@functools.lru_cache(maxsize=1)
def _mallinfo2() -> Callable[[], _MallocInfo]:
    function = ctypes.CDLL("libc.so.6").mallinfo2
    function.restype = _MallocInfo
    return function


def heap_bytes() -> int:
    """Bytes handed out by the heap, small blocks and mapped ones."""
    info = _mallinfo2()()
    return int(info.uordblks + info.hblkhd)


def heap_peak(work: Callable[[], Any]) -> int:
    """Most bytes the heap held beyond its start while `work` ran; another thread reads the counters."""
    start, peak, ended = heap_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(WATCH_S):
            peak = max(peak, heap_bytes() - start)

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    ended.set()
    watcher.join()
    return peak


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryCase:
    """One update on one rank."""

    lengths: tuple[int, ...]
    micro_batch: int
    recompute: bool
    spec: ModelSpec = SPEC

    def __str__(self) -> str:
        mean = statistics.fmean(self.lengths)
        how = "full" if self.recompute else "no"
        return f"vocabulary {self.spec.vocab}, mean {mean:g}, micro-batch {self.micro_batch}, {how} recomputation"


MEMORY_CASES = tuple(
    MemoryCase(lengths, micro_batch, recompute, dataclasses.replace(SPEC, vocab=vocab))
    for vocab in (2048, 16384)
    for lengths in ((300, 340, 380, 420), (500, 500, 500, 500), (200, 400, 600, 800))
    for micro_batch in (2, 4)
    for recompute in (False, True)
)


def memory_rows(quick: bool) -> list[dict[str, Any]]:
    """State and peak of each case, measured in a process of its own, beside the memory model's."""
    context = multiprocessing.get_context("spawn")
    chosen = MEMORY_CASES[::6] if quick else MEMORY_CASES
    ours, theirs = context.Pipe()
    worker = context.Process(target=_measure_memory, args=(chosen, theirs), daemon=True)
    worker.start()
    rows = []
    try:
        for case in chosen:
            if not ours.poll(TIMEOUT_S):
                raise TimeoutError(f"{case}: no answer within {TIMEOUT_S:g} s")
            state_bytes, peak_bytes = ours.recv()
            rows.append(_memory_row(case, state_bytes, peak_bytes))
    finally:
        worker.terminate()
        worker.join(10)
    return rows


def _memory_row(case: MemoryCase, state_bytes: int, peak_bytes: int) -> dict[str, Any]:
    values = tuple(map(float, sorted(case.lengths)))
    parts = stage_memory(
        ACTOR_TRAINING, case.spec, Layout(), dp=1,
        workload=Workload(batch=len(values), prompt_tokens=PROMPT, response=Lengths(values)),
        micro_batch=case.micro_batch, recompute=Recompute.FULL if case.recompute else Recompute.NONE, precision=FP32,
    )  # fmt: skip
    working = sum(parts.active.get(name, 0) for name in ("activations", "logits", "workspace"))
    return {
        "case": str(case),
        "state_bytes": state_bytes,
        "predicted_state_bytes": parts.idle_bytes,
        "peak_bytes": peak_bytes,
        "predicted_peak_bytes": working,
        "error": working / peak_bytes - 1,
    }


def _measure_memory(chosen: tuple[MemoryCase, ...], pipe: Connection) -> None:
    import torch

    from nereus.algorithms.objectives import PolicyObjective
    from nereus.engines.state import UnitState, state_dtypes, zeros_on
    from nereus.engines.train import AdamW, RankGroups, Trainer
    from nereus.runtime.groups import Group

    torch.set_num_threads(1)
    groups = RankGroups(*(Group.single(name) for name in ("tp", "pp", "dp", "tie", "all")))
    for case in chosen:
        dtypes = state_dtypes(torch.float32, trains=True)
        state = UnitState.allocate(case.spec, Layout(), 0, dtypes=dtypes, allocator=zeros_on(torch.device("cpu")))
        for flat in state.flats.values():
            flat.uniform_(0.001, 0.02)
        trainer = Trainer(state, groups, AdamW(learning_rate=lambda _: 1e-5), recompute=case.recompute)
        batch = random_batch(case.lengths, vocab=case.spec.vocab)
        objective = PolicyObjective(counts=batch.counts)
        trainer.update(batch, objective, micro_batch=case.micro_batch)
        peaks = [
            heap_peak(lambda t=trainer, b=batch, o=objective, m=case.micro_batch: t.update(b, o, micro_batch=m))
            for _ in range(2)
        ]
        buffers = [*state.flats.values(), trainer.grads]
        pipe.send((sum(buffer.numel() * buffer.element_size() for buffer in buffers), max(peaks)))
        del trainer, state
