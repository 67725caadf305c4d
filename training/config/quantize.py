"""The keys of the group `quantize`, in which frozen weights have fewer bits."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf


@dataclass
class NoQuantize:
    pass


@dataclass
class Quantize:
    """The keys of every format. Those that an option adds are arguments of the format."""

    blocks: str | None = MISSING
    include: list[str] | None = MISSING
    exclude: list[str] | None = MISSING
    cache: bool = MISSING
    compare: bool = MISSING


@dataclass
class QuantizeInt8(Quantize):
    pass


@dataclass
class QuantizeFloat8(Quantize):
    pass


@dataclass
class QuantizeInt4(Quantize):
    group: int = field(default=MISSING, metadata={"at_least": 2})


@dataclass
class QuantizeNf4(Quantize):
    double: bool = MISSING


OPTIONS = {
    "none": NoQuantize,
    "int8": QuantizeInt8,
    "float8": QuantizeFloat8,
    "int4": QuantizeInt4,
    "nf4": QuantizeNf4,
}


def quantises(config: DictConfig) -> bool:
    """Tells whether the run of `config` quantises weights."""
    return issubclass(OmegaConf.get_type(config, "quantize"), Quantize)


def chosen_format(config: DictConfig) -> tuple[str, dict[str, Any]]:
    """Returns the name of the chosen format, and the keys of its option that are its arguments."""
    kind = OmegaConf.get_type(config, "quantize")
    name = next(name for name, option in OPTIONS.items() if option is kind)
    return name, {key: value for key, value in config.quantize.items() if key not in Quantize.__dataclass_fields__}
