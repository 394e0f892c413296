"""`nereus.plan(...)`: the planner for people. Names and texts in, a typed result out; the command only prints it.

names, cluster, lengths -> PlanningProblem -> search -> PlanResult: stages, critical path, runners-up, exclusions
"""

import dataclasses
import json
import math
import numbers
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nereus.cluster import GB, Cluster, load_cluster
from nereus.engine_facts import DTYPE_ALIASES, PRECISIONS
from nereus.errors import ConfigError, DataError, PlanError
from nereus.known_models import load_spec
from nereus.model import Head, ModelSpec
from nereus.plan import Layout, ModelStage, Plan, Role, StagePlan, check_settings, parse_stage_plan
from nereus.planner.evaluate import PlanPrice, price, tokens_per_second
from nereus.planner.placement import Placement
from nereus.planner.prices.calibration import Calibration
from nereus.planner.prices.cost import CostModel
from nereus.planner.problem import Limits, PlanningProblem
from nereus.planner.search.optimum import Choice, Restriction, optimum, search
from nereus.planner.search.refusal import Refusal
from nereus.planner.space.layouts import Space
from nereus.planner.workload import Lengths, Workload
from nereus.workflow import ROLES_OF, step_workflow

MAX_QUANTILES = 64

MAX_STEP_TOKENS = 10**12
"""Tokens of one step, were every sample as long as the longest: far above any job, and what is counted in 64 bits."""


@dataclasses.dataclass(frozen=True, slots=True)
class Alternative:
    """Another plan and what it would cost; `note` says what it differs in."""

    price: PlanPrice
    note: str


@dataclasses.dataclass(frozen=True, slots=True)
class Excluded:
    """A setting that would be faster for one model-stage, and the limit that keeps it out."""

    model_stage: ModelStage
    shape: str
    seconds: float
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class PlanResult:
    """What `nereus plan` shows: a choice with its price, or a refusal; and what else there was."""

    problem: PlanningProblem
    choice: Choice | None
    price: PlanPrice | None
    refusal: Refusal | None
    alternatives: tuple[Alternative, ...] = ()
    excluded: tuple[Excluded, ...] = ()
    compared: PlanPrice | None = None
    notes: tuple[str, ...] = ()

    @property
    def feasible(self) -> bool:
        return self.choice is not None

    @property
    def plan(self) -> Plan | None:
        return self.choice.plan if self.choice else None

    @property
    def tokens_per_second(self) -> float | None:
        return tokens_per_second(self.problem, self.price.step_seconds) if self.price else None

    def to_json(self) -> dict[str, Any]:
        """The form of the contracts."""
        found: dict[str, Any] = {
            "feasible": self.feasible,
            "reason": str(self.refusal) if self.refusal else None,
            "limit": self.refusal.limit if self.refusal else None,
            "step_s": self.price.step_seconds if self.price else None,
            "tokens_per_s": self.tokens_per_second,
            "stages": _stages_json(self.price) if self.price else [],
            "wave_s": list(self.price.wave_seconds) if self.price else [],
            "overlapped": self.price.overlapped if self.price else False,
            "sync_s": _syncs_json(self.price) if self.price else {},
            "placement": self.choice.placement.value if self.choice else None,
            "gap": self.choice.gap if self.choice else None,
            "idle_devices": list(self.choice.idle_devices) if self.choice else [],
            "alternatives": [
                {"step_s": a.price.step_seconds, "note": a.note, "plan": str(a.price.plan),
                 "stages": _stages_json(a.price)}
                for a in self.alternatives
            ],
            "excluded": [
                {"model_stage": e.model_stage.name, "shape": e.shape, "seconds": e.seconds, "reason": e.reason}
                for e in self.excluded
            ],
            "notes": list(self.notes),
        }  # fmt: skip
        if self.compared:
            found["compared"] = {
                "step_s": self.compared.step_seconds,
                "feasible": self.compared.feasible,
                "excess_gb": max(0.0, self.compared.excess_bytes / GB),
                "stages": _stages_json(self.compared),
            }
        return found


def _stages_json(priced: PlanPrice) -> list[dict[str, Any]]:
    rows = []
    for row in priced.plan.to_json():
        stage = priced.stages[ModelStage.parse(row["model_stage"])]
        parts = {part: size / GB for part, size in stage.memory.active.items()}
        rows.append(
            row
            | {
                "seconds": stage.cost.seconds,
                "micro_batch": stage.micro_batch,
                "recompute": stage.recompute.value,
                "shares_weights": stage.shares_weights,
                "memory_gb": {"total": stage.memory.active_bytes / GB, **parts},
                "idle_gb": stage.memory.idle_bytes / GB,
            }
        )
    return rows


