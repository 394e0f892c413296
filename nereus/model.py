"""What a model is, without its weights: its shapes and the table of its logical parameters.

The table says once, for every family, how tensor parallelism cuts a parameter, which parameters are stored as one
fused tensor, which are replicated, and whether replicas hold partial gradients. Everything that loads, saves, moves
or reduces weights reads it.
"""

import dataclasses
import enum
import functools

from nereus.errors import ModelError, PlanError


class Axis(enum.Enum):
    """What a cut dimension counts. Tensor parallelism gives each rank a contiguous range of it."""

    HEADS = "query heads"
    KV_HEADS = "key/value heads"
    FFN = "feed-forward channels"
    VOCAB = "vocabulary rows"


class Head(enum.StrEnum):
    """What follows the last norm: logits over the vocabulary, or one scalar (critic, reward model)."""

    LM = "lm"
    SCORE = "score"


@dataclasses.dataclass(frozen=True, slots=True)
class Param:
    """One logical parameter in HF naming and HF shape.

    name: HF name, e.g. `model.layers.3.self_attn.q_proj.weight`.
    shape: full logical shape.
    dim, axis: the dimension tensor parallelism cuts and what it counts; None for replicated parameters.
    unit: elements of `dim` per counted item (head_dim for heads, 1 otherwise).
    layer: decoder layer, or None; `first` / `last`: held by the first / last pipeline stage (both when tied).
    fused: parameters of a layer with the same value here are stored as one tensor, stacked on dim 0.
    partial: replicas under tensor parallelism compute partial gradients that must be summed over the tp group
        (q/k norms, replicated KV heads); other replicas compute equal gradients.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    axis: Axis | None = None
    unit: int = 1
    layer: int | None = None
    first: bool = False
    last: bool = False
    fused: str | None = None
    partial: bool = False

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclasses.dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Frequency scaling of Llama 3.1 and later (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


MAX_LAYERS, MAX_PARAMS = 10_000, 10**14
"""Of a model, far above any there is; what is counted stays within 64 bits."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes and options of one decoder-only transformer."""

    family: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    rms_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Llama3RopeScaling | None = None
    max_positions: int = 4096
    sliding_window: int | None = None
    head: Head = Head.LM

    def __post_init__(self) -> None:
        for field in ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "ffn", "vocab"):
            if getattr(self, field) < 1:
                raise ModelError(f"{field} is {getattr(self, field)}; it must be at least 1")
        if self.num_layers > MAX_LAYERS:
            raise ModelError(f"num_layers is {self.num_layers}; {MAX_LAYERS} at most")
        projections = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim + 3 * self.ffn
        if (self.num_layers * projections + 2 * self.vocab) * self.hidden > MAX_PARAMS:
            raise ModelError(f"the sizes make more than {MAX_PARAMS:.0e} parameters, the most that is counted")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} query heads are not a multiple of {self.num_kv_heads} KV heads")

    @property
    def valid_tp(self) -> tuple[int, ...]:
        """Every tensor-parallel size the model admits: the divisors of its query heads."""
        return tuple(t for t in range(1, self.num_heads + 1) if self.num_heads % t == 0)

    def check_layout(self, *, tp: int, pp: int) -> None:
        """Raise PlanError naming the valid values where the model does not admit tp x pp."""
        if self.num_heads % tp:
            valid = ", ".join(map(str, self.valid_tp))
            raise PlanError(f"tp {tp} does not divide {self.num_heads} query heads; valid tp: {valid}")
        if pp > self.num_layers:
            raise PlanError(f"pp {pp} exceeds {self.num_layers} layers; valid pp: 1 to {self.num_layers}")

    def with_head(self, head: Head) -> "ModelSpec":
        return dataclasses.replace(self, head=head, tied=self.tied and head is Head.LM)

    @property
    def params(self) -> tuple[Param, ...]:
        """Every logical parameter, in memory order."""
        return _params(self)

    @property
    def num_params(self) -> int:
        return _num_params(self)


@functools.lru_cache(maxsize=64)
def _num_params(spec: ModelSpec) -> int:
    return sum(param.numel for param in spec.params)


@functools.lru_cache(maxsize=64)
def _params(spec: ModelSpec) -> tuple[Param, ...]:
    embed = Param("model.embed_tokens.weight", (spec.vocab, spec.hidden), 0, Axis.VOCAB, first=True, last=spec.tied)
    rows = [embed]
    for layer in range(spec.num_layers):
        rows.extend(_layer_params(spec, layer))
    rows.append(Param("model.norm.weight", (spec.hidden,), last=True))
    if spec.head is Head.SCORE:
        rows.append(Param("score.weight", (1, spec.hidden), last=True))
    elif not spec.tied:
        rows.append(Param("lm_head.weight", (spec.vocab, spec.hidden), 0, Axis.VOCAB, last=True))
    return tuple(rows)


def _layer_params(spec: ModelSpec, layer: int) -> list[Param]:
    at, hidden, head_dim = f"model.layers.{layer}.", spec.hidden, spec.head_dim
    q_rows, kv_rows = spec.num_heads * head_dim, spec.num_kv_heads * head_dim

    def projection(name: str, rows: int, axis: Axis, suffix: str, shape: tuple[int, ...]) -> Param:
        return Param(
            f"{at}self_attn.{name}.{suffix}", shape, 0, axis, unit=head_dim, layer=layer,
            fused=f"qkv_{suffix}", partial=axis is Axis.KV_HEADS,
        )  # fmt: skip

    qkv = [("q_proj", q_rows, Axis.HEADS), ("k_proj", kv_rows, Axis.KV_HEADS), ("v_proj", kv_rows, Axis.KV_HEADS)]
    rows = [Param(f"{at}input_layernorm.weight", (hidden,), layer=layer)]
    rows += [projection(name, size, axis, "weight", (size, hidden)) for name, size, axis in qkv]
    if spec.qkv_bias:
        rows += [projection(name, size, axis, "bias", (size,)) for name, size, axis in qkv]
    if spec.qk_norm:
        rows += [
            Param(f"{at}self_attn.{name}.weight", (head_dim,), layer=layer, partial=True)
            for name in ("q_norm", "k_norm")
        ]
    return rows + [
        Param(f"{at}self_attn.o_proj.weight", (hidden, q_rows), 1, Axis.HEADS, unit=head_dim, layer=layer),
        Param(f"{at}post_attention_layernorm.weight", (hidden,), layer=layer),
        Param(f"{at}mlp.gate_proj.weight", (spec.ffn, hidden), 0, Axis.FFN, layer=layer, fused="gate_up"),
        Param(f"{at}mlp.up_proj.weight", (spec.ffn, hidden), 0, Axis.FFN, layer=layer, fused="gate_up"),
        Param(f"{at}mlp.down_proj.weight", (hidden, spec.ffn), 1, Axis.FFN, layer=layer),
    ]
