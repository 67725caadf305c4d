"""Types, choices and ranges of the configuration.

YAML under conf/ carries the values; the dataclasses here say what may stand there. Hydra merges every option into its
dataclass, so that an unknown key, a wrong type or a wrong choice is refused while composing, in overlays too. What
types cannot say is held by `training.config.validation`.

Nothing here imports torch: `python train.py --cfg job` answers at once.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


def number(at_least: float | None = None, above: float | None = None, at_most: float | None = None) -> Any:
    """A numeric key whose range `training.config.validation` holds; its value comes from YAML."""
    return field(default=MISSING, metadata={"at_least": at_least, "above": above, "at_most": at_most})


class Precision(StrEnum):
    """bf16: weights and compute in bfloat16, with float32 master weights in the optimizer; fp32: all in float32."""

    bf16 = "bf16"
    fp32 = "fp32"


class Pin(StrEnum):
    """auto: page-lock host memory, and warn once where that fails; off: use pageable memory."""

    auto = "auto"
    off = "off"


class StateDtype(StrEnum):
    """Of the optimizer's moments, which are computed in float32 either way."""

    fp32 = "fp32"
    bf16 = "bf16"


class Compile(StrEnum):
    """auto: the fastest kernel, compiled where there is a compiler; off: torch's own."""

    auto = "auto"
    off = "off"


class OnNonfinite(StrEnum):
    """Where gradients are not finite. stop: the run ends; skip: the step is left out, and the run goes on."""

    stop = "stop"
    skip = "skip"


class TrackingMode(StrEnum):
    """auto: what WANDB_MODE says, else online where an API key is set and offline where none is."""

    auto = "auto"
    online = "online"
    offline = "offline"
    disabled = "disabled"


@dataclass
class Built:
    """An option that becomes an object: its keys are the arguments of `_target_`, as plain Python values."""

    _target_: str = MISSING
    _convert_: str = "all"


@dataclass
class Resident(Built):
    _target_: str = "offload.modes.none.Resident"


class Elsewhere(StrEnum):
    """What a mode's cuts leave out does: resident on the device, or stream as well."""

    resident = "resident"
    stream = "stream"


class Boundary(StrEnum):
    """Where the inputs of recomputed blocks wait for backward."""

    host = "host"
    device = "device"


@dataclass
class WeightMode(Built):
    """The knobs that modes which stream weights have in common."""

    slots: int = number(at_least=1)
    prefetch: int | None = number(at_least=0)
    resident: str | int = MISSING
    include: list[str] = MISSING
    exclude: list[str] = MISSING
    pin: Pin = MISSING


@dataclass
class BounceLinear(WeightMode):
    _target_: str = "offload.modes.bounce_linear.BounceLinear"
    outside: Elsewhere = MISSING


@dataclass
class LayerStream(WeightMode):
    _target_: str = "offload.modes.layer_stream.LayerStream"
    layers: str | None = MISSING
    outside: Elsewhere = MISSING


@dataclass
class ShardOffload(WeightMode):
    _target_: str = "offload.modes.shard_offload.ShardOffload"
    layers: str | None = MISSING
    shards: int | None = number(at_least=1)
    shard_bytes: str | int = MISSING
    checkpoint: bool = MISSING
    boundary: Boundary = MISSING


@dataclass
class TensorSwap(Built):
    _target_: str = "offload.modes.tensor_swap.TensorSwap"
    weights: Any = MISSING
    layers: list[str] | None = MISSING
    min_bytes: str | int = MISSING
    budget: str | int = MISSING
    keep_last: int = number(at_least=0)
    prefetch: str | int = MISSING
    host_budget: str | int | None = MISSING
    predicate: str | None = MISSING
    pin: Pin = MISSING


@dataclass
class SaveOnCpu(Built):
    _target_: str = "offload.modes.save_on_cpu.SaveOnCpu"
    weights: Any = MISSING
    pin: Pin = MISSING


@dataclass
class Llama(Built):
    _target_: str = "models.llama.Llama"
    vocab_size: int = number(at_least=1)
    hidden_size: int = number(at_least=1)
    intermediate_size: int = number(at_least=1)
    # More would take minutes to be made, weights aside.
    num_hidden_layers: int = number(at_least=1, at_most=10_000)
    num_attention_heads: int = number(at_least=1)
    num_key_value_heads: int = number(at_least=1)
    rope_theta: float = number(above=0)
    rms_norm_eps: float = number(above=0)
    tie_word_embeddings: bool = MISSING
    weights: str | None = MISSING


@dataclass
class Text(Built):
    """What every dataset of text takes; the builder adds seed, seq_len and batch_size."""

    tokenizer: str | None = MISSING
    max_tokens: int | None = number(at_least=1)


@dataclass
class StdlibText(Text):
    _target_: str = "training.data.datasets.StdlibText"


@dataclass
class TextFiles(Text):
    _target_: str = "training.data.datasets.TextFiles"
    # One pattern or a list of them; OmegaConf knows no type for that, so `training.config.validation` holds it.
    files: Any = MISSING
    text_column: str = MISSING