def _syncs_json(priced: PlanPrice) -> dict[str, float]:
    return {f"{source} -> {target}": seconds for (source, target), seconds in priced.sync_seconds.items()}


def plan(
    model: str | ModelSpec,
    cluster: str | Cluster,
    *,
    alternatives: bool = False,
    explain: bool = False,
    compare: str | Mapping[str, str] | None = None,
    current: Plan | None = None,
    **job: Any,
) -> PlanResult:
    """The best plan of a job on a cluster, or why there is none.

    job: further arguments of `problem_for`. alternatives: find runners-up too; explain: and what kept faster settings
    out. compare: a plan to price as well. current: among equally fast placements take the one that moves least.
    Raises InputError where what is asked cannot be read.
    """
    return plan_problem(
        problem_for(model, cluster, **job),
        alternatives=alternatives, explain=explain, compare=compare, current=current,
    )  # fmt: skip


def problem_for(
    model: str | ModelSpec,
    cluster: str | Cluster,
    *,
    algorithm: str = "ppo",
    batch: int = 512,
    prompt: float = 1024,
    response: float | Lengths = 1024,
    n: int = 1,
    mini_batches: int = 1,
    max_staleness: int = 0,
    memory_gb: float | None = None,
    placement: str | Placement = Placement.FREE,
    critic: str | ModelSpec | None = None,
    reward: str | ModelSpec | None = None,
    reference: str | ModelSpec | None = None,
    dtype: str = "bf16",
    paper_space: bool = False,
    calibration: Calibration | None = None,
) -> PlanningProblem:
    """The planning problem of a job on a cluster.

    model, critic, reward, reference: HF folder, config.json or built-in name; the last three default to the actor's
    shape (`reward` to no reward model). batch: prompts of a step; n: samples of each; prompt: tokens; response: mean
    tokens, or a distribution. max_staleness: updates by which the generating policy may lag behind; from 1 on the next
    batch is generated beside the rest of the step. memory_gb: devices count as having no more. Raises InputError where
    something cannot be read.
    """
    if max_staleness < 0:
        raise ConfigError("max-staleness", f"{max_staleness} given; 0 or more is needed")
    if memory_gb is not None and not 0 < memory_gb < math.inf:
        raise ConfigError("memory-gb", f"{memory_gb} given; a positive number is needed")
    if algorithm not in ROLES_OF:
        raise ConfigError("algorithm", f"no {algorithm!r}; known: {', '.join(ROLES_OF)}")
    if placement not in set(Placement):
        raise ConfigError("placement", f"no {placement!r}; known: {', '.join(Placement)}")
    dtype = DTYPE_ALIASES.get(dtype, dtype)
    if dtype not in PRECISIONS:
        raise ConfigError("dtype", f"no {dtype!r}; known: {', '.join(PRECISIONS)}")
    devices = load_cluster(cluster) if isinstance(cluster, str) else cluster
    actor = _spec(model)
    specs = {Role.ACTOR: actor, Role.REFERENCE: actor if reference is None else _spec(reference)}
    if Role.CRITIC in ROLES_OF[algorithm]:
        specs[Role.CRITIC] = (actor if critic is None else _spec(critic)).with_head(Head.SCORE)
    if reward is not None:
        specs[Role.REWARD] = _spec(reward).with_head(Head.SCORE)
    workload = _workload(batch, prompt, response, n=n, mini_batches=mini_batches)
    return PlanningProblem(
        workflow=step_workflow(algorithm, specs.keys(), max_staleness=max_staleness),
        specs=specs,
        cluster=devices,
        workload=workload,
        precision=PRECISIONS[dtype],
        cost=CostModel(devices, calibration or Calibration(devices.accelerators)),
        limits=Limits(
            memory_cap_bytes=None if memory_gb is None else int(memory_gb * GB),
            placement=Placement(placement),
            space=Space(paper=paper_space),
        ),
    )


