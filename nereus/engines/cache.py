"""Keys and values of the sequences that one rank generates, in slots; attention over them.

A slot holds one sequence. Slots in use are always the first ones, so a decode step works on plain slices. Nothing
here knows sampling or scheduling.
"""

import math

import torch

from nereus.engines.transformer import PackedAttention, Packing, StageModel, repeats_of


class KvCache:
    """Keys and values of every layer of one pipeline stage, and which of them each slot's next query may see.

    Rows are (slot, head), heads fastest. keys [rows, D, length] are stored transposed and values [rows, length, D] not,
    so both products of a decode step run along contiguous memory. `bias` [rows, 1, length] is 0 where visible and
    -inf elsewhere. Stored heads are the rank's KV heads, or its query heads where those share KV heads unevenly.
    """

    def __init__(self, model: StageModel, *, num_slots: int, length: int, dtype: torch.dtype, device: torch.device):
        repeats, head_dim = repeats_of(model.kv_of_head), model.spec.head_dim
        self._kv_of_head = None if repeats is not None else model.kv_of_head
        self._window = model.spec.sliding_window
        self.num_heads = model.num_heads // (repeats or 1)
        self.num_slots, self.length = num_slots, length
        rows = num_slots * self.num_heads
        self._keys = torch.zeros(len(model.layers), rows, head_dim, length, dtype=dtype, device=device)
        self._values = torch.zeros(len(model.layers), rows, length, head_dim, dtype=dtype, device=device)
        self.keys, self.values = self._keys.unbind(), self._values.unbind()
        self.bias = torch.full((rows, 1, length), -torch.inf, dtype=dtype, device=device)
        self._heads = torch.arange(self.num_heads, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(t.numel() * t.element_size() for t in (self._keys, self._values))

    def rows_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows [T, heads] of slots [T]."""
        return slots.unsqueeze(1) * self.num_heads + self._heads

    def write(self, layer: int, rows: torch.Tensor, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store keys and values [T, kv, D] of tokens at rows [T, heads] and positions [T, 1]."""
        if self._kv_of_head is not None:
            k, v = k[:, self._kv_of_head], v[:, self._kv_of_head]
        self.keys[layer][rows, :, positions] = k
        self.values[layer][rows, positions] = v

    def show(self, rows: torch.Tensor, positions: torch.Tensor) -> None:
        """Make tokens visible to the next query of their rows [T, heads], and hide what leaves the window."""
        self.bias[rows, 0, positions] = 0
        if self._window is not None:
            gone = (positions - self._window).squeeze(1)
            inside = gone >= 0
            self.bias[rows[inside], 0, gone[inside].unsqueeze(1)] = -torch.inf

    def clear(self, first: int, stop: int) -> None:
        """Hide everything in a range of slots."""
        self.bias[first * self.num_heads : stop * self.num_heads] = -torch.inf

    def move(self, sources: list[int], targets: list[int], *, longest: int) -> None:
        """Copy whole slots, of at most `longest` tokens each."""
        device = self.bias.device
        source = self.rows_of(torch.tensor(sources, device=device)).flatten()
        target = self.rows_of(torch.tensor(targets, device=device)).flatten()
        self._keys[:, target, :, :longest] = self._keys[:, source, :, :longest]
        self._values[:, target, :longest] = self._values[:, source, :longest]
        self.bias[target] = self.bias[source]


class CachedAttention:
    """Attention (an `Attend`) of one step: `num_decode` tokens, one for each of the first slots, then whole prompts.

    rows [T, heads], positions [T, 1]: where each token of the step belongs. Its keys and values are written on the way.
    """

    def __init__(
        self,
        cache: KvCache,
        model: StageModel,
        *,
        num_decode: int,
        longest: int,
        rows: torch.Tensor,
        positions: torch.Tensor,
        prompts: Packing | None,
    ):
        self._cache, self._num_decode = cache, num_decode
        self._rows, self._positions = rows, positions
        self._prompts = PackedAttention(prompts, model) if prompts is not None else None
        self._scale = 1 / math.sqrt(model.spec.head_dim)
        num_rows, shared = num_decode * cache.num_heads, model.num_heads // cache.num_heads
        self._grouped = (num_rows, shared, model.spec.head_dim)
        self._bias = cache.bias[:num_rows, :, :longest].expand(-1, shared, -1)
        self._keys = [keys[:num_rows, :, :longest] for keys in cache.keys]
        self._values = [values[:num_rows, :longest] for values in cache.values]

    def __call__(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self._cache.write(index, self._rows, self._positions, k, v)
        n = self._num_decode
        if self._prompts is None:
            return self._decode(index, q)
        prefilled = self._prompts(index, q[n:], k[n:], v[n:])
        return torch.cat((self._decode(index, q[:n]), prefilled)) if n else prefilled

    def _decode(self, index: int, q: torch.Tensor) -> torch.Tensor:
        """Attention of queries [n, heads, D], one a slot; query heads that share a stored head are adjacent."""
        grouped = q.reshape(self._grouped)
        scores = torch.baddbmm(self._bias, grouped, self._keys[index], alpha=self._scale)
        return torch.bmm(scores.softmax(-1), self._values[index]).view(q.shape)
