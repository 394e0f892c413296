"""Keys and values of the sequences that one rank generates, in slots; attention over them.

A slot holds one sequence. Slots in use are always the first ones, so a decode step works on plain slices. Nothing
here knows sampling or scheduling.
"""

import math

import torch
from torch.nn import functional

from nereus.engines.transformer import PackedAttention, Packing, StageModel, repeats_of


class KvCache:
    """Keys and values [slots, heads, length, D] of every layer of one pipeline stage, and which entries are visible.

    `bias` [slots, length] is 0 where a slot's next token may look and -inf elsewhere. Stored heads are the rank's
    KV heads, or its query heads where those share KV heads unevenly.
    """

    def __init__(self, model: StageModel, *, num_slots: int, length: int, dtype: torch.dtype, device: torch.device):
        spec = model.spec
        repeats = repeats_of(model.kv_of_head)
        self._kv_of_head = None if repeats is not None else model.kv_of_head
        self.num_heads = model.num_heads // repeats if repeats is not None else model.num_heads
        self.window = spec.sliding_window
        shape = (len(model.layers), num_slots, self.num_heads, length, spec.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.bias = torch.full((num_slots, length), -torch.inf, dtype=dtype, device=device)

    def stored(self, heads: torch.Tensor) -> torch.Tensor:
        """Keys or values [T, kv, D] with the heads that are stored."""
        return heads if self._kv_of_head is None else heads[:, self._kv_of_head]

    def write(self, layer: int, slots: torch.Tensor, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store keys and values [T, kv, D] of tokens at (slot, position), both [T]."""
        self.keys[layer][slots, :, positions] = self.stored(k)
        self.values[layer][slots, :, positions] = self.stored(v)

    def show(self, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Make the tokens at (slot, position) visible to their slot's next query, and hide what leaves the window."""
        self.bias[slots, positions] = 0
        if self.window is not None:
            gone = positions - self.window
            inside = gone >= 0
            self.bias[slots[inside], gone[inside]] = -torch.inf

    def clear(self, first: int, stop: int) -> None:
        """Hide everything in a range of slots."""
        self.bias[first:stop] = -torch.inf

    def move(self, sources: list[int], targets: list[int], *, longest: int) -> None:
        """Copy whole slots, of at most `longest` tokens each."""
        self.keys[:, targets, :, :longest] = self.keys[:, sources, :, :longest]
        self.values[:, targets, :, :longest] = self.values[:, sources, :, :longest]
        self.bias[targets] = self.bias[sources]


class CachedAttention:
    """Attention (an `Attend`) of one step: `num_decode` tokens, one for each of the first slots, then whole prompts.

    slots, positions [T]: where each token of the step belongs. Its keys and values are written on the way.
    """

    def __init__(
        self,
        cache: KvCache,
        model: StageModel,
        *,
        num_decode: int,
        longest: int,
        slots: torch.Tensor,
        positions: torch.Tensor,
        prompts: Packing | None,
    ):
        self._cache, self._num_decode, self._longest = cache, num_decode, longest
        self._slots, self._positions = slots, positions
        self._prompts = PackedAttention(prompts, model) if prompts is not None else None
        self._scale = 1 / math.sqrt(model.spec.head_dim)
        self._bias = cache.bias[:num_decode, None, None, :longest]

    def __call__(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self._cache.write(index, self._slots, self._positions, k, v)
        n = self._num_decode
        parts = []
        if n:
            parts.append(self._decode(index, q[:n]))
        if self._prompts is not None:
            parts.append(self._prompts(index, q[n:], k[n:], v[n:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, index: int, q: torch.Tensor) -> torch.Tensor:
        """Queries [n, heads, D], one a slot, over the first `longest` entries of the slots."""
        cache, n = self._cache, self._num_decode
        keys = cache.keys[index][:n, :, : self._longest]
        values = cache.values[index][:n, :, : self._longest]
        grouped = q.reshape(n, cache.num_heads, -1, q.shape[-1])  # query heads that share a KV head are adjacent
        out = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._bias, scale=self._scale)
        return out.reshape(q.shape)
