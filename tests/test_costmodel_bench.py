import dataclasses
import importlib
import math
import sys
from pathlib import Path

import pytest
import torch

from nereus.comm.groups import Group
from nereus.engine_facts import SAMPLING_COPIES
from nereus.engines.sampling import Sampler, SamplingParams
from nereus.plan import Layout, Recompute, StagePlan

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"

needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the published data is not beside the repository")


@pytest.fixture(scope="module")
def benchmark():
    """Imports a benchmark's module by its name."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def training(benchmark):
    return benchmark("costmodel_training")


@needs_data
def test_repeats_of_one_configuration_count_once_and_nothing_else_is_dropped(training):
    rows = training.load_rows(DATA)
    assert sum(row["repeats"] for row in rows) == 241
    assert len(rows) == 239


@needs_data
def test_every_published_training_row_is_predicted_or_calibrated_on(training):
    rows = training.load_rows(DATA)
    fits = training.evaluate(rows)
    seen = [row for fit in fits for row in [*fit.calibrated_on, *fit.errors]]
    assert sorted(seen) == sorted(row["id"] for row in rows)
    for fit in fits:
        assert len(fit.calibrated_on) == max(1, (len(fit.calibrated_on) + len(fit.errors)) // 10)
        assert all(math.isfinite(error) for error in fit.errors.values())


@needs_data
def test_dense_runs_of_one_source_are_predicted_within_the_goal(training):
    fits = {fit.source.split()[0]: fit.mape for fit in training.evaluate(training.load_rows(DATA))}
    assert fits["MosaicML"] < 0.0496
    assert fits["llm-analysis"] < 0.0496


def test_a_run_counts_the_same_products_however_it_is_cut(training):
    from nereus.cluster import Link
    from nereus.planner.prices.operations import Op, Shape

    shape = Shape(layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008, vocab=0)

    def work(**changes):
        settings = {
            "source": "mine", "accelerator": "a100", "node": 8, "shape": shape, "layer_params": shape.layer_params,
            "tp": 1, "pp": 1, "dp": 1, "cp": 1, "ep": 1, "vpp": 1, "zero": 0, "micro_batch": 1, "micro_batches": 64,
            "seq_len": 2048, "sequence_parallel": False, "async_tp": False, "recompute": "none", "precision": "bf16",
            "step_s": 1.0,
        }  # fmt: skip
        shown, hidden = training.count(training.Run(**(settings | changes)))
        return {key: amount for bill in (shown, hidden) for key, amount, _ in bill}

    gemm, attention = (Op.GEMM, None), (Op.ATTENTION, None)
    whole = work()
    assert work(tp=4)[gemm] == pytest.approx(whole[gemm] / 4)
    assert work(cp=4)[attention] == pytest.approx(whole[attention] / 4)
    assert work(pp=4)[gemm] == pytest.approx(whole[gemm] / 4 * (1 + 3 / 64))
    assert work(pp=4, vpp=4)[gemm] == pytest.approx(whole[gemm] / 4 * (1 + 3 / 4 / 64))
    assert work(recompute="full")[gemm] == pytest.approx(whole[gemm] * 4 / 3)
    gathered = work(dp=8, zero=3)[(Op.ALL_GATHER, Link.INTRA_NODE)]
    assert gathered == pytest.approx(64 * 2 * work(dp=8)[(Op.ALL_GATHER, Link.INTRA_NODE)])


@pytest.mark.parametrize("recompute", list(Recompute))
def test_an_update_holds_what_the_memory_model_says(benchmark, recompute):
    workers, memory = benchmark("costmodel_workers"), benchmark("costmodel_memory")
    spec = dataclasses.replace(workers.SPEC, num_layers=2)
    case = workers.Case("training", StagePlan.of(Layout(), (0,)), (300, 300), 2, spec, recompute)
    rank = workers.EngineRank(case, 0, None, epoch=0)
    rank.peak(case)  # what is allocated once
    row = memory.compared(case, {0: rank.held_bytes}, {0: max(rank.peak(case) for _ in range(4))})
    assert row["state_bytes"] == row["predicted_state_bytes"]
    assert abs(row["error"]) < 0.1


def test_sampling_holds_as_many_copies_of_the_logits_as_the_memory_model_says(benchmark):
    workers, slots, vocab = benchmark("costmodel_workers"), 64, 1 << 15
    sampler = Sampler(SamplingParams(1), first_row=0, num_rows=vocab, tp=Group.single(), device=torch.device("cpu"))
    logits, keys = torch.randn(slots, vocab), torch.arange(slots)
    peak = max(workers.heap_peak(lambda: sampler(logits, keys, keys)) for _ in range(3))
    assert 1 + peak / logits.nbytes == pytest.approx(SAMPLING_COPIES, rel=0.05)


@needs_data
def test_every_published_memory_figure_is_compared_or_left_out_with_a_reason(benchmark):
    published = benchmark("costmodel_published_memory")
    rows = published.load_rows(DATA)
    found = published.figures(rows)
    left_out = {row["id"] for row in rows if published.excluded(row)}
    assert {figure.id for figure in found} | left_out == {row["id"] for row in rows}
    assert not {figure.id for figure in found} & left_out
    assert len(rows) == 39 and len(left_out) == 11


@needs_data
def test_published_memory_is_predicted_from_stated_settings(benchmark):
    published = benchmark("costmodel_published_memory")
    errors = published.summary(published.figures(published.load_rows(DATA)))
    assert errors["litgpt resource tables"]["max"] < 0.05
    assert errors["Reducing Activation Recomputation Fig. 1"]["max"] < 0.1
    assert errors["Reducing Activation Recomputation Fig. 7"]["max"] < 0.01
    assert errors["torchtitan benchmarks"]["mape"] < 0.15


def test_a_megatron_layer_keeps_what_its_paper_counts(benchmark):
    from nereus.planner.prices.operations import Shape

    published = benchmark("costmodel_published_memory")
    h, a, s = 6144, 64, 2048
    shape = Shape(layers=48, hidden=h, heads=a, kv_heads=a, head_dim=h // a, ffn=4 * h, vocab=0, mlp_matrices=2)

    def kept(tp=1, recompute="none", sequence_parallel=False):
        return published.megatron_layer_bytes(
            shape, tp=tp, seq_len=s, recompute=recompute, sequence_parallel=sequence_parallel
        )

    assert kept() == 34 * h + 5 * a * s
    assert kept(tp=8) == 10 * h + 24 * h / 8 + 5 * a * s / 8
    assert kept(tp=8, sequence_parallel=True) == kept() / 8
    assert kept(tp=8, recompute="selective") == 10 * h + 24 * h / 8
    assert kept(tp=8, recompute="full") == 2 * h
