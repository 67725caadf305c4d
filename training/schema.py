"""Types, choices and ranges of the configuration.

YAML under conf/ carries the values; the dataclasses here say what may stand there. Hydra merges every option into its
dataclass, so that an unknown key, a wrong type or a wrong choice is refused while composing, in overlays too. Ranges
and rules across keys, which types cannot say, are in `check`.

Nothing here imports torch: `python train.py --cfg job` answers at once.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from enum import StrEnum
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from training.errors import UserError


def number(at_least: float | None = None, above: float | None = None) -> Any:
    """A numeric key whose range `check` holds; its value comes from YAML."""
    return field(default=MISSING, metadata={"at_least": at_least, "above": above})


class Precision(StrEnum):
    """bf16: weights and compute in bfloat16, with float32 master weights in the optimizer; fp32: all in float32."""

    bf16 = "bf16"
    fp32 = "fp32"


class Pin(StrEnum):
    """auto: page-lock host memory, and warn once where that fails; off: use pageable memory."""

    auto = "auto"
    off = "off"


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
    others: Elsewhere = MISSING


@dataclass
class LayerStream(WeightMode):
    _target_: str = "offload.modes.layer_stream.LayerStream"
    layers: str | None = MISSING
    embedding: Elsewhere = MISSING


@dataclass
class Llama(Built):
    _target_: str = "models.llama.Llama"
    vocab_size: int = number(at_least=1)
    hidden_size: int = number(at_least=1)
    intermediate_size: int = number(at_least=1)
    num_hidden_layers: int = number(at_least=1)
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
    _target_: str = "training.data.StdlibText"


@dataclass
class TextFiles(Text):
    _target_: str = "training.data.TextFiles"
    # One pattern or a list of them; OmegaConf knows no type for that, so `check` holds it.
    files: Any = MISSING
    text_column: str = MISSING


@dataclass
class HubText(Text):
    _target_: str = "training.data.HubText"
    name: str = MISSING
    config_name: str | None = MISSING
    split: str = MISSING
    text_column: str = MISSING
    revision: str | None = MISSING
    shuffle_buffer: int = number(at_least=1)


@dataclass
class SyntheticTokens(Built):
    _target_: str = "training.data.SyntheticTokens"
    vocab_size: int = number(at_least=1)


@dataclass
class AdamW(Built):
    _target_: str = "training.optimizer.AdamW"
    lr: float = number(at_least=0)
    betas: tuple[float, float] = MISSING
    eps: float = number(above=0)
    weight_decay: float = number(at_least=0)


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
class TrainConfig:
    """The top level. Each group holds the option that was chosen, with that option's own dataclass."""

    offload: Any = MISSING
    model: Any = MISSING
    dataset: Any = MISSING
    optimizer: Any = MISSING
    recompute: Any = MISSING
    tracking: Any = MISSING
    seed: int = number(at_least=0)
    steps: int = number(at_least=1)
    batch_size: int = number(at_least=1)
    microbatches: int = number(at_least=1)
    seq_len: int = number(at_least=1)
    device: str = MISSING
    precision: Precision = MISSING
    clip_norm: float | None = number(above=0)
    warmup_steps: int = number(at_least=0)
    log_every: int = number(at_least=1)


SCHEMAS = {
    "offload": {"none": Resident, "bounce_linear": BounceLinear, "layer_stream": LayerStream},
    "model": {"llama": Llama},
    "dataset": {"stdlib": StdlibText, "text": TextFiles, "hub": HubText, "synthetic": SyntheticTokens},
    "optimizer": {"adamw": AdamW},
    "recompute": {"none": RecomputeNothing, "block": RecomputeBlocks},
    "tracking": {"wandb": Tracking},
}


def register() -> None:
    """Stores the dataclasses under the group `schema`, from which the defaults lists of conf/ take them."""
    store = ConfigStore.instance()
    store.store(group="schema", name="train", node=TrainConfig)
    for group, options in SCHEMAS.items():
        for name, schema in options.items():
            store.store(group=f"schema/{group}", name=name, node=schema)


def check(config: DictConfig) -> None:
    """Refuses what the types let through, before anything is built.

    Raises UserError naming the key, its value and what it may be: a key that is unknown (added with +) or has no
    value, a number out of range, a combination of keys that contradicts itself.
    """
    for key, node in _sections(config):
        _check_keys(key, node)
    for key, node in _sections(config):
        _check_ranges(key, node)
    _check_rules(config)


