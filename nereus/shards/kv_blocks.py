"""Blocks of the key/value cache: how many bytes one is on a rank, and how many a number of sequences needs. Pure.

The cache of a generation unit is counted in blocks of `BLOCK_TOKENS` tokens of one sequence. The planner prices blocks,
the plan bounds their bytes (`StagePlan.cache_bytes`), the engine takes them: all three count with what stands here. A
block counts the same on every rank of a unit, as on its fullest, so ranks that are told the same bytes take the same
decisions without asking each other.
"""

import functools
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from nereus.errors import InputError
from nereus.model import ModelSpec
from nereus.plan import Layout
from nereus.shards.boxes import kv_of_head, repeats_of

BLOCK_TOKENS = 32
"""Tokens of one sequence in a block. Smaller ones waste less of a sequence's last block, and grow the cache oftener."""

Count = TypeVar("Count", int, npt.NDArray[np.int64])


@functools.lru_cache(maxsize=256)
def cache_heads(spec: ModelSpec, tp: int) -> int:
    """KV heads that the fullest rank stores of each token: query heads where those share KV heads unevenly."""
    groups = [kv_of_head(spec, tp, rank) for rank in range(tp)]
    return max(len(group) if repeats_of(group) is None else group[-1] + 1 for group in groups)


def block_numel(layers: Count, heads: Count, head_dim: int) -> Count:
    """Elements of a block on a rank that stores `heads` KV heads in `layers` layers.

    For each token and head: a key and a value a layer, an entry of the mask, and once more the keys or the values of
    one layer, which are there twice while a cache grows.
    """
    return heads * ((2 * layers + 1) * head_dim + 1) * BLOCK_TOKENS


def block_bytes(spec: ModelSpec, layout: Layout, value_bytes: int) -> int:
    """Bytes of a block on the fullest rank of a unit."""
    return block_numel(-(-spec.num_layers // layout.pp), cache_heads(spec, layout.tp), spec.head_dim) * value_bytes


def blocks_of(tokens: float) -> int:
    """Blocks of a sequence of `tokens` tokens."""
    return int(-(-tokens // BLOCK_TOKENS))


def blocks_for(sequences: Count, *, longest: float, cap: float) -> Count:
    """Blocks for `sequences` at once that are all as long as the `longest` one counted.

    At least those of one sequence at the `cap`: with fewer the engine could not finish every sequence it may get.
    """
    each, least = blocks_of(longest), blocks_of(max(longest, cap))
    if isinstance(sequences, int):
        return max(sequences * each, least)
    return np.maximum(sequences * each, least)


def most_blocks(
    spec: ModelSpec, layout: Layout, value_bytes: int, *, sequences: int, longest: int, cache_bytes: int | None
) -> int:
    """Blocks that a rank may take for `sequences` at once of `longest` tokens, within `cache_bytes` where said.

    The same on every rank of the unit. Raises InputError where the bytes do not hold one such sequence.
    """
    one = blocks_of(longest)
    if cache_bytes is None:
        return sequences * one
    each = block_bytes(spec, layout, value_bytes)
    if cache_bytes < one * each:
        raise InputError(
            f"cache_bytes is {cache_bytes:,}; "
            f"one sequence of {longest} tokens needs {one * each:,} on a rank of {layout}"
        )
    return min(sequences * one, cache_bytes // each)
