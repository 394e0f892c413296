import json
from pathlib import Path

import pytest

from nereus.errors import ModelError
from nereus.known_models import MODELS, load_spec, model_by_name

PUBLISHED = Path(__file__).resolve().parents[2] / "shared" / "data" / "models.json"


def test_built_in_models_have_the_published_number_of_parameters():
    if not PUBLISHED.is_file():
        pytest.skip("the published model table is not here")
    published = {row["name"].lower(): row["params_published"] for row in json.loads(PUBLISHED.read_text())["models"]}
    assert {name: spec.num_params for name, spec in MODELS.items()} == {name: published[name] for name in MODELS}


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b", "QWEN2.5-7B"])
def test_a_model_is_found_by_any_spelling_of_its_name(name):
    assert model_by_name(name) is MODELS["qwen2.5-7b"]


def test_heads_of_a_7b_model_admit_no_tp_of_8():
    assert 8 not in load_spec("qwen2.5-7b").valid_tp


def test_an_unknown_model_lists_the_names():
    with pytest.raises(ModelError, match="llama-3.1-8b"):
        load_spec("llama-9")


def test_a_config_file_is_read_before_names_are_looked_up(tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 512,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert load_spec(path).num_layers == 2
    assert load_spec(tmp_path).vocab == 512


CONFIG = dict(
    architectures=["LlamaForCausalLM"], hidden_size=64, num_attention_heads=4, num_hidden_layers=2,
    num_key_value_heads=2, intermediate_size=128, vocab_size=500,
)  # fmt: skip


@pytest.mark.parametrize(
    "key, value",
    [
        ("hidden_size", "wide"),
        ("hidden_size", None),
        ("hidden_size", [64]),
        ("hidden_size", 64.5),
        ("hidden_size", 10**12),
        ("num_attention_heads", 0),
        ("num_hidden_layers", 10**9),
        ("max_position_embeddings", "many"),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", "x"),
        ("rope_scaling", "yarn"),
        ("architectures", {"a": 1}),
        ("architectures", "MixtralForCausalLM"),
    ],
)
def test_a_config_with_a_value_of_the_wrong_kind_is_refused_in_one_line(tmp_path, key, value):
    source = tmp_path / "config.json"
    source.write_text(json.dumps({**CONFIG, key: value}))
    with pytest.raises(ModelError) as error:
        load_spec(source)
    assert "\n" not in str(error.value)


def test_a_reward_config_whose_labels_are_no_table_is_refused(tmp_path):
    source = tmp_path / "config.json"
    source.write_text(json.dumps({**CONFIG, "architectures": ["LlamaForSequenceClassification"], "id2label": 3}))
    with pytest.raises(ModelError, match="one label"):
        load_spec(source)


def test_a_config_that_is_no_text_is_refused(tmp_path):
    source = tmp_path / "config.json"
    source.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match="not valid JSON"):
        load_spec(source)
