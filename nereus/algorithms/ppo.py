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
from nereus.recipe.sections import ActorConfig, AlgorithmConfig, CriticConfig

__all__ = ["PPO", "cut_mini_batches", "global_permutation"]


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class PPO(Algorithm):
    """The actor is updated with the clipped surrogate, the critic with the clipped squared error.

    Its settings are a recipe's: sections algorithm, actor and critic; n of rollout; critic_warmup of trainer, the first
    steps, in which only the critic is trained. A mini-batch has at most ppo_mini_batch_size x n samples.
    """

    algorithm: AlgorithmConfig
    actor: ActorConfig
    critic: CriticConfig
    n: int = 1
    critic_warmup: int = 0

    @classmethod
    def of(cls, config: RunConfig) -> "PPO":
        return cls(
            algorithm=config.algorithm,
            actor=config.actor,
            critic=config.critic,
            n=config.rollout.n,
            critic_warmup=config.trainer.critic_warmup,
        )

    @property
    def sampling(self) -> Sampling:
        return Sampling(num_sampled=self.n)

    def prepare(self, batch: RolloutBatch) -> Prepared:
        """Needs scores, values, old_logprobs, and reference_logprobs where there is a KL penalty."""
        batch, metrics = self.reward_tokens(batch)
        advantages, returns = gae(
            batch.column("token_rewards"),
            batch.column("values"),
            batch,
            gamma=self.algorithm.gamma,
            lam=self.algorithm.lam,
        )
        if self.algorithm.whiten_advantages:
            advantages = whiten(advantages, batch.response_mask)
        batch = batch.with_columns(advantages=advantages, returns=returns)
        return Prepared(batch, {**batch_metrics(batch), **metrics})

    def reward_tokens(self, batch: RolloutBatch) -> tuple[RolloutBatch, dict[str, float]]:
        """token_rewards: the score at the last token, less kl_weight x KL at each."""
        old_logprobs = batch.column("old_logprobs")
        rewards = place_scores(batch.column("scores").to(old_logprobs.dtype), batch)
        if self.algorithm.kl_weight == 0:
            return batch.with_columns(token_rewards=rewards), {}
        kl = KL_ESTIMATORS[self.algorithm.kl_penalty](old_logprobs, batch.column("reference_logprobs"))
        kl = torch.where(batch.response_mask, kl, 0)
        of_sequence = batch.sum_by_sample(kl) / batch.valid_lengths.clamp(min=1)
        metrics = {
            "actor/reward_kl_penalty": float(of_sequence.sum()) / max(batch.counts.sequences, 1),
            "actor/reward_kl_penalty_coeff": self.algorithm.kl_weight,
        }
        return batch.with_columns(token_rewards=rewards - self.algorithm.kl_weight * kl), metrics

    def mini_batches(self, batch: RolloutBatch, *, seed: int, step: int) -> tuple[MiniBatch, ...]:
        return cut_mini_batches(
            batch.num_samples,
            epochs=self.actor.ppo_epochs,
            max_samples=self.actor.ppo_mini_batch_size * self.n,
            seed=seed,
            step=step,
        )

    def trains(self, role: Role, *, step: int) -> bool:
        return role is Role.CRITIC or (role is Role.ACTOR and step > self.critic_warmup)

    def objective(self, role: Role, counts: GlobalCounts) -> Objective:
        assert role in (Role.ACTOR, Role.CRITIC), f"{role} is not trained"
        aggregation = Aggregation(self.actor.loss_agg_mode)
        if role is Role.CRITIC:
            return ValueObjective(counts=counts, aggregation=aggregation, cliprange_value=self.critic.cliprange_value)
        return PolicyObjective(
            counts=counts,
            aggregation=aggregation,
            clip_low=self.actor.clip_low,
            clip_high=self.actor.clip_high,
            clip_ratio_c=self.actor.clip_ratio_c,
            entropy_coeff=self.actor.entropy_coeff,
            kl_loss_coef=self.actor.kl_weight,
            kl_loss_type=self.actor.kl_loss_type,
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
