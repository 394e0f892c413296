"""The sections of a recipe: their keys, bounds and defaults, and what each checks of itself alone.

What several sections must agree on is checked by the whole recipe (`config.py`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field

from nereus.engine_facts import DTYPE_ALIASES
from nereus.errors import ConfigError
from nereus.model import ModelSpec

__all__ = [
    "ALGORITHM_OF",
    "ActorConfig",
    "AlgorithmConfig",
    "ClusterConfig",
    "CriticConfig",
    "DataConfig",
    "DataSource",
    "ModelConfig",
    "OptimizerConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunFolderConfig",
    "Section",
    "ShapeConfig",
    "SupplyConfig",
    "TrainerConfig",
    "TransitionConfig",
    "TriggerConfig",
    "WarmStartConfig",
]


def _number(value: object) -> object:
    """Refuse yes and no, which would pass as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("it must be a number")
    return value


HomePath = Annotated[Path, AfterValidator(Path.expanduser)]
"""A path; `~` is the home folder."""

Count = Annotated[int, BeforeValidator(_number), Field(ge=1)]
Whole = Annotated[int, BeforeValidator(_number), Field(ge=0)]
Positive = Annotated[float, BeforeValidator(_number), Field(gt=0)]
NonNegative = Annotated[float, BeforeValidator(_number), Field(ge=0)]
Share = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1)]

KL_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
LOSS_ALIASES = {"seq-mean-token-sum": "sequence-sum", "seq-mean-token-mean": "sequence-mean"}


def _alias(names: Mapping[str, str]) -> BeforeValidator:
    return BeforeValidator(lambda value: names.get(value, value) if isinstance(value, str) else value)


KlEstimator = Annotated[Literal["k1", "k2", "k3"], _alias(KL_ALIASES)]
LossAggregation = Annotated[Literal["token-mean", "sequence-sum", "sequence-mean"], _alias(LOSS_ALIASES)]