def unknown_key(key: str, known: Iterable[str]) -> str:
    """One line about a key that does not exist: the one probably meant, and those that do exist beside it."""
    parent, _, name = key.rpartition(".")
    prefix = f"{parent}." if parent else ""
    known = sorted(name for name in known if not name.startswith("_") and name != "hydra")
    close = get_close_matches(name, known, n=1)
    meant = f" Did you mean {prefix}{close[0]}?" if close else ""
    where = f"{parent}, as chosen," if parent else "the top level"
    return f"{key} is no key of the configuration.{meant} Keys that {where} has: {', '.join(known) or 'none'}"


def _sections(config: DictConfig) -> Iterator[tuple[str, DictConfig]]:
    yield "", config
    for name in config:
        if not OmegaConf.is_missing(config, name) and OmegaConf.is_dict(config[name]):
            yield f"{name}.", config[name]


def _check_keys(prefix: str, node: DictConfig) -> None:
    schema = OmegaConf.get_type(node)
    known = [entry.name for entry in fields(schema)] if schema is not dict else []
    for name in node:
        if name not in known:
            raise UserError(unknown_key(f"{prefix}{name}", known))
    for name in known:
        if name not in node:  # removed with ~, or nothing but ??? in YAML
            raise UserError(f"{prefix}{name} has no value: give it one, {prefix}{name}=VALUE")


def _check_ranges(prefix: str, node: DictConfig) -> None:
    for entry in fields(OmegaConf.get_type(node)):
        value = node[entry.name]
        if value is None:
            continue
        at_least, above = entry.metadata.get("at_least"), entry.metadata.get("above")
        # Written so that NaN is refused.
        if at_least is not None and not value >= at_least:
            raise UserError(f"{prefix}{entry.name}={value}: must be at least {at_least}")
        if above is not None and not value > above:
            raise UserError(f"{prefix}{entry.name}={value}: must be above {above}")


def _check_rules(config: DictConfig) -> None:
    if config.microbatches > config.batch_size:
        raise UserError(
            f"microbatches={config.microbatches}: must be between 1 and batch_size={config.batch_size},"
            " the sequences that it divides"
        )
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", config.device):
        raise UserError(f"device={config.device}: must be auto, cuda, cuda:N (N counts from 0) or cpu")
    rules = {WeightMode: _check_weight_mode, Llama: _check_llama, TextFiles: _check_files, AdamW: _check_adamw}
    for _, node in _sections(config):
        for schema, rule in rules.items():
            if issubclass(OmegaConf.get_type(node), schema):
                rule(node)


def _check_weight_mode(offload: DictConfig) -> None:
    if offload.prefetch is not None and offload.prefetch >= offload.slots:
        raise UserError(
            f"offload.prefetch={offload.prefetch}: must be below offload.slots={offload.slots},"
            " because the unit that computes holds a slot as well"
        )
    if not re.fullmatch(r"\d+|\d+(\.\d+)?(%|[KMGT]iB)", str(offload.resident)):
        raise UserError(
            f"offload.resident={offload.resident}: must be a number of units (8), a share of the bytes (25%)"
            " or bytes (2GiB, 512MiB)"
        )


def _check_llama(model: DictConfig) -> None:
    heads = model.num_attention_heads
    if model.hidden_size % (2 * heads):
        raise UserError(
            f"model.hidden_size={model.hidden_size}: must be a multiple of {2 * heads},"
            f" twice model.num_attention_heads={heads}"
        )
    if heads % model.num_key_value_heads:
        raise UserError(
            f"model.num_key_value_heads={model.num_key_value_heads}: must divide model.num_attention_heads={heads}"
        )


def _check_files(dataset: DictConfig) -> None:
    files = dataset.files
    if isinstance(files, str):
        return
    if not OmegaConf.is_list(files) or not files or not all(isinstance(name, str) for name in files):
        raise UserError(
            f"dataset.files={files}: must be a path or pattern (texts/*.txt), or a list of them ([a.txt,b.txt])"
        )


def _check_adamw(optimizer: DictConfig) -> None:
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        raise UserError(f"optimizer.betas={optimizer.betas}: both must be at least 0 and below 1")
