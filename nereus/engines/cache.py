"""Keys and values of the sequences that one rank generates, in slots; attention over them.

A slot holds one sequence. Slots in use are always the first ones, and all of them write a step's token to the same
column, so a decode step works on plain slices. Columns form a ring: a sequence lies in the columns that end at the
current one, wherever that is. Nothing here knows sampling or scheduling.

    slot 0   . . p p p t t t t        p: prompt, right-aligned at the column before its first decode step
    slot 1   p p p p p t t t t        t: tokens since
    slot 2   . . . . . . p p t        admitted later
                     column ^
"""

import math

import torch

from nereus.engine_facts import Op
from nereus.engines.transformer import PackedAttention, Packing, StageModel
from nereus.shards.boxes import repeats_of
from nereus.shards.state import StateKind


class KvCache:
    """Keys and values of every layer of one pipeline stage, and which of them each slot's next query may see.

    Rows are (slot, head), heads fastest. keys [layers, rows, D + 1, columns] are stored transposed and values [layers,
    rows, columns, D] not, so both products of a decode step run along contiguous memory. The last entry of a key is 0
    where visible and hugely negative elsewhere; that of a query is 1, so the product of both masks. Stored heads are
    the rank's KV heads, or its query heads where those share KV heads unevenly.
    """

    def __init__(self, model: StageModel, *, num_slots: int, num_columns: int):
        repeats, head_dim, window = repeats_of(model.kv_of_head), model.spec.head_dim, model.spec.sliding_window
        params = model.state.flats[StateKind.PARAM]
        dtype, device = params.dtype, params.device
        self._kv_of_head = None if repeats is not None else model.kv_of_head
        self.window = window if window is not None and window < num_columns else None
        self.num_heads = model.num_heads // (repeats or 1)
        self.num_slots, self.num_columns = num_slots, num_columns
        rows = num_slots * self.num_heads
        self.keys = torch.zeros(len(model.layers), rows, head_dim + 1, num_columns, dtype=dtype, device=device)
        self.values = torch.zeros(len(model.layers), rows, num_columns, head_dim, dtype=dtype, device=device)
        self._mask = self.keys[:, :, head_dim]  # [layers, rows, columns]
        self._hidden = torch.finfo(dtype).min / 2
        self._heads = torch.arange(self.num_heads, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(t.numel() * t.element_size() for t in (self.keys, self.values))

    def spans(self, column: int, length: int) -> list[slice]:
        """Columns that a sequence of `length` tokens up to `column` can see: one slice, or two where the ring wraps."""
        return self.ring(column, min(length, self.window or length))

    def ring(self, column: int, count: int) -> list[slice]:
        """The last `count` columns up to `column`, oldest first: one slice, or two where the ring wraps."""
        first = column + 1 - count
        if first >= 0:
            return [slice(first, column + 1)]
        return [slice(first + self.num_columns, self.num_columns), slice(0, column + 1)]

    def stored(self, heads: torch.Tensor) -> torch.Tensor:
        """Keys or values [T, kv, D] with the heads that are stored."""
        return heads if self._kv_of_head is None else heads[:, self._kv_of_head]

    def open_column(self, column: int, num_slots: int) -> None:
        """Make the column that a decode step writes visible, and hide the one that leaves the window."""
        rows = num_slots * self.num_heads
        self._mask[:, :rows, column] = 0
        if self.window is not None:
            self._mask[:, :rows, (column - self.window) % self.num_columns] = self._hidden

    def place(self, slots: torch.Tensor, prompts: Packing, column: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [P, heads] and columns [P, 1] of prompts that end at `column`, now visible to the next queries."""
        lengths = torch.tensor(prompts.lengths, device=slots.device)
        rows = slots.unsqueeze(1) * self.num_heads + self._heads
        self._mask[:, rows] = self._hidden
        back = lengths.repeat_interleave(lengths) - 1 - prompts.positions  # [P]: tokens behind the prompt's last
        rows, columns = rows.repeat_interleave(lengths, 0), (column - back).remainder(self.num_columns).unsqueeze(1)
        inside = back < (self.window or self.num_columns)
        self._mask[:, rows[inside], columns[inside]] = 0
        return rows, columns

    def by_slot(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [layers, slots, heads, D + 1, columns] and values [layers, slots, heads, columns, D]."""
        keys, values = (t.view(-1, self.num_slots, self.num_heads, *t.shape[2:]) for t in (self.keys, self.values))
        return keys, values

    def move(self, sources: list[int], targets: list[int], spans: list[slice]) -> None:
        """Copy what slots hold in the given columns."""
        keys, values = self.by_slot()
        keys[:, targets, :, -1] = keys[:, sources, :, -1]
        for span in spans:
            keys[:, targets, :, :, span] = keys[:, sources, :, :, span]
            values[:, targets, :, span] = values[:, sources, :, span]


class CachedAttention:
    """Attention (an `Attend`) of one step: a token for each of the first slots, then whole prompts of new slots.

    num_decode: tokens of slots in use, written at `column`; length: tokens of the longest sequence in use, these
    included. prompts: packing, rows and columns of the prompts, if any. Keys and values are written on the way.
    """

    def __init__(
        self,
        cache: KvCache,
        model: StageModel,
        *,
        num_decode: int,
        column: int,
        length: int,
        prompts: tuple[Packing, torch.Tensor, torch.Tensor] | None,
    ):
        self._cache, self._num_decode = cache, num_decode
        self._prompts = prompts
        self._over_prompts = PackedAttention(prompts[0], model) if prompts is not None else None
        self.operation: str = Op.ATTENTION_DECODE
        self.gemm: str = Op.DECODE_GEMM if prompts is None else Op.GEMM
        self.work: float = 2 * num_decode * length * cache.num_heads * model.spec.head_dim * cache.keys.element_size()
        if not num_decode:
            return
        head_dim, shared = model.spec.head_dim, model.num_heads // cache.num_heads
        num_rows = num_decode * cache.num_heads
        self._scale = 1 / math.sqrt(head_dim)
        self._queries = cache.keys.new_ones(num_decode, cache.num_heads, shared, head_dim + 1)
        self._scaled = self._queries[..., :head_dim]
        keys, values = cache.by_slot()
        self._new_keys = keys[:, :num_decode, :, :head_dim, column].unbind()  # each [n, heads, D]
        self._new_values = values[:, :num_decode, :, column].unbind()
        spans = cache.spans(column, length)
        self._keys = [cache.keys[:, :num_rows, :, span].unbind() for span in spans]
        self._values = [cache.values[:, :num_rows, span].unbind() for span in spans]

    def __call__(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        n = self._num_decode
        if self._prompts is None:
            return self._decode(index, q, k, v)
        assert self._over_prompts is not None
        prefilled = self._over_prompts(index, q[n:], k[n:], v[n:])
        _, rows, columns = self._prompts
        self._cache.keys[index, :, : k.shape[-1]][rows, :, columns] = self._cache.stored(k[n:])
        self._cache.values[index][rows, columns] = self._cache.stored(v[n:])
        return torch.cat((self._decode(index, q[:n], k[:n], v[:n]), prefilled)) if n else prefilled

    def _decode(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of queries [n, heads, D], one a slot; query heads that share a stored head are adjacent."""
        self._new_keys[index].copy_(self._cache.stored(k))
        self._new_values[index].copy_(self._cache.stored(v))
        torch.mul(q.view(self._scaled.shape), self._scale, out=self._scaled)
        queries = self._queries.flatten(0, 1)
        scores = [torch.bmm(queries, keys[index]) for keys in self._keys]
        if len(scores) == 1:
            return torch.bmm(scores[0].softmax(-1), self._values[0][index]).view(q.shape)
        weights = torch.split(torch.cat(scores, -1).softmax(-1), [part.shape[-1] for part in scores], -1)
        older, newer = (torch.bmm(w, values[index]) for w, values in zip(weights, self._values, strict=True))
        return (older + newer).view(q.shape)
