"""Types, choices and ranges of the configuration.

YAML under conf/ has the values; the dataclasses here have the possible values. Hydra merges every option into its
dataclass, so that an unknown key, a wrong type or a wrong choice is refused while composing, in overlays too.
`validation` checks what types cannot express. The dataclasses of modes, tasks and optimizers are made from the
arguments of their classes (`declare.schema_of`).
"""

from dataclasses import dataclass, field, make_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.utils import get_class
from omegaconf import MISSING, DictConfig, OmegaConf

from offload import HostAdamW
from training.config.adapter import OPTIONS as ADAPTER_OPTIONS
from training.config.adapter import has_adapter
from training.config.cards import PRESETS
from training.config.datasets import DATASETS
from training.config.declare import LONGEST, Built, number, renamed, schema_of
from training.config.modes import all_options
from training.optim import AdamW

ROOT = Path(__file__).parents[2]


class Precision(StrEnum):
    """bf16: bfloat16, with float32 masters in the optimizer; fp32: all float32; auto: bf16 if the GPU supports it."""

    auto = "auto"
    bf16 = "bf16"
    fp32 = "fp32"


class OnNonfinite(StrEnum):
    """For gradients that are not finite. stop: the run ends. skip: the step is left out, and the run continues."""

    stop = "stop"
    skip = "skip"


class TrackingMode(StrEnum):
    """auto: as WANDB_MODE says, else online where an API key is set, and offline where none is."""

    auto = "auto"
    online = "online"
    offline = "offline"
    disabled = "disabled"


@dataclass
class Llama(Built):
    _target_: str = "models.llama.Llama"
    vocab_size: int = number(at_least=1)
    hidden_size: int = number(at_least=1)
    intermediate_size: int = number(at_least=1)
    # Making the modules of more layers would take minutes.
    num_hidden_layers: int = number(at_least=1, at_most=10_000)
    num_attention_heads: int = number(at_least=1)
    num_key_value_heads: int = number(at_least=1)
    rope_theta: float = number(above=0)
    rms_norm_eps: float = number(above=0)
    tie_word_embeddings: bool = MISSING
    weights: str | None = MISSING


@dataclass
class OfLibrary(Built):
    """The keys of every model of another library."""

    source: str = MISSING
    # A dictionary of any keys, or null. OmegaConf would refuse new keys in a dictionary that is there already.
    overrides: Any = MISSING
    weights: str | None = MISSING


@dataclass
class HuggingFace(OfLibrary):
    _target_: str = "models.hf.build_hf"
    task: str = MISSING
    attention: str = MISSING


@dataclass
class Pipeline(OfLibrary):
    _target_: str = "models.pipelines.model.build_pipeline"


@dataclass
class ConstantSchedule(Built):
    _target_: str = "training.optim.constant"
    warmup: int | str = number(at_least=0)


@dataclass
class LinearSchedule(ConstantSchedule):
    _target_: str = "training.optim.linear"
    final: float = number(at_least=0)


@dataclass
class Recompute:
    """`blocks`: backward computes each block again from its input; null: if the model is large.

    `tile`: tokens of a microbatch that the MLPs and norms of a block compute at a time; null: all; auto: 16,384 of long
    sequences.
    """

    blocks: bool | None = MISSING
    tile: int | str | None = number(at_least=1)


@dataclass
class NoQuantize:
    pass


@dataclass
class Quantize:
    """The keys of every format, and all of int8. Those that another option adds are arguments of the format."""

    include: list[str] | None = MISSING
    exclude: list[str] | None = MISSING
    cache: bool = MISSING


@dataclass
class QuantizeInt4(Quantize):
    group: int = number(at_least=2)


@dataclass
class QuantizeNf4(Quantize):
    double: bool = MISSING


@dataclass
class Tracking:
    mode: TrackingMode = MISSING
    project: str = MISSING
    name: str | None = MISSING
    tags: list[str] = MISSING
    system: bool = MISSING


class Homes(StrEnum):
    """The place in host memory of the weights that stream.

    own: each rank has all of them; shared: the ranks of a host have them once; auto: shared if that is possible.
    """

    auto = "auto"
    own = "own"
    shared = "shared"


@dataclass
class Parallel:
    """A run on several devices: if ranks share homes, the number of hosts, and when a silent rank counts as hung.

    `sequence`: how many ranks divide each sequence, 1 or all; with 1 they divide the sequences of a step.
    """

    sequence: int = number(at_least=1, at_most=64)
    homes: Homes = MISSING
    hosts: int = number(at_least=1, at_most=64)
    timeout_s: float = number(above=0, at_most=1_000_000)


@dataclass
class Checkpointing:
    """When a run saves itself; it keeps the newest `keep` checkpoints, and the best one by the metric `best`.

    `on_signal` null: on a signal if `every` is set, or after a minute of training.
    """

    every: int | None = number(at_least=1)
    keep: int = number(at_least=1)
    best: str | None = MISSING
    on_signal: bool | None = MISSING


@dataclass
class Evaluating:
    """Steps after which a run evaluates, and batches of the held-out split. `every` null: never."""

    every: int | None = number(at_least=1)
    batches: int = number(at_least=1)


@dataclass
class Sampling:
    """Steps after which a run makes a sample, and how text is drawn. `every` null: never. `temperature` 0: greedy."""

    every: int | None = number(at_least=1)
    prompt: str = MISSING
    prompts: list[str] | None = MISSING
    tokens: int = number(at_least=1, at_most=10_000)
    temperature: float = number(at_least=0)
    top_p: float = number(above=0, at_most=1)


