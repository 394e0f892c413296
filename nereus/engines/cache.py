"""Keys and values of the sequences that one lane of a rank generates, in slots; attention over them.

A slot holds one sequence. Slots in use are always the first ones, and all of them write a step's token to the same
column, so a decode step works on plain slices, whatever the lengths. Columns form a ring: a sequence lies in the
columns that end at the current one, wherever that is. Nothing here knows sampling or scheduling.

    slot 0   . . p p p t t t t        p: prompt, right-aligned at the column before its first decode step
    slot 1   p p p p p t t t t        t: tokens since
    slot 2   . . . . . . p p t        admitted later
                     column ^

The cache is taken in blocks (`shards/kv_blocks.py`), as many columns of them as the longest sequence in use needs, as
many rows as there are sequences in use. When either is too few it is taken anew, one layer's keys or values after the
other, and what living sequences can see is copied:

    slot 0   p p p t | . . . .        a second column of blocks, for both slots,
    slot 1   . p t t | . . . .        because slot 0 needs it

Why not a table of blocks for each sequence: gathering what lies in many places reads the whole cache once more every
step, and one product a block is a hundred small kernels a layer at a thousand tokens. A copy each time a length has
grown by a block (an eighth, where there is room) costs a few hundredths of what the steps between read. The price: a
slot's row is as long as the longest sequence's. A plan counts its bytes in the same way; where one sequence outgrows
what the plan counted, others wait for it.
"""

import math

import torch

from nereus.engine_facts import Op
from nereus.engines.transformer import PackedAttention, Packing, StageModel
from nereus.shards.boxes import repeats_of
from nereus.shards.kv_blocks import BLOCK_TOKENS
from nereus.shards.state import StateKind