@dataclass
class HubText(Text):
    _target_: str = "training.data.datasets.HubText"
    name: str = MISSING
    config_name: str | None = MISSING
    split: str = MISSING
    text_column: str = MISSING
    revision: str | None = MISSING
    shuffle_buffer: int = number(at_least=1)


@dataclass
class SyntheticTokens(Built):
    _target_: str = "training.data.datasets.SyntheticTokens"
    vocab_size: int = number(at_least=1)


@dataclass
class AdamW(Built):
    _target_: str = "training.optim.AdamW"
    lr: float = number(at_least=0)
    betas: tuple[float, float] = MISSING
    eps: float = number(above=0)
    weight_decay: float = number(at_least=0)
    decay_norms_and_biases: bool = MISSING


@dataclass
class HostAdamW(AdamW):
    _target_: str = "offload.optimizer.adamw.HostAdamW"
    state_dtype: StateDtype = MISSING
    device_share: str | int = MISSING
    visiting_share: float = number(at_least=0, at_most=1)
    threads: int | None = number(at_least=1, at_most=1024)
    compile: Compile = MISSING


@dataclass
class ConstantSchedule(Built):
    _target_: str = "training.optim.constant"
    warmup: int = number(at_least=0)


@dataclass
class LinearSchedule(ConstantSchedule):
    _target_: str = "training.optim.linear"
    final: float = number(at_least=0)


@dataclass
class CosineSchedule(LinearSchedule):
    _target_: str = "training.optim.cosine"


@dataclass
class RecomputeNothing:
    pass


@dataclass
class RecomputeBlocks:
    blocks: str | None = MISSING


@dataclass
class Tracking:
    mode: TrackingMode = MISSING
    project: str = MISSING
    entity: str | None = MISSING
    group: str | None = MISSING
    tags: list[str] = MISSING


@dataclass
class Checkpointing:
    """When a run saves itself; `on_signal` null: wherever it saves itself at all."""

    every: int | None = number(at_least=1)
    keep: int = number(at_least=1)
    on_signal: bool | None = MISSING


@dataclass
class Hardware:
    """A machine to plan for; see `training.planning.machine.Machine`. What is null is measured, or kept by the probe"""

    name: str | None = MISSING
    vram_gib: float | None = number(above=0)
    host_gib: float | None = number(above=0)
    cores: int | None = number(at_least=1)
    h2d_gb_s: float | None = number(above=0)
    d2h_gb_s: float | None = number(above=0)
    both_gb_s: float | None = number(above=0)
    bf16_tflops: float | None = number(above=0)
    fp32_tflops: float | None = number(above=0)
    update_gparams_s: float | None = number(above=0)
    device_gb_s: float | None = number(above=0)


@dataclass
class TrainConfig:
    """The top level. Each group holds the option that was chosen, with that option's own dataclass."""

    offload: Any = MISSING
    model: Any = MISSING
    dataset: Any = MISSING
    optimizer: Any = MISSING
    schedule: Any = MISSING
    recompute: Any = MISSING
    tracking: Any = MISSING
    hardware: Any = MISSING
    plan: bool = MISSING
    seed: int = number(at_least=0, at_most=2**64 - 1)
    steps: int = number(at_least=1)
    batch_size: int = number(at_least=1, at_most=1_000_000)
    microbatches: int = number(at_least=1)
    seq_len: int = number(at_least=1)
    device: str = MISSING
    precision: Precision = MISSING
    clip_norm: float | None = number(above=0)
    on_nonfinite: OnNonfinite = MISSING
    vram_budget: str | int | None = MISSING
    host_budget: str | int | None = MISSING
    warmup_steps: int = number(at_least=0)
    log_every: int = number(at_least=1)
    trace: bool = MISSING
    trace_step: int | None = number(at_least=1)
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    resume: str | None = MISSING


SCHEMAS = {
    "offload": {
        "none": Resident,
        "bounce_linear": BounceLinear,
        "layer_stream": LayerStream,
        "shard_offload": ShardOffload,
        "tensor_swap": TensorSwap,
        "save_on_cpu": SaveOnCpu,
    },
    "model": {"llama": Llama},
    "dataset": {"stdlib": StdlibText, "text": TextFiles, "hub": HubText, "synthetic": SyntheticTokens},
    "optimizer": {"adamw": AdamW, "host_adamw": HostAdamW},
    "schedule": {"constant": ConstantSchedule, "linear": LinearSchedule, "cosine": CosineSchedule},
    "recompute": {"none": RecomputeNothing, "block": RecomputeBlocks},
    "tracking": {"wandb": Tracking},
    "hardware": {"figures": Hardware},
}


def register() -> None:
    """Stores the dataclasses under the group `schema`, from which the defaults lists of conf/ take them."""
    store = ConfigStore.instance()
    store.store(group="schema", name="train", node=TrainConfig)
    for group, options in SCHEMAS.items():
        for name, schema in options.items():
            store.store(group=f"schema/{group}", name=name, node=schema)
