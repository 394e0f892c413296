"""Teaches a small model the task's form before RL, so a demo has something to improve. Cached by what it depends on.

One process, the same engine as every worker's: the model, tokenizer and (where asked) a reward model are written as
HF folders, and the run then starts from those like from any other.
"""

import dataclasses
import functools
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from nereus.algorithms.base import Objective
from nereus.algorithms.buffer import RolloutBatch
from nereus.algorithms.objectives import BernoulliRewardObjective, LikelihoodObjective
from nereus.algorithms.types import Sample
from nereus.checkpoint.hf import init_unit, load_unit, save_folder
from nereus.comm.groups import Group
from nereus.data.dataset import RunData
from nereus.data.tokenizers import Tokenizer
from nereus.engines.train import AdamW, RankGroups, Trainer
from nereus.examples.chain_sum.answers import WarmStart
from nereus.hf_config import read_model, read_stop_ids
from nereus.model import Head, ModelSpec
from nereus.plan import Layout
from nereus.recipe.config import RunConfig
from nereus.shards.state import RankState, state_dtypes, zeros_on

Progress = Callable[[str, int, int], None]
"""(what, done, total)."""

FORMAT = 1
"""Changed when the same settings give another result, so that older caches are not used."""
WARMUP_STEPS = 30
MICRO_BATCH = 64


@dataclasses.dataclass(frozen=True, slots=True)
class WarmModels:
    """Folders a warm start has made; `cached`: by an earlier run."""

    actor: Path
    reward: Path | None
    cached: bool


def ensure_warm_start(config: RunConfig, run_data: RunData, progress: Progress) -> WarmModels:
    """The models of the recipe's warm start, made unless the cache has them."""
    folder = config.warm_start.cache / _key(config)
    actor, reward = folder / "actor", folder / "reward" if config.warm_start.reward_steps else None
    if actor.is_dir() and (reward is None or reward.is_dir()):
        return WarmModels(actor, reward, cached=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run_data.tokenizer.save(folder / "tokenizer")
    data = _batches(config, run_data)
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, min(4, threads)))
    spec = _train_actor(config, run_data.tokenizer, data, folder, progress)
    if reward is not None:
        _train_reward(config, spec, data, folder, progress)
    torch.set_num_threads(threads)
    return WarmModels(actor, reward, cached=False)


def _key(config: RunConfig) -> str:
    """A hash of every setting the result depends on."""
    sections = {
        "format": FORMAT,
        "model": config.model.model_dump(mode="json"),
        "data": config.data.model_dump(mode="json", exclude={"val", "train_batch_size"}),
        "warm_start": config.warm_start.model_dump(mode="json", exclude={"cache"}),
        "seed": config.trainer.seed,
    }
    return hashlib.sha256(json.dumps(sections, sort_keys=True).encode()).hexdigest()[:16]


def _batches(config: RunConfig, run_data: RunData) -> WarmStart:
    warm = config.warm_start
    return WarmStart(
        run_data.train,
        run_data.tokenizer,
        steps=warm.steps,
        batch=warm.batch,
        seed=config.trainer.seed,
        worked_share=warm.worked_share,
        switch_at=warm.switch_at,
        late_worked_share=warm.late_worked_share,
    )


def _train_actor(
    config: RunConfig, tokenizer: Tokenizer, data: WarmStart, folder: Path, progress: Progress
) -> ModelSpec:
    warm, shape = config.warm_start, config.model.shape
    spec = shape.spec(vocab=tokenizer.vocab_size) if shape is not None else read_model(str(config.model.path))
    state = _new_state(spec)
    if shape is not None:
        init_unit(spec, state, seed=config.trainer.seed)
    else:
        load_unit(str(config.model.path), spec, state)
    trainer = _trainer(state, lr=warm.lr, steps=warm.steps)
    for step in range(warm.steps):
        samples = [
            Sample(i, 0, example.prompt_tokens, example.response_tokens, finished=True)
            for i, example in enumerate(data.examples(step))
        ]
        batch = RolloutBatch.from_samples(samples)
        trainer.update(batch, LikelihoodObjective(counts=batch.counts), micro_batch=MICRO_BATCH)
        progress("warm start: teaching the task", step + 1, warm.steps)
    stops = dict.fromkeys((tokenizer.eos_id, *(read_stop_ids(config.model.path) if config.model.path else ())))
    save_folder(folder / "actor", spec, _tensors(state), tokenizer_folder=folder / "tokenizer", stop_ids=tuple(stops))
    return spec


def _train_reward(config: RunConfig, actor: ModelSpec, data: WarmStart, folder: Path, progress: Progress) -> None:
    """A reward model with the actor's body, taught to tell right answers from wrong ones."""
    warm, spec = config.warm_start, actor.with_head(Head.SCORE)
    state = _new_state(spec)
    load_unit(folder / "actor", spec, state, fresh_score=True)
    trainer = _trainer(state, lr=warm.reward_lr, steps=warm.reward_steps)
    for step in range(warm.reward_steps):
        samples: list[Sample] = []
        for i, pair in enumerate(data.pairs(step)):
            samples.append(Sample(i, 0, pair.prompt_tokens, pair.right_tokens, finished=True))
            samples.append(Sample(i, 1, pair.prompt_tokens, pair.wrong_tokens, finished=True))
        batch = RolloutBatch.from_samples(samples)
        batch = batch.with_columns(scores=(batch.group_index == 0).to(torch.float32))
        objective: Objective = BernoulliRewardObjective(counts=batch.counts)
        result = trainer.update(batch, objective, micro_batch=MICRO_BATCH)
        what = f"warm start: teaching the reward model (accuracy {result.metrics['reward/accuracy']:.2f})"
        progress(what, step + 1, warm.reward_steps)
    save_folder(folder / "reward", spec, _tensors(state), tokenizer_folder=folder / "tokenizer")


def _new_state(spec: ModelSpec) -> RankState:
    dtypes = state_dtypes(torch.float32, trains=True)
    return RankState.allocate(spec, Layout(), 0, dtypes=dtypes, allocator=zeros_on(torch.device("cpu")))


def _trainer(state: RankState, *, lr: float, steps: int) -> Trainer:
    single = Group.single()
    rate = functools.partial(warm_rate, peak=lr, steps=steps)
    optimizer = AdamW(rate, betas=(0.9, 0.98), weight_decay=0.01)
    return Trainer(state, RankGroups(tp=single, pp=single, dp=single, tie=single, all=single), optimizer)


def warm_rate(update: int, *, peak: float, steps: int) -> float:
    """Linear warm-up, flat until 30% of the steps, then a linear decay to 5% of the peak."""
    decay = 1 - max(0.0, update / steps - 0.3) / 0.7
    return peak * min(1.0, (update + 1) / WARMUP_STEPS) * max(0.05, decay)


def _tensors(state: RankState) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors of a unit of one rank."""
    return ((param.name, state.view(param.name)) for param in state.spec.params)
