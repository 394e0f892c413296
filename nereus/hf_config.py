"""What an HF `config.json` says of a model: read key by key, or refused by name.

Every key of a config is read, known to change nothing (with its reason), accepted for some values only, or refused: a
key that nobody looked at could change what the model computes. A key that is absent has the default of its family's
class in `transformers`; a test walks those classes, so a version that adds an attribute is noticed.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from nereus.errors import ModelError
from nereus.model import Head, Llama3RopeScaling, ModelSpec

__all__ = ["HARMLESS", "ONLY", "READ", "SUPPORTED", "read_config", "read_model", "read_stop_ids"]

SUPPORTED: Final = {
    "LlamaForCausalLM": ("llama", Head.LM),
    "MistralForCausalLM": ("mistral", Head.LM),
    "Qwen2ForCausalLM": ("qwen2", Head.LM),
    "Qwen3ForCausalLM": ("qwen3", Head.LM),
    "LlamaForSequenceClassification": ("llama", Head.SCORE),
    "MistralForSequenceClassification": ("mistral", Head.SCORE),
    "Qwen2ForSequenceClassification": ("qwen2", Head.SCORE),
    "Qwen3ForSequenceClassification": ("qwen3", Head.SCORE),
}

_QWEN_WINDOW = frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})
READ: Final[Mapping[str, frozenset[str]]] = {
    family: keys
    | {
        "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps",
        "tie_word_embeddings", "rope_parameters", "rope_scaling", "rope_theta", "id2label", "num_labels",
    }
    for family, keys in {
        "llama": frozenset[str](),
        "mistral": frozenset({"sliding_window"}),
        "qwen2": _QWEN_WINDOW,
        "qwen3": _QWEN_WINDOW,
    }.items()
}  # fmt: skip
"""By family, the keys that decide what is computed."""

ONLY: Final[Mapping[str, tuple[Any, ...]]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "sliding_window": (None,),  # of a family whose class has none
    "use_sliding_window": (False, None),
    "layer_types": (None,),
    "partial_rotary_factor": (1, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "is_decoder": (False, True, None),
    "quantization_config": (None,),
    "auto_map": (None,),
    "pruned_heads": ({}, None),
    "use_bidirectional_attention": (False, None),
}
"""Keys that are accepted where they have one of these values, in families that do not read them."""

_DECODING = "how responses are sampled is the recipe's"
_OUTPUT = "what a call returns, not what it computes"
HARMLESS: Final[Mapping[str, str]] = {
    "attention_dropout": "log-probabilities and updates are computed without dropout",
    "hidden_dropout": "as attention_dropout",
    "classifier_dropout": "as attention_dropout",
    "initializer_range": "weights are loaded",
    "pretraining_tp": "the same products in pieces",
    "use_cache": _DECODING,
    "dtype": "the recipe says in which precision a job computes",
    "torch_dtype": "the recipe says in which precision a job computes",
    "use_bfloat16": "the recipe says in which precision a job computes",
    "bos_token_id": "the tokenizer puts it",
    "pad_token_id": "sequences are packed without padding",
    "eos_token_id": "read as a stop token, not by the model",
    "sep_token_id": "the tokenizer puts it",
    "decoder_start_token_id": "of encoder-decoder models",
    "output_attentions": _OUTPUT,
    "output_hidden_states": _OUTPUT,
    "output_scores": _OUTPUT,
    "return_dict": _OUTPUT,
    "return_dict_in_generate": _OUTPUT,
    "torchscript": _OUTPUT,
    "problem_type": "the loss of a classifier; a reward model is only read",
    "label2id": "names of labels",
    "chunk_size_feed_forward": "the same products in pieces",
    "attn_implementation": "which kernel computes attention",
    "transformers_version": "who wrote the file",
    "tokenizer_class": "read by the tokenizer's loader",
    "name_or_path": "where the file came from",
    "finetuning_task": "where the file came from",
    "task_specific_params": _DECODING,
    "prefix": "no prompt is prefixed",
    "max_window_layers": "of a family that has no windows",
    **dict.fromkeys(
        (
            "max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
            "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
            "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
            "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
            "forced_bos_token_id", "forced_eos_token_id",
        ),
        _DECODING,
    ),
}  # fmt: skip
"""Keys that change no logit, each with its reason. So are those that begin with an underscore: bookkeeping."""

ROPE_KEYS: Final = frozenset(
    {
        "rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "partial_rotary_factor",
        "original_max_position_embeddings",
    }
)  # fmt: skip

_KV_HEADS = {"llama": None, "mistral": 8, "qwen2": 32, "qwen3": 32}
_MAX_POSITIONS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
_HEAD_DIM = {"qwen3": 128}
_MISTRAL_WINDOW = _QWEN_WINDOW_SIZE = 4096
_DEFAULT_THETA = 10000.0


def read_model(folder: str | Path) -> ModelSpec:
    """The spec of an HF folder or of a `config.json` by path; raises ModelError."""
    path = Path(folder).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ModelError(f"{path}: not found; give an HF model folder or its config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path}: holds {type(config).__name__}; a config.json is a mapping")
    return read_config(config, source=str(path))


def read_config(config: Mapping[str, Any], *, source: str = "config.json") -> ModelSpec:
    """The spec of an HF config; raises ModelError naming the key that is missing, wrong or not supported."""
    family, head = _architecture(config, source)
    _check_keys(config, family, source)
    reader = _Reader(config, source)
    heads, hidden = reader.count("num_attention_heads"), reader.count("hidden_size")
    kv_heads = config.get("num_key_value_heads", _KV_HEADS[family])
    max_positions = reader.count("max_position_embeddings", _MAX_POSITIONS[family])
    theta, scaling = _rope(config, max_positions, source)
    return ModelSpec(
        family=family,
        num_layers=reader.count("num_hidden_layers"),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=heads if kv_heads is None else reader.count("num_key_value_heads", kv_heads),
        head_dim=reader.count("head_dim", _HEAD_DIM.get(family, hidden // heads)),
        ffn=reader.count("intermediate_size"),
        vocab=reader.count("vocab_size"),
        tied=reader.flag("tie_word_embeddings") and head is Head.LM,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        rms_eps=reader.figure("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=max_positions,
        sliding_window=_sliding_window(config, family, reader),
        head=head,
    )


def read_stop_ids(folder: str | Path) -> tuple[int, ...]:
    """Ids that end a response, as `transformers` and vLLM take them: every `eos_token_id` of generation_config.json, or
    of config.json where there is none. Raises ModelError."""
    for name in ("generation_config.json", "config.json"):
        path = Path(folder).expanduser() / name
        if not path.is_file():
            continue
        try:
            found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError):
            raise ModelError(f"{path}: not a JSON mapping") from None
        ids = found if isinstance(found, list) else [] if found is None else [found]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise ModelError(f"{path}: eos_token_id is {found!r}; it must be a token id or a list of them")
        return tuple(ids)
    return ()


def _architecture(config: Mapping[str, Any], source: str) -> tuple[str, Head]:
    named = config.get("architectures") or ["none"]
    architecture = named[0] if isinstance(named, list) else named
    if not isinstance(architecture, str) or architecture not in SUPPORTED:
        raise ModelError(f"{source}: architecture {architecture} is not supported; supported: {', '.join(SUPPORTED)}")
    family, head = SUPPORTED[architecture]
    if config.get("model_type", family) != family:
        raise ModelError(f"{source}: model_type {config['model_type']!r} is not that of {architecture} ({family})")
    if head is Head.SCORE:
        labels = config.get("id2label")
        count = config.get("num_labels", 2) if labels is None else len(labels) if isinstance(labels, list | dict) else 0
        if count != 1:
            raise ModelError(f"{source}: a reward model needs one label, found id2label {labels!r}")
    return family, head


def _check_keys(config: Mapping[str, Any], family: str, source: str) -> None:
    """Refuse what could change the computation and is not read."""
    for key, value in config.items():
        if key in READ[family] or key.startswith("_"):
            continue
        if key in ONLY:
            if value not in ONLY[key]:
                accepted = ", ".join("null" if v is None else json.dumps(v) for v in ONLY[key])
                raise ModelError(f"{source}: {key} {value!r} is not supported for {family}; supported: {accepted}")
        elif key not in HARMLESS:
            raise ModelError(
                f"{source}: key {key!r} is not known for {family}, so what it changes would be left out; remove it if "
                "it changes nothing"
            )


class _Reader:
    """Values of a config by key, checked."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self._config, self.source = config, source

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1; `default` where the key is absent or null."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{self.source}: {key} is {value!r}; it must be a whole number of at least 1")
        return value

    def figure(self, key: str, default: float | None = None) -> float:
        """A number above 0; `default` where the key is absent or null."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ModelError(f"{self.source}: {key} is {value!r}; it must be a number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false; false where the key is absent or null."""
        value = self._config.get(key)
        if value is not None and not isinstance(value, bool):
            raise ModelError(f"{self.source}: {key} is {value!r}; it must be true or false")
        return bool(value)

    def _value(self, key: str, default: Any) -> Any:
        value = self._config.get(key)
        if value is None and default is None:
            raise ModelError(f"{self.source}: key {key!r} is missing")
        return default if value is None else value


