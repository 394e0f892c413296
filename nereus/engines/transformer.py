"""One pipeline stage of one unit rank of a decoder-only transformer: Llama, Mistral, Qwen2, Qwen3 in one body.

Hidden states are packed: [T, H] over all tokens of a batch without padding, so only attention knows about sequences.
How queries, keys and values become outputs is the caller's `Attend`: whole sequences for training and scoring
(`PackedAttention`), a key/value cache for generation (`generate.py`). Weights are views of a flat buffer
(`RankState`); gradients, where wanted, accumulate into a flat buffer of the same offsets.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from nereus.comm.groups import Group
from nereus.engine_facts import Op, causal_pairs
from nereus.engines.meter import Meter
from nereus.engines.parallel import copy_to_ranks, embed, sum_over_ranks
from nereus.engines.recompute import linear_after, rms_norm
from nereus.model import Axis, Head, ModelSpec
from nereus.plan import Recompute
from nereus.shards.boxes import Shard, axis_range, kv_of_head, layer_range, repeats_of
from nereus.shards.state import RankState, StateKind, fused_view


class Attend(Protocol):
    """How the queries, keys and values of a layer become outputs.

    operation, work: its class and the work of one layer, for the meter; gemm: the class of the products around it.
    """

    operation: str
    gemm: str
    work: float

    def __call__(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, /) -> torch.Tensor:
        """(local layer index, q [T, heads/tp, D], k [T, kv, D], v [T, kv, D]) -> [T, heads/tp, D]."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer as the rank computes with them; fused matrices are stacked on dim 0.

    A norm whose weight is absent here had it multiplied into the matrix that follows (`packing.py`), with sqrt(H).
    """

    input_norm: torch.Tensor | None
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    post_norm: torch.Tensor | None
    gate_up: torch.Tensor
    down: torch.Tensor


class StageModel:
    """Computes one pipeline stage. `grads`: flat buffer that gradients accumulate into, or None for no gradients."""

    def __init__(
        self,
        state: RankState,
        *,
        tp: Group,
        grads: torch.Tensor | None = None,
        recompute: Recompute = Recompute.NONE,
    ):
        spec, layout = state.spec, state.layout
        self.spec, self.state, self.tp, self.recompute = spec, state, tp, recompute
        self.tp_rank, self.pp_rank = layout.tp_rank(state.rank), layout.pp_rank(state.rank)
        self.is_first, self.is_last = self.pp_rank == 0, self.pp_rank == layout.pp - 1
        self.num_heads = len(axis_range(spec, Axis.HEADS, layout.tp, self.tp_rank))
        self.num_kv_heads = len(axis_range(spec, Axis.KV_HEADS, layout.tp, self.tp_rank))
        self.kv_of_head = kv_of_head(spec, layout.tp, self.tp_rank)
        self.first_row = axis_range(spec, Axis.VOCAB, layout.tp, self.tp_rank).start
        self._norm_floor = state.flats[StateKind.PARAM].new_full((1,), math.sqrt(spec.hidden * spec.rms_eps))
        self._grads = grads
        self.meter: Meter | None = None
        self._gemm: str = Op.GEMM
        self.layers = [self._layer_weights(i) for i in layer_range(spec.num_layers, layout.pp, self.pp_rank)]
        embedding = self._leaf(["model.embed_tokens.weight"]) if self.is_first or (spec.tied and self.is_last) else None
        self.embedding = embedding
        self.final_norm = self._leaf(["model.norm.weight"]) if self.is_last else None
        self.head: torch.Tensor | None = None
        if self.is_last:
            name = "score.weight" if spec.head is Head.SCORE else "lm_head.weight"
            self.head = embedding if spec.tied else self._leaf([name])

    def _leaf(self, names: list[str]) -> torch.Tensor:
        """The weight of (fused) parameters; with gradients a leaf whose `.grad` is a view of the flat gradients."""
        shards = [self.state.shard(name) for name in names]
        flat = self.state.flats[StateKind.PARAM]
        weight = _stored(flat, shards)
        if self._grads is None:
            return weight
        weight = weight.detach().requires_grad_()
        target = _stored(self._grads, shards)
        if target.dtype == weight.dtype:
            weight.grad = target
        else:
            hook = functools.partial(_accumulate_wide, target)
            weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return weight

    def _layer_weights(self, layer: int) -> LayerWeights:
        at = f"model.layers.{layer}."
        qkv = [f"{at}self_attn.{name}_proj" for name in "qkv"]
        spec = self.spec
        return LayerWeights(
            input_norm=self._leaf([f"{at}input_layernorm.weight"]),
            qkv=self._leaf([f"{name}.weight" for name in qkv]),
            qkv_bias=self._leaf([f"{name}.bias" for name in qkv]) if spec.qkv_bias else None,
            q_norm=self._leaf([f"{at}self_attn.q_norm.weight"]) if spec.qk_norm else None,
            k_norm=self._leaf([f"{at}self_attn.k_norm.weight"]) if spec.qk_norm else None,
            o=self._leaf([f"{at}self_attn.o_proj.weight"]),
            post_norm=self._leaf([f"{at}post_attention_layernorm.weight"]),
            gate_up=self._leaf([f"{at}mlp.gate_proj.weight", f"{at}mlp.up_proj.weight"]),
            down=self._leaf([f"{at}mlp.down_proj.weight"]),
        )

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, H] of tokens [T]; first pipeline stage only."""
        assert self.embedding is not None
        return embed(tokens, self.embedding, self.first_row, self.tp)

    def body(self, hidden: torch.Tensor, rope: "Rope", attend: Attend) -> torch.Tensor:
        """This stage's layers over packed hidden states [T, H]."""
        self._gemm = attend.gemm
        for index, weights in enumerate(self.layers):
            if self.recompute is Recompute.FULL and hidden.requires_grad:
                step = functools.partial(self._layer, weights=weights, rope=rope, attend=attend, index=index)
                hidden = checkpoint(step, hidden, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = self._layer(hidden, weights=weights, rope=rope, attend=attend, index=index)
        return hidden

    def _layer(
        self, hidden: torch.Tensor, *, weights: LayerWeights, rope: "Rope", attend: Attend, index: int
    ) -> torch.Tensor:
        hidden = hidden + self._attended(hidden, weights, rope, attend, index)
        gate_up = self._after(self._normed, (hidden, weights.post_norm), weights.gate_up)
        return hidden + sum_over_ranks(self._after(_gated, (gate_up,), weights.down), self.tp)

    def _attended(
        self, hidden: torch.Tensor, weights: LayerWeights, rope: "Rope", attend: Attend, index: int
    ) -> torch.Tensor:
        """What attention adds to the hidden states; its intermediate tensors end here."""
        qkv = self._after(self._normed, (hidden, weights.input_norm), weights.qkv, weights.qkv_bias)
        q, k, v = self._rotated(qkv, weights, rope)
        attended = self._attend(attend, index, q, k, v).reshape(hidden.shape[0], -1)
        return sum_over_ranks(self._linear(attended, weights.o), self.tp)

    def _normed(self, hidden: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        """Normalized hidden states that enter a tensor-parallel region."""
        return copy_to_ranks(self._norm(hidden, norm), self.tp)

    def _after(
        self,
        make: Callable[..., torch.Tensor],
        inputs: tuple[torch.Tensor | None, ...],
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The linear layer after what is cheap to make; selective recomputation keeps only the inputs of that."""
        if self.recompute is Recompute.SELECTIVE and torch.is_grad_enabled():
            return linear_after(self._linear, make, inputs, weight, bias)
        return self._linear(make(*inputs), weight, bias)

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, in] times weight [out, in] transposed; measured where there is a meter."""
        if self.meter is None:
            return functional.linear(x, weight, bias)
        begun = time.perf_counter()
        result = functional.linear(x, weight, bias)
        decodes = self._gemm == Op.DECODE_GEMM
        work = weight.numel() * weight.element_size() if decodes else 2 * x.shape[0] * weight.numel()
        self.meter.add(self._gemm, work, time.perf_counter() - begun)
        return result

    def _attend(self, attend: Attend, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.meter is None:
            return attend(index, q, k, v)
        with self.meter.time(attend.operation, attend.work):
            return attend(index, q, k, v)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is None:
            size: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return x / size.hypot_(self._norm_floor)
        return rms_norm(x, weight, self.spec.rms_eps)

    def _rotated(
        self, qkv: torch.Tensor, weights: LayerWeights, rope: "Rope"
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated q [T, h, D], rotated k [T, kv, D] and v [T, kv, D] of this rank's projections [T, (h + 2 kv) D]."""
        heads, kv = self.num_heads, self.num_kv_heads
        qk, v = qkv.view(-1, heads + 2 * kv, self.spec.head_dim).split_with_sizes([heads + kv, kv], 1)
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = qk.split_with_sizes([heads, kv], 1)
            qk = torch.cat((self._norm(q, weights.q_norm), self._norm(k, weights.k_norm)), 1)
        q, k = rope.rotate(qk).split_with_sizes([heads, kv], 1)
        return q, k, v

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's logits [R, V/tp] (fp32 or wider) of last-stage hidden states [R, H]."""
        assert self.head is not None
        normed = copy_to_ranks(self._norm(hidden, self.final_norm), self.tp)
        logits = functional.linear(normed, self.head)
        return logits.float() if logits.dtype == torch.bfloat16 else logits

    def values(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scalars [R] (fp32 or wider) of last-stage hidden states [R, H] for a model with a scalar head."""
        assert self.final_norm is not None and self.head is not None
        values = functional.linear(self._norm(hidden, self.final_norm), self.head).squeeze(-1)
        return values.float() if values.dtype == torch.bfloat16 else values


def _gated(gate_up: torch.Tensor) -> torch.Tensor:
    """The activated gate times up [T, F/tp] of both [T, 2F/tp]."""
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate) * up


def _stored(flat: torch.Tensor, shards: Sequence[Shard]) -> torch.Tensor:
    return fused_view(flat, list(shards))


def _accumulate_wide(target: torch.Tensor, leaf: torch.Tensor) -> None:
    """Add a bf16 leaf's gradient to its wide flat buffer and drop it."""
    assert leaf.grad is not None
    target += leaf.grad
    leaf.grad = None


@functools.lru_cache(maxsize=16)
def _rope_table(
    spec: ModelSpec, num_positions: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos [P, 1, D] and signed sin [P, 1, D] tables: x * cos + swap_halves(x) * sin rotates x."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    half = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).to(wide) / spec.head_dim
    inverse = 1.0 / (spec.rope_theta**half)
    if spec.rope_scaling is not None:
        scaling = spec.rope_scaling
        wavelength = 2 * math.pi / inverse
        low = scaling.original_max_position / scaling.low_freq_factor
        high = scaling.original_max_position / scaling.high_freq_factor
        smooth = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        blended = (1 - smooth) * inverse / scaling.factor + smooth * inverse
        inverse = torch.where(wavelength > low, inverse / scaling.factor, inverse)
        inverse = torch.where((wavelength <= low) & (wavelength >= high), blended, inverse)
    angles = torch.arange(num_positions, dtype=wide).unsqueeze(-1) * inverse
    cos, sin = angles.cos(), angles.sin()
    tables = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return tuple(t.to(dtype=dtype, device=device).unsqueeze(1) for t in tables)  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position tables picked for packed tokens: cos and signed sin, each [T, 1, D]."""

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def at(cls, spec: ModelSpec, positions: torch.Tensor, dtype: torch.dtype, *, longest: int) -> "Rope":
        """Tables for positions [T], all below `longest`."""
        size = 1 << max(longest - 1, 255).bit_length()
        cos, sin = _rope_table(spec, size, dtype, str(positions.device))
        return cls(cos[positions], sin[positions])

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotated [T, heads, D]; halves are paired as in HF's models."""
        return torch.addcmul(x * self.cos, x.roll(x.shape[-1] // 2, -1), self.sin)


@dataclasses.dataclass(frozen=True, slots=True)
class Packing:
    """Where each sequence of a packed batch lies. `slots` [T]: row of each token in the padded [B * longest] grid."""

    lengths: tuple[int, ...]
    positions: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "Packing":
        counts = torch.tensor(lengths, dtype=torch.int64)
        starts = counts.cumsum(0) - counts
        positions = torch.arange(int(counts.sum())) - starts.repeat_interleave(counts)
        rows = torch.arange(len(lengths)).repeat_interleave(counts)
        longest = int(counts.max()) if len(lengths) else 0
        return cls(tuple(lengths), positions.to(device), (rows * longest + positions).to(device))

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)


class PackedAttention:
    """Causal attention over whole sequences of a packed batch (an `Attend`).

    Sequences are padded on the right for the attention only; padded rows are computed and dropped.
    """

    operation: str = Op.ATTENTION
    gemm: str = Op.GEMM

    def __init__(self, packing: Packing, model: StageModel):
        self._packing = packing
        pairs = sum(causal_pairs(length, model.spec.sliding_window) for length in packing.lengths)
        self.work = 4 * pairs * model.num_heads * model.spec.head_dim
        # Even groups of query heads are the kernel's to match with KV heads; uneven ones get a KV head each.
        self._kv_of_head = model.kv_of_head if repeats_of(model.kv_of_head) is None else None
        self._mask = causal_window_mask(packing.longest, model.spec.sliding_window, packing.slots.device)

    def __call__(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self._kv_of_head is not None:
            k, v = k[:, self._kv_of_head], v[:, self._kv_of_head]
        out = functional.scaled_dot_product_attention(
            self._pad(q), self._pad(k), self._pad(v),
            attn_mask=self._mask, is_causal=self._mask is None, enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        rows = out.transpose(1, 2).reshape(-1, *out.shape[1::2])  # [B * L, h, D]
        return rows if len(rows) == len(q) else rows.index_select(0, self._packing.slots)

    def _pad(self, x: torch.Tensor) -> torch.Tensor:
        """[B, heads, L, D] of [T, heads, D]."""
        batch, longest = len(self._packing.lengths), self._packing.longest
        if x.shape[0] == batch * longest:
            return x.view(batch, longest, *x.shape[1:]).transpose(1, 2)
        # Unlike index_copy this keeps no reference to x until the backward pass.
        grid = x.new_zeros(batch * longest, *x.shape[1:]).index_put((self._packing.slots,), x)
        return grid.view(batch, longest, *x.shape[1:]).transpose(1, 2)


def causal_window_mask(longest: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Boolean [L, L] mask of a causal sliding window, or None where plain causal attention is the same."""
    if window is None or longest <= window:
        return None
    distance = torch.arange(longest, device=device).unsqueeze(1) - torch.arange(longest, device=device)
    return (distance >= 0) & (distance < window)