def _workload(batch: int, prompt: float, response: float | Lengths, *, n: int, mini_batches: int) -> Workload:
    """The workload of one step; raises ConfigError where a number is out of range."""
    for name, count in (("batch", batch), ("n", n), ("mini-batches", mini_batches)):
        if not isinstance(count, numbers.Integral) or count < 1:
            raise ConfigError(name, f"{count} given; a whole number of at least 1 is needed")
    if not 1 <= prompt < math.inf:
        raise ConfigError("prompt", f"{prompt} given; at least 1 token is needed")
    if not isinstance(response, Lengths) and not 0 < response < math.inf:
        raise ConfigError("response", f"{response} given; more than 0 tokens are needed")
    if mini_batches > batch:
        raise ConfigError("mini-batches", f"{mini_batches} given; at most the batch, {batch}, leaves each a prompt")
    lengths = response if isinstance(response, Lengths) else Lengths.constant(float(response))
    work = Workload(int(batch), float(prompt), lengths, n=int(n), mini_batches=int(mini_batches))
    if work.num_samples * work.longest_tokens > MAX_STEP_TOKENS:
        most = f"batch x n x (prompt + response) may be {MAX_STEP_TOKENS:.0e} at most"
        raise ConfigError("batch", f"{work.num_samples * work.longest_tokens:.3g} tokens a step; {most}")
    return work


def _spec(model: str | ModelSpec) -> ModelSpec:
    return model if isinstance(model, ModelSpec) else load_spec(model)


