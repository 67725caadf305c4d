"""The keys of the group `adapter`, whose options train small matrices beside a frozen model.

It imports no torch, because a sweep asks whether its jobs train an adapter.
"""

from dataclasses import dataclass

from omegaconf import MISSING, DictConfig, OmegaConf

from training.config.declare import Built, number, renamed


@dataclass
class NoAdapter:
    pass


@dataclass
class LoraAdapter(Built):
    """The keys of an adapter that `models.adapters` makes, and of its initial values.

    Args:
        rank: of the two matrices beside a layer.
        alpha: scales what they compute, by alpha / rank (rslora: by alpha over the root of rank).
        dropout: share of their input that is dropped in training.
        targets: patterns over the names of layers, such as [q_proj,v_proj]; null is every linear layer of the blocks.
        experts: experts of a mixture that are one tensor have adapters too: true for each its own, shared for one that
            all experts of a layer share.
        modules_to_save: patterns over the names of modules that train in full beside the adapters; null is none.
        weights: an adapter to start from: a folder of peft, such as a checkpoint, or for a model of diffusers a file of
            diffusers, kohya or others; null starts from the seed.
    """

    _target_: str = "models.adapters.Lora"
    rank: int = number(at_least=1)
    alpha: float = number(above=0)
    dropout: float = number(at_least=0, at_most=0.999)
    targets: list[str] | None = MISSING
    experts: bool | str = MISSING
    modules_to_save: list[str] | None = MISSING
    weights: str | None = MISSING


OPTIONS = {
    "none": NoAdapter,
    "lora": LoraAdapter,
    "dora": renamed(LoraAdapter, "models.adapters.Dora"),
    "rslora": renamed(LoraAdapter, "models.adapters.RsLora"),
}


def has_adapter(config: DictConfig) -> bool:
    """Tells whether the run of `config` trains an adapter beside a frozen model."""
    kind = OmegaConf.get_type(config, "adapter")
    return isinstance(kind, type) and issubclass(kind, LoraAdapter)
