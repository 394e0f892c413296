"""Worker processes that run one stage of the engine at a time: the project's groups, state and engines, without Ray.

    Workers.ask --- pipe ---> _serve: join a case's groups, then time it, or watch the heap while it runs

Every worker is pinned to a core; what a case does is the same whether it is timed or watched.
"""

import dataclasses
import multiprocessing
import os
import random
import statistics
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Self

from nereus.model import ModelSpec
from nereus.plan import ACTOR_TRAINING, Recompute, StagePlan
from nereus.planner.workload import Lengths, Workload

SPEC = ModelSpec(
    family="qwen2", num_layers=4, hidden=256, num_heads=8, num_kv_heads=4, head_dim=32, ffn=704, vocab=2048,
    qkv_bias=True,
)  # fmt: skip
PROMPT = 32
TIMEOUT_S = 120.0
WATCH_S = 0.001
"""Between two readings of the heap's counters; the peaks last for tens of milliseconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One run: a stage under a plan with response lengths and a micro-batch (slots, for generation)."""

    stage: str
    plan: StagePlan
    lengths: tuple[int, ...]
    micro_batch: int
    spec: ModelSpec = SPEC
    recompute: Recompute = Recompute.NONE

    def __str__(self) -> str:
        mean = statistics.fmean(self.lengths)
        return f"{self.stage} {self.plan.shape}, mean length {mean:g}, micro-batch {self.micro_batch}"

    @property
    def workload(self) -> Workload:
        values = tuple(map(float, sorted(self.lengths)))
        return Workload(batch=len(self.lengths), prompt_tokens=PROMPT, response=Lengths(values))

    @property
    def place(self) -> tuple[StagePlan, ModelSpec, Recompute, bool]:
        """What has to be set up anew when it differs from the case before."""
        return self.plan, self.spec, self.recompute, self.stage == "training"


class Workers:
    """`count` worker processes, devices 0 to count - 1, until the context ends."""

    def __init__(self, count: int) -> None:
        self._count, self._joined = count, 0
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def __enter__(self) -> Self:
        from nereus.comm.store import serve_store

        self._server = serve_store()
        context = multiprocessing.get_context("spawn")
        cores = sorted(os.sched_getaffinity(0))
        for device in range(self._count):
            ours, theirs = context.Pipe()
            address = (self._server.host, self._server.port)
            args = (device, cores[device % len(cores)], *address, theirs)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.send(("end",))
        for process in self._processes:
            process.join(10)

    def join(self, case: Case) -> dict[int, int]:
        """Set up groups, state and trainer of a case; bytes of state and gradients by device."""
        self._joined += 1
        return self._ask(case, "join", self._joined)

    def seconds(self, case: Case) -> float:
        """Seconds of a case on its slowest rank, from the instant at which every rank is ready."""
        return float(max(self._ask(case, "time").values()))

    def peaks(self, case: Case) -> dict[int, int]:
        """Most bytes the heap held by device while a case ran, beyond those before it."""
        return self._ask(case, "watch")

    def _ask(self, case: Case, what: str, *arguments: Any) -> dict[int, Any]:
        for device in case.plan.devices:
            self._pipes[device].send((what, case, *arguments))
        return {device: self._reply(device, f"{what} {case}") for device in case.plan.devices}

    def _reply(self, device: int, what: str) -> Any:
        if not self._pipes[device].poll(TIMEOUT_S):
            raise TimeoutError(f"worker {device} did not answer within {TIMEOUT_S:g} s: {what}")
        return self._pipes[device].recv()


def _serve(device: int, core: int, host: str, port: int, pipe: Connection) -> None:
    """One worker: joins the groups of a case, then runs cases of the same place as it is told."""
    import torch

    from nereus.comm.store import connect_store

    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    store = connect_store(host, port, timeout=timedelta(seconds=TIMEOUT_S))
    rank: EngineRank | None = None
    while True:
        what, *arguments = pipe.recv()
        if what == "end":
            return
        if what == "join":
            if rank is not None:
                rank.groups.close()
            rank = None  # its memory goes before the next one's comes
            case, epoch = arguments
            rank = EngineRank(case, device, store, epoch=epoch)
            pipe.send(rank.held_bytes)
        else:
            assert rank is not None
            pipe.send({"time": rank.seconds, "watch": rank.peak}[what](*arguments))


