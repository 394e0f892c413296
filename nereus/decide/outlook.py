"""What plans of a real job cost and what moving takes: the planner and the transition code as an `Outlook`.

    lengths -> workload -> price (planner) ---------------> Prediction
    devices -> search, near the current plan, assign ------> plans, fastest first
    two plans -> plan_transition -------------------------> Transition, which is what is executed
    a measured step -> bills of what it did -> Calibration: all of the above

Everything is a function of the job, the calibration it started with, and the steps it was told of.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nereus.cluster import Cluster, Link
from nereus.decide.decider import Decider
from nereus.decide.policies import POLICIES
from nereus.decide.policy import Dials
from nereus.decide.seam import Outlook, Prediction
from nereus.engine_facts import PRECISIONS, Op, Precision
from nereus.errors import PlanError
from nereus.model import Head, Llama3RopeScaling, ModelSpec
from nereus.plan import Layout, ModelStage, Plan, Recompute, Role, Stage, format_devices
from nereus.planner.evaluate import PlanPrice, complete, price
from nereus.planner.prices.calibration import Calibration
from nereus.planner.prices.cost import ON_DEVICE, CostModel
from nereus.planner.prices.operations import COLLECTIVES, COLUMN, Bill, parse_key
from nereus.planner.problem import Limits, PlanningProblem
from nereus.planner.search.optimum import Choice, search
from nereus.planner.space.layouts import Space
from nereus.planner.space.line import speed_ranks
from nereus.planner.workload import LengthSummary, Workload
from nereus.recipe.config import RunConfig, parse_config
from nereus.reports.events import read_events
from nereus.runtime.seam import StepReport
from nereus.transition.assignment import assign
from nereus.transition.judged import Transition, plan_transition
from nereus.transition.operations import Infeasible
from nereus.transition.price import DeviceTable, Rates, StageState
from nereus.workflow import Workflow

STEP_NOISE = 0.15
"""Relative noise of a model-stage's measured seconds: waiting and neighbours are in them."""

OPERATION_NOISE = 0.3
"""Relative noise of an operation class's measured seconds: on shared cores a call may be preempted."""

WORKER_START_S = {"cpu": 3.0, "cuda": 10.0}
"""Seconds until a new worker process has imported its libraries and answers; workers start at once. A first guess that
measured transitions correct."""


