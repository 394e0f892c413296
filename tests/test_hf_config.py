"""What we read of an HF config decides what we compute, or is refused: held against the installed `transformers`."""

import itertools
from typing import Any

import pytest
from engine_builders import CONFIGS, SIZES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedConfig

from nereus.errors import ModelError
from nereus.hf_config import HARMLESS, ONLY, READ, SUPPORTED, read_config

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ARCHITECTURE = {family: name for name, (family, _) in reversed(SUPPORTED.items()) if name.endswith("CausalLM")}
MISTRAL_DEFAULT = {"sliding_window": 64}  # the class's own is longer than these sequences


def raw(family: str, **changed: Any) -> dict[str, Any]:
    """A config.json as one finds it; `...` takes a key out."""
    own = MISTRAL_DEFAULT if family == "mistral" else {}
    whole = {"architectures": [ARCHITECTURE[family]], "model_type": family, **SIZES, **own, **changed}
    return {key: value for key, value in whole.items() if value is not ...}


def understood(family: str, config: dict[str, Any]) -> PreTrainedConfig:
    """What `transformers` makes of the file."""
    return CONFIGS[family][0].from_dict({k: dict(v) if isinstance(v, dict) else v for k, v in config.items()})


def windows(config: PreTrainedConfig) -> set[int | None]:
    """The windows of the layers in `transformers`: Llama has none, Mistral one for all, Qwen by the layer's type."""
    if config.model_type == "llama":
        return {None}
    if config.model_type == "mistral":
        return {config.sliding_window}
    return {config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types}


def check_reads_alike(family: str, config: dict[str, Any]) -> None:
    ours, theirs = read_config(config), understood(family, config)
    heads = theirs.num_attention_heads
    assert (ours.num_layers, ours.hidden, ours.ffn, ours.vocab, ours.num_heads) == (
        theirs.num_hidden_layers, theirs.hidden_size, theirs.intermediate_size, theirs.vocab_size, heads,
    )  # fmt: skip
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // heads)
    assert ours.rms_eps == theirs.rms_norm_eps and ours.max_positions == theirs.max_position_embeddings
    assert {ours.sliding_window} == windows(theirs) and ours.tied == theirs.tie_word_embeddings
    rope = theirs.rope_parameters
    assert ours.rope_theta == rope["rope_theta"]
    assert (ours.rope_scaling is not None) == (rope["rope_type"] == "llama3")
    if ours.rope_scaling is not None:
        assert ours.rope_scaling.factor == rope["factor"]
        assert ours.rope_scaling.original_max_position == rope["original_max_position_embeddings"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_attribute_of_a_config_class_is_accounted_for(family: str) -> None:
    config = CONFIGS[family][0]()
    fields = {name for base in type(config).__mro__ for name in getattr(base, "__annotations__", {})}
    declared = {name for name in fields if hasattr(config, name) and name in config.to_dict()}
    for key in sorted({*config.to_dict(), *declared} - {"label2id", "id2label"}):
        assert key in READ[family] or key in ONLY or key in HARMLESS or key.startswith("_"), key


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_class_writes_of_itself_is_read(family: str) -> None:
    config = understood(family, raw(family)).to_dict()
    check_reads_alike(family, {**config, "architectures": [ARCHITECTURE[family]]})


ABSENT = ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "rope_parameters",
          "tie_word_embeddings", "sliding_window", "hidden_act")  # fmt: skip


@pytest.mark.parametrize("key", ABSENT)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_absent_key_has_the_default_of_its_class(family: str, key: str) -> None:
    config = raw(family, **{key: ..., "num_attention_heads": 32, "hidden_size": 128})
    check_reads_alike(family, config)


LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
DEFAULT = {"rope_type": "default", "rope_theta": 500000.0}
ROPES: list[dict[str, Any]] = [
    {"rope_parameters": DEFAULT},
    {"rope_parameters": DEFAULT, "rope_scaling": LLAMA3},
    {"rope_parameters": DEFAULT, "rope_scaling": {**LLAMA3, "rope_theta": 7000.0}},
    {"rope_parameters": ..., "rope_scaling": LLAMA3, "rope_theta": 300000.0},
    {"rope_parameters": {**LLAMA3, "rope_theta": 1000.0}, "rope_scaling": None},
    {"rope_parameters": {**LLAMA3, "rope_theta": 1000.0}, "rope_scaling": {}},
    {"rope_parameters": ..., "rope_theta": 250000.0},
    {"rope_parameters": {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}},
    {"rope_parameters": ..., "rope_scaling": {"type": "default"}},
]


@pytest.mark.parametrize("rope", ROPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_rope_is_read_in_the_order_in_which_transformers_reads_it(family: str, rope: dict[str, Any]) -> None:
    check_reads_alike(family, raw(family, **rope))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_qwen_window_is_that_of_transformers_or_refused(family: str) -> None:
    read = refused = 0
    layers = SIZES["num_hidden_layers"]
    kinds = (..., None, ["sliding_attention"] * layers, ["full_attention"] * layers,
             ["full_attention", *["sliding_attention"] * (layers - 1)])  # fmt: skip
    for use, window, first, types in itertools.product((True, False, ...), (16, None, ...), (0, 2, 28, ...), kinds):
        config = raw(
            family, use_sliding_window=use, sliding_window=window, max_window_layers=first, layer_types=types
        )  # fmt: skip
        if len(windows(understood(family, config))) > 1:
            refused += 1
            with pytest.raises(ModelError, match="layers is not supported"):
                read_config(config)
        else:
            read += 1
            check_reads_alike(family, config)
    assert read and refused


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_act": "relu"}, "hidden_act 'relu'"),
    ("qwen2", {"hidden_act": "gelu"}, "supported: \"silu\", \"swish\""),
    ("llama", {"rope_parameters": DEFAULT, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
    ("llama", {"rope_parameters": {**DEFAULT, "rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    ("llama", {"rope_parameters": {**LLAMA3, "beta_fast": 32}}, "beta_fast"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama", {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("llama", {"sliding_window": 16}, "sliding_window 16"),
    ("mistral", {"layer_types": ["sliding_attention"] * 5}, "layer_types"),
    ("llama", {"num_local_experts": 8}, "num_local_experts"),
    ("qwen3", {"num_experts": 8}, "num_experts"),
    ("llama", {"attention_bias": True}, "attention_bias"),
    ("qwen3", {"attention_bias": True}, "attention_bias"),
    ("mistral", {"mlp_bias": True}, "mlp_bias"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"auto_map": {"AutoModel": "own.Model"}}, "auto_map"),
    ("llama", {"model_type": "qwen2"}, "model_type"),
    ("llama", {"tie_word_embeddings": "yes"}, "true or false"),
    ("qwen2", {"layer_types": ["full_attention"]}, "for each of 5 layers"),
    ("llama", {"logit_scale": 2.0}, "logit_scale"),
    ("llama", {"num_hidden_layers": ...}, "'num_hidden_layers' is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "changed", "said"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_would_change_the_computation_is_refused_by_name(family: str, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        read_config(raw(family, **changed))


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias", "rope_scaling", "sliding_window", "tie_word_embeddings"])
def test_a_null_is_as_good_as_absent(key: str) -> None:
    assert read_config(raw("llama", **{key: None})) == read_config(raw("llama"))


KEYS = st.sampled_from(sorted({*READ["qwen3"], *ONLY, *HARMLESS, "rope_interleaved", "x"}))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | KEYS, inner, max_size=3),
    max_leaves=4,
)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(changed=st.dictionaries(KEYS, VALUES, max_size=3))
def test_any_config_is_read_or_refused_in_one_line(family: str, changed: dict[str, Any]) -> None:
    try:
        read_config(raw(family, **changed))
    except ModelError as error:
        assert "\n" not in str(error)