class EngineRank:
    """One rank of a case: its state, engines and groups. A case of one rank needs no store."""

    def __init__(self, case: Case, device: int, store: Any, *, epoch: int) -> None:
        import torch

        from nereus.comm.buffers import SharedMemory
        from nereus.engines.meter import Meter
        from nereus.engines.train import AdamW, Trainer
        from nereus.runtime.ranks import join_groups, rank_group_specs
        from nereus.shards.state import RankState, state_dtypes

        plan, trains = case.plan, case.stage == "training"
        position = plan.position(device)
        assert position is not None
        self.unit, rank = position
        self.dp = plan.dp
        specs = rank_group_specs(case.spec, ACTOR_TRAINING, plan, device, epoch=epoch)
        self.groups = join_groups(
            specs, store, device, timeout=timedelta(seconds=TIMEOUT_S), backend="gloo", trains=True, meter=Meter(),
            nodes=dict.fromkeys(plan.devices, "node0"),
        )  # fmt: skip
        memory, dtypes = SharedMemory(), state_dtypes(torch.float32, trains=trains)
        self.state = RankState.allocate(case.spec, plan.layout, rank, dtypes=dtypes, allocator=memory)
        for flat in self.state.flats.values():
            flat.uniform_(0.001, 0.02)
        self.trainer: Trainer | None = None
        self.held_bytes = memory.num_bytes
        if trains:
            self.trainer = Trainer(self.state, self.groups, AdamW(lambda _: 1e-5), recompute=case.recompute)
            self.held_bytes += self.trainer.grads.nbytes
        self.ballot = torch.zeros(1)

    def seconds(self, case: Case) -> float:
        work = self._ready(case)
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun

    def peak(self, case: Case) -> int:
        return heap_peak(self._ready(case))

    def _ready(self, case: Case) -> Callable[[], Any]:
        """The work of a case, when every rank can begin."""
        work = {"generation": self._generate, "inference": self._score, "training": self._update}[case.stage](case)
        self.groups.all.all_reduce(self.ballot)
        return work

    def _update(self, case: Case) -> Callable[[], Any]:
        from nereus.algorithms.objectives import PolicyObjective

        batch, trainer = random_batch(case.lengths, vocab=case.spec.vocab), self.trainer
        share = batch.shares(self.dp)[self.unit]
        objective = PolicyObjective(counts=batch.counts)
        assert trainer is not None
        return lambda: trainer.update(share, objective, micro_batch=case.micro_batch)

    def _score(self, case: Case) -> Callable[[], Any]:
        from nereus.algorithms.types import OutputKind
        from nereus.engines.infer import score
        from nereus.engines.pipeline import Pipeline
        from nereus.engines.transformer import StageModel

        model = StageModel(self.state, tp=self.groups.tp)
        share = random_batch(case.lengths, vocab=case.spec.vocab).shares(self.dp)[self.unit]
        pipeline = Pipeline(model, self.groups.pp)
        return lambda: score(model, pipeline, share, OutputKind.LOGPROBS, micro_batch=case.micro_batch)

    def _generate(self, case: Case) -> Callable[[], Any]:
        from nereus.engines.generate import Generator
        from nereus.engines.rollout import Request
        from nereus.engines.sampling import SamplingParams
        from nereus.engines.transformer import StageModel

        new = case.lengths[0]
        generator = Generator(
            StageModel(self.state, tp=self.groups.tp), tp=self.groups.tp, pp=self.groups.pp,
            max_slots=case.micro_batch, max_length=PROMPT + new,
        )  # fmt: skip
        requests = [Request(place, 0, list(range(PROMPT))) for place in range(len(case.lengths))]
        own = requests[self.unit :: self.dp]

        def generate() -> Any:
            generator.load()
            return generator.generate(own, SamplingParams(max_new_tokens=new))

        return generate


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


def heap_peak(work: Callable[[], Any]) -> int:
    """Most bytes the heap held beyond its start while `work` ran; another thread reads the counters."""
    from nereus.engines.gauge import heap_bytes

    start, peak, ended = heap_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(WATCH_S):
            peak = max(peak, heap_bytes() - start)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        ended.set()
        watcher.join()
    return peak
