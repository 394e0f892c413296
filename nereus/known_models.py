"""Models known by name: the numbers of their published `config.json`, no weights.

Rotary bases and positions matter to the engine only; they are here so that a spec by name equals the one of the
model's own folder.
"""

import re
from pathlib import Path

from nereus.errors import ModelError
from nereus.hf_config import read_model
from nereus.model import Llama3RopeScaling, ModelSpec


def _llama3(layers: int, hidden: int, heads: int, head_dim: int, ffn: int, *, tied: bool, factor: float) -> ModelSpec:
    """Llama 3.1 and 3.2: 8 KV heads, vocabulary 128,256, scaled rotary frequencies."""
    return ModelSpec(
        family="llama", num_layers=layers, hidden=hidden, num_heads=heads, num_kv_heads=8, head_dim=head_dim, ffn=ffn,
        vocab=128256, tied=tied, rms_eps=1e-5, rope_theta=500000.0, max_positions=131072,
        rope_scaling=Llama3RopeScaling(
            factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
        ),
    )  # fmt: skip


def _qwen25(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, *, vocab: int = 152064, positions: int = 131072
) -> ModelSpec:
    """Qwen2.5: biases on q, k, v; the small ones tie their embeddings and have vocabulary 151,936."""
    return ModelSpec(
        family="qwen2", num_layers=layers, hidden=hidden, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=hidden // heads, ffn=ffn, vocab=vocab, tied=vocab == 151936, qkv_bias=True, rms_eps=1e-6,
        rope_theta=1000000.0, max_positions=positions,
    )  # fmt: skip


def _qwen3(layers: int, hidden: int, heads: int, ffn: int, *, tied: bool) -> ModelSpec:
    """Qwen3 dense: norms on q and k, 8 KV heads, head size 128 whatever the hidden size."""
    return ModelSpec(
        family="qwen3", num_layers=layers, hidden=hidden, num_heads=heads, num_kv_heads=8, head_dim=128, ffn=ffn,
        vocab=151936, tied=tied, qk_norm=True, rms_eps=1e-6, rope_theta=1000000.0, max_positions=40960,
    )  # fmt: skip


MODELS = {
    "llama-3.1-8b": _llama3(32, 4096, 32, 128, 14336, tied=False, factor=8.0),
    "llama-3.1-70b": _llama3(80, 8192, 64, 128, 28672, tied=False, factor=8.0),
    "llama-3.2-1b": _llama3(16, 2048, 32, 64, 8192, tied=True, factor=32.0),
    "llama-3.2-3b": _llama3(28, 3072, 24, 128, 8192, tied=True, factor=32.0),
    "qwen2.5-0.5b": _qwen25(24, 896, 14, 2, 4864, vocab=151936, positions=32768),
    "qwen2.5-1.5b": _qwen25(28, 1536, 12, 2, 8960, vocab=151936),
    "qwen2.5-3b": _qwen25(36, 2048, 16, 2, 11008, vocab=151936, positions=32768),
    "qwen2.5-7b": _qwen25(28, 3584, 28, 4, 18944),
    "qwen2.5-14b": _qwen25(48, 5120, 40, 8, 13824),
    "qwen2.5-32b": _qwen25(64, 5120, 40, 8, 27648),
    "qwen2.5-72b": _qwen25(80, 8192, 64, 8, 29568),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288, tied=False),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408, tied=False),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600, tied=False),
}
"""Base models as their makers publish them; sizes and flags agree with the published parameter counts (a test)."""

_SUFFIX = re.compile(r"-(instruct|base|hf)$")


def model_by_name(name: str) -> ModelSpec | None:
    """The built-in model called `name`, in any case, owner and `-Instruct` allowed; None where unknown."""
    plain = _SUFFIX.sub("", name.strip().lower().rsplit("/", 1)[-1]).replace("meta-llama", "llama")
    return MODELS.get(plain)


def load_spec(text: str | Path) -> ModelSpec:
    """The spec of an HF folder, a `config.json`, or a built-in name; raises ModelError listing the names."""
    path = Path(text)
    if str(text) and path.exists():
        return read_model(path)
    found = model_by_name(str(text))
    if found is None:
        raise ModelError(f"model {str(text)!r}: no such folder or config.json; built-in names: {', '.join(MODELS)}")
    return found