@dataclass
class Hardware:
    """A machine to plan for (`training.planning.machine`). Null: as the preset has it, or measured."""

    vram_gib: float | None = number(above=0)
    host_gib: float | None = number(above=0)
    bus_gb_s: float | None = number(above=0)
    tflops: float | None = number(above=0)
    update_gparams_s: float | None = number(above=0)


@dataclass
class TrainConfig:
    """The top level. Each group has the option that was chosen, with the dataclass of that option."""

    offload: Any = MISSING
    model: Any = MISSING
    adapter: Any = MISSING
    dataset: Any = MISSING
    task: Any = MISSING
    optimizer: Any = MISSING
    schedule: Any = MISSING
    recompute: Any = MISSING
    quantize: Any = MISSING
    tracking: Any = MISSING
    hardware: Any = MISSING
    plan: bool = MISSING
    force: bool = MISSING
    seed: int = number(at_least=0, at_most=2**64 - 1)
    steps: int | None = number(at_least=1)
    epochs: float | None = number(above=0, at_most=1_000_000)
    batch_size: int = number(at_least=1, at_most=1_000_000)
    microbatches: int | str = MISSING
    seq_len: int | str = number(at_least=1, words=(LONGEST,))
    device: str = MISSING
    devices: int = number(at_least=1, at_most=64)
    precision: Precision = MISSING
    clip_norm: float | None = number(above=0)
    on_nonfinite: OnNonfinite = MISSING
    ema: float | None = number(above=0, at_most=0.999999)
    vram_budget: str | int | None = MISSING
    host_budget: str | int | None = MISSING
    warmup_steps: int = number(at_least=0)
    log_every: int = number(at_least=1)
    trace: bool = MISSING
    eval: Evaluating = field(default_factory=Evaluating)
    sample: Sampling = field(default_factory=Sampling)
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    parallel: Parallel = field(default_factory=Parallel)
    resume: str | None = MISSING


TASKS = {
    "causal_lm": "training.tasks.causal_lm.CausalLM",
    "dpo": "training.tasks.dpo.DPO",
    "flow_matching": "training.tasks.flow_matching.FlowMatching",
    "noise_prediction": "training.tasks.noise_prediction.NoisePrediction",
    "classification": "training.tasks.classification.Classification",
}
QUANTIZE = {
    "none": NoQuantize,
    "int8": Quantize,
    "float8": make_dataclass("QuantizeFloat8", (), bases=(Quantize,)),
    "int4": QuantizeInt4,
    "nf4": QuantizeNf4,
}
OPTIMIZERS = {"adamw": AdamW, "host_adamw": HostAdamW}
RATES = frozenset({"lr", "weight_decay"})
SCHEMAS = {
    "offload": {name: schema_of(get_class(option.target)) for name, option in all_options().items() if option.target},
    "model": {
        "llama": Llama,
        "hf": HuggingFace,
        "diffusers": renamed(OfLibrary, "models.diffusion.build_diffusion"),
        "pipeline": Pipeline,
    },
    "adapter": ADAPTER_OPTIONS,
    "dataset": DATASETS,
    "task": {name: schema_of(get_class(path)) for name, path in TASKS.items()},
    "optimizer": {name: schema_of(optimizer, frozenset({"params"}), RATES) for name, optimizer in OPTIMIZERS.items()},
    "schedule": {
        "constant": ConstantSchedule,
        "linear": LinearSchedule,
        "cosine": renamed(LinearSchedule, "training.optim.cosine"),
    },
    "recompute": dict.fromkeys(("auto", "none", "block"), Recompute),
    "quantize": QUANTIZE,
    "tracking": {"wandb": Tracking},
    "hardware": {"figures": Hardware},
}


def register() -> None:
    """Stores the dataclasses under the group `schema`, where the defaults lists of conf/ find them.

    Makes resolvers known to OmegaConf: `${unless:OTHER,VALUE}` is the value, or null where the other one is given;
    `${with_adapter:A,B}` is A where the run trains an adapter, else B; `${root:PATH}` is a file of this repository.
    """
    OmegaConf.register_new_resolver(
        "with_adapter", lambda adapter, whole, *, _root_: adapter if has_adapter(_root_) else whole, replace=True
    )
    OmegaConf.register_new_resolver("unless", lambda other, value: value if other is None else None, replace=True)
    OmegaConf.register_new_resolver("root", lambda path: str(ROOT / path), replace=True)
    store = ConfigStore.instance()
    # Hydra copies the store each time it composes and, for its page of help, some 170 times: 60 ms each. What it takes
    # out of the store it copies besides.
    store.__deepcopy__ = lambda memo: store
    store.store(group="schema", name="train", node=TrainConfig)
    for group, options in SCHEMAS.items():
        for name, schema in options.items():
            store.store(group=f"schema/{group}", name=name, node=schema)
    for card in PRESETS:
        store.store(group="hardware", name=card, node={"defaults": ["auto"]})


def due(every: int | None, step: int, steps: int) -> bool:
    """Tells whether what happens `every` so many steps, and after the last, happens after `step` of `steps` steps."""
    return every is not None and (step % every == 0 or step == steps)


def quantises(config: DictConfig) -> bool:
    """Tells whether the run of `config` quantises weights."""
    return issubclass(OmegaConf.get_type(config, "quantize"), Quantize)


def chosen_format(config: DictConfig) -> tuple[str, dict[str, Any]]:
    """Returns the name of the chosen format, and the keys of its option that are its arguments."""
    kind = OmegaConf.get_type(config, "quantize")
    name = next(name for name, option in QUANTIZE.items() if option is kind)
    return name, {key: value for key, value in config.quantize.items() if key not in Quantize.__dataclass_fields__}
