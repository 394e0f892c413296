import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from engine_builders import make_twin, spec_of

from nereus.checkpoint.hf import hf_config, init_folder, init_tensors, init_unit, load_unit, save_folder
from nereus.checkpoint.weight_files import INDEX_FILE, SINGLE_FILE, check_folder, read_folder
from nereus.data.tokenizers import byte_tokenizer, load_tokenizer
from nereus.errors import ModelError
from nereus.hf_config import read_config, read_model, read_stop_ids
from nereus.model import Head, ModelSpec
from nereus.plan import Layout
from nereus.shards.boxes import Box
from nereus.shards.state import RankState, StateKind, state_dtypes, zeros_on

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
LAYOUTS = (Layout(1, 1), Layout(2, 1), Layout(4, 2), Layout(8, 5), Layout(1, 3))
SMALL = ModelSpec(
    family="llama", num_layers=2, hidden=16, num_heads=4, num_kv_heads=2, head_dim=4, ffn=24, vocab=33,
)  # fmt: skip


def saved(folder: Path, family: str, *, head: Head = Head.LM, shard: str = "20KB", **sizes: Any) -> Any:
    twin = make_twin(family, head=head, **sizes)
    twin.save_pretrained(str(folder), max_shard_size=shard)
    return twin


def state_of(spec: ModelSpec, layout: Layout, rank: int, dtype: torch.dtype = torch.float32) -> RankState:
    dtypes = state_dtypes(dtype, trains=True)
    return RankState.allocate(spec, layout, rank, dtypes=dtypes, allocator=zeros_on(torch.device("cpu")))


def assert_holds(state: RankState, whole: dict[str, torch.Tensor]) -> None:
    """Every box of the rank equals the same box cut from the whole tensor."""
    for shard in state.shards:
        expected = whole[shard.param.name][shard.box.within(Box.whole(shard.param.shape))]
        assert torch.equal(state.view(shard.param.name), expected.to(state.flats[StateKind.PARAM].dtype))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_rank_of_every_layout_loads_its_boxes(family: str, tied: bool, tmp_path: Path) -> None:
    twin = saved(tmp_path, family, tie_word_embeddings=tied)
    assert (tmp_path / INDEX_FILE).is_file(), "the folder should be sharded"
    spec = read_model(tmp_path)
    assert spec == spec_of(twin) and spec.tied is tied
    check_folder(tmp_path, spec)
    whole = dict(twin.state_dict())
    for layout in LAYOUTS:
        for rank in range(layout.num_ranks):
            state = state_of(spec, layout, rank)
            load_unit(tmp_path, spec, state)
            assert_holds(state, whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reward_model_loads_with_its_scalar_head(family: str, tmp_path: Path) -> None:
    twin = saved(tmp_path, family, head=Head.SCORE)
    spec = read_model(tmp_path)
    assert spec.head is Head.SCORE
    state = state_of(spec, Layout(2, 2), 3)
    load_unit(tmp_path, spec, state)
    assert_holds(state, dict(twin.state_dict()))
    assert state.view("score.weight").abs().sum() > 0


def test_a_single_file_loads_as_shards_do(tmp_path: Path) -> None:
    twin = saved(tmp_path, "llama", shard="1GB")
    assert (tmp_path / SINGLE_FILE).is_file()
    state = state_of(spec_of(twin), Layout(2, 1), 1)
    load_unit(tmp_path, spec_of(twin), state)
    assert_holds(state, dict(twin.state_dict()))


def test_a_critic_starts_from_a_language_model_with_a_zero_head_only_where_that_is_asked_for(tmp_path: Path) -> None:
    twin = saved(tmp_path, "qwen3", tie_word_embeddings=True)
    spec = read_model(tmp_path).with_head(Head.SCORE)
    state = state_of(spec, Layout(1, 1), 0)
    state.view("score.weight").fill_(3.0)
    with pytest.raises(ModelError, match=r"tensor score.weight is missing; it is a language model"):
        check_folder(tmp_path, spec)
    with pytest.raises(ModelError, match=r"score.weight is missing"):
        load_unit(tmp_path, spec, state)
    check_folder(tmp_path, spec, fresh_score=True)
    load_unit(tmp_path, spec, state, fresh_score=True)
    assert_holds(state, {**twin.state_dict(), "score.weight": torch.zeros(1, spec.hidden)})


def test_masters_take_the_full_precision_of_the_file(tmp_path: Path) -> None:
    twin = saved(tmp_path, "llama")
    spec = spec_of(twin)
    state = state_of(spec, Layout(2, 1), 0, torch.bfloat16)
    load_unit(tmp_path, spec, state)
    assert_holds(state, dict(twin.state_dict()))
    name = "model.norm.weight"
    assert torch.equal(state.view(name, StateKind.MASTER), twin.state_dict()[name])
    assert not torch.equal(state.view(name, StateKind.MASTER), state.view(name).float())


def test_weights_of_another_dtype_are_converted(tmp_path: Path) -> None:
    twin = make_twin("llama").to(torch.bfloat16)
    twin.save_pretrained(str(tmp_path))
    spec = read_model(tmp_path)
    state = state_of(spec, Layout(1, 1), 0, torch.float64)
    load_unit(tmp_path, spec, state)
    assert_holds(state, dict(twin.state_dict()))


@pytest.mark.parametrize("head", list(Head))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_folder_gives_transformers_the_same_model(family: str, head: Head, tmp_path: Path) -> None:
    twin = make_twin(family, head=head, tie_word_embeddings=family == "qwen3")
    spec = spec_of(twin)
    names = [param.name for param in spec.params]
    save_folder(tmp_path / "out", spec, ((n, twin.state_dict()[n]) for n in reversed(names)), max_shard_bytes=50_000)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 3
    assert read_model(tmp_path / "out") == spec
    auto = transformers.AutoModelForCausalLM if head is Head.LM else transformers.AutoModelForSequenceClassification
    loaded, report = auto.from_pretrained(str(tmp_path / "out"), output_loading_info=True)
    assert type(loaded) is type(twin)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    loaded.config.pad_token_id = twin.config.pad_token_id = 0
    tokens = torch.arange(1, 41).reshape(2, 20)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, twin(tokens).logits)


