"""`nereus.plan` and its command: the users' cases, the JSON of the contracts, and what is said when nothing fits."""

import io
import json

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from nereus.commands.plan import plan as plan_command
from nereus.errors import ConfigError, DataError, InputError, ModelError, PlanError
from nereus.known_models import load_spec
from nereus.model import Head
from nereus.plan import ACTOR_GENERATION, ACTOR_TRAINING, CRITIC_TRAINING, Plan
from nereus.planner.api import load_lengths, parse_plan, plan
from nereus.planner.evaluate import price
from nereus.planner.report import show
from nereus.planner.workload import Lengths

SEVEN = dict(batch=16, prompt=512, response=1024)


@pytest.fixture(scope="module")
def fitting():
    return plan("qwen2.5-7b", "2x8xa100", **SEVEN)


def test_what_fits_has_a_plan_with_its_memory(fitting):
    assert fitting.feasible and fitting.price.feasible
    for stage in fitting.to_json()["stages"]:
        assert {"model_stage", "dp", "tp", "pp", "devices", "seconds", "memory_gb"} <= set(stage)
        parts = {part: size for part, size in stage["memory_gb"].items() if part != "total"}
        assert stage["memory_gb"]["total"] == pytest.approx(sum(parts.values()))
        assert stage["memory_gb"]["total"] <= 72
        assert stage["dp"] * stage["tp"] * stage["pp"] == sum(map(len, stage["devices"]))
    assert fitting.to_json()["step_s"] == pytest.approx(
        sum(fitting.price.wave_seconds) + sum(fitting.price.sync_seconds.values())
    )


def test_what_does_not_fit_is_refused_naming_the_limit():
    refused = plan("qwen2.5-7b", "2x8xa100", memory_gb=10, **SEVEN)
    assert not refused.feasible and refused.refusal.limit == "memory"
    assert "actor-training" in refused.refusal.reason and "9.0 GB are usable" in refused.refusal.reason
    assert refused.refusal.valid
    found = refused.to_json()
    assert found["feasible"] is False and found["stages"] == [] and "memory" in found["reason"]


def test_tp_never_cuts_heads_unevenly():
    for devices in ("1x8xa100", "1x7xa100"):
        result = plan("qwen2.5-7b", devices, algorithm="grpo", **SEVEN)
        assert all(28 % stage["tp"] == 0 for stage in result.to_json()["stages"])


def test_a_tp_that_heads_or_nodes_forbid_is_refused_in_one_line():
    with pytest.raises(PlanError, match="valid tp: 1, 2, 4, 7, 14, 28") as error:
        plan("qwen2.5-7b", "1x8xa100", algorithm="grpo", compare="actor-training=t8", **SEVEN)
    assert "\n" not in str(error.value)
    with pytest.raises(PlanError, match="tp 14 exceeds a node of 8 devices; valid tp: 1, 2, 4, 7"):
        plan("qwen2.5-7b", "2x8xa100", algorithm="grpo", compare="actor-training=t14", **SEVEN)


def test_the_logits_peak_counts_and_the_plan_changes_before_the_cap():
    shapes, peaks = [], []
    for mean in (512, 2048, 4096, 8192):
        values = sorted([*(min(9216.0, mean * (0.5 + i / 16)) for i in range(16)), 9216.0])
        result = plan(
            "qwen2.5-7b", "2x8xa100", algorithm="grpo", batch=16, prompt=512, response=Lengths(tuple(values)),
            compare="actor-training=d4t4p1@0-15",
        )  # fmt: skip
        assert result.feasible and result.price.memory_share <= 1
        training = result.price.stages[ACTOR_TRAINING]
        shapes.append((result.plan[ACTOR_TRAINING].shape, training.micro_batch, training.recompute))
        compared = result.compared.stages[ACTOR_TRAINING]
        peaks.append(compared.memory.active["logits"] / compared.micro_batch)
    assert len(set(shapes)) > 1
    assert peaks[0] < peaks[-1] and peaks[0] >= 9216 / 17 * 152064 / 4 * 4


