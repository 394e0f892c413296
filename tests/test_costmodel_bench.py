import importlib
import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"

needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the published data is not beside the repository")


@pytest.fixture(scope="module")
def training():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("costmodel_training")
    sys.path.remove(str(ROOT / "benchmarks"))


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
    from nereus.planner.operations import Op, Shape

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
