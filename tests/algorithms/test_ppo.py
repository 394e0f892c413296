"""PPO's own decisions: what it needs, how it prepares a batch, how it cuts updates, what it minimizes."""

import math
from typing import get_args

import pytest
import torch
from rollout_cases import partly_masked, ragged_batch, rows_of

from nereus.algorithms.advantages import KL_ESTIMATORS
from nereus.algorithms.by_estimator import ALGORITHMS
from nereus.algorithms.losses import Aggregation
from nereus.algorithms.metrics import length_metrics, length_summary
from nereus.algorithms.objectives import PolicyObjective, ValueObjective
from nereus.algorithms.ppo import PPO, cut_mini_batches, global_permutation
from nereus.algorithms.types import GlobalCounts
from nereus.plan import Role
from nereus.recipe.config import parse_config
from nereus.recipe.sections import ALGORITHM_OF, ActorConfig, AlgorithmConfig, CriticConfig, Section
from nereus.workflow import ROLES_OF


def ppo(*, n: int = 2, critic_warmup: int = 0, **changes: object) -> PPO:
    """PPO with changes to its settings, whichever section each is in."""
    settings = {"ppo_mini_batch_size": 4, "gamma": 0.95, "lam": 0.9} | changes

    def of(section: type[Section]) -> dict[str, object]:
        return {name: value for name, value in settings.items() if name in section.model_fields}

    return PPO(
        algorithm=AlgorithmConfig.model_validate(of(AlgorithmConfig)),
        actor=ActorConfig.model_validate(of(ActorConfig)),
        critic=CriticConfig.model_validate(of(CriticConfig)),
        n=n,
        critic_warmup=critic_warmup,
    )


def test_prepare_is_penalty_then_gae_then_whitening() -> None:
    batch = partly_masked(ragged_batch([4, 1, 7, 5], fully_masked=(1,)))
    prepared = ppo(kl_coef=0.1, kl_penalty="k2").prepare(batch)
    columns = ("old_logprobs", "reference_logprobs", "values", "response_mask")
    rows = zip(*(rows_of(batch.column(name), batch) for name in columns), strict=True)
    rewards: list[float] = []
    advantages: list[float] = []
    returns: list[float] = []
    penalties: list[float] = []
    for score, (old, reference, values, mask) in zip(batch.column("scores").tolist(), rows, strict=True):
        valid = [t for t, counts in enumerate(mask) if counts]
        kl = {t: (old[t] - reference[t]) ** 2 / 2 for t in valid}
        reward = {t: -0.1 * kl[t] + (score if t == valid[-1] else 0.0) for t in valid}
        advantage, following, out = 0.0, 0.0, []
        for t in reversed(valid):
            advantage = reward[t] + 0.95 * following - values[t] + 0.95 * 0.9 * advantage
            following = values[t]
            out.append((advantage, advantage + values[t]))
        rewards += [reward[t] for t in valid]
        advantages += [a for a, _ in reversed(out)]
        returns += [r for _, r in reversed(out)]
        penalties += [sum(kl.values()) / len(kl)] if kl else []
    mean = sum(advantages) / len(advantages)
    deviation = math.sqrt(sum((a - mean) ** 2 for a in advantages) / (len(advantages) - 1) + 1e-8)
    kept = batch.response_mask
    assert prepared.batch.column("token_rewards")[kept].tolist() == pytest.approx(rewards, abs=1e-12)
    assert prepared.batch.column("returns")[kept].tolist() == pytest.approx(returns, abs=1e-12)
    assert prepared.batch.column("advantages")[kept].tolist() == pytest.approx(
        [(a - mean) / deviation for a in advantages], abs=1e-12
    )
    assert prepared.metrics["actor/reward_kl_penalty"] == pytest.approx(sum(penalties) / len(penalties))
    for name in ("token_rewards", "advantages", "returns"):
        assert not prepared.batch.column(name)[~kept].any()