@dataclasses.dataclass(frozen=True, slots=True)
class JobShape:
    """A job as planning sees it. cluster: every device it may ever use.

    limits: `space` has what the recipe pins of micro-batch, sequences at once and recomputation. Processor workers take
    turns only where nothing else fits: how much they slow each other down is the least certain of all predictions.
    worker_start_s: what a transition to devices that have no worker yet takes besides moving state.
    host_bytes_per_node: host memory for units that a transition stages; None: as `DeviceTable.of` has it.
    """

    workflow: Workflow
    specs: Mapping[Role, ModelSpec]
    cluster: Cluster
    precision: Precision
    batch: int
    n: int
    mini_batches: int
    epochs: int
    max_prompt_tokens: int
    max_response_tokens: int
    limits: Limits = Limits()
    worker_start_s: float = 0.0
    host_bytes_per_node: int | None = None

    @classmethod
    def of(cls, config: RunConfig, specs: Mapping[Role, ModelSpec], cluster: Cluster) -> "JobShape":
        """The shape of a recipe's job; settings that the recipe names are pinned, the planner chooses the others."""
        pinned = config.trainer.recompute
        space = Space(
            paper=config.space == "paper",
            recomputes=tuple(Recompute) if pinned is None else (Recompute(pinned),),
            micro_batch=config.actor.ppo_micro_batch_size,
            max_num_seqs=config.rollout.max_num_seqs,
        )
        return cls(
            workflow=config.workflow,
            specs=dict(specs),
            cluster=cluster,
            precision=PRECISIONS[config.trainer.dtype],
            batch=config.data.train_batch_size,
            n=config.rollout.n,
            mini_batches=config.num_mini_batches,
            epochs=config.actor.ppo_epochs,
            max_prompt_tokens=config.data.max_prompt_length,
            max_response_tokens=config.data.max_response_length,
            limits=Limits(space=space, turns_if_faster=config.cluster.device == "cuda"),
            worker_start_s=WORKER_START_S[config.cluster.device],
            host_bytes_per_node=config.cluster.host_bytes_per_node,
        )

    @classmethod
    def from_event(cls, start: Mapping[str, Any]) -> "JobShape":
        """The shape recorded in a `start` event."""
        config = parse_config(start["config"])
        specs = {Role(role): _spec(fields) for role, fields in start["models"].items()}
        return cls.of(config, specs, Cluster.from_json(start["cluster"]))

    @property
    def first_lengths(self) -> LengthSummary:
        """What is assumed before the first step: every response as long as may be."""
        longest = float(self.max_response_tokens)
        return LengthSummary(longest, longest, longest, float(self.max_prompt_tokens))

    def workload(self, lengths: LengthSummary) -> Workload:
        return Workload(
            batch=self.batch,
            prompt_tokens=lengths.prompt_mean,
            response=lengths.quantiles(),
            n=self.n,
            mini_batches=self.mini_batches,
            epochs=self.epochs,
            max_prompt_tokens=self.max_prompt_tokens,
            max_tokens=self.max_prompt_tokens + self.max_response_tokens,
        )

    def states(self) -> dict[ModelStage, StageState]:
        """What a transition moves of each model-stage: parameters, and masters and moments where it trains."""
        return {
            m: StageState(self.specs[m.role], self.precision.state_bytes(trains=m.stage is Stage.TRAINING))
            for m in self.workflow.model_stages
        }