def test_two_models_planned_after_each_other_share_no_state(fitting):
    other = plan("qwen2.5-14b", "2x8xh200", algorithm="grpo", **SEVEN)
    assert all(40 % stage["tp"] == 0 for stage in other.to_json()["stages"])
    again = plan("llama-3.2-1b", "1x2xh200", algorithm="grpo", batch=8, prompt=64, response=64)
    assert all(28 % stage_plan.layout.tp == 0 for _, stage_plan in fitting.plan.stages) and again.feasible


def test_devices_that_the_batch_cannot_use_stay_idle_and_are_counted():
    result = plan("llama-3.2-1b", "8x8xh100", algorithm="grpo", batch=2, prompt=64, response=32)
    assert result.choice.idle_devices
    assert any("stay idle" in note for note in result.notes)


def test_one_device_runs_models_in_turn():
    spec = load_spec("qwen2.5-0.5b")
    result = plan(spec, "1x1xh200", batch=4, prompt=64, response=64, reward=spec.with_head(Head.SCORE))
    assert result.feasible and result.choice.placement == "colocated"
    assert any("take turns" in note for note in result.notes)


def test_colocated_model_stages_begin_at_the_first_device():
    result = plan("llama-3.2-1b", "1x4xh100", placement="colocated", batch=32, prompt=128, response=256)
    assert all(stage_plan.devices[0] == 0 for _, stage_plan in result.plan.stages)


def test_disjoint_roles_share_no_device():
    result = plan("llama-3.2-1b", "1x8xh100", placement="disjoint", batch=32, prompt=128, response=256)
    taken = {}
    for m, stage_plan in result.plan.stages:
        taken.setdefault(m.role, set()).update(stage_plan.devices)
    sizes = [len(devices) for devices in taken.values()]
    assert sum(sizes) == len(set().union(*taken.values()))


def test_a_plan_that_shares_weights_synchronizes_nothing():
    result = plan("llama-3.2-1b", "1x2xh200", algorithm="grpo", batch=16, prompt=64, response=16)
    both = "d2t1p1@0-1"
    compared = plan(
        "llama-3.2-1b", "1x2xh200", algorithm="grpo", batch=16, prompt=64, response=16,
        compare={"actor-training": both, "actor-generation": both},
    ).compared  # fmt: skip
    assert compared.sync_seconds == {(ACTOR_TRAINING, ACTOR_GENERATION): 0.0}
    assert compared.stages[ACTOR_GENERATION].shares_weights
    assert compared.step_seconds >= result.price.step_seconds * (1 - 1e-9)


def test_explaining_lists_slower_runners_up_and_what_kept_faster_settings_out():
    result = plan("llama-3.2-3b", "1x4xh100", algorithm="grpo", explain=True, memory_gb=60, **SEVEN)
    assert result.alternatives
    for other in result.alternatives:
        assert other.price.step_seconds >= result.price.step_seconds * (1 - 1e-9) and other.price.feasible
    assert result.excluded and all(e.reason.startswith(("memory", "devices")) for e in result.excluded)


def test_no_compared_plan_that_fits_is_faster_than_the_choice(fitting):
    for text in (
        "actor-training=d2t4p1@0-7 critic-training=d2t4p1@8-15",
        "actor-training=megatron:d1p2t4@0-7;critic-training=d1p2t4@8-15",
        "actor-generation=d16",
    ):
        compared = price(fitting.problem, parse_plan(fitting.problem, text, fitting.choice))
        assert not compared.feasible or compared.step_seconds >= fitting.price.step_seconds * (1 - 1e-9)


def test_a_plan_that_cannot_be_read_says_how_to_write_one():
    with pytest.raises(PlanError, match="write actor-training=d4t2p2"):
        plan("llama-3.2-1b", "1x2xh100", algorithm="grpo", compare="d4t2p2", **SEVEN)


def test_an_argument_that_no_job_has_is_a_mistake_of_the_caller():
    with pytest.raises(TypeError, match="bath"):
        plan("llama-3.2-1b", "1x2xh100", bath=8)