class KvCache:
    """Keys and values of every layer of one pipeline stage, and which of them each slot's next query may see.

    Rows are (slot, head), heads fastest. Of each layer, keys [rows, D, columns] are stored transposed and values [rows,
    columns, D] not, so both products of a decode step run along contiguous memory. The mask [rows, 1, columns] is 0
    where visible and hugely negative elsewhere. Stored heads are the rank's KV heads, or its query heads where those
    share KV heads unevenly. A new cache has no slots; `resize` gives it some. column: the last one written.
    """

    def __init__(self, model: StageModel):
        repeats = repeats_of(model.kv_of_head)
        params = model.state.flats[StateKind.PARAM]
        self._kv_of_head = None if repeats is not None else model.kv_of_head
        self.window = model.spec.sliding_window
        self.num_heads, self.head_dim = model.num_heads // (repeats or 1), model.spec.head_dim
        self.num_slots = self.num_columns = 0
        self.column = -1
        self.dtype, self.device = params.dtype, params.device
        self._hidden = torch.finfo(self.dtype).min / 2
        self._heads = torch.arange(self.num_heads, device=self.device)
        self.mask = params.new_zeros(0, 1, 0)
        self.keys = [params.new_zeros(0, self.head_dim, 0) for _ in model.layers]
        self.values = [params.new_zeros(0, 0, self.head_dim) for _ in model.layers]

    @property
    def num_bytes(self) -> int:
        """Bytes held now: keys, values and mask."""
        return sum(t.nbytes for t in (*self.keys, *self.values, self.mask))

    @property
    def num_blocks(self) -> int:
        """Blocks taken."""
        return self.num_slots * (self.num_columns // BLOCK_TOKENS)

    def resize(self, num_slots: int, num_columns: int, *, used: int, length: int) -> int:
        """Have so many slots and columns; the first `used` slots keep the last `length` tokens up to the column.

        What is kept then lies in the first columns. Returns the most bytes held on the way.
        """
        spans = self.spans(self.column, length) if used else []
        rows, kept = num_slots * self.num_heads, slice(0, used * self.num_heads)
        self.mask = _copied(self.mask, (rows, 1, num_columns), kept, spans, dim=2, empty=self._hidden)
        held = peak = self.num_bytes
        for of, dim, shape in (
            (self.keys, 2, (rows, self.head_dim, num_columns)),
            (self.values, 1, (rows, num_columns, self.head_dim)),
        ):
            for layer, old in enumerate(of):
                new = of[layer] = _copied(old, shape, kept, spans, dim=dim)
                peak = max(peak, held + new.nbytes)
                held += new.nbytes - old.nbytes
        self.num_slots, self.num_columns = num_slots, num_columns
        self.column = sum(span.stop - span.start for span in spans) - 1
        return peak

    def spans(self, column: int, length: int) -> list[slice]:
        """Columns that a sequence of `length` tokens up to `column` can see: one slice, or two where the ring wraps."""
        first = column + 1 - min(length, self.window or length)
        if first >= 0:
            return [slice(first, column + 1)]
        return [slice(first + self.num_columns, self.num_columns), slice(0, column + 1)]

    def stored(self, heads: torch.Tensor) -> torch.Tensor:
        """Keys or values [T, kv, D] with the heads that are stored."""
        return heads if self._kv_of_head is None else heads[:, self._kv_of_head]

    def advance(self, num_slots: int) -> None:
        """Go on to the column that a decode step writes: make it visible, and hide the one that leaves the window."""
        self.column = (self.column + 1) % self.num_columns
        rows = num_slots * self.num_heads
        self.mask[:rows, 0, self.column] = 0
        if self.window is not None and self.window < self.num_columns:
            self.mask[:rows, 0, (self.column - self.window) % self.num_columns] = self._hidden

    def place(self, slots: torch.Tensor, prompts: Packing) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [P, heads] and columns [P, 1] of prompts that end at the column, now visible to the next queries."""
        lengths = torch.tensor(prompts.lengths, device=slots.device)
        rows, mask = slots.unsqueeze(1) * self.num_heads + self._heads, self.mask[:, 0]
        mask[rows] = self._hidden
        back = lengths.repeat_interleave(lengths) - 1 - prompts.positions  # [P]: tokens behind the prompt's last
        columns = (self.column - back).remainder(self.num_columns).unsqueeze(1)
        rows, inside = rows.repeat_interleave(lengths, 0), back < (self.window or self.num_columns)
        mask[rows[inside], columns[inside]] = 0
        return rows, columns

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy the last `length` tokens that slots hold."""
        by_slot = (self.num_slots, self.num_heads)
        mask = self.mask.view(*by_slot, -1)
        mask[targets] = mask[sources]
        for span in self.spans(self.column, length):
            for layer, values in zip(self.keys, self.values, strict=True):
                keys = layer.view(*by_slot, self.head_dim, -1)[..., span]
                keys[targets] = keys[sources]
                values = values.view(*by_slot, -1, self.head_dim)[:, :, span]
                values[targets] = values[sources]


def _copied(
    old: torch.Tensor, shape: tuple[int, ...], rows: slice, spans: list[slice], *, dim: int, empty: float = 0
) -> torch.Tensor:
    """A tensor of `shape`, whose first columns (along `dim`) hold the old one's `spans`; else `empty`."""
    new = old.new_full(shape, empty) if empty else old.new_zeros(shape)  # never garbage: 0 times it must be 0
    start = 0
    for span in spans:
        size = span.stop - span.start
        new[rows].narrow(dim, start, size).copy_(old[rows].narrow(dim, span.start, size))
        start += size
    return new


class CachedAttention:
    """Attention (an `Attend`) of one step: a token for each of the first slots, then whole prompts of new slots.

    num_decode: tokens of slots in use, written at the cache's column; length: tokens of the longest sequence in use,
    these included. prompts: packing, rows and columns of the prompts, if any. Keys and values are written on the way.
    """

    def __init__(
        self,
        cache: KvCache,
        model: StageModel,
        *,
        num_decode: int,
        length: int,
        prompts: tuple[Packing, torch.Tensor, torch.Tensor] | None,
    ):
        self._cache, self._num_decode = cache, num_decode
        self._prompts = prompts
        self._over_prompts = PackedAttention(prompts[0], model) if prompts is not None else None
        self.operation: str = Op.ATTENTION_DECODE
        self.gemm: str = Op.DECODE_GEMM if prompts is None else Op.GEMM
        self.work: float = 2 * num_decode * length * cache.num_heads * cache.head_dim * cache.dtype.itemsize
        if not num_decode:
            return
        rows = num_decode * cache.num_heads
        self._scale = 1 / math.sqrt(cache.head_dim)
        self._shape = (rows, model.num_heads // cache.num_heads, cache.head_dim)
        self._spans = cache.spans(cache.column, length)
        self._masks = [cache.mask[:rows, :, span] for span in self._spans]

    def __call__(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        n = self._num_decode
        if self._prompts is None:
            return self._decode(index, q, k, v)
        assert self._over_prompts is not None
        prefilled = self._over_prompts(index, q[n:], k[n:], v[n:])
        _, rows, columns = self._prompts
        self._cache.keys[index][rows, :, columns] = self._cache.stored(k[n:])
        self._cache.values[index][rows, columns] = self._cache.stored(v[n:])
        return torch.cat((self._decode(index, q[:n], k[:n], v[:n]), prefilled)) if n else prefilled

    def _decode(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of queries [n, heads, D], one a slot; query heads that share a stored head are adjacent."""
        cache = self._cache
        rows, _, head_dim = self._shape
        keys, values = cache.keys[index][:rows], cache.values[index][:rows]
        by_slot = (-1, cache.num_heads, head_dim)
        keys[:, :, cache.column].view(by_slot).copy_(cache.stored(k))
        values[:, cache.column].view(by_slot).copy_(cache.stored(v))
        queries = q.reshape(self._shape)
        scores = [
            torch.baddbmm(mask, queries, keys[..., span], alpha=self._scale)
            for mask, span in zip(self._masks, self._spans, strict=True)
        ]
        if len(scores) == 1:
            return torch.bmm(scores[0].softmax(-1), values[:, self._spans[0]]).view(q.shape)
        weights = torch.split(torch.cat(scores, -1).softmax(-1), [part.shape[-1] for part in scores], -1)
        older, newer = (torch.bmm(w, values[:, span]) for w, span in zip(weights, self._spans, strict=True))
        return (older + newer).view(q.shape)