class ModelOutlook(Outlook):
    """The outlook of one job. `refusal`: why the last search found nothing."""

    def __init__(self, job: JobShape, calibration: Calibration) -> None:
        self.job, self.calibration = job, calibration
        self.refusal = ""
        self._frozen = calibration
        self._clusters: dict[tuple[int, ...], Cluster] = {}
        self._states = job.states()
        self._engine_bytes: Mapping[int, int] = {}
        self._table = self._device_table()

    def predict(self, plan: Plan, lengths: LengthSummary, *, frozen: bool = False) -> Prediction:
        found = self._price(plan, lengths, self._frozen if frozen else self.calibration)
        return Prediction(found.step_seconds, found.memory_share)

    def plans(self, current: Plan | None, lengths: LengthSummary, devices: Sequence[int]) -> list[Plan]:
        """The optimum, what it becomes when training, or all but training, keeps its layout and dp, and what is in
        force with other settings."""
        if not devices:
            self.refusal = "there is no device"
            return []
        problem = self._problem(self._restricted(devices), lengths, self.calibration)
        best = search(problem, current=current)
        if not isinstance(best, Choice):
            self.refusal = str(best)
            return []
        found = [self._near(current, best.plan)]
        for kept in _kept_shapes(current, best.plan) if current else []:
            near = search(problem, current=current, fixed=kept)
            if isinstance(near, Choice):
                found.append(self._near(current, near.plan))
        if current and set(current.devices) <= set(devices):
            found.append(complete(problem, current.placed))
        return list(dict.fromkeys(found))

    def assess(self, current: Plan, target: Plan) -> Transition | Infeasible:
        try:
            settled = self.complete(target)
        except PlanError as error:
            return Infeasible(str(error))
        return plan_transition(
            current,
            settled,
            states=self._states,
            table=self._table,
            rates=self._rates(),
            start_s=self.job.worker_start_s,
        )

    def complete(self, plan: Plan) -> Plan:
        """A plan that a recipe or a person wrote with every setting said: those left out suit the longest responses.

        Raises PlanError where the job, its models or its devices do not admit the plan.
        """
        have = self.job.cluster.device_ids
        self.job.workflow.check_plan(plan)
        for m, stage_plan in plan.stages:
            self.job.specs[m.role].check_layout(**stage_plan.layout.axes)
        if unknown := sorted(set(plan.devices).difference(have)):
            raise PlanError(f"device {format_devices(unknown)} does not exist; there are {format_devices(have)}")
        return complete(self._problem(self._restricted(plan.devices), self.job.first_lengths, self.calibration), plan)

    def occupy(self, engine_bytes: Mapping[int, int]) -> None:
        self._engine_bytes = engine_bytes
        self._table = self._device_table()

    @property
    def cluster(self) -> Cluster:
        return self.job.cluster

    def recluster(self, cluster: Cluster) -> None:
        self.job = dataclasses.replace(self.job, cluster=cluster)
        self._clusters.clear()
        self._table = self._device_table()

    def learn(self, plan: Plan, report: StepReport) -> None:
        """Learn from the seconds of operation classes where they were measured, and of every model-stage."""
        priced = self._price(plan, report.lengths, self.calibration)
        accelerator = self._slowest(plan.devices)
        plain = self.calibration.lines(accelerator)
        launch = COLUMN[(Op.LAUNCH, None)]
        total, crowded_s = Bill(), 0.0
        for m, stage in priced.stages.items():
            # Processor workers that share cores take longer for the same work. Its counts are raised by that factor, so
            # that the calibration learns the speed of a worker with cores of its own.
            crowding = float(stage.cost.lines[1, launch] / plain[1, launch])
            crowded_s += crowding * report.task_s.get(m, 0.0)
            bill = Bill()
            for task in stage.cost.tasks.values():
                total.add_bill(task.work)
                bill.add_bill(task.work)
                bill.add_bill(task.bubble)
            bill = Bill(np.where(ON_DEVICE, bill.counts * crowding, bill.counts))
            self.calibration.observe_total(bill, report.task_s.get(m, 0.0), accelerator=accelerator, noise=STEP_NOISE)
        busy_s = sum(report.task_s.values())
        for name, (work, seconds) in report.operations.items():
            mean_crowding = crowded_s / busy_s if busy_s else 1.0
            self._learn_operation(name, work, seconds, total, mean_crowding, accelerator)

    def freeze(self) -> None:
        self._frozen = Calibration.from_json(self.calibration.to_json())

    def _learn_operation(
        self, name: str, work: float, seconds: float, total: Bill, crowding: float, accelerator: str
    ) -> None:
        """One measured class; its calls are in proportion to the step's counted ones.

        Collectives are left out: a rank's seconds in one are mostly the wait for its slowest peer.
        """
        key = parse_key(name)
        if key[0] in COLLECTIVES:
            return
        column = COLUMN[key]
        counted, calls = float(total.counts[0, column]), float(total.counts[1, column])
        count = calls * work / counted if counted > 0 else 1.0
        share = crowding if ON_DEVICE[column] else 1.0
        self.calibration.observe_total(
            [(key, work, count)], seconds / share, accelerator=accelerator, noise=OPERATION_NOISE
        )

    def _device_table(self) -> DeviceTable:
        """What devices have for a transition: less what engines held beside the state when the last step ended."""
        job = self.job
        return DeviceTable.of(
            job.cluster,
            headroom=job.limits.headroom,
            reserved_bytes=self._engine_bytes,
            host_bytes_per_node=job.host_bytes_per_node,
        )

    def _price(self, plan: Plan, lengths: LengthSummary, calibration: Calibration) -> PlanPrice:
        return price(self._problem(self._restricted(plan.devices), lengths, calibration), plan)

    def _near(self, current: Plan | None, target: Plan) -> Plan:
        """The target with its devices where they keep most of what is there."""
        if current is None:
            return target
        return assign(current, target, states=self._states, table=self._table, cluster=self.job.cluster)

    def _problem(self, cluster: Cluster, lengths: LengthSummary, calibration: Calibration) -> PlanningProblem:
        job = self.job
        return PlanningProblem(
            workflow=job.workflow,
            specs=job.specs,
            cluster=cluster,
            workload=job.workload(lengths),
            precision=job.precision,
            cost=CostModel(cluster, calibration),
            limits=job.limits,
        )

    def _restricted(self, devices: Sequence[int]) -> Cluster:
        key = tuple(sorted(devices))
        if key not in self._clusters:
            self._clusters[key] = self.job.cluster.restricted(key)
        return self._clusters[key]

    def _slowest(self, devices: Sequence[int]) -> str:
        ranks = speed_ranks(self.job.cluster)
        return max((self.job.cluster.device(d).accelerator for d in devices), key=ranks.__getitem__)

    def _rates(self) -> Rates:
        """Link speeds and group set-up as learned on the slowest type."""
        accelerator = self._slowest(self.job.cluster.device_ids)
        efficiency = {
            link: self.calibration.efficiency(Op.POINT_TO_POINT, accelerator, link=link)
            for link in (Link.INTRA_NODE, Link.INTER_NODE)
        }
        setup_s, _ = self.calibration.line((Op.GROUP_SETUP, Link.INTRA_NODE), accelerator)
        return Rates.of(self.job.cluster, efficiency=efficiency, setup_s=setup_s)


