"""One run as a frozen value: a recipe's sections, what they must agree on, and what follows from them.

Recipes are YAML; `a.b=c` overrides them. Names are those verl's users know wherever verl has the option. Everything is
validated once, when the value is built: an unknown key, a value out of range and keys that contradict each other raise
ConfigError with the dotted key, the value and what is accepted. Nothing here reads a model or starts anything; what
needs the model's shapes is `check_model`.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import pydantic
import yaml

from nereus.errors import ConfigError, PlanError
from nereus.model import ModelSpec
from nereus.plan import ModelStage, Plan, Role
from nereus.recipe.plans import named_plans
from nereus.recipe.sections import (
    ActorConfig,
    AlgorithmConfig,
    ClusterConfig,
    CriticConfig,
    DataConfig,
    ModelConfig,
    NonNegative,
    RewardConfig,
    RolloutConfig,
    RunFolderConfig,
    Section,
    SupplyConfig,
    TrainerConfig,
    TransitionConfig,
    TriggerConfig,
    WarmStartConfig,
)
from nereus.recipe.text import config_error, merge_override, read_recipe
from nereus.workflow import ROLES_OF, Workflow, step_workflow

__all__ = ["RunConfig", "check_model", "load_config", "parse_config"]


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
        _check_start(self)
        _check_batches(self)
        _ = self.plans  # what is wrong with a plan is found when the config is built
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
        return self.plans.get("plan")

    @functools.cached_property
    def plans(self) -> Mapping[str, Plan]:
        """{key: plan} of the plans the recipe names, by the recipe alone: each change over the one before it."""
        return named_plans(self)

    def to_yaml(self) -> str:
        """The text of `config.yaml`; `parse_config` of it gives an equal value."""
        return yaml.safe_dump(self.model_dump(mode="json", exclude_none=True), sort_keys=False)


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
    stages = {"plan": config.plan} | {f"transitions.{i}.plan": t.plan for i, t in enumerate(config.transitions)}
    for key, plan in config.plans.items():
        for name, text in stages[key].items():
            model_stage = ModelStage.parse(name)
            try:
                specs[model_stage.role].check_layout(**plan[model_stage].layout.axes)
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
