"""The command line: what is wrong with the input is said in one line before anything starts, with exit code 2."""

import dataclasses
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import SPEC

from nereus.checkpoint.hf import init_tensors, save_folder
from nereus.cli import main
from nereus.data.tokenizers import byte_tokenizer

PLAN = {
    "actor-generation": "d2t1p1@0-1",
    "actor-training": "d1t2p1@0-1",
    "critic-training": "d1t1p2@0-1",
    "critic-inference": "d1t1p2@0-1",
    "reference-inference": "d1t1p1@0",
}


@dataclasses.dataclass
class Case:
    """A run that would work, in a folder of its own, until a test breaks something."""

    folder: Path
    recipe: dict[str, Any]

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def train(self) -> Path:
        return self.folder / "train.jsonl"

    def arguments(self, *overrides: str) -> list[str]:
        path = self.folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(self.recipe))
        return ["train", str(path), *overrides]


@pytest.fixture(autouse=True)
def keep_signal_handler() -> Iterator[None]:
    """`main` catches SIGTERM for the whole process."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    spec = dataclasses.replace(SPEC, vocab=258, max_positions=128)
    byte_tokenizer().save(tmp_path / "tokenizer")
    save_folder(
        tmp_path / "model",
        spec,
        init_tensors(spec, seed=0),
        tokenizer_folder=tmp_path / "tokenizer",
        max_shard_bytes=20_000,
    )
    for name in ("train", "val"):
        rows = [row(f"{name} {i}") for i in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    recipe = {
        "model": {"path": str(tmp_path / "model")},
        "data": {
            "train": str(tmp_path / "train.jsonl"),
            "val": str(tmp_path / "val.jsonl"),
            "train_batch_size": 4,
            "max_prompt_length": 16,
            "max_response_length": 8,
        },
        "actor": {"ppo_mini_batch_size": 2},
        "reward": {"function": "nereus.data.rewards:exact_answer"},
        "trainer": {"steps": 1},
        "cluster": {"workers": 2},
        "plan": dict(PLAN),
        "run": {"dir": str(tmp_path / "run")},
    }
    return Case(tmp_path, recipe)


def row(question: str) -> dict[str, Any]:
    return {"data_source": "t", "prompt": question, "reward_model": {"style": "rule", "ground_truth": "1"}}


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of `nereus` with these arguments, run in this process."""
    monkeypatch.setattr(sys, "argv", ["nereus", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    code = ended.value.code
    return code if isinstance(code, int) else int(code is not None)


def refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which bad input is refused, before any worker or Ray starts."""
    assert run(arguments, monkeypatch) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err and "starting Ray" not in captured.out
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), captured.err
    return lines[0]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.step=3", r"trainer\.step: unknown key; did you mean trainer\.steps\?"),
        ("modell.path=x", r"modell\.?\S*: unknown key; did you mean model\?"),
        ("steps=3", r"steps: unknown key"),
        ("trainer.steps", r"trainer\.steps: an override is written key=value"),
        ("trainer.steps=-1", r"trainer\.steps: got -1"),
        ("plan.actor-training=d1t3p1", r"needs 3 devices; 2 are available"),
        ("plan.actor-training=d1t4p1@0-3", r"plan\.actor-training: .*needs device 3, so 4 workers.* is 2"),
        ("plan.actor-trainin=d1t2p1", r"no such model-stage; did you mean actor-training\?"),
        ("plan.actor-training=fast", r"is not a plan; write d2t2p1"),
        ("data.max_prompt_length=4", r"train\.jsonl:1: the prompt has 7 tokens; data\.max_prompt_length is 4"),
        ("data.max_response_length=500", r"data\.max_response_length: .* the model has 128 positions"),
        ("data.train=nowhere.jsonl", r"nowhere\.jsonl: no such data file"),
        ("data.tokenizer=nowhere", r"nowhere"),
        ("reward.function=nereus.data.rewards:exact_anwser", r"exact_anwser"),
        ("reward.function=no.such.module:f", r"reward\.function 'no\.such\.module:f'"),
        ("reward.function=missing.py:f", r"no such file missing\.py"),
        ("model.path=nowhere", r"nowhere"),
        ("reward.model=nowhere", r"names no devices for reward-inference"),
        ("transitions=[{step: 9, plan: {actor-training: d1t1p2}}]", r"transitions\.0\.step: got 9"),
        ("transitions=[{step: 1, plan: {actor-training: d1t2p3}}]", r"transitions\.0\.plan\.actor-training"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(
    case: Case, override: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(case.arguments(override), monkeypatch, capsys)
    assert re.search(said, line), line
    assert not (case.folder / "run" / "metrics.jsonl").exists()


def test_tp_that_does_not_divide_the_heads_lists_what_does(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(case.arguments("cluster.workers=3", "plan.actor-training=d1t3p1@0-2"), monkeypatch, capsys)
    assert "plan.actor-training: d1t3p1@0-2" in line and "1, 2, 4" in line


def test_a_missing_recipe_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(["train", str(tmp_path / "none.yaml")], monkeypatch, capsys)
    assert "none.yaml: no such recipe" in line


def test_a_recipe_that_is_no_yaml_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.yaml").write_text("data:\n  train: [a\nmodel: }\n")
    assert re.search(r"r\.yaml:\d", refused(["train", str(tmp_path / "r.yaml")], monkeypatch, capsys))


def test_an_empty_data_file_is_named(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case.train.write_text("")
    assert "train.jsonl: the file is empty" in refused(case.arguments(), monkeypatch, capsys)


def test_a_broken_line_is_named_with_its_number(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case.train.write_text(json.dumps(row("a")) + '\n{"prompt": "b", \n')
    assert "train.jsonl:2: broken json line" in refused(case.arguments(), monkeypatch, capsys)


def test_a_missing_weight_file_is_named(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = sorted(case.model.glob("model-0*.safetensors"))[1]
    shard.unlink()
    assert f"{shard}: the weight file is missing" in refused(case.arguments(), monkeypatch, capsys)


def test_a_truncated_weight_file_is_named_with_a_tensor(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = sorted(case.model.glob("model-0*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-100])
    line = refused(case.arguments(), monkeypatch, capsys)
    assert f"{shard}: truncated" in line and "tensor" in line


@pytest.mark.parametrize("config", [None, "{", "[]", '{"model_type": "llama"}', '{"model_type": "gpt2"}'])
def test_a_folder_that_is_no_model_is_named(
    case: Case, config: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (case.model / "config.json").unlink()
    if config is not None:
        (case.model / "config.json").write_text(config)
    assert str(case.model) in refused(case.arguments("data.tokenizer=byte"), monkeypatch, capsys)


def test_a_language_model_is_no_reward_model(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case.recipe["plan"]["reward-inference"] = "d1t1p1@1"
    line = refused(case.arguments(f"reward.model={case.model}"), monkeypatch, capsys)
    assert "it is a language model, not a reward model" in line


def test_a_reward_function_that_fails_to_import_shows_why(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = case.folder / "score.py"
    path.write_text("import not_there\n\ndef compute_score(*a, **k):\n    return 1.0\n")
    line = refused(case.arguments(f"reward.function={path}:compute_score"), monkeypatch, capsys)
    assert "score.py:compute_score" in line and "not_there" in line


def test_a_run_folder_that_cannot_be_written_is_refused(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (case.folder / "file").write_text("")
    assert str(case.folder / "file") in refused(case.arguments(f"run.dir={case.folder}/file"), monkeypatch, capsys)


def test_json_into_a_folder_that_does_not_exist_is_refused_before_the_run(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused([*case.arguments(), "--json", str(case.folder / "none" / "out.json")], monkeypatch, capsys)
    assert "none" in line and "does not exist" in line


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ("8xh200", r"write NODESxDEVICESxTYPE such as 8x8xh200, a YAML file, local or ray"),
        ("1x8xh900", r"unknown accelerator type 'h900'; known: .*h200"),
        ("nowhere.yaml", r"nowhere\.yaml: not found"),
        ("ray:127.0.0.1:1", r"Ray at 127\.0\.0\.1:1: nothing answers"),
    ],
)
def test_a_cluster_that_is_not_there_is_refused(
    cluster: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(["plan", "--model", "llama-3.2-1b", "--cluster", cluster], monkeypatch, capsys)
    assert re.search(said, line), line


def test_an_unknown_benchmark_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no benchmark 'speed'; there are generate" in refused(["bench", "speed"], monkeypatch, capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["Usage: nereus", "train", "bench", "post-training"]),
        (["train", "--help"], ["RECIPE", "KEY=VALUE", "--json"]),
        (["plan", "--help"], ["8x8xh200", "local", "ray", "ray://HOST:PORT", "--explain"]),
    ],
    ids=["nereus", "train", "plan"],
)
def test_help_reads_well(
    arguments: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments, monkeypatch) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in words), text


def test_the_installed_command_refuses_as_well(case: Case) -> None:
    """The real entry point, in a process of its own: exit code, streams, no traceback."""
    command = str(Path(sys.executable).with_name("nereus"))
    ended = subprocess.run([command, *case.arguments("trainer.step=1")], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert ended.stderr == "error: trainer.step: unknown key; did you mean trainer.steps?\n"
    assert "Traceback" not in ended.stdout
