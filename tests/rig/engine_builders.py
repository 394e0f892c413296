"""Tiny models with their `transformers` twins, batches, and units of an engine run as threads of one process.

The twin is the slow obvious way: whole weights, one sequence at a time, plain autograd.
"""

import dataclasses
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from support import StoreFactory, run_threads
from torch._C._distributed_c10d import HashStore
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from nereus.algorithms.base import Objective
from nereus.algorithms.buffer import RolloutBatch
from nereus.algorithms.types import OutputKind, Outputs
from nereus.engines.meter import Meter
from nereus.engines.train import AdamW, RankGroups, Trainer, UpdateResult
from nereus.hf_config import read_config
from nereus.model import Head, ModelSpec
from nereus.plan import ACTOR_TRAINING, Layout, Recompute, StagePlan
from nereus.runtime.ranks import join_groups, rank_group_specs
from nereus.shards.boxes import Box, Shard
from nereus.shards.state import RankState, StateKind, shard_view, state_dtypes, zeros_on

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 12}),
    "mistral": (MistralConfig, {"sliding_window": 16}),
}
SIZES = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 90,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}


def make_twin(family: str, *, head: Head = Head.LM, seed: int = 0, **sizes: Any) -> PreTrainedModel:
    """A `transformers` model in fp32 with random weights in which no parameter is without effect."""
    config_class, own = CONFIGS[family]
    config = config_class(**{**SIZES, **own, "pad_token_id": None, **sizes})
    if head is Head.SCORE:
        config.num_labels = 1
        twin = AutoModelForSequenceClassification.from_config(config, attn_implementation="sdpa")
    else:
        twin = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in twin.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 1:
                weight.copy_(0.3 * noise if name.endswith("bias") else 1 + 0.3 * noise)
            else:
                weight.copy_(noise * (0.3 if "embed" in name else weight.shape[1] ** -0.5))
    return twin


def spec_of(twin: PreTrainedModel) -> ModelSpec:
    """The spec of a twin's config, as it would be read from its folder."""
    return read_config({**twin.config.to_dict(), "architectures": [type(twin).__name__]})


def in_float64(twin: PreTrainedModel) -> PreTrainedModel:
    """The twin in float64 throughout: its norms and rotary tables, which compute in fp32, are exchanged."""
    twin = twin.double()
    for path, module in list(twin.named_modules()):
        parent, _, name = path.rpartition(".")
        if type(module).__name__.endswith("RMSNorm"):
            norm = torch.nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon, dtype=torch.float64)
            norm.weight = module.weight
            setattr(twin.get_submodule(parent), name, norm)
        elif type(module).__name__.endswith("RotaryEmbedding"):
            setattr(twin.get_submodule(parent), name, _WideRotary(spec_of(twin)))
    return twin


