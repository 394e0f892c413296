"""Micro-batches through the pipeline stages of one unit: forward only, and one-forward-one-backward (1F1B).

    stage 0   F0 F1 F2 B0 F3 B1 B2 B3        F: receive hidden states, compute, send on
    stage 1      F0 F1 B0 F2 B1 F3 B2 B3     B: receive the gradient of what was sent, compute, send back
    stage 2         F0 B0 F1 B1 F2 B2 F3 B3

A stage waits in a receive for the one neighbour that makes the tensor, and in a send where the neighbour lags behind by
more than `MAX_SENDS` messages. Hidden states on their way back as gradients have arrived, so under 1F1B only gradients
are waited for, towards the first stage; forward only, towards the last: there is no cycle of waits. Shapes are known on
both sides from the token counts. With one stage the same loop runs without any message.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from nereus.algorithms.buffer import RolloutBatch
from nereus.comm.groups import Group, Work
from nereus.engine_facts import MAX_SENDS
from nereus.engines.transformer import PackedAttention, Packing, Rope, StageModel

T = TypeVar("T")
Loss = Callable[[torch.Tensor, "MicroBatch"], torch.Tensor]
"""(last-stage hidden states [T, H], micro-batch) -> scalar with a gradient."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Flight:
    """A micro-batch between its forward and its backward pass.

    received: hidden states from the stage before; computed: the loss, or the hidden states that `sent` carries on.
    """

    index: int
    received: torch.Tensor | None
    computed: torch.Tensor
    sent: Work | None


@dataclasses.dataclass(frozen=True, slots=True)
class MicroBatch:
    """What every stage of a unit needs of one micro-batch."""

    batch: RolloutBatch
    packing: Packing
    rope: Rope

    @property
    def num_tokens(self) -> int:
        return self.batch.tokens.numel()

    @classmethod
    def of(cls, batch: RolloutBatch, model: StageModel) -> "MicroBatch":
        packing = Packing.of(batch.sequence_lengths.tolist(), batch.tokens.device)
        dtype = model.layers[0].qkv.dtype
        return cls(batch, packing, Rope.at(model.spec, packing.positions, dtype, longest=packing.longest))


class Pipeline:
    """One rank's place in the pipeline of its unit. `pp`: the ranks of its tensor-parallel position, stage by stage."""

    def __init__(self, model: StageModel, pp: Group):
        self._model, self._pp = model, pp
        self._pending: collections.deque[Work] = collections.deque()

    def forward(self, micros: Sequence[MicroBatch], head: Callable[[torch.Tensor, MicroBatch], T]) -> list[T]:
        """`head` of the last stage's hidden states for each micro-batch; an empty list on other stages."""
        results: list[T] = []
        with torch.no_grad():
            for index, micro in enumerate(micros):
                hidden = self._run(self._receive_hidden(micro, index), micro)
                if self._model.is_last:
                    results.append(head(hidden, micro))
                else:
                    self._send(hidden, self._pp.rank + 1, tag=2 * index)
        self._drain()
        return results

    def forward_backward(self, micros: Sequence[MicroBatch], loss: Loss) -> None:
        """1F1B over the micro-batches; gradients accumulate into the model's flat gradients."""
        num_ahead = min(self._pp.size - 1 - self._pp.rank, len(micros))
        flights: collections.deque[_Flight] = collections.deque()
        for index, micro in enumerate(micros):
            flights.append(self._forward_one(index, micro, loss))
            if index >= num_ahead:
                self._backward_one(flights.popleft())
        while flights:
            self._backward_one(flights.popleft())
        self._drain()

    def _forward_one(self, index: int, micro: MicroBatch, loss: Loss) -> _Flight:
        received = self._receive_hidden(micro, index)
        if received is not None:
            received.requires_grad_()
        hidden = self._run(received, micro)
        computed = loss(hidden, micro) if self._model.is_last else hidden
        if self._model.meter is not None:
            self._model.meter.sample_memory()
        if self._model.is_last:
            return _Flight(index, received, computed, None)
        sent = self._pp.send(hidden.detach().contiguous(), self._pp.rank + 1, tag=2 * index)
        return _Flight(index, received, computed, sent)

    def _backward_one(self, flight: _Flight) -> None:
        index, received, computed = flight.index, flight.received, flight.computed
        if flight.sent is None:
            computed.backward()  # type: ignore[no-untyped-call]
        else:
            grad = torch.empty_like(computed)
            self._pp.recv(grad, self._pp.rank + 1, tag=2 * index + 1)
            flight.sent.wait()  # arrived, as its gradient has come back
            computed.backward(grad)  # type: ignore[no-untyped-call]
        if received is not None:
            assert received.grad is not None
            self._send(received.grad, self._pp.rank - 1, tag=2 * index + 1)

    def _run(self, received: torch.Tensor | None, micro: MicroBatch) -> torch.Tensor:
        hidden = self._model.embed(micro.batch.tokens) if received is None else received
        return self._model.body(hidden, micro.rope, PackedAttention(micro.packing, self._model))

    def _receive_hidden(self, micro: MicroBatch, index: int) -> torch.Tensor | None:
        if self._model.is_first:
            return None
        weight = self._model.layers[0].qkv
        hidden = torch.empty(micro.num_tokens, self._model.spec.hidden, dtype=weight.dtype, device=weight.device)
        self._pp.recv(hidden, self._pp.rank - 1, tag=2 * index)
        return hidden

    def _send(self, tensor: torch.Tensor, peer: int, *, tag: int) -> None:
        """Start a send, which keeps its tensor alive, when at most `MAX_SENDS` - 1 are under way."""
        while len(self._pending) >= MAX_SENDS:
            self._pending.popleft().wait()
        self._pending.append(self._pp.send(tensor.contiguous(), peer, tag=tag))

    def _drain(self) -> None:
        while self._pending:
            self._pending.popleft().wait()
