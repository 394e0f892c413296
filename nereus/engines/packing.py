"""A stage's matrices copied into the form in which a decode step computes fastest.

A decode step multiplies a few rows with every matrix. There a column-major matrix is up to 1.6 times as fast on a
CPU, and a norm whose weight is part of the next matrix takes fewer passes. The copy is worth it only where matrices
are small: large ones are bound by reading them. Nothing here knows caches or sampling.
"""

import copy
import dataclasses
import math

import torch

from nereus.engine_facts import MAX_PACKED_BYTES
from nereus.engines.transformer import StageModel
from nereus.shards.state import StateKind


def packed_for_decoding(model: StageModel) -> StageModel:
    """A model that computes the same, without gradients, from packed copies of the weights as they are now.

    The model itself where packing gains nothing: on an accelerator, in bf16, with large matrices.
    """
    params = model.state.flats[StateKind.PARAM]
    large = params.numel() * params.element_size() > MAX_PACKED_BYTES
    if large or params.device.type != "cpu" or params.dtype == torch.bfloat16:
        return model
    packed = copy.copy(model)
    packed.layers = [
        dataclasses.replace(
            layer,
            input_norm=None,
            qkv=_pack(layer.qkv, layer.input_norm),
            o=_pack(layer.o, None),
            post_norm=None,
            gate_up=_pack(layer.gate_up, layer.post_norm),
            down=_pack(layer.down, None),
        )
        for layer in model.layers
    ]
    if model.head is not None:
        packed.head, packed.final_norm = _pack(model.head, model.final_norm), None
    return packed


def _pack(matrix: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
    """The matrix [out, in] column-major, with the weight [in] of the norm before it and that norm's sqrt(in)."""
    transposed = matrix.t()
    if norm is not None:
        return (transposed * (norm * math.sqrt(len(norm))).unsqueeze(1)).t()
    return transposed.contiguous().t()