def test_without_whitening_and_penalty_the_plain_advantages_remain() -> None:
    batch = ragged_batch([3, 5])
    settings = {"kl_coef": 0.0, "whiten_advantages": False, "gamma": 1.0, "lam": 1.0}
    prepared = ppo(**settings).prepare(batch)
    expected = batch.column("scores")[batch.sample_of_token] - batch.column("values")
    torch.testing.assert_close(prepared.batch.column("advantages"), expected)
    assert "actor/reward_kl_penalty" not in prepared.metrics


def test_metrics_have_verl_names_and_plain_values() -> None:
    batch = ragged_batch([3, 5, 9])
    metrics = ppo().prepare(batch).metrics
    lengths = length_metrics(batch, length_summary(batch))
    assert lengths["response_length/mean"] == pytest.approx(17 / 3)
    assert lengths["response_length/max"] == 9 and lengths["response_length/min"] == 3
    assert lengths["response_length/clip_ratio"] == pytest.approx(1 / 3)
    assert lengths["prompt_length/mean"] == 2
    assert metrics["critic/score/mean"] == batch.column("scores").mean().item()
    assert metrics["critic/advantages/mean"] == pytest.approx(0.0, abs=1e-12)
    assert {"critic/rewards/mean", "critic/returns/max", "critic/values/min", "critic/vf_explained_var"} <= set(metrics)


def test_every_response_that_is_asked_for_is_sampled() -> None:
    assert ppo(n=3).sampling.num_sampled == 3


def test_the_first_steps_train_the_critic_only() -> None:
    algorithm = ppo(critic_warmup=2)
    assert [algorithm.trains(Role.ACTOR, step=step) for step in (1, 2, 3)] == [False, False, True]
    assert all(algorithm.trains(Role.CRITIC, step=step) for step in (1, 2, 3))
    assert not algorithm.trains(Role.REFERENCE, step=3)


def test_mini_batches_use_each_sample_once_an_epoch() -> None:
    cut = cut_mini_batches(22, epochs=3, max_samples=8, seed=1, step=5)
    assert [(m.epoch, m.index, len(m.samples)) for m in cut] == [
        (epoch, index, size) for epoch in range(3) for index, size in enumerate((8, 7, 7))
    ]
    for epoch in range(3):
        assert sorted(i for m in cut if m.epoch == epoch for i in m.samples) == list(range(22))


def test_a_mini_batch_size_counts_prompts() -> None:
    batch = ragged_batch([2] * 16)
    assert [len(m.samples) for m in ppo().mini_batches(batch, seed=0, step=1)] == [8, 8]


def test_the_order_is_a_function_of_seed_step_and_epoch() -> None:
    order = global_permutation(50, seed=1, step=2, epoch=0)
    assert order == global_permutation(50, seed=1, step=2, epoch=0)
    others = {
        global_permutation(50, seed=seed, step=step, epoch=epoch)
        for seed, step, epoch in ((2, 2, 0), (1, 3, 0), (1, 2, 1))
    }
    assert len(others | {order, tuple(range(50))}) == 5


def test_a_restart_on_another_machine_or_version_finds_the_same_order() -> None:
    assert global_permutation(8, seed=0, step=1, epoch=0) == (4, 3, 7, 0, 2, 6, 5, 1)


def test_objectives_carry_the_settings_and_the_counts() -> None:
    batch = ragged_batch([2, 3])
    algorithm = ppo(clip_ratio=0.1, clip_ratio_high=0.4, entropy_coeff=0.01, loss_agg_mode=Aggregation.SEQUENCE_SUM)
    actor = algorithm.objective(Role.ACTOR, batch.counts)
    critic = algorithm.objective(Role.CRITIC, batch.counts)
    assert isinstance(actor, PolicyObjective) and isinstance(critic, ValueObjective)
    assert (actor.clip_low, actor.clip_high, actor.needs_entropy) == (0.1, 0.4, True)
    assert actor.aggregation is critic.aggregation is Aggregation.SEQUENCE_SUM
    assert actor.counts == critic.counts == batch.counts


