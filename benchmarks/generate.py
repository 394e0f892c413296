"""How fast one process generates, against `transformers` and vLLM, and how often fp32 layouts part ways.

    nereus bench generate --json out.json        (--quick: within a minute)

Both sides get the same weights, prompts, sampling and threads, and make the same number of tokens; runs alternate and
medians count. `transformers` runs with the settings, number of threads included, that were fastest in a trial before.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from nereus.comm.groups import Group, build_group, connect_store, serve_store
from nereus.engines.generate import Generator
from nereus.engines.rollout import Request
from nereus.engines.sampling import SamplingParams
from nereus.engines.transformer import StageModel
from nereus.hf_config import read_config
from nereus.plan import Layout
from nereus.shards.boxes import Box
from nereus.shards.state import RankState, StateKind, zeros_on

COMMAND = "nereus bench generate"
BATCH, NEW_TOKENS, PROMPT_TOKENS, SEED = 32, 128, 9, 0
SIZES: dict[str, dict[str, int]] = {
    "quickstart": {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 336,
        "vocab_size": 354,
    },
    "125M": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "intermediate_size": 2048,
        "vocab_size": 25000,
    },
}
TIMEOUT = timedelta(seconds=120)


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """How `transformers` runs, and the threads that both sides get."""

    attention: str
    cache: str
    threads: int


@dataclasses.dataclass(frozen=True, slots=True)
class Effort:
    """How much is run: alternating runs by size, and fp32 sequences a layout."""

    repeats: dict[str, int]
    layout_sequences: int

    @classmethod
    def of(cls, quick: bool) -> "Effort":
        return cls({"quickstart": 4}, 128) if quick else cls({"quickstart": 15, "125M": 2}, 2048)


def run(quick: bool = False) -> dict[str, Any]:
    """Measure, print a table, and return `metrics`, `setup`, `rows` and `command`."""
    effort = Effort.of(quick)
    threads = torch.get_num_threads()
    transformers.logging.set_verbosity_error()
    try:
        rows = [_compare(size, repeats, threads) for size, repeats in effort.repeats.items()]
    finally:
        torch.set_num_threads(threads)
    parted = _parted_sequences(effort.layout_sequences)
    main = rows[0]
    metrics = {
        "vs_transformers": main["vs_transformers"],
        "vs_vllm": main["vs_vllm"],
        "tokens_per_s": main["tokens_per_s"],
        "vs_transformers_by_size": {row["model"]: row["vs_transformers"] for row in rows},
        "greedy_tokens_equal": {row["model"]: row["greedy_tokens_equal"] for row in rows},
        "sequences_that_differ": parted,
    }
    result = {
        "metrics": metrics,
        "setup": _setup(effort),
        "rows": rows,
        "command": COMMAND + (" --quick" if quick else ""),
    }
    _print(result)
    return result


def _compare(size: str, repeats: int, most_threads: int) -> dict[str, Any]:
    """One row: both sides on one model, in alternation."""
    theirs = _twin(size)
    generator, prompts = _generator(theirs, BATCH), _prompts(SIZES[size]["vocab_size"], BATCH)
    setting = _fastest_setting(theirs, prompts, most_threads, new_tokens=24 if size == "quickstart" else 4)
    torch.set_num_threads(setting.threads)
    same = _greedy_agreement(theirs, generator, prompts)
    seconds = _alternate(
        {
            "transformers": lambda: _theirs(theirs, prompts, setting, NEW_TOKENS).numel(),
            "nereus": lambda: sum(len(tokens) for tokens in _ours(generator, prompts, NEW_TOKENS)),
        },
        repeats,
    )
    ours, base = (statistics.median(seconds[name]) for name in ("nereus", "transformers"))
    vllm = _vllm_seconds(theirs, prompts, repeats)
    ratios = [b / a for a, b in zip(seconds["nereus"], seconds["transformers"], strict=True)]
    return {
        "model": size,
        "parameters": sum(p.numel() for p in theirs.parameters()),
        "tokens_per_s": BATCH * NEW_TOKENS / ours,
        "transformers_tokens_per_s": BATCH * NEW_TOKENS / base,
        "vs_transformers": base / ours,
        "vs_transformers_range": [min(ratios), max(ratios)],
        "vs_vllm": None if vllm is None else vllm / ours,
        "transformers_setting": f"{setting.attention}, {setting.cache} cache",
        "threads": setting.threads,
        "greedy_tokens_equal": same,
        "repeats": repeats,
    }


def _alternate(engines: dict[str, Callable[[], int]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each run of each engine; a round before them warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for repeat in range(repeats + 1):
        for name, generate in engines.items():
            start = time.perf_counter()
            made = generate()
            assert made == BATCH * NEW_TOKENS, f"{name} made {made} tokens"
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _twin(size: str) -> transformers.LlamaForCausalLM:
    """A `transformers` Llama with random weights."""
    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(
        **SIZES[size], max_position_embeddings=512, initializer_range=0.08, tie_word_embeddings=False, eos_token_id=None
    )
    return transformers.LlamaForCausalLM(config).eval()


def _stage_model(twin: transformers.LlamaForCausalLM, layout: Layout, rank: int, tp: Group) -> StageModel:
    """The same weights as a rank of a unit holds them."""
    spec = read_config({**twin.config.to_dict(), "architectures": ["LlamaForCausalLM"]})
    dtypes = {StateKind.PARAM: torch.float32}
    state = RankState.allocate(spec, layout, rank, dtypes=dtypes, allocator=zeros_on(torch.device("cpu")))
    weights = twin.state_dict()
    for shard in state.shards:
        state.view(shard.param.name).copy_(weights[shard.param.name][shard.box.within(Box.whole(shard.param.shape))])
    return StageModel(state, tp=tp)


def _generator(twin: transformers.LlamaForCausalLM, slots: int) -> Generator:
    single = Group.single()
    model = _stage_model(twin, Layout(1, 1), 0, single)
    return Generator(model, tp=single, pp=single, max_slots=slots, max_length=PROMPT_TOKENS + NEW_TOKENS)


def _prompts(vocab: int, count: int) -> torch.Tensor:
    """Token ids [count, PROMPT_TOKENS]."""
    return torch.randint(0, vocab, (count, PROMPT_TOKENS), generator=torch.Generator().manual_seed(SEED))


def _ours(
    generator: Generator, prompts: torch.Tensor, new_tokens: int, *, greedy: bool = False
) -> list[tuple[int, ...]]:
    """New tokens of each sequence."""
    requests = [Request(place, 0, tokens) for place, tokens in enumerate(prompts.tolist())]
    generator.load()
    completions = generator.generate(requests, SamplingParams(new_tokens, greedy=greedy, seed=SEED))
    return [completion.tokens for completion in completions]


@torch.inference_mode()
def _theirs(
    twin: transformers.LlamaForCausalLM,
    prompts: torch.Tensor,
    setting: Setting,
    new_tokens: int,
    *,
    greedy: bool = False,
) -> torch.Tensor:
    """New tokens [B, new_tokens]; no end-of-sequence token, so that every sequence gets all."""
    twin.set_attn_implementation(setting.attention)
    sampling: dict[str, Any] = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0, "temperature": 1.0}
    if setting.cache == "static":
        sampling["cache_implementation"] = "static"
    out: torch.Tensor = twin.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=new_tokens,
        eos_token_id=None,
        pad_token_id=0,
        disable_compile=True,
        **sampling,
    )
    return out[:, prompts.shape[1] :]


def _fastest_setting(
    twin: transformers.LlamaForCausalLM, prompts: torch.Tensor, most_threads: int, *, new_tokens: int, tries: int = 2
) -> Setting:
    def seconds(setting: Setting) -> float:
        torch.set_num_threads(setting.threads)
        times = []
        for _ in range(tries):
            start = time.perf_counter()
            _theirs(twin, prompts, setting, new_tokens)
            times.append(time.perf_counter() - start)
        return min(times)

    kinds = [("sdpa", "dynamic"), ("sdpa", "static"), ("eager", "dynamic")]
    settings = [Setting(*kind, threads) for threads in sorted({1, most_threads}) for kind in kinds]
    return min(settings, key=seconds)


def _greedy_agreement(twin: transformers.LlamaForCausalLM, generator: Generator, prompts: torch.Tensor) -> float:
    """Share of greedy tokens on which both sides agree: evidence that they compute the same model."""
    few = 16
    setting = Setting("sdpa", "dynamic", torch.get_num_threads())
    theirs = _theirs(twin, prompts, setting, few, greedy=True).tolist()
    ours = _ours(generator, prompts, few, greedy=True)
    equal = sum(a == b for mine, other in zip(ours, theirs, strict=True) for a, b in zip(mine, other, strict=True))
    return float(equal / (few * len(ours)))


def _vllm_seconds(twin: transformers.LlamaForCausalLM, prompts: torch.Tensor, repeats: int) -> float | None:
    """Median seconds of vLLM on the same weights and prompts, or None where it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        return None
    vllm = importlib.import_module("vllm")
    with tempfile.TemporaryDirectory() as folder:
        twin.save_pretrained(folder)
        engine = vllm.LLM(
            model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=512, max_num_seqs=BATCH
        )
        params = vllm.SamplingParams(temperature=1.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": tokens} for tokens in prompts.tolist()]

        def generate() -> int:
            return sum(len(out.outputs[0].token_ids) for out in engine.generate(inputs, params, use_tqdm=False))

        return statistics.median(_alternate({"vllm": generate}, repeats)["vllm"])


def _parted_sequences(count: int) -> dict[str, float]:
    """Share of `count` fp32 sequences of 48 tokens that differ from those of tp 1 pp 1 with 64 slots."""
    twin = _twin("quickstart")
    prompts = _prompts(SIZES["quickstart"]["vocab_size"], count)
    variants = {"16 slots": (1, 1, 16), "pp 2": (1, 2, 64), "tp 2": (2, 1, 64), "tp 2 pp 2": (2, 2, 64)}
    baseline = _on_layout(twin, prompts, 1, 1, 64)

    def share(variant: tuple[int, int, int]) -> float:
        other = _on_layout(twin, prompts, *variant)
        return sum(a != b for a, b in zip(baseline, other, strict=True)) / count

    return {name: share(variant) for name, variant in variants.items()}


def _on_layout(
    twin: transformers.LlamaForCausalLM, prompts: torch.Tensor, tp_size: int, pp_size: int, slots: int
) -> list[tuple[int, ...]]:
    """Tokens that a unit whose ranks are threads of this process samples."""
    layout, server = Layout(tp_size, pp_size), serve_store()
    results: dict[int, list[tuple[int, ...]]] = {}

    def rank_main(rank: int) -> None:
        torch.set_num_threads(1)
        store = connect_store(server.host, server.port, timeout=TIMEOUT)
        tp_rank, pp_rank = layout.tp_rank(rank), layout.pp_rank(rank)
        tp = build_group(store, f"tp/{pp_rank}", rank=tp_rank, size=tp_size, timeout=TIMEOUT)
        pp = build_group(store, f"pp/{tp_rank}", rank=pp_rank, size=pp_size, timeout=TIMEOUT)
        model = _stage_model(twin, layout, rank, tp)
        generator = Generator(model, tp=tp, pp=pp, max_slots=slots, max_length=64)
        results[rank] = _ours(generator, prompts, 48)
        tp.close()
        pp.close()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(layout.num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results[0]


def _setup(effort: Effort) -> dict[str, Any]:
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "batch": BATCH,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "sizes": {name: SIZES[name] for name in effort.repeats},
        "dtype": "float32",
        "seed": SEED,
        "repeats": effort.repeats,
        "layout_sequences": effort.layout_sequences,
    }


def _print(result: dict[str, Any]) -> None:
    console = Console(width=120)
    table = Table(title=f"generation, {BATCH} x {NEW_TOKENS} tokens, one process, fp32; medians of alternating runs")
    for column in (
        "model",
        "parameters",
        "nereus tok/s",
        "transformers tok/s",
        "ratio (range)",
        "vs vLLM",
        "threads",
        "setting",
    ):
        table.add_column(column, justify="right")
    for row in result["rows"]:
        low, high = row["vs_transformers_range"]
        table.add_row(
            row["model"],
            f"{row['parameters'] / 1e6:.1f}M",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['transformers_tokens_per_s']:,.0f}",
            f"{row['vs_transformers']:.2f} ({low:.2f}-{high:.2f})",
            "not installed" if row["vs_vllm"] is None else f"{row['vs_vllm']:.2f}",
            str(row["threads"]),
            row["transformers_setting"],
        )
    console.print(table)
    count = result["setup"]["layout_sequences"]
    shares = ", ".join(f"{name} {share:.3%}" for name, share in result["metrics"]["sequences_that_differ"].items())
    console.print(f"of {count} fp32 sequences of 48 tokens, differing from tp 1 pp 1 with 64 slots: {shares}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    measured = run(arguments.quick)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(measured, indent=2))
