"""Proximal policy optimization with a critic, generalized advantage estimation and a KL penalty in the reward."""

import dataclasses
import math
import struct
from typing import final

import torch
import xxhash

from nereus.algorithms.advantages import KL_ESTIMATORS, gae, place_scores, whiten
from nereus.algorithms.base import Algorithm, MiniBatch, Objective, Prepared
from nereus.algorithms.buffer import RolloutBatch, shares
from nereus.algorithms.losses import Aggregation
from nereus.algorithms.metrics import batch_metrics
from nereus.algorithms.objectives import PolicyObjective, ValueObjective
from nereus.algorithms.types import GlobalCounts, Sampling
from nereus.errors import ConfigError
from nereus.plan import Role

__all__ = ["PPO", "PPOSettings", "cut_mini_batches", "global_permutation"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOSettings:
    """PPO's recipe keys, named and defaulted as in verl; `KEYS` has their sections.

    ppo_mini_batch_size counts prompts: a mini-batch has at most ppo_mini_batch_size x n samples.
    kl_coef weighs the penalty in the reward, kl_loss_coef the term in the actor's loss; 0 leaves each out.
    critic_warmup: the first steps, in which only the critic is trained.
    """

    ppo_mini_batch_size: int
    n: int = 1
    gamma: float = 1.0
    lam: float = 1.0
    kl_coef: float = 0.001
    kl_penalty: str = "kl"
    whiten_advantages: bool = True
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0
    entropy_coeff: float = 0.0
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "low_var_kl"
    loss_agg_mode: str = Aggregation.TOKEN_MEAN.value
    ppo_epochs: int = 1
    cliprange_value: float = 0.5
    critic_warmup: int = 0

    def __post_init__(self) -> None:
        """Raise ConfigError where a setting is out of its bounds."""
        for name, (low, high) in BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                bound = f"must be in [{low:g}, {high:g}]" if math.isfinite(high) else f"must be at least {low:g}"
                raise ConfigError(KEYS[name], f"{bound}, is {value:g}")
        for name, valid in CHOICES.items():
            value = getattr(self, name)
            if value not in valid:
                raise ConfigError(KEYS[name], f"is {value!r}; valid: {', '.join(valid)}")
        if self.clip_ratio_c <= 1:
            raise ConfigError(KEYS["clip_ratio_c"], f"must be above 1, is {self.clip_ratio_c:g}")


KEYS = {
    "n": "rollout.n",
    "gamma": "algorithm.gamma",
    "lam": "algorithm.lam",
    "kl_coef": "algorithm.kl_coef",
    "kl_penalty": "algorithm.kl_penalty",
    "whiten_advantages": "algorithm.whiten_advantages",
    "clip_ratio": "actor.clip_ratio",
    "clip_ratio_low": "actor.clip_ratio_low",
    "clip_ratio_high": "actor.clip_ratio_high",
    "clip_ratio_c": "actor.clip_ratio_c",
    "entropy_coeff": "actor.entropy_coeff",
    "kl_loss_coef": "actor.kl_loss_coef",
    "kl_loss_type": "actor.kl_loss_type",
    "loss_agg_mode": "actor.loss_agg_mode",
    "ppo_epochs": "actor.ppo_epochs",
    "ppo_mini_batch_size": "actor.ppo_mini_batch_size",
    "cliprange_value": "critic.cliprange_value",
    "critic_warmup": "trainer.critic_warmup",
}
"""The recipe key of each setting, for whoever fills them and for messages."""

BOUNDS: dict[str, tuple[float, float]] = {
    "n": (1, math.inf),
    "gamma": (0, 1),
    "lam": (0, 1),
    "kl_coef": (0, math.inf),
    "clip_ratio": (0, 1),
    "clip_ratio_low": (0, 1),
    "clip_ratio_high": (0, math.inf),
    "entropy_coeff": (-math.inf, math.inf),
    "kl_loss_coef": (0, math.inf),
    "ppo_epochs": (1, math.inf),
    "ppo_mini_batch_size": (1, math.inf),
    "cliprange_value": (0, math.inf),
    "critic_warmup": (0, math.inf),
}

CHOICES: dict[str, tuple[str, ...]] = {
    "kl_penalty": tuple(KL_ESTIMATORS),
    "kl_loss_type": tuple(KL_ESTIMATORS),
    "loss_agg_mode": tuple(a.value for a in Aggregation),
}


@final
@dataclasses.dataclass(frozen=True)
class PPO(Algorithm):
    """The actor is updated with the clipped surrogate, the critic with the clipped squared error."""

    settings: PPOSettings
    name = "ppo"

    @property
    def roles(self) -> frozenset[Role]:
        uses_reference = self.settings.kl_coef != 0 or self.settings.kl_loss_coef != 0
        return frozenset({Role.ACTOR, Role.CRITIC} | ({Role.REFERENCE} if uses_reference else set()))

    @property
    def sampling(self) -> Sampling:
        return Sampling(num_sampled=self.settings.n)

    def prepare(self, batch: RolloutBatch) -> Prepared:
        """Needs scores, values, old_logprobs, and reference_logprobs where there is a KL penalty."""
        batch, metrics = self.reward_tokens(batch)
        advantages, returns = gae(
            batch.column("token_rewards"),
            batch.column("values"),
            batch,
            gamma=self.settings.gamma,
            lam=self.settings.lam,
        )
        if self.settings.whiten_advantages:
            advantages = whiten(advantages, batch.response_mask)
        batch = batch.with_columns(advantages=advantages, returns=returns)
        return Prepared(batch, {**batch_metrics(batch), **metrics})

    def reward_tokens(self, batch: RolloutBatch) -> tuple[RolloutBatch, dict[str, float]]:
        """token_rewards: the score at the last token, less kl_coef x KL at each."""
        old_logprobs = batch.column("old_logprobs")
        rewards = place_scores(batch.column("scores").to(old_logprobs.dtype), batch)
        if self.settings.kl_coef == 0:
            return batch.with_columns(token_rewards=rewards), {}
        kl = KL_ESTIMATORS[self.settings.kl_penalty](old_logprobs, batch.column("reference_logprobs"))
        kl = torch.where(batch.response_mask, kl, 0)
        of_sequence = batch.sum_by_sample(kl) / batch.valid_lengths.clamp(min=1)
        metrics = {
            "actor/reward_kl_penalty": float(of_sequence.sum()) / max(batch.counts.sequences, 1),
            "actor/reward_kl_penalty_coeff": self.settings.kl_coef,
        }
        return batch.with_columns(token_rewards=rewards - self.settings.kl_coef * kl), metrics

    def mini_batches(self, batch: RolloutBatch, *, seed: int, step: int) -> tuple[MiniBatch, ...]:
        return cut_mini_batches(
            batch.num_samples,
            epochs=self.settings.ppo_epochs,
            max_samples=self.settings.ppo_mini_batch_size * self.settings.n,
            seed=seed,
            step=step,
        )

    def trains(self, role: Role, *, step: int) -> bool:
        return role is Role.CRITIC or (role is Role.ACTOR and step > self.settings.critic_warmup)

    def objective(self, role: Role, counts: GlobalCounts) -> Objective:
        assert role in (Role.ACTOR, Role.CRITIC), f"{role} is not trained"
        settings = self.settings
        aggregation = Aggregation(settings.loss_agg_mode)
        if role is Role.CRITIC:
            return ValueObjective(counts=counts, aggregation=aggregation, cliprange_value=settings.cliprange_value)
        low, high = settings.clip_ratio_low, settings.clip_ratio_high
        return PolicyObjective(
            counts=counts,
            aggregation=aggregation,
            clip_low=settings.clip_ratio if low is None else low,
            clip_high=settings.clip_ratio if high is None else high,
            clip_ratio_c=settings.clip_ratio_c,
            entropy_coeff=settings.entropy_coeff,
            kl_loss_coef=settings.kl_loss_coef,
            kl_loss_type=settings.kl_loss_type,
        )


def cut_mini_batches(num_samples: int, *, epochs: int, max_samples: int, seed: int, step: int) -> tuple[MiniBatch, ...]:
    """Each epoch's permutation of the batch, cut into as few mini-batches as max_samples allows, sizes one apart."""
    parts = max(1, -(-num_samples // max_samples))
    return tuple(
        MiniBatch(epoch, index, tuple(order[i] for i in share))
        for epoch in range(epochs)
        for order in (global_permutation(num_samples, seed=seed, step=step, epoch=epoch),)
        for index, share in enumerate(shares(num_samples, parts))
    )


def global_permutation(num_samples: int, *, seed: int, step: int, epoch: int) -> tuple[int, ...]:
    """A permutation of range(num_samples): the places sorted by a hash of (seed, step, epoch, place).

    No generator and so no state: the same on any machine, any version, after any restart.
    """

    def key(place: int) -> tuple[int, int]:
        return xxhash.xxh3_64_intdigest(struct.pack("<4q", seed, step, epoch, place)), place

    return tuple(sorted(range(num_samples), key=key))