def test_bad_arguments_name_the_key():
    with pytest.raises(ConfigError, match="batch"):
        plan("llama-3.2-1b", "1x2xh100", batch=0)
    with pytest.raises(ConfigError, match="colocated, disjoint, free"):
        plan("llama-3.2-1b", "1x2xh100", placement="anywhere")
    with pytest.raises(ConfigError, match="ppo, grpo, remax"):
        plan("llama-3.2-1b", "1x2xh100", algorithm="dpo")


def test_lengths_are_read_as_quantiles(tmp_path):
    source = tmp_path / "lengths.csv"
    source.write_text("step,length\n" + "\n".join(f"{i},{i}" for i in range(1, 1001)))
    lengths = load_lengths(source)
    assert len(lengths.values) == 64 and lengths.longest == 1000 and 480 < lengths.mean < 540
    source.write_text("[5, 3, 4]")
    assert load_lengths(source).values == (3, 4, 5)
    source.write_text("nothing")
    with pytest.raises(DataError, match="one number"):
        load_lengths(source)


def test_mixed_types_and_uneven_nodes_have_a_plan(tmp_path):
    source = tmp_path / "cluster.yaml"
    source.write_text("nodes:\n  - {count: 1, devices: 2, accelerator: h200}\n  - {devices: 3, accelerator: a100}\n")
    result = plan("llama-3.2-1b", str(source), **SEVEN)
    assert result.feasible and result.price.feasible
    assert {CRITIC_TRAINING, ACTOR_TRAINING} <= set(result.plan.model_stages)


def run_command(*arguments):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(plan_command)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_prints_json_alone_and_a_plan_that_reads_back():
    done = run_command(
        "--model", "llama-3.2-1b", "--cluster", "1x4xh200", "--algorithm", "grpo", "--batch", "32", "--json", "-"
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["feasible"] is True and found["reason"] is None
    Plan.from_json(found["stages"])
    assert found["alternatives"] and not found["excluded"]
    assert all(a["step_s"] >= found["step_s"] * (1 - 1e-9) for a in found["alternatives"])


def test_the_command_shows_the_table_and_the_critical_path():
    done = run_command("--model", "llama-3.2-1b", "--cluster", "1x2xh200", "--algorithm", "grpo", "--batch", "8")
    assert done.exit_code == 0, done.output
    assert "critical path" in done.stdout and "tokens/s" in done.stdout


def test_the_command_exits_with_one_where_nothing_fits():
    done = run_command("--model", "llama-3.1-8b", "--cluster", "1x2xh100", "--memory-gb", "4", "--batch", "8")
    assert done.exit_code == 1 and "no plan fits" in done.stdout


@pytest.mark.parametrize(
    "content, named",
    [
        (b"5\n-3\n7\n", "line 2"),
        (b"5\nnan\n7\n", "line 2"),
        (b"5\nseven\n", "'seven' is not a number"),
        (b"100,\n200,\n", "line 2"),
        (b"[1, Infinity]", "inf"),
        (b"[1, null]", "entry 2"),
        (b"[true, 3]", "entry 1"),
        (b"[1", "one number"),
        (b"\xff\xfe\x00\x80", "one number"),
        (b"0\n0\n", "no lengths above 0"),
    ],
)
def test_nothing_in_a_lengths_file_is_skipped_in_silence(tmp_path, content, named):
    source = tmp_path / "lengths.txt"
    source.write_bytes(content)
    with pytest.raises(DataError, match=named) as error:
        load_lengths(source)
    assert str(source) in str(error.value) and "\n" not in str(error.value)


def test_lengths_are_read_in_any_usual_spelling(tmp_path):
    source = tmp_path / "lengths.txt"
    for content in (b"12\r\n1.3e1\r\n", b'tokens\n"12"\n13\n', b"\xef\xbb\xbf12\n\n13", b"[13, 12.0]"):
        source.write_bytes(content)
        assert load_lengths(source).values == (12, 13)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
@pytest.mark.parametrize("key", ["prompt", "response", "memory_gb"])
def test_numbers_that_are_none_are_refused_by_key(key, value):
    with pytest.raises(ConfigError, match=key.replace("_", "-")):
        plan("llama-3.2-1b", "1x2xh100", **{key: value})


@pytest.mark.parametrize(
    "job", [dict(batch=10**15), dict(prompt=1e30), dict(response=1e12), dict(response=Lengths((1.0, 1e13)))]
)
def test_more_tokens_than_are_counted_exactly_are_refused(job):
    with pytest.raises(ConfigError, match="tokens a step"):
        plan("llama-3.2-1b", "1x2xh100", **job)


def test_a_batch_of_a_hundred_million_is_planned():
    assert plan("llama-3.2-1b", "1x2xh100", algorithm="grpo", batch=10**8, prompt=64, response=64).feasible


def test_a_mini_batch_has_a_prompt():
    with pytest.raises(ConfigError, match="mini-batches: 9 given; at most the batch, 8"):
        plan("llama-3.2-1b", "1x2xh100", batch=8, mini_batches=9)


def test_a_memory_limit_below_a_byte_is_a_limit():
    refused = plan("llama-3.2-1b", "1x2xh100", batch=8, memory_gb=1e-12)
    assert not refused.feasible and refused.refusal.limit == "memory"


def test_an_empty_name_is_no_model_and_no_default():
    for role in ("critic", "reward", "reference"):
        with pytest.raises(ModelError, match="built-in names"):
            plan("llama-3.2-1b", "1x2xh100", batch=8, **{role: ""})


def test_a_place_where_json_cannot_be_written_is_said_before_the_search(tmp_path):
    for place in (tmp_path, tmp_path / "missing" / "out.json"):
        with pytest.raises(InputError, match="--json"):
            plan_command("no such model", "1x2xh100", json_file=str(place))


def test_models_that_outnumber_the_devices_they_may_not_share_are_refused_for_devices():
    refused = plan("llama-3.2-1b", "1x2xh100", batch=8, placement="disjoint").refusal
    assert refused.limit == "devices" and "3 models need devices of their own" in refused.reason


@pytest.mark.parametrize(
    "text, named",
    [
        ("", "write actor-training="),
        ("actor-training=d2 actor-training=d1", "actor-training is named twice"),
        ("actor-training=d2@0-9999999999", "0-9999999999 names"),
        ("actor-generation=d1t1/mb=3", "mb"),
        ("actor-training=d1t1/seqs=3", "seqs"),
    ],
)
def test_a_plan_to_compare_that_cannot_be_meant_is_refused(text, named):
    with pytest.raises(PlanError, match=named):
        plan("llama-3.2-1b", "1x2xh100", algorithm="grpo", batch=8, compare=text)


def test_more_memory_never_makes_the_answer_slower():
    steps = [plan("llama-3.2-1b", "1x2xh100", batch=64, memory_gb=gb).price.step_seconds for gb in (28, 30, 40, 80)]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in zip(steps, steps[1:], strict=False))