class _WideRotary(torch.nn.Module):
    """Rotary tables in float64, Llama 3's scaling written out frequency by frequency."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self._frequencies = torch.tensor(
            [self._frequency(spec, i) for i in range(spec.head_dim // 2)], dtype=torch.float64
        )

    @staticmethod
    def _frequency(spec: ModelSpec, index: int) -> float:
        frequency: float = spec.rope_theta ** (-2 * index / spec.head_dim)
        scaling = spec.rope_scaling
        if scaling is None:
            return frequency
        turns = scaling.original_max_position * frequency / (2 * torch.pi)
        if turns < scaling.low_freq_factor:
            return frequency / scaling.factor
        if turns > scaling.high_freq_factor:
            return frequency
        share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        return (1 - share) * frequency / scaling.factor + share * frequency

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].double() * self._frequencies
        doubled = torch.cat((angles, angles), -1)
        return doubled.cos(), doubled.sin()


def make_batch(
    response_lengths: Sequence[int], *, vocab: int, prompt_lengths: Sequence[int] | None = None, seed: int = 0
) -> RolloutBatch:
    """Random tokens with every column an objective may read; all response tokens count."""
    generator = torch.Generator().manual_seed(seed)
    responses = torch.tensor(response_lengths, dtype=torch.int64)
    if prompt_lengths is None:
        prompts = 1 + torch.randint(0, 4, responses.shape, generator=generator)
    else:
        prompts = torch.tensor(prompt_lengths, dtype=torch.int64)
    num, num_tokens = len(response_lengths), int(responses.sum())

    def noise() -> torch.Tensor:
        return torch.randn(num_tokens, generator=generator, dtype=torch.float64)

    return RolloutBatch(
        prompt_index=torch.arange(num),
        group_index=torch.zeros(num, dtype=torch.int64),
        policy_version=torch.zeros(num, dtype=torch.int64),
        finished=torch.ones(num, dtype=torch.bool),
        prompt_lengths=prompts,
        response_lengths=responses,
        tokens=torch.randint(0, vocab, (int((prompts + responses).sum()),), generator=generator),
        response_mask=torch.ones(num_tokens, dtype=torch.bool),
        old_logprobs=noise() - 4,
        reference_logprobs=noise() - 4,
        values=noise(),
        advantages=noise(),
        returns=noise(),
    )


def sequences(batch: RolloutBatch) -> list[torch.Tensor]:
    """The tokens of each sample."""
    return list(torch.split(batch.tokens, batch.sequence_lengths.tolist()))


def load_state(
    spec: ModelSpec, layout: Layout, rank: int, weights: dict[str, torch.Tensor], *, dtype: torch.dtype, trains: bool
) -> RankState:
    """A rank's state cut from whole weights in HF naming."""
    state = RankState.allocate(
        spec,
        layout,
        rank,
        dtypes=state_dtypes(dtype, trains=trains),
        allocator=zeros_on(torch.device("cpu")),
    )
    for kind in {StateKind.PARAM, StateKind.MASTER} & state.flats.keys():
        for shard in state.shards:
            state.view(shard.param.name, kind).copy_(weights[shard.param.name][cut(shard)])
    return state


def cut(shard: Shard) -> tuple[slice, ...]:
    """Slices that select a shard's box from the whole tensor."""
    return shard.box.within(Box.whole(shard.param.shape))


@dataclasses.dataclass(frozen=True)
class Place:
    """One rank of one unit of a model-stage, with its groups."""

    spec: ModelSpec
    layout: Layout
    unit: int
    rank: int
    groups: RankGroups


def run_places(
    spec: ModelSpec, layout: Layout, fn: Callable[[Place], Any], *, dp: int = 1, timeout_s: float = 30.0
) -> list[list[Any]]:
    """[[fn(place) for each rank] for each unit], every place a thread; `timeout_s` is that of the groups."""
    size, store = layout.num_ranks, HashStore()
    plan = StagePlan.of(layout, range(dp * size))

    def run(device: int, _: StoreFactory) -> Any:
        unit, rank = divmod(device, size)
        specs = rank_group_specs(spec, ACTOR_TRAINING, plan, device, epoch=0)
        groups = join_groups(
            specs,
            store,
            device,
            timeout=timedelta(seconds=timeout_s),
            backend="gloo",
            trains=True,
            meter=Meter(),
            nodes=dict.fromkeys(plan.devices, "node0"),
        )
        try:
            return fn(Place(spec, layout, unit, rank, groups))
        finally:
            groups.close()

    results = run_threads(dp * size, run, timeout_s=120)
    return [results[unit * size : (unit + 1) * size] for unit in range(dp)]


@dataclasses.dataclass(frozen=True)
class Update:
    """What one update left behind, whole: gradients as applied, parameters, and the numbers reported."""

    grads: dict[str, torch.Tensor]
    params: dict[str, torch.Tensor]
    grad_norm: float
    metrics: dict[str, float]


def twin_update(
    twin: PreTrainedModel, batch: RolloutBatch, objective: Objective, optimizer: AdamW, *, num_updates: int = 1
) -> Update:
    """Updates of the twin by autograd and `torch.optim.AdamW`, the same batch every time; what the last one left."""
    rate = optimizer.learning_rate(0)
    adam = torch.optim.AdamW(
        twin.parameters(), rate, betas=optimizer.betas, eps=optimizer.eps, weight_decay=optimizer.weight_decay
    )
    for _ in range(num_updates):
        adam.zero_grad()
        loss, metrics = objective(twin_outputs(twin, batch, objective), batch)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), optimizer.max_norm)
        adam.step()
    named = dict(twin.named_parameters())
    grads = {name: weight.grad for name, weight in named.items() if weight.grad is not None}
    params = {name: weight.detach() for name, weight in named.items()}
    return Update(grads, params, float(norm), {name: float(value) for name, value in metrics.items()})