class Section(pydantic.BaseModel):
    """A frozen group of keys that refuses keys it does not know."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)


class ShapeConfig(Section):
    """A Llama-shaped model made from random weights in the warm start, for recipes that need no download."""

    hidden: Count
    num_layers: Count
    num_heads: Count
    num_kv_heads: Count
    ffn: Count
    max_positions: Count = 512

    def spec(self, *, vocab: int) -> ModelSpec:
        """The model over a tokenizer's vocabulary; raises ConfigError where the shape is none."""
        if self.hidden % self.num_heads or (self.hidden // self.num_heads) % 2:
            raise ConfigError(
                "model.shape.hidden", f"got {self.hidden}; it must be an even multiple of num_heads {self.num_heads}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                "model.shape.num_kv_heads", f"got {self.num_kv_heads}; it must divide num_heads {self.num_heads}"
            )
        return ModelSpec(
            family="llama",
            num_layers=self.num_layers,
            hidden=self.hidden,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.hidden // self.num_heads,
            ffn=self.ffn,
            vocab=vocab,
            rms_eps=1e-5,
            max_positions=self.max_positions,
        )


class ModelConfig(Section):
    """`path`: the HF folder the actor starts from; or `shape`: a new model that the warm start trains."""

    path: HomePath | None = None
    shape: ShapeConfig | None = None


class DataSource(pydantic.BaseModel):
    """`files`: jsonl or parquet with verl's columns; or `reasoning_gym`: a task by name, its index range and options.

    Options of the task (`min_terms: 4`) stand beside `seed` and `size`.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="allow")

    files: Annotated[tuple[HomePath, ...], BeforeValidator(lambda v: (v,) if isinstance(v, str | Path) else v)] = ()
    reasoning_gym: str | None = None
    seed: Whole = 0
    size: Count = 1000

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the reasoning-gym task."""
        return dict(self.model_extra or {})


def _source(value: object) -> object:
    """A path, or several, is short for `files`."""
    if isinstance(value, str | Path):
        return {"files": [value]}
    return {"files": value} if isinstance(value, list) else value


Source = Annotated[DataSource, BeforeValidator(_source)]


class DataConfig(Section):
    """`tokenizer`: an HF folder, `byte`, or `trained` (by the warm start, with at most `vocab_size` tokens); by default
    the model folder's. Lengths are in tokens."""

    train: Source
    val: Source
    tokenizer: str | None = None
    vocab_size: Annotated[int, Field(ge=258)] = 384
    train_batch_size: Count = 64
    max_prompt_length: Count = 512
    max_response_length: Count = 512

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        for key, source in (("data.train", self.train), ("data.val", self.val)):
            if bool(source.files) == (source.reasoning_gym is not None):
                raise ConfigError(key, "give files (jsonl or parquet) or reasoning_gym (a task's name), one of the two")
            if source.files and source.options:
                unknown = next(iter(source.options))
                raise ConfigError(f"{key}.{unknown}", "unknown key; options of a task need reasoning_gym")
        return self


class RolloutConfig(Section):
    """How responses are sampled. `max_num_seqs`: sequences one generation unit decodes at a time; by default the
    planner chooses."""

    engine: Literal["native"] = "native"
    n: Count = 1
    temperature: NonNegative = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    stop_token_ids: tuple[Whole, ...] = ()
    max_num_seqs: Count | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_k == 0:
            raise ConfigError("rollout.top_k", "got 0; it must be -1 (off) or at least 1")
        return self


ALGORITHM_OF = {"gae": "ppo"}
"""The name of the algorithm that each estimator of advantages makes; the roles it uses are in `nereus.workflow`."""


class AlgorithmConfig(Section):
    """Advantages and the KL penalty. `adv_estimator` chooses the algorithm.

    `kl_penalty` also takes verl's names kl, mse and low_var_kl.
    """

    adv_estimator: Literal["gae"] = "gae"
    gamma: Share = 1.0
    lam: Share = 1.0
    kl_coef: NonNegative = 0.001
    kl_penalty: KlEstimator = "k1"
    use_kl_in_reward: bool = True
    whiten_advantages: bool = True

    @property
    def name(self) -> str:
        """The algorithm's name."""
        return ALGORITHM_OF[self.adv_estimator]

    @property
    def kl_weight(self) -> float:
        """What the KL divergence to the reference weighs in the reward; 0 leaves it out."""
        return self.kl_coef if self.use_kl_in_reward else 0.0


class OptimizerConfig(Section):
    """AdamW with warm-up and decay, counted in RL steps. `grad_clip` bounds the global gradient norm."""

    lr: Positive
    lr_warmup_steps: Whole = 0
    lr_decay: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: Share = 0.0
    weight_decay: NonNegative = 0.0
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: Positive = 1e-8
    grad_clip: Positive = 1.0


class ActorConfig(OptimizerConfig):
    """`ppo_mini_batch_size` counts prompts, as in verl; `ppo_micro_batch_size` samples of one unit at a time, by
    default as the planner chooses.

    `clip_ratio_low` and `clip_ratio_high` replace `clip_ratio` on their side of 1; `clip_ratio_c` bounds the loss where
    the advantage is negative.
    """

    lr: Positive = 1e-6
    ppo_mini_batch_size: Count = 16
    ppo_micro_batch_size: Count | None = None
    ppo_epochs: Count = 1
    clip_ratio: Positive = 0.2
    clip_ratio_low: Positive | None = None
    clip_ratio_high: Positive | None = None
    clip_ratio_c: Annotated[float, BeforeValidator(_number), Field(gt=1)] = 3.0
    entropy_coeff: NonNegative = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: NonNegative = 0.001
    kl_loss_type: KlEstimator = "k3"
    loss_agg_mode: LossAggregation = "token-mean"

    @property
    def clip_low(self) -> float:
        """How far below 1 ratios are clipped."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """How far above 1 ratios are clipped."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high

    @property
    def kl_weight(self) -> float:
        """What the KL divergence to the reference weighs in the loss; 0 leaves it out."""
        return self.kl_loss_coef if self.use_kl_loss else 0.0


class CriticConfig(OptimizerConfig):
    """`path`: the folder its body starts from (by default the actor's, with a fresh scalar head)."""

    lr: Positive = 1e-5
    path: HomePath | None = None
    cliprange_value: Positive = 0.5


class RewardConfig(Section):
    """`function` scores a response (`package.module:function` or `file.py:function`); where there is a reward model
    (`model`: a folder, or one trained by the warm start) the model's score trains and the function only validates."""

    function: str | None = None
    model: HomePath | None = None
    timeout_s: Positive = 5.0
    num_processes: Count = 2


class WarmStartConfig(Section):
    """Supervised steps before the first RL step, on the task's worked and direct answers.

    `worked_share` of the answers are worked until `switch_at` of the steps, `late_worked_share` after.
    `reward_steps`: steps that train a reward model on right and wrong answers. Results are kept in `cache`.
    """

    steps: Whole = 0
    batch: Count = 64
    lr: Positive = 3e-3
    worked_share: Share = 0.7
    switch_at: Share = 0.8
    late_worked_share: Share = 0.15
    reward_steps: Whole = 0
    reward_lr: Positive = 1e-3
    cache: HomePath = Path(".cache/nereus")


class TrainerConfig(Section):
    """`critic_warmup`: the actor starts to learn after so many steps. `val_every` 0: only before and after the run.

    `recompute`: what updates compute again instead of keeping it, to need less memory: norms and activations
    (`selective`) or whole layers (`full`); by default the planner chooses.
    """

    steps: Count = 20
    seed: Whole = 0
    val_every: Whole = 5
    val_samples: Count = 200
    critic_warmup: Whole = 0
    dtype: Annotated[Literal["fp32", "bf16", "fp64"], _alias(DTYPE_ALIASES)] = "fp32"
    recompute: Literal["none", "selective", "full"] | None = None


class ClusterConfig(Section):
    """Local workers, or a Ray cluster joined by `address` (`auto`). `memory_gb` is of a device, `cores` of a node.

    `host_memory_gb` of a node may hold what a transition has no room for on devices; by default as much as its largest
    device has. 0: such transitions are refused.
    """

    workers: Count = 4
    memory_gb: Positive | None = None
    host_memory_gb: NonNegative | None = None
    address: str | None = None
    cores: Count | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    timeout_s: Positive = 60.0

    @property
    def host_bytes_per_node(self) -> int | None:
        return None if self.host_memory_gb is None else int(self.host_memory_gb * 1e9)


class TransitionConfig(Section):
    """A change of plan before step `step`; model-stages not named keep theirs."""

    step: Count
    plan: dict[str, str]


class SupplyConfig(Section):
    """`trace`: a file of device counts over time; `notices`: a file or URL that announces devices to be taken away.

    Without a trace: the nodes of a joined cluster as they come and go, or `cluster.workers` devices all the time.
    """

    trace: HomePath | None = None
    notices: str | None = None
    seed: Whole = 0


class TriggerConfig(Section):
    """Relative drift of a signal that starts a replan."""

    length: Positive = 0.30
    efficiency: Positive = 0.15


class RunFolderConfig(Section):
    """Where the run writes. `overwrite`: an earlier run in `dir` is replaced; otherwise a new one there is refused."""

    dir: HomePath = Path("runs/nereus")
    overwrite: bool = False
