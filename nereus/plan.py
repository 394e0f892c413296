"""Layouts, model-stages and plans: who computes what, on which devices. Values only.

A plan is written the same way everywhere: `actor-training: d2t2p1@0-3/mb=4/recompute=full` in YAML,
`actor-training=d2t2p1@0-3/mb=4` on a command line, `stages` in JSON. Devices are listed unit after unit,
then pipeline stage after pipeline stage, tensor-parallel rank fastest. What is not written is left to the planner.
"""

import dataclasses
import enum
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from nereus.errors import PlanError


class Role(enum.StrEnum):
    """A model of the job."""

    ACTOR = "actor"
    CRITIC = "critic"
    REFERENCE = "reference"
    REWARD = "reward"


class Stage(enum.StrEnum):
    """A stage of one RL step, in the order they run."""

    GENERATION = "generation"
    INFERENCE = "inference"
    TRAINING = "training"


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class ModelStage:
    """One model in one stage, such as actor-generation."""

    role: Role
    stage: Stage

    @property
    def name(self) -> str:
        return f"{self.role}-{self.stage}"

    def __str__(self) -> str:
        return self.name

    @classmethod
    def parse(cls, name: str) -> "ModelStage":
        """The model-stage called `name`; raises PlanError listing the valid names."""
        for model_stage in MODEL_STAGES:
            if model_stage.name == name:
                return model_stage
        raise PlanError(f"no model-stage {name!r}; valid: {', '.join(m.name for m in MODEL_STAGES)}")


ACTOR_GENERATION = ModelStage(Role.ACTOR, Stage.GENERATION)
ACTOR_TRAINING = ModelStage(Role.ACTOR, Stage.TRAINING)
CRITIC_INFERENCE = ModelStage(Role.CRITIC, Stage.INFERENCE)
CRITIC_TRAINING = ModelStage(Role.CRITIC, Stage.TRAINING)
REFERENCE_INFERENCE = ModelStage(Role.REFERENCE, Stage.INFERENCE)
REWARD_INFERENCE = ModelStage(Role.REWARD, Stage.INFERENCE)
MODEL_STAGES = (
    ACTOR_GENERATION,
    REFERENCE_INFERENCE,
    REWARD_INFERENCE,
    CRITIC_INFERENCE,
    CRITIC_TRAINING,
    ACTOR_TRAINING,
)


AXES = {"tp": "t", "pp": "p"}
"""The axes of a layout and the letters a plan writes them with, those whose ranks are nearest to each other first. An
axis more is a field of `Layout`, an entry here, and whoever computes with it."""


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class Layout:
    """How the ranks of one unit share its model: tensor parallelism within pipeline stages.

    Ranks count through the axes in the order of `AXES`, the first fastest: rank = pp_rank * tp + tp_rank.
    """

    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        if min(self.axes.values()) < 1:
            raise PlanError(f"layout {self}: every axis must be at least 1")

    @property
    def axes(self) -> dict[str, int]:
        """Size of each axis by name."""
        return {axis: getattr(self, axis) for axis in AXES}

    @classmethod
    def of_axes(cls, sizes: Mapping[str, Any]) -> "Layout":
        """A layout of sizes by name, such as a row of JSON; axes that are not named are 1."""
        return cls(**{axis: sizes[axis] for axis in AXES if axis in sizes})

    @property
    def num_ranks(self) -> int:
        return math.prod(self.axes.values())

    def along(self, axis: str, rank: int) -> int:
        """Where a rank stands along an axis."""
        for name, size in self.axes.items():
            if name == axis:
                return rank % size
            rank //= size
        raise KeyError(axis)

    def tp_rank(self, rank: int) -> int:
        return rank % self.tp

    def pp_rank(self, rank: int) -> int:
        return self.along("pp", rank)

    def rank(self, *, tp_rank: int, pp_rank: int) -> int:
        return pp_rank * self.tp + tp_rank

    def __str__(self) -> str:
        return "".join(f"{AXES[axis]}{size}" for axis, size in self.axes.items())


class Recompute(enum.StrEnum):
    """What the backward pass computes again instead of keeping: nothing, what is cheap to make, whole layers.

    Attention scores are never kept. Selective: the outputs of norms, the activated gate and its product with up.
    """

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


