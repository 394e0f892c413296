"""One run as a frozen value: every recipe key, its bound and its default.

Recipes are YAML; `a.b=c` overrides them. Names are those verl's users know wherever verl has the option. Everything is
validated once, when the value is built: an unknown key, a value out of range and keys that contradict each other raise
ConfigError with the dotted key, the value and what is accepted. Nothing here reads a model or starts anything; what
needs the model's shapes is `check_model`.
"""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
import yaml
from pydantic import BeforeValidator, Field

from nereus.errors import ConfigError, PlanError
from nereus.model import ModelSpec
from nereus.plan import MODEL_STAGES, ModelStage, Plan, Role, Stage, StagePlan, parse_shape
from nereus.recipe.text import config_error, merge_override, read_recipe
from nereus.workflow import ROLES_OF, Workflow, step_workflow

__all__ = ["DataSource", "OptimizerConfig", "RunConfig", "check_model", "load_config", "parse_config"]


def _number(value: object) -> object:
    """Refuse yes and no, which would pass as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("it must be a number")
    return value


Count = Annotated[int, BeforeValidator(_number), Field(ge=1)]
Whole = Annotated[int, BeforeValidator(_number), Field(ge=0)]
Positive = Annotated[float, BeforeValidator(_number), Field(gt=0)]
NonNegative = Annotated[float, BeforeValidator(_number), Field(ge=0)]
Share = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1)]

STAGE_NAMES = tuple(model_stage.name for model_stage in MODEL_STAGES)
KL_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
LOSS_ALIASES = {"seq-mean-token-sum": "sequence-sum", "seq-mean-token-mean": "sequence-mean"}


def _alias(names: Mapping[str, str]) -> BeforeValidator:
    return BeforeValidator(lambda value: names.get(value, value) if isinstance(value, str) else value)


KlEstimator = Annotated[Literal["k1", "k2", "k3"], _alias(KL_ALIASES)]
LossAggregation = Annotated[Literal["token-mean", "sequence-sum", "sequence-mean"], _alias(LOSS_ALIASES)]


class Section(pydantic.BaseModel):
    """A frozen group of keys that refuses keys it does not know."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)