def twin_outputs(twin: PreTrainedModel, batch: RolloutBatch, objective: Objective) -> Outputs:
    """What an objective reads, sample by sample from whole rows of logits or the scalar head."""
    columns: list[tuple[torch.Tensor, ...]] = []
    for tokens, length in zip(sequences(batch), batch.response_lengths.tolist(), strict=True):
        predicting = slice(len(tokens) - length - 1, len(tokens) - 1)
        hidden = twin.model(tokens.unsqueeze(0)).last_hidden_state[0]
        if objective.output is OutputKind.LOGPROBS:
            rows = twin.lm_head(hidden[predicting]).log_softmax(-1)
            picked = rows.gather(-1, tokens[len(tokens) - length :].unsqueeze(-1)).squeeze(-1)
            columns.append((picked, -(rows.exp() * rows).sum(-1)))
        else:
            last = slice(len(tokens) - 1, len(tokens))
            columns.append((twin.score(hidden[predicting if objective.output is OutputKind.VALUES else last])[:, 0],))
    joined = [torch.cat(parts) for parts in zip(*columns, strict=True)]
    if objective.output is OutputKind.LOGPROBS:
        return Outputs(logprobs=joined[0], entropy=joined[1] if objective.needs_entropy else None)
    return Outputs(values=joined[0]) if objective.output is OutputKind.VALUES else Outputs(scores=joined[0])


@dataclasses.dataclass(frozen=True)
class RankUpdate:
    """What a rank of a unit is left with after its updates."""

    trainer: Trainer
    result: UpdateResult


def engine_update(
    spec: ModelSpec,
    weights: dict[str, torch.Tensor],
    batch: RolloutBatch,
    objective: Objective,
    optimizer: AdamW,
    *,
    layout: Layout,
    dp: int = 1,
    micro_batch: int = 2,
    num_updates: int = 1,
    recompute: Recompute = Recompute.NONE,
    dtype: torch.dtype = torch.float64,
) -> list[list[RankUpdate]]:
    """The same updates by `dp` units of a layout; [unit][rank]."""
    shares = batch.shares(dp)

    def run(place: Place) -> RankUpdate:
        state = load_state(spec, layout, place.rank, weights, dtype=dtype, trains=True)
        trainer = Trainer(state, place.groups, optimizer, recompute=recompute)
        for _ in range(num_updates):
            result = trainer.update(shares[place.unit], objective, micro_batch=micro_batch)
        return RankUpdate(trainer, result)

    return run_places(spec, layout, run, dp=dp)


@dataclasses.dataclass(frozen=True)
class Errors:
    """Largest differences to the twin, over all ranks and replicas; tensors relative to the largest entry of each."""

    loss: float
    grads: float
    norm: float
    params: float


def errors(units: list[list[RankUpdate]], expected: Update) -> Errors:
    """How far an engine's update is from the twin's."""
    grads, params, norm = 0.0, 0.0, 0.0
    for place in (place for unit in units for place in unit):
        state = place.trainer.state
        norm = max(norm, abs(place.result.grad_norm / expected.grad_norm - 1))
        for shard in state.shards:
            if shard.box.numel == 0:
                continue
            name = shard.param.name
            grads = max(grads, _error(shard_view(place.trainer.grads, shard), expected.grads[name], shard))
            params = max(params, _error(state.view(name), expected.params[name], shard))
    totals = {
        name: sum(place.result.metrics.get(name, 0.0) for unit in units for place in unit) for name in expected.metrics
    }
    loss = max(abs(totals[name] - value) / max(1.0, abs(value)) for name, value in expected.metrics.items())
    return Errors(loss, grads, norm, params)


def _error(part: torch.Tensor, whole: torch.Tensor, shard: Shard) -> float:
    return float((part - whole[cut(shard)]).abs().max() / whole.abs().max())
