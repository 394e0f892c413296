"""What a model is, without its weights: shapes from an HF `config.json` and the table of logical parameters.

The table says once, for every family, how tensor parallelism cuts a parameter, which parameters are stored as one
fused tensor, which are replicated, and whether replicas hold partial gradients. Everything that loads, saves, moves
or reduces weights reads it.
"""

import dataclasses
import enum
import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


SUPPORTED = {
    "LlamaForCausalLM": ("llama", Head.LM),
    "MistralForCausalLM": ("mistral", Head.LM),
    "Qwen2ForCausalLM": ("qwen2", Head.LM),
    "Qwen3ForCausalLM": ("qwen3", Head.LM),
    "LlamaForSequenceClassification": ("llama", Head.SCORE),
    "MistralForSequenceClassification": ("mistral", Head.SCORE),
    "Qwen2ForSequenceClassification": ("qwen2", Head.SCORE),
    "Qwen3ForSequenceClassification": ("qwen3", Head.SCORE),
}


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

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, source: str = "config.json") -> "ModelSpec":
        """The spec of an HF config; raises ModelError naming what is unsupported."""
        named = config.get("architectures") or ["none"]
        architecture = named[0] if isinstance(named, list) else named
        if not isinstance(architecture, str) or architecture not in SUPPORTED:
            raise ModelError(
                f"{source}: architecture {architecture} is not supported; supported: {', '.join(SUPPORTED)}"
            )
        family, head = SUPPORTED[architecture]
        for key in ("attention_bias", "mlp_bias"):
            if config.get(key):
                raise ModelError(f"{source}: {key} is not supported")
        labels = config.get("id2label") or [0]
        if head is Head.SCORE and (not isinstance(labels, list | dict) or len(labels) != 1):
            raise ModelError(f"{source}: a reward model needs one label, found id2label {labels!r}")
        try:
            heads, hidden = _count(config, "num_attention_heads", source), _count(config, "hidden_size", source)
            theta, scaling = _rope(config, source)
            return cls(
                family=family,
                num_layers=_count(config, "num_hidden_layers", source),
                hidden=hidden,
                num_heads=heads,
                num_kv_heads=_count(config, "num_key_value_heads", source, heads),
                head_dim=_count(config, "head_dim", source, hidden // heads),
                ffn=_count(config, "intermediate_size", source),
                vocab=_count(config, "vocab_size", source),
                tied=bool(config.get("tie_word_embeddings", False)) and head is Head.LM,
                qkv_bias=family == "qwen2",
                qk_norm=family == "qwen3",
                rms_eps=_figure(config, "rms_norm_eps", source, 1e-6),
                rope_theta=theta,
                rope_scaling=scaling,
                max_positions=_count(config, "max_position_embeddings", source, 4096),
                sliding_window=_sliding_window(config, family, source),
                head=head,
            )
        except KeyError as error:
            raise ModelError(f"{source}: key {error.args[0]!r} is missing") from None

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelSpec":
        """The spec of an HF folder or of a `config.json` by path."""
        path = Path(folder)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise ModelError(f"{path}: not found; give an HF model folder or its config.json")
        try:
            config = json.loads(path.read_text())
        except ValueError as error:
            raise ModelError(f"{path}: not valid JSON ({error})") from None
        if not isinstance(config, dict):
            raise ModelError(f"{path}: holds {type(config).__name__}; a config.json is a mapping")
        return cls.from_config(config, source=str(path))


def _count(config: Mapping[str, Any], key: str, source: str, default: int | None = None) -> int:
    """A whole number of at least 1; `default` where the key is absent, null or 0."""
    value = config[key] if default is None else config.get(key) or default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{source}: {key} is {value!r}; it must be a whole number of at least 1")
    return value


def _figure(config: Mapping[str, Any], key: str, source: str, default: float | None = None) -> float:
    """A number above 0; `default` where the key is absent or null."""
    value = config.get(key)
    value = config[key] if value is None and default is None else default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"{source}: {key} is {value!r}; it must be a number above 0")
    return float(value)


def _rope(config: Mapping[str, Any], source: str) -> tuple[float, Llama3RopeScaling | None]:
    """Rope base and scaling; both spellings of `transformers` (before and since version 5) are read."""
    new = config.get("rope_parameters") or {}
    scaling = new or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ModelError(f"{source}: rope scaling {scaling!r} is not a mapping")
    theta = _figure(new if new.get("rope_theta") is not None else config, "rope_theta", source, 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ModelError(f"{source}: rope scaling {kind!r} is not supported; supported: default, llama3")
    return theta, Llama3RopeScaling(
        factor=_figure(scaling, "factor", source),
        low_freq_factor=_figure(scaling, "low_freq_factor", source),
        high_freq_factor=_figure(scaling, "high_freq_factor", source),
        original_max_position=_count(scaling, "original_max_position_embeddings", source),
    )


def _sliding_window(config: Mapping[str, Any], family: str, source: str) -> int | None:
    """The window of every layer, or None; Qwen's windows start at a layer, and some layers with one is refused."""
    window = config.get("sliding_window")
    if window is None or family not in ("qwen2", "qwen3"):
        return None if window is None else _count(config, "sliding_window", source)
    num_layers, first = config["num_hidden_layers"], config.get("max_window_layers", 28)
    if not isinstance(first, int):
        raise ModelError(f"{source}: max_window_layers is {first!r}; it must be a whole number")
    if not config.get("use_sliding_window") or first >= num_layers:
        return None
    if first > 0:
        raise ModelError(
            f"{source}: a sliding window from layer {first} of {num_layers} on is not supported; "
            "supported: all layers (max_window_layers 0) or none"
        )
    return _count(config, "sliding_window", source)


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