def _rope(config: Mapping[str, Any], max_positions: int, source: str) -> tuple[float, Llama3RopeScaling | None]:
    """Rope base and scaling. As in `transformers`, a `rope_scaling` that says anything replaces `rope_parameters`, with
    the base it holds itself, else the config's, else 10,000."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise ModelError(f"{source}: rope scaling {scaling!r} is not a mapping")
    unknown = sorted(map(str, set(scaling) - ROPE_KEYS))
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "llama3"):
        raise ModelError(f"{source}: rope scaling {kind!r} is not supported; supported: default, llama3")
    if unknown:
        raise ModelError(f"{source}: rope key {unknown[0]!r} is not known; known: {', '.join(sorted(ROPE_KEYS))}")
    if scaling.get("partial_rotary_factor") not in ONLY["partial_rotary_factor"]:
        raise ModelError(f"{source}: partial_rotary_factor {scaling['partial_rotary_factor']!r} is not supported")
    theta = _Reader(scaling if scaling.get("rope_theta") is not None else config, source).figure(
        "rope_theta", _DEFAULT_THETA
    )
    if kind == "default":
        return theta, None
    reader = _Reader(scaling, source)
    return theta, Llama3RopeScaling(
        factor=reader.figure("factor"),
        low_freq_factor=reader.figure("low_freq_factor"),
        high_freq_factor=reader.figure("high_freq_factor"),
        original_max_position=reader.count("original_max_position_embeddings", max_positions),
    )


def _sliding_window(config: Mapping[str, Any], family: str, reader: _Reader) -> int | None:
    """The window of every layer, or None; a model of which only some layers have one is refused."""
    if family == "llama":
        return None
    if family == "mistral":
        absent = "sliding_window" not in config
        window = _MISTRAL_WINDOW if absent else config["sliding_window"]
        return None if window is None else reader.count("sliding_window", window)
    num_layers = reader.count("num_hidden_layers")
    on = reader.flag("use_sliding_window") and config.get("sliding_window", _QWEN_WINDOW_SIZE) is not None
    first = config.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int):
        raise ModelError(f"{reader.source}: max_window_layers is {first!r}; it must be a whole number")
    types = config.get("layer_types") or [
        "sliding_attention" if on and layer >= first else "full_attention" for layer in range(num_layers)
    ]
    if not isinstance(types, list) or len(types) != num_layers or set(types) - {"full_attention", "sliding_attention"}:
        raise ModelError(
            f"{reader.source}: layer_types is {types!r}; it must name full_attention or sliding_attention for each of "
            f"{num_layers} layers"
        )
    windowed = [kind == "sliding_attention" for kind in types]
    if not on or not any(windowed):
        return None
    if not all(windowed):
        raise ModelError(
            f"{reader.source}: a sliding window in {sum(windowed)} of {num_layers} layers is not supported; "
            "supported: all layers or none"
        )
    return reader.count("sliding_window", _QWEN_WINDOW_SIZE)
