import pickle
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from nereus.engine_facts import PRECISIONS
from nereus.engines.by_name import ENGINES
from nereus.errors import ConfigError
from nereus.model import ModelSpec
from nereus.plan import ACTOR_GENERATION, Plan, Role
from nereus.planner.api import problem_for
from nereus.recipe.config import RunConfig, check_model, load_config, parse_config
from nereus.recipe.sections import RolloutConfig, TrainerConfig
from nereus.shards.state import TORCH_DTYPES

RECIPES = Path(__file__).parents[2] / "recipes"

MINIMAL: dict[str, Any] = {
    "model": {"path": "some/folder"},
    "data": {"train": "train.jsonl", "val": ["a.parquet", "b.parquet"]},
    "reward": {"function": "nereus.data.rewards:exact_answer"},
}

SPEC = ModelSpec(
    family="llama", num_layers=2, hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn=96, vocab=384,
    max_positions=64,
)  # fmt: skip


def recipe_file(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def with_overrides(folder: Path, *overrides: str) -> RunConfig:
    return load_config(recipe_file(folder, yaml.safe_dump(MINIMAL)), list(overrides))


def test_a_minimal_recipe_gets_every_default() -> None:
    config = parse_config(MINIMAL)
    assert config.data.train.files == (Path("train.jsonl"),)
    assert config.data.val.files == (Path("a.parquet"), Path("b.parquet"))
    assert config.trainer.steps == 20 and config.initial_plan is None and config.gamma == 0.5
    assert config.num_mini_batches == 4 and config.samples_per_step == 64


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_recipe_is_valid(recipe: Path) -> None:
    config = load_config(recipe, ["trainer.steps=10"])
    assert config.trainer.steps == 10
    assert config.initial_plan is not None and config.initial_plan[ACTOR_GENERATION].dp >= 1


def test_a_config_survives_yaml_and_pickle(tmp_path: Path) -> None:
    config = with_overrides(tmp_path, "actor.lr=2e-4", "transitions=[{step: 5, plan: {actor-training: d1t2p1}}]")
    assert parse_config(yaml.safe_load(config.to_yaml())) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse_config(MINIMAL).trainer.steps = 3


def test_overrides_are_yaml_and_merge_deeply(tmp_path: Path) -> None:
    config = with_overrides(
        tmp_path,
        "actor.lr=3e-5",
        "actor={clip_ratio: 0.3}",
        "run.dir=out",
        "adapt=true",
        "rollout.stop_token_ids=[1, 2]",
    )
    assert (config.actor.lr, config.actor.clip_ratio) == (3e-5, 0.3)
    assert config.run.dir == Path("out") and config.adapt and config.rollout.stop_token_ids == (1, 2)


def test_one_model_stage_of_a_plan_can_be_overridden() -> None:
    config = load_config(RECIPES / "quickstart.yaml", ["plan.actor-generation=d2t2p1"])
    assert config.initial_plan is not None
    assert config.initial_plan[ACTOR_GENERATION].units == ((0, 1), (2, 3))


def test_verl_names_of_estimators_and_aggregations_are_understood(tmp_path: Path) -> None:
    config = with_overrides(tmp_path, "algorithm.kl_penalty=low_var_kl", "actor.loss_agg_mode=seq-mean-token-sum")
    assert config.algorithm.kl_penalty == "k3" and config.actor.loss_agg_mode == "sequence-sum"


def test_the_reference_model_is_needed_only_for_a_kl_term(tmp_path: Path) -> None:
    assert Role.REFERENCE in with_overrides(tmp_path).roles
    assert Role.REFERENCE not in with_overrides(tmp_path, "algorithm.kl_coef=0").roles
    assert Role.REFERENCE in with_overrides(tmp_path, "algorithm.kl_coef=0", "actor.use_kl_loss=true").roles


@pytest.mark.parametrize(
    ("override", "key", "says"),
    [
        ("trainer.stpes=3", "trainer.stpes", "did you mean trainer.steps?"),
        ("lr=3", "lr", "did you mean actor.lr or critic.lr"),
        ("faults=[]", "faults", "known in a recipe: data, model"),
        ("trainer.steps=-3", "trainer.steps", "got -3; it must be greater than or equal to 1"),
        ("trainer.steps=true", "trainer.steps", "must be a number"),
        ("trainer.dtype=fp8", "trainer.dtype", "'fp32', 'bf16' or 'fp64'"),
        ("actor.lr=fast", "actor.lr", "got 'fast'"),
        ("actor=3", "actor", "must be a section of keys"),
        ("actor.betas=[0.9, 1.0]", "actor.betas.1", "less than 1"),
        ("gamma=.nan", "gamma", "finite"),
        ("algorithm.adv_estimator=gea", "algorithm.adv_estimator", "'gae'"),
        ("rollout.top_k=0", "rollout.top_k", "-1 (off) or at least 1"),
        ("actor.ppo_mini_batch_size=7", "actor.ppo_mini_batch_size", "must divide data.train_batch_size 64: 1, 2, 4"),
        ("trainer.steps.x=1", "trainer.steps", "valid integer"),
        ("trainer.steps", "trainer.steps", "key=value"),
        ("trainer.steps=[1", "trainer.steps", "not valid YAML"),
        ("model.shape={hidden: 8, num_layers: 1, num_heads: 1, num_kv_heads: 1, ffn: 8}", "model", "one of the two"),
        ("data.train.reasoning_gym=chain_sum", "data.train", "is 'train.jsonl', not a section"),
        ("data.train={files: x.jsonl, min_terms: 3}", "data.train.min_terms", "need reasoning_gym"),
        ("reward.function=null", "reward", "give function"),
        ("warm_start.steps=5", "warm_start", "chain_sum"),
        ("plan.actor-trainin=d1", "plan.actor-trainin", "did you mean actor-training?"),
        ("plan.actor-training=dx", "plan.actor-training", "write d2t2p1"),
        ("plan.actor-training=d8", "plan.actor-training", "needs 8 devices; 4 are available"),
        ("plan.actor-training=d1t2p1@3-4", "plan.actor-training", "5 workers; cluster.workers is 4"),
        ("plan.actor-training=d1", "plan", "names no devices for actor-generation"),
        ("plan.actor-training=3", "plan.actor-training", "must be a valid string"),
        ("actor.clip_ratio_c=1.0", "actor.clip_ratio_c", "greater than 1"),
        ("plan.actor-training=d2t2p1@2-5", "plan.actor-training", "needs device 5, so 6 workers"),
        ("transitions={step: 3}", "transitions", "must be a list"),
        ("run.dir=[1]", "run.dir", "must be a path"),
        ("transitions=[{step: 3, plan: {}}]", "transitions.0.plan", "names no model-stage"),
        ("transitions=[{step: 30, plan: {actor-training: d1}}]", "transitions.0.step", "1 to trainer.steps 20"),
        ("transitions=[{stp: 3, plan: {}}]", "transitions.0.step", "missing"),
        ("transitions=[{step: 3, plan: {actor-training: d1}, stp: 3}]", "transitions.0.stp", "transitions.step"),
    ],
)  # fmt: skip
def test_a_wrong_key_is_refused_with_its_name_its_value_and_what_is_accepted(
    override: str, key: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        with_overrides(tmp_path, override)
    assert caught.value.key == key
    assert says in str(caught.value)


def test_transitions_must_ascend(tmp_path: Path) -> None:
    steps = "transitions=[{step: 5, plan: {actor-training: d1}}, {step: 5, plan: {actor-training: d2}}]"
    with pytest.raises(ConfigError, match=r"transitions.1.step: got 5; it must be 6 to"):
        with_overrides(tmp_path, steps)


def test_a_missing_recipe_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.yaml: no such recipe"):
        load_config(tmp_path / "nowhere.yaml")


def test_broken_yaml_is_refused_with_file_and_line(tmp_path: Path) -> None:
    path = recipe_file(tmp_path, "model:\n  path: a\ndata: [1, 2\nactor: 3\n")
    with pytest.raises(ConfigError, match=r"recipe.yaml:4: not valid YAML"):
        load_config(path)


def test_a_recipe_that_is_not_a_mapping_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds list; a recipe is a mapping"):
        load_config(recipe_file(tmp_path, "- 1\n"))


def test_a_dotted_key_in_a_recipe_is_refused_with_its_nested_form(tmp_path: Path) -> None:
    path = recipe_file(tmp_path, yaml.safe_dump(MINIMAL) + "actor.lr: 3\n")
    with pytest.raises(ConfigError, match=r"actor.lr: unknown key; write it nested: actor: \{lr: ...\}"):
        load_config(path)


def test_a_missing_section_is_named() -> None:
    with pytest.raises(ConfigError, match="data: missing"):
        load_config(None)


def small(**keys: Any) -> RunConfig:
    plan = {
        "actor-generation": "d4", "actor-training": "d1t4p1", "critic-training": "d4", "critic-inference": "d4",
        "reference-inference": "d4",
    }  # fmt: skip
    data = MINIMAL["data"] | {"max_prompt_length": 32, "max_response_length": 32}
    return parse_config({**MINIMAL, "data": data, "plan": plan, **keys})


def test_more_units_than_samples_are_refused() -> None:
    data = MINIMAL["data"] | {"train_batch_size": 8}
    plan = small().plan | {"actor-training": "d4t1p1"}
    with pytest.raises(ConfigError, match=r"plan.actor-training: got dp 4; a mini-batch has 2 samples"):
        small(data=data, actor={"ppo_mini_batch_size": 2}, plan=plan)


def test_a_shape_becomes_a_model_over_the_tokenizers_vocabulary() -> None:
    shape = load_config(RECIPES / "quickstart.yaml").model.shape
    assert shape is not None
    assert 700_000 < shape.spec(vocab=354).num_params < 900_000


@pytest.mark.parametrize(("key", "value"), [("hidden", 130), ("hidden", 60), ("num_kv_heads", 3)])
def test_a_shape_that_is_no_model_is_refused(key: str, value: int) -> None:
    shape = load_config(RECIPES / "quickstart.yaml", [f"model.shape.{key}={value}"]).model.shape
    assert shape is not None
    with pytest.raises(ConfigError, match=f"model.shape.{key}: got {value}"):
        shape.spec(vocab=354)


def specs(spec: ModelSpec) -> dict[Role, ModelSpec]:
    return dict.fromkeys(Role, spec)


def test_a_config_that_suits_its_model_passes() -> None:
    check_model(small(), specs(SPEC))


def test_lengths_beyond_the_positions_of_the_model_are_refused() -> None:
    config = small(data=MINIMAL["data"] | {"max_prompt_length": 40, "max_response_length": 32})
    with pytest.raises(ConfigError, match=r"data.max_response_length: .* is 72 tokens; the model has 64 positions"):
        check_model(config, specs(SPEC))


def test_tp_that_does_not_divide_the_heads_is_refused_with_the_valid_ones() -> None:
    config = small(plan=small().plan | {"actor-training": "d1t3p1"})
    with pytest.raises(ConfigError, match=r"plan.actor-training: d1t3p1: tp 3 .* valid tp: 1, 2, 4"):
        check_model(config, specs(SPEC))


def test_a_stop_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout.stop_token_ids: got 384"):
        check_model(small(rollout={"stop_token_ids": [384]}), specs(SPEC))


def test_the_plans_of_a_recipe_are_read_once_each_over_the_one_before_it() -> None:
    config = load_config(RECIPES / "quickstart.yaml", ["transitions=[{step: 2, plan: {actor-generation: d2t2p1}}]"])
    assert config.plans == {
        "plan": Plan.parse(config.plan, devices=range(config.cluster.workers)),
        "transitions.0.plan": Plan.parse({"actor-generation": "d2t2p1"}, base=config.initial_plan),
    }
    assert config.plans is config.plans and parse_config(config.model_dump()) == config


def test_every_rollout_engine_that_a_recipe_may_name_is_there() -> None:
    assert set(get_args(RolloutConfig.model_fields["engine"].annotation)) == set(ENGINES)


@pytest.mark.parametrize(("written", "read"), [("bfloat16", "bf16"), ("bf16", "bf16"), ("float64", "fp64")])
def test_a_dtype_is_read_under_either_word_for_it(written: str, read: str) -> None:
    assert TrainerConfig.model_validate({"dtype": written}).dtype == read
    problem = problem_for("llama-3.2-1b", "1x1xh200", dtype=written)
    assert problem.precision == PRECISIONS[read]
    assert TORCH_DTYPES[read].itemsize == PRECISIONS[read].param_bytes


def test_a_path_may_begin_at_the_home_folder() -> None:
    config = load_config(
        RECIPES / "quickstart.yaml",
        [
            "run.dir=~/runs/x",
            "model.path=~/m",
            "model.shape=null",
            "warm_start.cache=~/c",
            "warm_start.steps=0",
            "data.train=~/t.jsonl",
        ],  # fmt: skip
    )
    home = Path.home()
    assert (config.run.dir, config.model.path) == (home / "runs/x", home / "m")
    assert config.warm_start.cache == home / "c" and config.data.train.files == (home / "t.jsonl",)