@dataclasses.dataclass(frozen=True, slots=True)
class StagePlan:
    """Layout of a model-stage, the devices of each of its units rank by rank, and how its engine runs there.

    micro_batch: samples of one unit computed at a time (inference, training).
    recompute: what its updates compute again (training).
    max_num_seqs: sequences one unit decodes at a time; cache_bytes: what each rank may fill with keys and values
    (generation). A setting that is None is not said: the planner says them all, and completes plans that others write
    (`planner.evaluate.complete`). A unit whose plan leaves one out runs with the engine's own (`MICRO_BATCH` and
    `NUM_SEQS` of `engine_facts`; nothing is recomputed, the cache takes what it needs).
    """

    layout: Layout
    units: tuple[tuple[int, ...], ...]
    micro_batch: int | None = None
    recompute: Recompute | None = None
    max_num_seqs: int | None = None
    cache_bytes: int | None = None

    def __post_init__(self) -> None:
        if not self.units:
            raise PlanError("a model-stage needs at least one unit")
        for unit in self.units:
            if len(unit) != self.layout.num_ranks:
                raise PlanError(f"a unit of {self.layout} needs {self.layout.num_ranks} devices, got {list(unit)}")
        if len(set(self.devices)) != len(self.devices):
            raise PlanError(f"devices {list(self.devices)} of one model-stage repeat a device")
        for name in ("micro_batch", "max_num_seqs", "cache_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{name} {value}: it must be at least 1")

    @property
    def placed(self) -> tuple[Layout, tuple[tuple[int, ...], ...]]:
        """Layout and units: what decides who holds which state, whatever the settings."""
        return self.layout, self.units

    @property
    def settings(self) -> dict[str, int | Recompute]:
        """The settings that are said, by name."""
        named = {name: getattr(self, name) for name in SETTINGS}
        return {name: value for name, value in named.items() if value is not None}

    def with_settings(self, **settings: int | Recompute | None) -> "StagePlan":
        """The same units with other settings."""
        return dataclasses.replace(self, **settings)  # type: ignore[arg-type]

    @property
    def dp(self) -> int:
        return len(self.units)

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices, unit after unit, rank after rank."""
        return tuple(device for unit in self.units for device in unit)

    def position(self, device: int) -> tuple[int, int] | None:
        """(unit index, rank in unit) of a device, or None where it holds no part."""
        for index, unit in enumerate(self.units):
            if device in unit:
                return index, unit.index(device)
        return None

    @property
    def shape(self) -> str:
        return f"d{self.dp}{self.layout}"

    def __str__(self) -> str:
        return "/".join([f"{self.shape}@{format_devices(self.devices)}", *_written(self.settings)])

    @classmethod
    def of(cls, layout: Layout, devices: Iterable[int]) -> "StagePlan":
        """Cut a flat device list into units of the layout."""
        flat, size = tuple(devices), layout.num_ranks
        if not flat or len(flat) % size:
            raise PlanError(f"{len(flat)} devices do not divide into units of {layout} ({size} devices each)")
        return cls(layout, tuple(flat[i : i + size] for i in range(0, len(flat), size)))


SETTINGS = {"micro_batch": "mb", "recompute": "recompute", "max_num_seqs": "seqs", "cache_bytes": "cache"}
"""Settings of a model-stage, and how each is written after its devices."""

SETTINGS_OF = {
    Stage.GENERATION: ("max_num_seqs", "cache_bytes"),
    Stage.INFERENCE: ("micro_batch",),
    Stage.TRAINING: ("micro_batch", "recompute"),
}
"""Settings that mean something to a stage."""

_BYTES = {"GB": 10**9, "MB": 10**6, "kB": 10**3, "B": 1}


def _written(settings: Mapping[str, int | Recompute]) -> list[str]:
    """`mb=4`, `cache=8.5GB`: settings as a plan writes them."""
    return [
        f"{SETTINGS[name]}={_format_bytes(value) if name == 'cache_bytes' else value}"  # type: ignore[arg-type]
        for name, value in settings.items()
    ]


def _format_bytes(count: int) -> str:
    """In the largest unit that needs at most three decimals, so that it is read back exactly."""
    for unit, size in _BYTES.items():
        if count >= size and count % max(1, size // 1000) == 0:
            return f"{count / size:.3f}".rstrip("0").rstrip(".") + unit
    return f"{count}B"


def _parse_settings(text: str, parts: Iterable[str]) -> dict[str, Any]:
    """Settings by name of `["mb=4", "recompute=full"]`."""
    names, found = {short: name for name, short in SETTINGS.items()}, dict[str, Any]()
    for part in parts:
        short, _, value = part.partition("=")
        name = names.get(short.strip())
        if name is None or name in found:
            raise PlanError(f"{text!r}: {part!r} is no setting of its own; there are {', '.join(SETTINGS.values())}")
        found[name] = _parse_setting(text, name, value.strip())
    return found


def _parse_setting(text: str, name: str, value: str) -> int | Recompute:
    if name == "recompute":
        if value not in list(Recompute):
            raise PlanError(f"{text!r}: recompute={value}; write one of {', '.join(Recompute)}")
        return Recompute(value)
    if name == "cache_bytes":
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(GB|MB|kB|B)", value)
        if match:
            return round(float(match[1]) * _BYTES[match[2]])
        raise PlanError(f"{text!r}: cache={value}; write bytes such as 8.5GB")
    if not value.isdecimal() or int(value) < 1:
        raise PlanError(f"{text!r}: {SETTINGS[name]}={value}; write a number from 1")
    return int(value)


MAX_DEVICES = 1 << 20
"""Devices a text may name; so that a slip of a key is refused at once."""

_LETTERS = "d" + "".join(AXES.values())
_SHAPE = re.compile(rf"^(?:[a-z_]+:)?((?:[{_LETTERS}]\d+)+)$")


def parse_shape(text: str) -> tuple[int, Layout]:
    """(dp, layout) of `d2t2p1`, letters in any order, absent ones 1; an engine prefix (`megatron:`) is allowed."""
    match = _SHAPE.match(text.strip())
    counts: dict[str, int] = {}
    for letter, number in re.findall(rf"([{_LETTERS}])(\d+)", match[1]) if match else []:
        if letter in counts:
            raise PlanError(f"{text!r} names {letter} twice")
        counts[letter] = int(number)
    if not counts or min(counts.values()) < 1:
        raise PlanError(f"{text!r} is not a plan; write d2t2p1 (dp, tp, pp) with optional devices, d2t2p1@0-3")
    return counts.get("d", 1), Layout(**{axis: counts.get(letter, 1) for axis, letter in AXES.items()})


def parse_devices(text: str) -> tuple[int, ...]:
    """Device ids of `0-3,6`."""
    devices: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not match:
            raise PlanError(f"devices {text!r}: write ids and ranges such as 0-3,6")
        first = int(match[1])
        last = int(match[2]) if match[2] else first
        if last < first:
            raise PlanError(f"devices {text!r}: {part.strip()} runs backwards")
        if len(devices) + last - first >= MAX_DEVICES:
            raise PlanError(f"devices {text!r}: {part.strip()} names {MAX_DEVICES} devices or more")
        devices.extend(range(first, last + 1))
    return tuple(devices)


def format_devices(devices: Iterable[int]) -> str:
    """`0-3,6` of device ids; order is kept."""
    parts: list[str] = []
    run: list[int] = []
    for device in [*devices, None]:
        if run and device == run[-1] + 1:
            run.append(device)
            continue
        if run:
            parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
        run = [] if device is None else [device]
    return ",".join(parts)


def parse_stage_plan(text: str, *, default_devices: Iterable[int] | None = None) -> StagePlan:
    """A StagePlan of `d2t2p1@0-3/mb=4`; without `@` the first of `default_devices` are taken."""
    place, *settings = text.split("/")
    shape, _, devices_text = place.partition("@")
    dp, layout = parse_shape(shape)
    needed = dp * layout.num_ranks
    if devices_text:
        devices = parse_devices(devices_text)
        if len(devices) != needed:
            raise PlanError(f"{text!r} needs {needed} devices and names {len(devices)}")
    else:
        available = tuple(default_devices or range(needed))
        if len(available) < needed:
            raise PlanError(f"{text!r} needs {needed} devices; {len(available)} are available")
        devices = available[:needed]
    return StagePlan.of(layout, devices).with_settings(**_parse_settings(text, settings))


def check_settings(model_stage: ModelStage, stage_plan: StagePlan) -> None:
    """Raise PlanError where a plan says a setting that means nothing to the model-stage."""
    for name in stage_plan.settings:
        if name not in (known := SETTINGS_OF[model_stage.stage]):
            valid = ", ".join(SETTINGS[other] for other in known)
            raise PlanError(f"{model_stage}: {SETTINGS[name]} says nothing to it; its settings are {valid}")


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """For each model-stage its layout, units and devices; ordered by `MODEL_STAGES`."""

    stages: tuple[tuple[ModelStage, StagePlan], ...]

    @classmethod
    def of(cls, stages: Mapping[ModelStage, StagePlan]) -> "Plan":
        return cls(tuple((m, stages[m]) for m in MODEL_STAGES if m in stages))

    @classmethod
    def parse(
        cls, stages: Mapping[str, str], *, base: "Plan | None" = None, devices: Iterable[int] | None = None
    ) -> "Plan":
        """A plan of `{"actor-training": "d2t2p1@0-3"}`; model-stages not named keep those of `base`."""
        merged = dict(base.stages) if base else {}
        for name, text in stages.items():
            model_stage = ModelStage.parse(name)
            merged[model_stage] = parse_stage_plan(text, default_devices=devices)
            check_settings(model_stage, merged[model_stage])
        return cls.of(merged)

    def __getitem__(self, model_stage: ModelStage) -> StagePlan:
        for key, stage_plan in self.stages:
            if key == model_stage:
                return stage_plan
        raise KeyError(model_stage.name)

    def __contains__(self, model_stage: ModelStage) -> bool:
        return any(key == model_stage for key, _ in self.stages)

    def get(self, model_stage: ModelStage) -> StagePlan | None:
        return self[model_stage] if model_stage in self else None

    @property
    def model_stages(self) -> tuple[ModelStage, ...]:
        return tuple(key for key, _ in self.stages)

    @property
    def devices(self) -> tuple[int, ...]:
        """Every device some model-stage uses, ascending."""
        return tuple(sorted({d for _, stage_plan in self.stages for d in stage_plan.devices}))

    @property
    def placed(self) -> "Plan":
        """The plan without settings: who holds which state."""
        return Plan(tuple((m, StagePlan(*stage_plan.placed)) for m, stage_plan in self.stages))

    @property
    def is_complete(self) -> bool:
        """Whether every model-stage says every setting that means something to it."""
        return all(stage_plan.settings.keys() >= set(SETTINGS_OF[m.stage]) for m, stage_plan in self.stages)

    @property
    def takes_turns(self) -> bool:
        """Whether model-stages of one stage share devices, so that they cannot run at once."""
        seen: dict[Stage, set[int]] = {}
        for m, stage_plan in self.stages:
            devices = seen.setdefault(m.stage, set())
            if not devices.isdisjoint(stage_plan.devices):
                return True
            devices.update(stage_plan.devices)
        return False

    def shares_weights(self, model_stage: ModelStage) -> ModelStage | None:
        """The training model-stage whose parameters `model_stage` uses in place (same layout and devices), if any."""
        training = ModelStage(model_stage.role, Stage.TRAINING)
        if model_stage == training or training not in self or model_stage not in self:
            return None
        return training if self[training].placed == self[model_stage].placed else None

    def holder(self, model_stage: ModelStage) -> ModelStage:
        """The model-stage whose units hold the parameters that `model_stage` computes with."""
        return self.shares_weights(model_stage) or model_stage

    def __str__(self) -> str:
        return " ".join(f"{key}={stage_plan}" for key, stage_plan in self.stages)

    def to_json(self) -> list[dict[str, Any]]:
        """The `stages` form of the contracts."""
        return [
            {
                "model_stage": key.name,
                "dp": stage_plan.dp,
                **stage_plan.layout.axes,
                "devices": [list(unit) for unit in stage_plan.units],
                **stage_plan.settings,
            }
            for key, stage_plan in self.stages
        ]

    @classmethod
    def from_json(cls, stages: Iterable[Mapping[str, Any]]) -> "Plan":
        return cls.of(
            {
                ModelStage.parse(row["model_stage"]): StagePlan(
                    Layout.of_axes(row),
                    tuple(tuple(unit) for unit in row["devices"]),
                    **{name: row[name] for name in SETTINGS if row.get(name) is not None and name != "recompute"},
                    recompute=Recompute(row["recompute"]) if row.get("recompute") else None,
                )
                for row in stages
            }
        )