def test_free_placement_is_never_slower_than_a_stricter_one():
    for devices, batch in (("1x1xh100", 8), ("1x2xh100", 64), ("1x3xh200", 16)):
        rules = {
            rule: plan("llama-3.2-1b", devices, batch=batch, placement=rule)
            for rule in ("free", "colocated", "disjoint")
        }
        steps = {rule: result.price.step_seconds for rule, result in rules.items() if result.feasible}
        assert steps["free"] <= min(steps.values()) * (1 + 1e-9)


def test_what_does_not_fit_in_turn_either_is_not_told_to_run_in_turn():
    refused = plan("llama-3.2-1b", "1x1xh100", batch=1, response=100000).refusal
    assert refused.limit == "memory" and "actor-training" in refused.reason


def test_figures_of_the_table_are_never_cut():
    result = plan("llama-3.1-8b", "2x8xh100", algorithm="grpo", batch=2_000_000)
    console = Console(width=80, file=io.StringIO())
    show(result, console)
    for stage in result.price.stages.values():
        assert f" {stage.cost.seconds:.3f} " in console.file.getvalue()


def test_a_refusal_is_not_hidden_by_a_plan_to_compare_that_leaves_model_stages_out():
    result = plan("qwen2.5-7b", "2x8xa100", memory_gb=10, compare="actor-training=d2t2p4")
    assert not result.feasible and result.refusal.limit == "memory"
    assert result.compared is None and "leaves model-stages out" in result.notes[0]