def test_a_sliding_window_survives_saving(tmp_path: Path) -> None:
    for family in FAMILIES:
        twin = make_twin(family)
        spec = spec_of(twin)
        assert (spec.sliding_window is not None) == (family == "mistral")
        assert read_config(hf_config(spec)) == spec


def test_views_of_one_buffer_can_be_saved(tmp_path: Path) -> None:
    state = state_of(SMALL, Layout(), 0)
    init_unit(SMALL, state, seed=3)
    save_folder(tmp_path / "out", SMALL, ((shard.param.name, state.view(shard.param.name)) for shard in state.shards))
    again = state_of(SMALL, Layout(), 0)
    load_unit(tmp_path / "out", SMALL, again)
    assert torch.equal(again.flats[StateKind.PARAM], state.flats[StateKind.PARAM])


def test_a_folder_is_never_overwritten(tmp_path: Path) -> None:
    init_folder(SMALL, tmp_path / "out", seed=0)
    with pytest.raises(ModelError, match="exists already"):
        init_folder(SMALL, tmp_path / "out", seed=1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_the_tokenizer_is_saved_with_the_model(tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path / "tokenizer")
    save_folder(tmp_path / "out", SMALL, init_tensors(SMALL, seed=0), tokenizer_folder=tmp_path / "tokenizer")
    assert load_tokenizer(tmp_path / "out").encode("a") == byte_tokenizer().encode("a")


def test_random_weights_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    init_folder(SMALL, tmp_path / "out", seed=5)
    whole = dict(init_tensors(SMALL, seed=5))
    assert whole["model.norm.weight"].eq(1).all()
    assert whole["model.embed_tokens.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    for layout in (Layout(1, 1), Layout(4, 2)):
        for rank in range(layout.num_ranks):
            fresh, loaded = state_of(SMALL, layout, rank), state_of(SMALL, layout, rank)
            init_unit(SMALL, fresh, seed=5)
            load_unit(tmp_path / "out", SMALL, loaded)
            assert_holds(fresh, whole)
            assert torch.equal(fresh.flats[StateKind.PARAM], loaded.flats[StateKind.PARAM])
    assert not torch.equal(dict(init_tensors(SMALL, seed=6))["lm_head.weight"], whole["lm_head.weight"])


def sharded(folder: Path) -> ModelSpec:
    """A folder of several shard files and its spec."""
    save_folder(folder, SMALL, init_tensors(SMALL, seed=0), max_shard_bytes=4_000)
    return SMALL


def refused(folder: Path, spec: ModelSpec, says: str) -> None:
    """Both the check before the start and loading refuse the folder in the same words."""
    with pytest.raises(ModelError, match=says):
        check_folder(folder, spec)
    with pytest.raises(ModelError, match=says):
        load_unit(folder, spec, state_of(spec, Layout(), 0))


def file_of(folder: Path, tensor: str) -> Path:
    return read_folder(folder)[tensor].path


def test_a_missing_shard_file_is_named(tmp_path: Path) -> None:
    spec = sharded(tmp_path / "m")
    path = file_of(tmp_path / "m", "model.norm.weight")
    path.unlink()
    refused(tmp_path / "m", spec, f"{path.name}: the weight file is missing; {INDEX_FILE} names it")


def test_a_truncated_shard_is_named_with_its_first_lost_tensor(tmp_path: Path) -> None:
    spec = sharded(tmp_path / "m")
    path = file_of(tmp_path / "m", "model.norm.weight")
    path.write_bytes(path.read_bytes()[:-1])
    refused(tmp_path / "m", spec, f"{path.name}: truncated: .* bytes, .* needed; tensor model.norm.weight is not whole")
    path.write_bytes(path.read_bytes()[:20])
    refused(tmp_path / "m", spec, f"{path.name}: truncated: 20 bytes do not hold the header")
    path.write_bytes(b"")
    refused(tmp_path / "m", spec, f"{path.name}: truncated: 0 bytes")


def test_a_file_that_is_no_safetensors_file_is_named(tmp_path: Path) -> None:
    spec = sharded(tmp_path / "m")
    path = file_of(tmp_path / "m", "lm_head.weight")
    path.write_bytes(struct.pack("<Q", 12) + b"not a header" + bytes(50))
    refused(tmp_path / "m", spec, f"{path.name}: broken header")
    path.write_bytes(struct.pack("<Q", 14) + b'{"a": {"b": 1}}'[:14] + bytes(50))
    refused(tmp_path / "m", spec, f"{path.name}: broken header")


def test_a_wrong_shape_is_named_with_the_right_one(tmp_path: Path) -> None:
    sharded(tmp_path / "m")
    wide = ModelSpec(**{field: getattr(SMALL, field) for field in SMALL.__dataclass_fields__} | {"ffn": 25})
    refused(tmp_path / "m", wide, r"tensor model.layers.0.mlp.gate_proj.weight has shape \[24, 16\]; .* \[25, 16\]")


def test_a_tensor_that_no_file_holds_is_named(tmp_path: Path) -> None:
    save_folder(tmp_path / "m", SMALL, init_tensors(SMALL, seed=0))
    deeper = ModelSpec(**{field: getattr(SMALL, field) for field in SMALL.__dataclass_fields__} | {"num_layers": 3})
    refused(tmp_path / "m", deeper, r"tensor model.layers.2.input_layernorm.weight is missing")


def test_an_index_that_does_not_match_its_files_is_refused(tmp_path: Path) -> None:
    spec = sharded(tmp_path / "m")
    index = tmp_path / "m" / INDEX_FILE
    document = json.loads(index.read_text())
    other = next(name for name in document["weight_map"].values() if name != document["weight_map"]["lm_head.weight"])
    document["weight_map"]["lm_head.weight"] = other
    index.write_text(json.dumps(document))
    refused(tmp_path / "m", spec, f"{other}: tensor lm_head.weight is missing; {INDEX_FILE} says it is there")
    index.write_text("{")
    refused(tmp_path / "m", spec, f"{INDEX_FILE}: not a weight index")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", SMALL, "no such model folder")
    refused(tmp_path, SMALL, f"holds neither {SINGLE_FILE} nor {INDEX_FILE}")


def with_tensors(folder: Path, change: dict[str, torch.Tensor]) -> None:
    """Add or replace tensors of a folder's single weight file."""
    path = str(folder / SINGLE_FILE)
    safetensors.torch.save_file({**safetensors.torch.load_file(path), **change}, path, metadata={"format": "pt"})


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(tmp_path: Path) -> None:
    twin = saved(tmp_path, "qwen3", shard="1GB", tie_word_embeddings=True)
    spec, embedding = read_model(tmp_path), twin.state_dict()["model.embed_tokens.weight"]
    with_tensors(tmp_path, {"lm_head.weight": embedding.clone()})
    check_folder(tmp_path, spec)
    other = embedding.clone()
    other[-1, -1] += 1
    with_tensors(tmp_path, {"lm_head.weight": other})
    with pytest.raises(ModelError, match="lm_head.weight differs from model.embed_tokens.weight"):
        check_folder(tmp_path, spec)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.5.mlp.up_proj.weight", "visual.proj.weight"]
)
def test_a_tensor_that_the_model_has_no_place_for_is_refused(name: str, tmp_path: Path) -> None:
    saved(tmp_path, "llama", shard="1GB")
    with_tensors(tmp_path, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    check_folder(tmp_path, read_model(tmp_path))
    with_tensors(tmp_path, {name: torch.ones(4)})
    with pytest.raises(ModelError, match=name):
        check_folder(tmp_path, read_model(tmp_path))


@pytest.mark.parametrize("stops", [(1,), (1, 90)])
def test_generation_of_transformers_ends_where_ours_does(stops: tuple[int, ...], tmp_path: Path) -> None:
    """The greedy tokens of the model, cut at the first stop: a saved folder says where that is."""
    twin = make_twin("llama")
    prompt = torch.tensor([[5, 17, 40]])
    free = twin.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)[0, 3:].tolist()
    stops = tuple(free[4 + i] for i in range(len(stops)))
    spec = spec_of(twin)
    save_folder(tmp_path / "out", spec, ((p.name, twin.state_dict()[p.name]) for p in spec.params), stop_ids=stops)
    assert read_stop_ids(tmp_path / "out") == stops
    loaded = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"))
    ended = loaded.generate(prompt, max_new_tokens=12, do_sample=False)[0, 3:].tolist()
    assert ended == free[: min(free.index(stop) for stop in stops) + 1]


def test_stop_ids_are_those_of_the_generation_config_before_those_of_the_config(tmp_path: Path) -> None:
    assert read_stop_ids(tmp_path) == ()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert read_stop_ids(tmp_path) == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 200]}))
    assert read_stop_ids(tmp_path) == (1, 200)
    for wrong in ("[]", '{"eos_token_id": "x"}', '{"eos_token_id": [true]}', "{"):
        (tmp_path / "generation_config.json").write_text(wrong)
        with pytest.raises(ModelError, match="generation_config.json"):
            read_stop_ids(tmp_path)