def _kept_shapes(current: Plan, best: Plan) -> list[dict[ModelStage, tuple[Layout, int]]]:
    """(layout, dp) to keep for slower targets with cheaper transitions: of training, of all but training."""
    shapes = {m: (stage_plan.layout, stage_plan.dp) for m, stage_plan in current.stages}
    changed = {m for m, stage_plan in best.stages if m in shapes and shapes[m] != (stage_plan.layout, stage_plan.dp)}
    training = {m: shape for m, shape in shapes.items() if m.stage is Stage.TRAINING}
    others = {m: shape for m, shape in shapes.items() if m.stage is not Stage.TRAINING}
    return [kept for kept in (training, others) if changed & set(kept) and changed - set(kept)]


def _spec(fields: Mapping[str, Any]) -> ModelSpec:
    scaling = fields["rope_scaling"]
    changed = {"head": Head(fields["head"]), "rope_scaling": Llama3RopeScaling(**scaling) if scaling else None}
    return ModelSpec(**{**fields, **changed})


def decider_of(config: RunConfig, outlook: ModelOutlook, plan: Plan) -> Decider:
    """The decider of a recipe's job, started on `plan`."""
    policy = POLICIES[config.admission](Dials(config.gamma, config.triggers.length, config.triggers.efficiency))
    return Decider(policy, outlook, plan, lengths=outlook.job.first_lengths, warmup_steps=config.trainer.critic_warmup)


def recorded_decider(start: Mapping[str, Any]) -> Decider:
    """The decider of a recorded run, as it stood before the first boundary; for `replay`."""
    job = JobShape.from_event(start)
    calibration = Calibration.from_json(start["calibration"])
    outlook = ModelOutlook(job, calibration)
    return decider_of(parse_config(start["config"]), outlook, Plan.from_json(start["plan"]))


def recorded_outlook(events: Path) -> ModelOutlook:
    """The outlook of a recorded run as it started: what it learned since is not in it."""
    start = read_events(events)[0]
    return ModelOutlook(JobShape.from_event(start), Calibration.from_json(start["calibration"]))


def describe_move(outlook: ModelOutlook, current: Plan, target: Plan) -> str:
    """What moving would take, in lines; raises PlanError where the models or the devices do not admit the target."""
    found = outlook.assess(current, target)
    if isinstance(found, Infeasible):
        raise PlanError(f"this move is not possible: {found.reason}")
    if found.target == current:
        return "that is the plan in force; nothing would move"
    changed = [f"  {m.name}: {current.get(m)} -> {p}" for m, p in found.target.stages if current.get(m) != p]
    return "\n".join([f"predicted to take {found.seconds:.3f} s", *changed])
