"""The plans a recipe names: from text to values, checked against its devices and its counts of samples."""

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from nereus.errors import ConfigError, PlanError
from nereus.plan import MODEL_STAGES, ModelStage, Plan, Stage, StagePlan

if TYPE_CHECKING:
    from nereus.recipe.config import RunConfig

__all__ = ["named_plans"]

STAGE_NAMES = tuple(model_stage.name for model_stage in MODEL_STAGES)


def named_plans(config: "RunConfig") -> dict[str, Plan]:
    """{key: plan} of every plan that the recipe names, each change over the one before it.

    Raises ConfigError where the text, the devices or the counts of samples do not suit.
    """
    plan = _parsed_plan("plan", config.plan, config, base=None) if config.plan else None
    named = {} if plan is None else {"plan": plan}
    previous = 0
    for index, transition in enumerate(config.transitions):
        key = f"transitions.{index}"
        if not previous < transition.step <= config.trainer.steps:
            bound = f"it must be {previous + 1} to trainer.steps {config.trainer.steps}, in ascending order"
            raise ConfigError(f"{key}.step", f"got {transition.step}; {bound}")
        previous = transition.step
        plan = named[f"{key}.plan"] = _parsed_plan(f"{key}.plan", transition.plan, config, base=plan)
    return named


def _parsed_plan(key: str, stages: Mapping[str, str], config: "RunConfig", *, base: Plan | None) -> Plan:
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


def _check_dp(key: str, model_stage: ModelStage, stage_plan: StagePlan, config: "RunConfig") -> None:
    """Every unit needs a sample: of the step's batch, or of a mini-batch where it trains."""
    trains = model_stage.stage is Stage.TRAINING
    samples = config.actor.ppo_mini_batch_size * config.rollout.n if trains else config.samples_per_step
    if stage_plan.dp > samples:
        batch = "mini-batch" if trains else "batch"
        raise ConfigError(key, f"got dp {stage_plan.dp}; a {batch} has {samples} samples, so dp is at most {samples}")
