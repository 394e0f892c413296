"""What the engine does that others count with: operation classes, buffers and copies. No torch in here."""

import dataclasses
import enum


@dataclasses.dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of one parameter or activation, of one gradient, master or moment, and whether masters are kept."""

    param_bytes: int
    wide_bytes: int
    has_masters: bool

    def state_bytes(self, *, trains: bool) -> int:
        """Bytes of state for one parameter: the parameter, and where it trains two moments and the master, if any."""
        return self.param_bytes + (self.wide_bytes * (2 + self.has_masters) if trains else 0)


BF16 = Precision(param_bytes=2, wide_bytes=4, has_masters=True)
FP32 = Precision(param_bytes=4, wide_bytes=4, has_masters=False)
FP64 = Precision(param_bytes=8, wide_bytes=8, has_masters=False)
PRECISIONS = {"bf16": BF16, "fp32": FP32, "fp64": FP64}
"""By the words for them, which everything that is written uses."""

DTYPE_ALIASES = {"bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
"""Other words that are read as those of `PRECISIONS`."""

MICRO_BATCH = 16
"""Samples of a unit that are computed at a time where the plan does not say how many."""


NUM_SEQS = 64
"""Sequences that a unit decodes at a time where the plan does not say how many."""


LOGITS_COPIES = 3
"""fp32 tensors of [loss tokens, vocabulary / tp] alive at the peak: logits, shifted logits, probabilities. An objective
with an entropy term keeps one more."""


SAMPLING_COPIES = 5
"""The same for [slots, vocabulary / tp] in generation: logits, and the noise as two 64-bit integers each. The searches
of top-k and top-p hold more."""


MAX_SENDS = 2
"""Messages [T, H] of one kind on their way from a pipeline stage to the next; each is kept until it has arrived."""


MAX_PACKED_BYTES = 16 << 20
"""Parameters of a stage that generation copies at most, into a form that decodes faster (not in bf16)."""


BUCKET_BYTES = 4 << 20
"""Bytes of a bucket: what is packed for one send between nodes at most; also the scratch of one digest."""


BUCKETS_STAGED = 8
"""Buckets that a rank has staged at once, sent and received ones together; lots sent from where they lie do not
count."""


class Op(enum.StrEnum):
    """Operation classes, each with its own learned efficiency. Work is in flops for the first three, else in bytes."""

    GEMM = "gemm"
    ATTENTION = "attention"
    ATTENTION_BACKWARD = "attention_backward"
    ATTENTION_DECODE = "attention_decode"
    DECODE_GEMM = "decode_gemm"
    ELEMENTWISE = "elementwise"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    POINT_TO_POINT = "point_to_point"
    LAUNCH = "launch"
    GROUP_SETUP = "group_setup"


def causal_pairs(length: float, window: int | None = None) -> float:
    """Query-key pairs of causal attention over one sequence; a query sees at most `window` keys."""
    if window is None or length <= window:
        return length * length / 2
    return window * window / 2 + (length - window) * window
