"""Proximal policy optimization with a critic, generalized advantage estimation and a KL penalty in the reward."""

import dataclasses
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
from nereus.plan import Role
from nereus.recipe.config import RunConfig

__all__ = ["PPO", "PPOSettings", "cut_mini_batches", "global_permutation"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOSettings:
    """What PPO takes from a recipe, under the recipe's names, which are verl's. `RunConfig` has checked the bounds.

    ppo_mini_batch_size counts prompts: a mini-batch has at most ppo_mini_batch_size x n samples.
    kl_coef weighs the penalty in the reward, kl_loss_coef the term in the actor's loss; 0 leaves each out.
    clip_ratio_low and clip_ratio_high replace clip_ratio below and above 1.
    critic_warmup: the first steps, in which only the critic is trained.
    """

    ppo_mini_batch_size: int
    n: int = 1
    gamma: float = 1.0
    lam: float = 1.0
    kl_coef: float = 0.001
    kl_penalty: str = "k1"
    whiten_advantages: bool = True
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0
    entropy_coeff: float = 0.0
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "k3"
    loss_agg_mode: Aggregation = Aggregation.TOKEN_MEAN
    ppo_epochs: int = 1
    cliprange_value: float = 0.5
    critic_warmup: int = 0

    @classmethod
    def from_config(cls, config: RunConfig) -> "PPOSettings":
        algorithm, actor = config.algorithm, config.actor
        return cls(
            n=config.rollout.n,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            kl_coef=algorithm.kl_coef if algorithm.use_kl_in_reward else 0.0,
            kl_penalty=algorithm.kl_penalty,
            whiten_advantages=algorithm.whiten_advantages,
            clip_ratio=actor.clip_ratio,
            clip_ratio_low=actor.clip_ratio_low,
            clip_ratio_high=actor.clip_ratio_high,
            clip_ratio_c=actor.clip_ratio_c,
            entropy_coeff=actor.entropy_coeff,
            kl_loss_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
            kl_loss_type=actor.kl_loss_type,
            loss_agg_mode=Aggregation(actor.loss_agg_mode),
            ppo_epochs=actor.ppo_epochs,
            ppo_mini_batch_size=actor.ppo_mini_batch_size,
            cliprange_value=config.critic.cliprange_value,
            critic_warmup=config.trainer.critic_warmup,
        )


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
        if role is Role.CRITIC:
            return ValueObjective(
                counts=counts, aggregation=settings.loss_agg_mode, cliprange_value=settings.cliprange_value
            )
        low, high = settings.clip_ratio_low, settings.clip_ratio_high
        return PolicyObjective(
            counts=counts,
            aggregation=settings.loss_agg_mode,
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