class ShapeConfig(Section):
    """A Llama-shaped model made from random weights in the warm start, for recipes that need no download."""

    hidden: Count
    num_layers: Count
    num_heads: Count
    num_kv_heads: Count
    ffn: Count
    max_positions: Count = 512

    def spec(self, *, vocab: int) -> ModelSpec:
        """The model over a tokenizer's vocabulary; raises ConfigError where the shape is none."""
        if self.hidden % self.num_heads or (self.hidden // self.num_heads) % 2:
            raise ConfigError(
                "model.shape.hidden", f"got {self.hidden}; it must be an even multiple of num_heads {self.num_heads}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                "model.shape.num_kv_heads", f"got {self.num_kv_heads}; it must divide num_heads {self.num_heads}"
            )
        return ModelSpec(
            family="llama",
            num_layers=self.num_layers,
            hidden=self.hidden,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.hidden // self.num_heads,
            ffn=self.ffn,
            vocab=vocab,
            rms_eps=1e-5,
            max_positions=self.max_positions,
        )


class ModelConfig(Section):
    """`path`: the HF folder the actor starts from; or `shape`: a new model that the warm start trains."""

    path: Path | None = None
    shape: ShapeConfig | None = None


class DataSource(pydantic.BaseModel):
    """`files`: jsonl or parquet with verl's columns; or `reasoning_gym`: a task by name, its index range and options.

    Options of the task (`min_terms: 4`) stand beside `seed` and `size`.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="allow")

    files: Annotated[tuple[Path, ...], BeforeValidator(lambda v: (v,) if isinstance(v, str | Path) else v)] = ()
    reasoning_gym: str | None = None
    seed: Whole = 0
    size: Count = 1000

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the reasoning-gym task."""
        return dict(self.model_extra or {})


def _source(value: object) -> object:
    """A path, or several, is short for `files`."""
    if isinstance(value, str | Path):
        return {"files": [value]}
    return {"files": value} if isinstance(value, list) else value


Source = Annotated[DataSource, BeforeValidator(_source)]


class DataConfig(Section):
    """`tokenizer`: an HF folder, `byte`, or `trained` (by the warm start, with at most `vocab_size` tokens); by default
    the model folder's. Lengths are in tokens."""

    train: Source
    val: Source
    tokenizer: str | None = None
    vocab_size: Annotated[int, Field(ge=258)] = 384
    train_batch_size: Count = 64
    max_prompt_length: Count = 512
    max_response_length: Count = 512


class RolloutConfig(Section):
    """How responses are sampled. `max_num_seqs`: sequences one generation unit decodes at a time; by default the
    planner chooses."""

    engine: Literal["native"] = "native"
    n: Count = 1
    temperature: NonNegative = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    stop_token_ids: tuple[Whole, ...] = ()
    max_num_seqs: Count | None = None


ALGORITHM_OF = {"gae": "ppo"}
"""The name of the algorithm that each estimator of advantages makes; the roles it uses are in `nereus.workflow`."""


class AlgorithmConfig(Section):
    """Advantages and the KL penalty. `adv_estimator` chooses the algorithm.

    `kl_penalty` also takes verl's names kl, mse and low_var_kl.
    """

    adv_estimator: Literal["gae"] = "gae"
    gamma: Share = 1.0
    lam: Share = 1.0
    kl_coef: NonNegative = 0.001
    kl_penalty: KlEstimator = "k1"
    use_kl_in_reward: bool = True
    whiten_advantages: bool = True

    @property
    def name(self) -> str:
        """The algorithm's name."""
        return ALGORITHM_OF[self.adv_estimator]

    @property
    def kl_weight(self) -> float:
        """What the KL divergence to the reference weighs in the reward; 0 leaves it out."""
        return self.kl_coef if self.use_kl_in_reward else 0.0


class OptimizerConfig(Section):
    """AdamW with warm-up and decay, counted in RL steps. `grad_clip` bounds the global gradient norm."""

    lr: Positive
    lr_warmup_steps: Whole = 0
    lr_decay: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: Share = 0.0
    weight_decay: NonNegative = 0.0
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: Positive = 1e-8
    grad_clip: Positive = 1.0


class ActorConfig(OptimizerConfig):
    """`ppo_mini_batch_size` counts prompts, as in verl; `ppo_micro_batch_size` samples of one unit at a time, by
    default as the planner chooses.

    `clip_ratio_low` and `clip_ratio_high` replace `clip_ratio` on their side of 1; `clip_ratio_c` bounds the loss where
    the advantage is negative.
    """

    lr: Positive = 1e-6
    ppo_mini_batch_size: Count = 16
    ppo_micro_batch_size: Count | None = None
    ppo_epochs: Count = 1
    clip_ratio: Positive = 0.2
    clip_ratio_low: Positive | None = None
    clip_ratio_high: Positive | None = None
    clip_ratio_c: Annotated[float, BeforeValidator(_number), Field(gt=1)] = 3.0
    entropy_coeff: NonNegative = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: NonNegative = 0.001
    kl_loss_type: KlEstimator = "k3"
    loss_agg_mode: LossAggregation = "token-mean"

    @property
    def clip_low(self) -> float:
        """How far below 1 ratios are clipped."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """How far above 1 ratios are clipped."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high

    @property
    def kl_weight(self) -> float:
        """What the KL divergence to the reference weighs in the loss; 0 leaves it out."""
        return self.kl_loss_coef if self.use_kl_loss else 0.0


class CriticConfig(OptimizerConfig):
    """`path`: the folder its body starts from (by default the actor's, with a fresh scalar head)."""

    lr: Positive = 1e-5
    path: Path | None = None
    cliprange_value: Positive = 0.5


class RewardConfig(Section):
    """`function` scores a response (`package.module:function` or `file.py:function`); where there is a reward model
    (`model`: a folder, or one trained by the warm start) the model's score trains and the function only validates."""

    function: str | None = None
    model: Path | None = None
    timeout_s: Positive = 5.0
    num_processes: Count = 2


class WarmStartConfig(Section):
    """Supervised steps before the first RL step, on the task's worked and direct answers.

    `worked_share` of the answers are worked until `switch_at` of the steps, `late_worked_share` after.
    `reward_steps`: steps that train a reward model on right and wrong answers. Results are kept in `cache`.
    """

    steps: Whole = 0
    batch: Count = 64
    lr: Positive = 3e-3
    worked_share: Share = 0.7
    switch_at: Share = 0.8
    late_worked_share: Share = 0.15
    reward_steps: Whole = 0
    reward_lr: Positive = 1e-3
    cache: Path = Path(".cache/nereus")


class TrainerConfig(Section):
    """`critic_warmup`: the actor starts to learn after so many steps. `val_every` 0: only before and after the run.

    `recompute`: what updates compute again instead of keeping it, to need less memory: norms and activations
    (`selective`) or whole layers (`full`); by default the planner chooses.
    """

    steps: Count = 20
    seed: Whole = 0
    val_every: Whole = 5
    val_samples: Count = 200
    critic_warmup: Whole = 0
    dtype: Literal["fp32", "bf16", "fp64"] = "fp32"
    recompute: Literal["none", "selective", "full"] | None = None


class ClusterConfig(Section):
    """Local workers, or a Ray cluster joined by `address` (`auto`). `memory_gb` is of a device, `cores` of a node.

    `host_memory_gb` of a node may hold what a transition has no room for on devices; by default as much as its largest
    device has. 0: such transitions are refused.
    """

    workers: Count = 4
    memory_gb: Positive | None = None
    host_memory_gb: NonNegative | None = None
    address: str | None = None
    cores: Count | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    timeout_s: Positive = 60.0

    @property
    def host_bytes_per_node(self) -> int | None:
        return None if self.host_memory_gb is None else int(self.host_memory_gb * 1e9)


class TransitionConfig(Section):
    """A change of plan before step `step`; model-stages not named keep theirs."""

    step: Count
    plan: dict[str, str]


class SupplyConfig(Section):
    """`trace`: a file of device counts over time; `notices`: a file or URL that announces devices to be taken away.

    Without a trace: the nodes of a joined cluster as they come and go, or `cluster.workers` devices all the time.
    """

    trace: Path | None = None
    notices: str | None = None
    seed: Whole = 0


class TriggerConfig(Section):
    """Relative drift of a signal that starts a replan."""

    length: Positive = 0.30
    efficiency: Positive = 0.15


class RunFolderConfig(Section):
    """Where the run writes. `overwrite`: an earlier run in `dir` is replaced; otherwise a new one there is refused."""

    dir: Path = Path("runs/nereus")
    overwrite: bool = False


class RunConfig(Section):
    """Every key of a recipe."""

    data: DataConfig
    model: ModelConfig = ModelConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    reward: RewardConfig = RewardConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    trainer: TrainerConfig = TrainerConfig()
    cluster: ClusterConfig = ClusterConfig()
    plan: dict[str, str] = {}
    transitions: tuple[TransitionConfig, ...] = ()
    adapt: bool = False
    space: Literal["full", "paper"] = "full"
    supply: SupplyConfig = SupplyConfig()
    triggers: TriggerConfig = TriggerConfig()
    admission: Literal["nereus", "paper"] = "nereus"
    gamma: NonNegative = 0.5
    run: RunFolderConfig = RunFolderConfig()

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        _check_sources(self)
        _check_start(self)
        _check_batches(self)
        _check_plans(self)
        return self

    @property
    def samples_per_step(self) -> int:
        return self.data.train_batch_size * self.rollout.n

    @property
    def num_mini_batches(self) -> int:
        """Optimizer updates of one epoch over the rollout batch."""
        return self.data.train_batch_size // self.actor.ppo_mini_batch_size

    @property
    def needs_reward_model(self) -> bool:
        return self.reward.model is not None or self.warm_start.reward_steps > 0

    @property
    def workflow(self) -> Workflow:
        """The step graph of the algorithm with the roles this run uses."""
        return step_workflow(self.algorithm.name, self.roles)

    @property
    def roles(self) -> frozenset[Role]:
        """The roles of the algorithm that this run's settings leave it, and the reward where a model scores."""
        roles = set(ROLES_OF[self.algorithm.name])
        if self.algorithm.kl_weight == self.actor.kl_weight == 0:
            roles.discard(Role.REFERENCE)
        return frozenset(roles | ({Role.REWARD} if self.needs_reward_model else set()))

    @property
    def initial_plan(self) -> Plan | None:
        """The plan the recipe names, or None where the planner is to choose."""
        return Plan.parse(self.plan, devices=range(self.cluster.workers)) if self.plan else None

    def to_yaml(self) -> str:
        """The text of `config.yaml`; `parse_config` of it gives an equal value."""
        return yaml.safe_dump(self.model_dump(mode="json", exclude_none=True), sort_keys=False)


def _check_sources(config: RunConfig) -> None:
    for key, source in (("data.train", config.data.train), ("data.val", config.data.val)):
        if bool(source.files) == (source.reasoning_gym is not None):
            raise ConfigError(key, "give files (jsonl or parquet) or reasoning_gym (a task's name), one of the two")
        if source.files and source.options:
            unknown = next(iter(source.options))
            raise ConfigError(f"{key}.{unknown}", "unknown key; options of a task need reasoning_gym")


def _check_start(config: RunConfig) -> None:
    model, warm = config.model, config.warm_start
    if (model.path is None) == (model.shape is None):
        raise ConfigError("model", "give path (an HF folder) or shape (a new model for the warm start), one of the two")
    if model.shape is not None and warm.steps == 0:
        raise ConfigError("warm_start.steps", "got 0; a model made from model.shape needs at least 1 warm-start step")
    if model.shape is not None and config.data.tokenizer is None:
        raise ConfigError("data.tokenizer", "model.shape has no tokenizer; give trained, byte or an HF folder")
    if (warm.steps or warm.reward_steps) and config.data.train.reasoning_gym != "chain_sum":
        raise ConfigError("warm_start", "needs data.train.reasoning_gym: chain_sum, the task with worked answers")
    if config.reward.model is not None and warm.reward_steps:
        raise ConfigError("reward.model", "contradicts warm_start.reward_steps, which trains one; give one of the two")
    if config.reward.function is None and not config.needs_reward_model:
        raise ConfigError("reward", "give function (package.module:function or file.py:function) or model (a folder)")


def _check_batches(config: RunConfig) -> None:
    batch, mini = config.data.train_batch_size, config.actor.ppo_mini_batch_size
    if batch % mini:
        valid = ", ".join(str(size) for size in range(1, batch + 1) if batch % size == 0)
        raise ConfigError(
            "actor.ppo_mini_batch_size", f"got {mini}; it must divide data.train_batch_size {batch}: {valid}"
        )
    if config.rollout.top_k == 0:
        raise ConfigError("rollout.top_k", "got 0; it must be -1 (off) or at least 1")


def _check_plans(config: RunConfig) -> None:
    plan = _parsed_plan("plan", config.plan, config, base=None) if config.plan else None
    previous = 0
    for index, transition in enumerate(config.transitions):
        key = f"transitions.{index}"
        if not previous < transition.step <= config.trainer.steps:
            bound = f"it must be {previous + 1} to trainer.steps {config.trainer.steps}, in ascending order"
            raise ConfigError(f"{key}.step", f"got {transition.step}; {bound}")
        previous = transition.step
        plan = _parsed_plan(f"{key}.plan", transition.plan, config, base=plan)


def _parsed_plan(key: str, stages: Mapping[str, str], config: RunConfig, *, base: Plan | None) -> Plan:
    """The plan of a recipe's `stages` over `base`; the error names the model-stage's key."""
    workers, plan = config.cluster.workers, base
    if not stages:
        raise ConfigError(key, f"names no model-stage; valid: {', '.join(STAGE_NAMES)}")
    for name, text in stages.items():
        if name not in STAGE_NAMES:
            near = difflib.get_close_matches(name, STAGE_NAMES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"valid: {', '.join(STAGE_NAMES)}"
            raise ConfigError(f"{key}.{name}", f"no such model-stage; {hint}")
        try:
            plan = Plan.parse({name: text}, base=plan, devices=range(workers))
        except PlanError as error:
            raise ConfigError(f"{key}.{name}", str(error)) from None
        _check_dp(f"{key}.{name}", ModelStage.parse(name), plan[ModelStage.parse(name)], config)
        missing = [device for device in plan[ModelStage.parse(name)].devices if device >= workers]
        if missing and config.supply.trace is None and config.cluster.address is None:
            raise ConfigError(
                f"{key}.{name}",
                f"{text} needs device {max(missing)}, so {max(missing) + 1} workers; cluster.workers is {workers} "
                f"(devices 0 to {workers - 1})",
            )
    assert plan is not None
    if base is None and key == "plan":
        try:
            config.workflow.check_plan(plan)
        except PlanError as error:
            raise ConfigError(key, str(error)) from None
    return plan


def _check_dp(key: str, model_stage: ModelStage, stage_plan: StagePlan, config: RunConfig) -> None:
    """Every unit needs a sample: of the step's batch, or of a mini-batch where it trains."""
    trains = model_stage.stage is Stage.TRAINING
    samples = config.actor.ppo_mini_batch_size * config.rollout.n if trains else config.samples_per_step
    if stage_plan.dp > samples:
        batch = "mini-batch" if trains else "batch"
        raise ConfigError(key, f"got dp {stage_plan.dp}; a {batch} has {samples} samples, so dp is at most {samples}")


def check_model(config: RunConfig, specs: Mapping[Role, ModelSpec]) -> None:
    """Raise ConfigError where lengths, stop tokens or a named plan do not suit the models of the run."""
    actor = specs[Role.ACTOR]
    longest = config.data.max_prompt_length + config.data.max_response_length
    if longest > actor.max_positions:
        raise ConfigError(
            "data.max_response_length",
            f"max_prompt_length {config.data.max_prompt_length} + max_response_length "
            f"{config.data.max_response_length} is {longest} tokens; the model has {actor.max_positions} positions",
        )
    for token in config.rollout.stop_token_ids:
        if token >= actor.vocab:
            raise ConfigError("rollout.stop_token_ids", f"got {token}; it must be below the vocabulary {actor.vocab}")
    plans = {"plan": config.plan} | {f"transitions.{i}.plan": t.plan for i, t in enumerate(config.transitions)}
    for key, stages in plans.items():
        for name, text in stages.items():
            layout = parse_shape(text.partition("/")[0].partition("@")[0])[1]
            try:
                specs[ModelStage.parse(name).role].check_layout(**layout.axes)
            except PlanError as error:
                raise ConfigError(f"{key}.{name}", f"{text}: {error}") from None


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of a recipe file (none: defaults) with `a.b=c` overrides merged over it; values are YAML."""
    recipe = read_recipe(path) if path is not None else {}
    for override in overrides:
        merge_override(recipe, override)
    return parse_config(recipe)


def parse_config(recipe: Mapping[str, Any]) -> RunConfig:
    """The config of nested keys; raises ConfigError."""
    try:
        return RunConfig.model_validate(recipe)
    except pydantic.ValidationError as error:
        raise config_error(RunConfig, error) from None