RECIPE = {
    "model": {"path": "model"},
    "data": {"train": "train.jsonl", "val": "val.jsonl", "train_batch_size": 64},
    "rollout": {"n": 4},
    "reward": {"function": "rewards.py:compute_score"},
    "critic": {"cliprange_value": 0.3},
    "trainer": {"critic_warmup": 2},
}


def test_a_recipe_in_verl_names_gives_the_settings() -> None:
    algorithm = {"gamma": 0.99, "lam": 0.95, "kl_coef": 0.01, "kl_penalty": "low_var_kl", "whiten_advantages": False}
    actor: dict[str, object] = {"ppo_mini_batch_size": 16, "ppo_epochs": 2, "clip_ratio": 0.1, "entropy_coeff": 0.001}
    actor |= {"use_kl_loss": True, "kl_loss_coef": 0.02, "kl_loss_type": "mse", "loss_agg_mode": "seq-mean-token-sum"}
    config = parse_config({**RECIPE, "algorithm": algorithm, "actor": actor})
    made = ALGORITHMS[config.algorithm.adv_estimator].of(config)
    assert made == PPO(
        algorithm=AlgorithmConfig(gamma=0.99, lam=0.95, kl_coef=0.01, kl_penalty="k3", whiten_advantages=False),
        actor=ActorConfig(
            ppo_mini_batch_size=16, ppo_epochs=2, clip_ratio=0.1, entropy_coeff=0.001, use_kl_loss=True,
            kl_loss_coef=0.02, kl_loss_type="k2", loss_agg_mode="sequence-sum",
        ),
        critic=CriticConfig(cliprange_value=0.3),
        n=4,
        critic_warmup=2,
    )  # fmt: skip
    objective = made.objective(Role.ACTOR, GlobalCounts(1, 1))
    assert objective == PolicyObjective(
        counts=GlobalCounts(1, 1), aggregation=Aggregation.SEQUENCE_SUM, clip_low=0.1, clip_high=0.1,
        entropy_coeff=0.001, kl_loss_coef=0.02, kl_loss_type="k2",
    )  # fmt: skip


def test_every_estimator_of_a_recipe_has_its_algorithm_and_that_its_roles() -> None:
    estimators = get_args(AlgorithmConfig.model_fields["adv_estimator"].annotation)
    assert set(estimators) == set(ALGORITHMS) == set(ALGORITHM_OF)
    assert set(ALGORITHM_OF.values()) <= set(ROLES_OF)


@pytest.mark.parametrize("in_reward", [True, False])
@pytest.mark.parametrize("in_loss", [True, False])
@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_the_reference_is_used_exactly_where_a_kl_divergence_weighs(
    in_reward: bool, in_loss: bool, coefficient: float
) -> None:
    algorithm = {"use_kl_in_reward": in_reward, "kl_coef": coefficient}
    config = parse_config({**RECIPE, "algorithm": algorithm, "actor": {"use_kl_loss": in_loss}})
    wanted = {Role.ACTOR, Role.CRITIC} | ({Role.REFERENCE} if in_loss or (in_reward and coefficient) else set())
    assert config.roles == {m.role for m in config.workflow.model_stages} == wanted


def test_every_choice_of_a_recipe_is_known() -> None:
    for name in ("kl", "mse", "low_var_kl", "k1", "k2", "k3"):
        config = parse_config({**RECIPE, "algorithm": {"kl_penalty": name}, "actor": {"kl_loss_type": name}})
        assert {config.algorithm.kl_penalty, config.actor.kl_loss_type} <= set(KL_ESTIMATORS)
    for name in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", *Aggregation):
        config = parse_config({**RECIPE, "actor": {"loss_agg_mode": str(name)}})
        assert config.actor.loss_agg_mode in [*Aggregation]
