"""A recipe that names everything a job reads, all of it small and made on the spot."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from jobs import SPEC

from nereus.checkpoint.hf import init_tensors, save_folder
from nereus.data.tokenizers import byte_tokenizer
from nereus.model import Head

PLAN = {
    "actor-generation": "d1t1p1@0",
    "actor-training": "d1t1p1@0",
    "critic-training": "d1t1p1@0",
    "critic-inference": "d1t1p1@0",
    "reference-inference": "d1t1p1@0",
    "reward-inference": "d1t1p1@0",
}


def job_recipe(folder: Path) -> dict[str, Any]:
    """A recipe with all four models from folders and with a reward function."""
    byte_tokenizer().save(folder / "tokenizer")
    for name, head in (("actor", Head.LM), ("reward", Head.SCORE)):
        spec = dataclasses.replace(SPEC, vocab=258).with_head(head)
        save_folder(folder / name, spec, init_tensors(spec, seed=0), tokenizer_folder=folder / "tokenizer")
    for name in ("train", "val"):
        row = {"data_source": "t", "reward_model": {"ground_truth": "1"}}
        rows = [json.dumps({**row, "prompt": f"{name} {i}"}) for i in range(6)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    return {
        "model": {"path": str(folder / "actor")},
        "data": {
            "train": str(folder / "train.jsonl"), "val": str(folder / "val.jsonl"), "train_batch_size": 4,
            "max_prompt_length": 16, "max_response_length": 8,
        },
        "rollout": {"temperature": 0.7, "top_k": 5, "stop_token_ids": [9]},
        "actor": {"ppo_mini_batch_size": 2, "lr": 1e-3, "ppo_epochs": 3},
        "critic": {"lr": 1e-2},
        "reward": {"function": "nereus.data.rewards:exact_answer", "model": str(folder / "reward")},
        "trainer": {"dtype": "fp64"},
        "cluster": {"workers": 1},
        "plan": dict(PLAN),
        "run": {"dir": str(folder / "run")},
    }  # fmt: skip
