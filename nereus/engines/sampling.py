"""Picks the next token of every sequence from logits cut along the vocabulary, the same in every layout.

    logits -> / temperature -> top-k -> top-p -> + keyed Gumbel noise -> argmax over logical token ids

Noise is a pure function of (seed, prompt's place, index in its group, position, logical token id), so a rollout does
not depend on layout, batch, order or retry. Top-k and top-p are thresholds on the logit, found by an exact search that
exchanges histograms; a whole row of logits never exists on one rank. Nothing here knows caches or scheduling.
"""

import dataclasses
import math

import torch

from nereus.comm.groups import Group
from nereus.errors import InputError

_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53
_DIGIT_BITS = 8
_MASS_BITS = 44


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one call of `generate` picks tokens.

    max_new_tokens: limit per request. top_k: 0 keeps all. stop_ids: tokens that end a sequence (and are part of it).
    A temperature of 0 is greedy. seed: one for the whole rollout; what else the noise depends on is in the request.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    greedy: bool = False
    stop_ids: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        checks = [
            ("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 1, "at least 1"),
            ("temperature", self.temperature, 0 <= self.temperature < math.inf, "0 (greedy) or above"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0, at most 1"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (off) or above"),
        ]
        for name, value, valid, accepted in checks:
            if not valid:
                raise InputError(f"{name} is {value}; it must be {accepted}")

    @property
    def is_greedy(self) -> bool:
        return self.greedy or self.temperature == 0


class Sampler:
    """Picks tokens under one `SamplingParams`. Called by every rank of a tensor-parallel group with its own rows."""

    def __init__(self, params: SamplingParams, *, first_row: int, num_rows: int, tp: Group, device: torch.device):
        self._params, self._tp = params, tp
        self._first_row = first_row
        self._token_keys = token_keys(first_row, num_rows, device)

    def __call__(self, logits: torch.Tensor, sequence_keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Tokens [R] for `positions` [R] from this rank's logits [R, V/tp], which it may overwrite."""
        params = self._params
        if not params.is_greedy:
            if params.temperature != 1:
                logits = logits.div_(params.temperature)
            if params.top_k or params.top_p < 1:
                logits = restrict(logits, top_k=params.top_k, top_p=params.top_p, tp=self._tp)
            waits = exponential_noise(position_keys(sequence_keys, positions), self._token_keys)
            logits = logits.sub_(waits.to(logits.dtype).log_())  # minus the logarithm: Gumbel noise
        return self._argmax(logits)

    def _argmax(self, scores: torch.Tensor) -> torch.Tensor:
        """Logical id [R] of the largest score of each row; the lowest id of equal ones."""
        if scores.shape[1] == 0:
            best, ids = scores.new_full(scores.shape[:1], -torch.inf), scores.new_zeros(scores.shape[0]).long()
        else:
            best, ids = scores.max(-1)
        if self._tp.size == 1:
            return ids
        mine = torch.stack((best.double(), (ids + self._first_row).double()))
        everyone = torch.stack(self._tp.all_gather(mine))  # [tp, 2, R]; ranks are in the order of their ids
        winner = everyone[:, 0].argmax(0, keepdim=True)
        return everyone[:, 1].gather(0, winner).squeeze(0).long()


def sequence_key(seed: int, place: int, index: int) -> int:
    """Key in int64 range of sequence `index` of the prompt at global `place`."""
    key = 0
    for value in (seed, place, index):
        key = _mix_int(key ^ _mix_int(value * _GOLDEN + _GOLDEN))
    return _signed(key)


def token_keys(first_id: int, count: int, device: torch.device) -> torch.Tensor:
    """Keys [count] of consecutive logical token ids."""
    ids = torch.arange(first_id, first_id + count, dtype=torch.int64, device=device)
    return _mix(ids.mul_(_signed(_GOLDEN)).add_(_signed(_MIX_1)))


def position_keys(sequence_keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Keys [R] of sequences at positions, both [R] int64."""
    return _mix(sequence_keys + (positions + 1) * _signed(_GOLDEN))


def exponential_noise(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Standard exponential noise [R, V] in float64 from position keys [R] and token keys [V]."""
    bits = _mix(keys.unsqueeze(1) + tokens)
    bits.bitwise_right_shift_(12).bitwise_and_((1 << 52) - 1)
    uniform = bits.double().add_(0.5).mul_(2.0**-52)  # exact, and never 0 or 1
    return uniform.log_().neg_()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's 64-bit finalizer on int64 in place, less its last step, which moves only low bits."""
    for factor in (_MIX_1, _MIX_2):
        x.bitwise_xor_((x >> 33).bitwise_and_((1 << 31) - 1)).mul_(_signed(factor))
    return x


def _mix_int(x: int) -> int:
    x &= _MASK_64
    for factor in (_MIX_1, _MIX_2):
        x = (x ^ x >> 33) * factor & _MASK_64
    return x ^ x >> 33


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def restrict(logits: torch.Tensor, *, top_k: int, top_p: float, tp: Group) -> torch.Tensor:
    """Logits [R, V/tp] with -inf outside the `top_k` largest and then outside the nucleus of mass `top_p`.

    Both keep every token whose logit equals the smallest kept one. Masses are integers in units of 2^-44 of the
    most likely token, so their sum does not depend on how the vocabulary is cut.
    """
    order = _ordered_bits(logits)
    kept = torch.ones_like(order)
    if top_k:
        needed = torch.full(logits.shape[:1], top_k, dtype=torch.int64, device=logits.device)
        kept = (order >= _threshold(order, kept, needed, tp).unsqueeze(1)).long()
    if top_p < 1:
        top = logits.amax(-1) if logits.shape[1] else logits.new_full(logits.shape[:1], -torch.inf)
        tp.all_reduce(top, op="max")
        mass = (logits - top.unsqueeze(1)).double().exp_().mul_(2.0**_MASS_BITS).round_().long().mul_(kept)
        total = mass.sum(-1)
        tp.all_reduce(total)
        needed = (total.double() * top_p).ceil_().long().clamp_(min=1)
        kept = kept * (order >= _threshold(order, mass, needed, tp).unsqueeze(1))
    return logits.masked_fill(kept == 0, -torch.inf)


def _ordered_bits(x: torch.Tensor) -> torch.Tensor:
    """int64 [R, V] that compares as the floats do; the two zeros are equal."""
    x = x + 0.0
    if x.dtype == torch.float64:
        bits = x.view(torch.int64)
        return bits ^ ((bits >> 63) & ((1 << 63) - 1))
    narrow = x.view(torch.int32).long()
    return narrow ^ ((narrow >> 31) & ((1 << 31) - 1))


def _threshold(order: torch.Tensor, weights: torch.Tensor, needed: torch.Tensor, tp: Group) -> torch.Tensor:
    """Per row the largest value t such that the weights of all entries >= t sum to `needed`; the smallest if none.

    order, weights: int64 [R, V/tp]; needed: int64 [R]. A radix search from the highest digit: each round exchanges
    one histogram [R, 256] and descends into the bucket where the sum from above reaches what is needed.
    """
    num_rows, num_digits = order.shape[0], 1 << _DIGIT_BITS
    prefix = torch.zeros_like(needed)
    alive = weights
    for shift in range(64 - _DIGIT_BITS, -1, -_DIGIT_BITS):
        digits = (order >> shift) & (num_digits - 1)
        if shift == 64 - _DIGIT_BITS:
            digits = digits ^ (num_digits >> 1)  # the sign bit: negative values come first
        histogram = torch.zeros(num_rows, num_digits, dtype=torch.int64, device=order.device)
        histogram.scatter_add_(1, digits, alive)
        tp.all_reduce(histogram)
        from_above = histogram.flip(1).cumsum(1).flip(1)  # [R, 256]: weight in this bucket and higher ones
        enough = from_above >= needed.unsqueeze(1)
        digit = (enough.sum(1) - 1).clamp_(min=0)
        reached = from_above.gather(1, digit.unsqueeze(1)) - histogram.gather(1, digit.unsqueeze(1))
        needed = needed - reached.squeeze(1)
        alive = alive * (digits == digit.unsqueeze(1))
        stored = digit ^ (num_digits >> 1) if shift == 64 - _DIGIT_BITS else digit
        prefix = prefix | (stored << shift)
    return prefix