def load_lengths(path: str | Path) -> Lengths:
    """A response length distribution from a file: a JSON list, or one number a line (a CSV's last column)."""
    source = Path(path)
    if not source.is_file():
        raise DataError(f"lengths file {path}: not found")
    try:
        text = source.read_text(encoding="utf-8-sig")
        cells = _listed(text) if text.lstrip().startswith("[") else _last_cells(text)
        values = [_length(where, cell) for where, cell in cells]
    except (OSError, ValueError) as error:
        raise DataError(f"lengths file {path}: {error}; {_LENGTHS_FORM}") from None
    if not values or max(values) == 0:
        raise DataError(f"lengths file {path}: no lengths above 0 found; {_LENGTHS_FORM}")
    values.sort()
    if len(values) > MAX_QUANTILES:
        size = len(values)
        values = [values[size * (i + 1) // MAX_QUANTILES - 1] for i in range(MAX_QUANTILES)]
    return Lengths(tuple(values))


_LENGTHS_FORM = "write one number of tokens a line or a JSON list"


def _listed(text: str) -> Iterator[tuple[str, Any]]:
    for number, cell in enumerate(json.loads(text), start=1):
        if isinstance(cell, bool) or not isinstance(cell, int | float):
            raise ValueError(f"entry {number} is {cell!r}")
        yield f"entry {number}", cell


def _last_cells(text: str) -> Iterator[tuple[str, Any]]:
    """The last column of each line; the first line with anything in it may be a header."""
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    for number, line in lines:
        cell = line.rpartition(",")[2].strip().strip("\"'")
        if (number, line) != lines[0] or _is_number(cell):
            yield f"line {number}", cell


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _length(where: str, cell: str | float) -> float:
    """A number of tokens; raises ValueError where it is none."""
    if isinstance(cell, str) and not _is_number(cell):
        raise ValueError(f"{where}: {cell[:40]!r} is not a number")
    value = float(cell)
    if not 0 <= value < math.inf:
        raise ValueError(f"{where}: {cell} is not a number of tokens")
    return value


def plan_problem(
    problem: PlanningProblem,
    *,
    alternatives: bool = False,
    explain: bool = False,
    compare: str | Mapping[str, str] | None = None,
    current: Plan | None = None,
) -> PlanResult:
    """Search a problem, and price what stands beside the choice; arguments as in `plan`."""
    found = search(problem, current=current)
    brought = parse_plan(problem, compare, found) if compare is not None else None
    notes = _notes(problem, found) if isinstance(found, Choice) else []
    if brought and isinstance(found, Refusal) and set(brought.model_stages) < set(problem.workflow.model_stages):
        notes.append("the plan to compare leaves model-stages out, and there is no choice to take them from")
        brought = None
    compared = price(problem, brought) if brought else None
    if isinstance(found, Refusal):
        return PlanResult(problem, None, None, found, compared=compared, notes=tuple(notes))
    return PlanResult(
        problem,
        choice=found,
        price=price_choice(problem, found),
        refusal=None,
        alternatives=tuple(runners_up(problem, found)) if alternatives or explain else (),
        excluded=tuple(tempting(problem, found)) if explain else (),
        compared=compared,
        notes=tuple(notes),
    )


def price_choice(problem: PlanningProblem, choice: Choice) -> PlanPrice:
    """The price of a choice's plan under its settings: its step, by another way than the search's."""
    return price(problem, choice.plan, in_turn=choice.placement is Placement.COLOCATED)


def parse_plan(problem: PlanningProblem, text: str | Mapping[str, str], found: Choice | Refusal) -> Plan:
    """A plan such as `actor-training=d4t2p2 critic-training=d2t2p2`; model-stages not named keep those of the choice.

    Without devices a model-stage takes the first of those that no concurrent one named before it has taken.
    """
    if isinstance(text, str):
        pairs = [part.partition("=") for part in text.replace(";", " ").split()]
        if not pairs or not all(mark and value for _, mark, value in pairs):
            raise PlanError(f"plan {text!r}: write actor-training=d4t2p2 with optional devices, d4t2p2@0-15")
        names = [name for name, _, _ in pairs]
        if len(set(names)) < len(names):
            raise PlanError(f"plan {text!r}: {max(names, key=names.count)} is named twice")
        text = {name: value for name, _, value in pairs}
    base = dict(found.plan.stages) if isinstance(found, Choice) else {}
    named: dict[ModelStage, StagePlan] = {}
    ids = [device.id for device in problem.line.devices]
    for name, value in text.items():
        model_stage = ModelStage.parse(name)
        taken = {d for m, p in named.items() if m.stage is model_stage.stage for d in p.devices}
        free = [d for d in ids if d not in taken]
        named[model_stage] = parse_stage_plan(value, default_devices=free or ids)
        check_settings(model_stage, named[model_stage])
    return Plan.of({**base, **named})


def runners_up(problem: PlanningProblem, choice: Choice) -> list[Alternative]:
    """The best plan with another layout for each model-stage in turn, fastest first."""
    found: dict[Plan, Alternative] = {}
    for model_stage, stage_plan in choice.plan.stages:
        other = search(problem, current=choice.plan, excluded={model_stage: (stage_plan.layout, stage_plan.dp)})
        if isinstance(other, Choice) and other.plan not in found:
            note = f"{model_stage} as {other.plan[model_stage].shape} instead of {stage_plan.shape}"
            found[other.plan] = Alternative(price_choice(problem, other), note)
    return sorted(found.values(), key=lambda a: a.price.step_seconds)


def tempting(problem: PlanningProblem, choice: Choice) -> list[Excluded]:
    """For each model-stage the fastest setting were there no limit of memory, and what keeps it out."""
    line = problem.line
    unbounded = dataclasses.replace(problem.pricing, line=line.with_capacity(1 << 60))
    found: list[Excluded] = []
    for m, chosen_s in choice.stage_seconds.items():
        table = unbounded.candidates(m, in_turn=choice.placement is Placement.COLOCATED)
        row = int(table.total_seconds.argmin())
        best = table[row]
        seconds = float(table.total_seconds[row])
        if seconds >= chosen_s * (1 - 1e-9):
            continue
        usable = line.max_capacity / GB
        if best.active_bytes > line.max_capacity:
            reason = f"memory: needs {best.active_bytes / GB:.1f} GB on a device, {usable:.1f} GB are usable"
        elif _would_be_slower(problem, choice, m, best.layout, best.dp):
            reason = "devices: what runs beside it, or synchronizes with it, would lose more than this gains"
        else:
            reason = f"memory: with what shares its devices more than the usable {usable:.1f} GB"
        found.append(Excluded(m, f"{best.shape} micro-batch {best.micro_batch}", seconds, reason))
    return found


def _would_be_slower(problem: PlanningProblem, choice: Choice, m: ModelStage, layout: Layout, dp: int) -> bool:
    """Whether no plan with this layout is faster, even if what shares a device could exceed its memory."""
    restriction = Restriction({m: (layout, dp)}, {}, crowding=True)
    limit_s = choice.step_seconds * (1 - 1e-9)
    found, _ = optimum(problem, choice.placement, restriction, overlapped=choice.overlapped, limit_s=limit_s)
    return found is None


def _notes(problem: PlanningProblem, choice: Choice) -> list[str]:
    notes = []
    if choice.idle_devices:
        notes.append(
            f"{len(choice.idle_devices)} of {problem.cluster.num_devices} devices stay idle: "
            f"no plan found is faster with them ({problem.workload.num_samples} samples a step)"
        )
    if choice.placement is not problem.limits.placement:
        notes.append("model-stages that could run at once take turns on shared devices: faster, or all that fits")
    if choice.gap:
        notes.append(f"a faster plan, if there is one, saves at most {choice.gap:.1%}")
    return notes
