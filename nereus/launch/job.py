"""From a recipe to a job that can start: data, tokenizer, models, reward, algorithm. Everything that can be wrong with
the input is found here, before any worker starts.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import timedelta

from nereus.algorithms.by_estimator import ALGORITHMS
from nereus.algorithms.learning_rate import LearningRate
from nereus.algorithms.progress import Scores
from nereus.checkpoint.weight_files import check_folder
from nereus.data.dataset import RunData, check_vocab, load_data
from nereus.data.prompts import Prompt, PromptOrder
from nereus.data.reward_pool import RewardPool, RewardSample, load_reward
from nereus.data.tokenizers import Tokenizer
from nereus.engines.sampling import SamplingParams
from nereus.engines.train import AdamW
from nereus.errors import DataError
from nereus.examples.chain_sum.answers import taught_answer
from nereus.examples.chain_sum.warm_start import Progress, WarmModels, ensure_warm_start
from nereus.hf_config import read_model, read_stop_ids
from nereus.model import Head, ModelSpec
from nereus.plan import Role
from nereus.recipe.config import RunConfig, check_model
from nereus.recipe.sections import OptimizerConfig
from nereus.runtime.live import JobSetup
from nereus.runtime.worker import RoleSetup
from nereus.shards.state import TORCH_DTYPES

CALL_TIMEOUT = timedelta(minutes=30)
"""How long the driver waits for one call; ranks find a late peer much earlier, by `cluster.timeout_s`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A job before its workers start."""

    setup: JobSetup
    reward: RewardPool | None
    notes: tuple[str, ...]

    @property
    def specs(self) -> dict[Role, ModelSpec]:
        return {role: setup.spec for role, setup in self.setup.roles.items()}


def prepare_job(config: RunConfig, progress: Progress) -> Job:
    """Read and check everything the recipe names; raises an InputError that names the key or file."""
    progress("reading data", 0, 0)
    data = load_data(config, answer=taught_answer)
    notes = [
        f"{len(data.train)} training prompts, {len(data.val)} held out; {data.num_removed} removed as seen in training"
    ]
    reward = _reward(config)
    try:
        models = _models(config, data, progress, notes)
        roles = _roles(config, models)
        check_vocab(data.tokenizer, roles[Role.ACTOR].spec)
        check_model(config, {role: setup.spec for role, setup in roles.items()})
        return Job(_setup(config, data, roles, reward), reward, tuple(notes))
    except BaseException:
        if reward is not None:
            reward.close()
        raise


def _reward(config: RunConfig) -> RewardPool | None:
    """The reward function, imported once so that a wrong name is found now."""
    if config.reward.function is None:
        return None
    timeout = timedelta(seconds=config.reward.timeout_s)
    return load_reward(config.reward.function, timeout=timeout, num_processes=config.reward.num_processes)


def _models(config: RunConfig, data: RunData, progress: Progress, notes: list[str]) -> WarmModels:
    """Where the actor and the reward model start from."""
    if config.model.shape is not None:  # a plan it does not admit is refused before it is trained
        spec = config.model.shape.spec(vocab=data.tokenizer.vocab_size)
        check_model(config, dict.fromkeys(config.roles, spec))
    if config.warm_start.steps or config.warm_start.reward_steps:
        models = ensure_warm_start(config, data, progress)
        notes.append(f"warm start {'reused from' if models.cached else 'written to'} {models.actor.parent}")
        return dataclasses.replace(models, reward=models.reward or config.reward.model)
    assert config.model.path is not None
    return WarmModels(config.model.path, config.reward.model, cached=False)


def _roles(config: RunConfig, models: WarmModels) -> dict[Role, RoleSetup]:
    """Every role of the workflow with its shapes, weights and optimizer; folders are checked, not read."""
    folders = {
        Role.ACTOR: models.actor,
        Role.REFERENCE: models.actor,
        Role.CRITIC: config.critic.path or models.actor,
        Role.REWARD: models.reward,
    }
    optimizers = {
        Role.ACTOR: _optimizer(config, config.actor),
        Role.CRITIC: _optimizer(config, config.critic),
    }
    roles: dict[Role, RoleSetup] = {}
    for role, folder in folders.items():
        if role not in config.roles:
            continue
        assert folder is not None
        scalar = role in (Role.CRITIC, Role.REWARD)
        spec = read_model(folder)
        spec = spec.with_head(Head.SCORE) if scalar else spec
        check_folder(folder, spec, fresh_score=role is Role.CRITIC)
        roles[role] = RoleSetup(
            spec,
            TORCH_DTYPES[config.trainer.dtype],
            folder.absolute(),
            config.data.max_prompt_length + config.data.max_response_length,
            optimizer=optimizers.get(role),
            fresh_head=role is Role.CRITIC,
            engine=config.rollout.engine,
            temperature=config.rollout.temperature if not scalar and config.rollout.temperature > 0 else 1.0,
        )
    return roles


def _optimizer(config: RunConfig, section: OptimizerConfig) -> AdamW:
    updates_per_step = config.num_mini_batches * config.actor.ppo_epochs
    rate = LearningRate.from_config(section, num_steps=config.trainer.steps, updates_per_step=updates_per_step)
    return AdamW(rate, section.betas, section.eps, section.weight_decay, section.grad_clip)


def _setup(config: RunConfig, data: RunData, roles: Mapping[Role, RoleSetup], reward: RewardPool | None) -> JobSetup:
    own = read_stop_ids(roles[Role.ACTOR].folder)
    stops = tuple(dict.fromkeys((data.tokenizer.eos_id, *own, *config.rollout.stop_token_ids)))
    return JobSetup(
        workflow=config.workflow,
        algorithm=ALGORITHMS[config.algorithm.adv_estimator].of(config),
        roles=roles,
        prompts=data.train,
        val_prompts=data.val,
        order=PromptOrder(len(data.train), seed=config.trainer.seed),
        batch=config.data.train_batch_size,
        score=Scorer(reward, data.tokenizer),
        sampling=SamplingParams(
            config.data.max_response_length,
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            top_k=max(config.rollout.top_k, 0),
            stop_ids=stops,
        ),
        seed=config.trainer.seed,
        timeout=CALL_TIMEOUT,
        checkpoints=config.run.dir.absolute() / "checkpoints",
    )


class Scorer:
    """Scores responses with the reward function; without one (a reward model scores) everything is 0.

    Raises DataError where the function fails for all samples of a batch and has not scored one before: it is wrong.
    """

    def __init__(self, reward: RewardPool | None, tokenizer: Tokenizer) -> None:
        self._reward, self._tokenizer = reward, tokenizer
        self._has_scored = False

    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]]) -> Scores:
        if self._reward is None:
            return Scores((0.0,) * len(prompts))
        texts = self._tokenizer.decode_batch(responses)
        samples = [
            RewardSample(p.data_source, text, p.ground_truth, p.extra_info)
            for p, text in zip(prompts, texts, strict=True)
        ]
        batch = self._reward.score(samples)
        self._has_scored = self._has_scored or batch.num_errors + batch.num_timeouts < len(samples)
        if samples and not self._has_scored:
            raise DataError(
                f"reward.function {self._reward.function!r} failed for all of {len(samples)} responses; "
                f"for the first:\n{batch.first_traceback}"
            )
        return Scores(
            batch.scores,
            num_failed=batch.num_errors,
            num_late=batch.num_timeouts,
            first_problem=batch.first_problem,
        )
