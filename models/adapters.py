"""Low-rank adapters of peft: small matrices that train beside the frozen layers of a model.

LoRA (Hu et al. 2021), DoRA (Liu et al. 2024) and rank-stabilised LoRA (Kalajdzievski 2023), with peft's layers and
peft's files (`models.adapter_files`). A model gets its adapters on the meta device, after its layers are what they will
be (quantised ones too). Then a mode makes its memory, the base is filled inside `without_adapters`, and
`initialise_adapters` fills the rest.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from models.adapter_targets import expert_names, saved_names, short_names, short_parameter_names, target_names
from models.built_again import with_statistics
from models.initialise import Draws
from models.quiet_imports import import_quantisers, without_remarks

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

# The name of the adapter inside peft's layers; files do not have it.
NAME = "default"
# As `Lora.experts`: one adapter for all experts of a layer.
SHARED = "shared"
# The attribute of wrappers that holds the library's own model, whose names files have.
INNER = ("hf", "network")


@dataclass(frozen=True)
class Lora:
    """LoRA: `base(x) + alpha / rank * B(A(dropout(x)))`; only A and B train.

    Attributes:
        rank, alpha, dropout: of every adapter.
        targets: patterns over the names of layers (`models.adapter_targets.matches`); None for all linear layers of the
            blocks.
        modules_to_save: patterns over the names of modules that train in full beside the adapters.
        experts: the experts of a mixture that are one tensor have adapters too: True for each its own, "shared" for one
            that all experts of a layer share (`models.adapter_experts`).
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: Sequence[str] | None = None
    modules_to_save: Sequence[str] | None = None
    experts: bool | str = False

    def peft_config(
        self, targets: Sequence[str], saved: Sequence[str] = (), parameters: Sequence[str] = ()
    ) -> LoraConfig:
        """Returns peft's configuration of the same adapter on the layers `targets`, and on `parameters`: no biases."""
        from peft import LoraConfig

        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=list(targets),
            target_parameters=list(parameters) or None,
            modules_to_save=list(saved) or None,
            bias="none",
            use_dora=isinstance(self, Dora),
            use_rslora=isinstance(self, RsLora),
        )


@dataclass(frozen=True)
class Dora(Lora):
    """DoRA: the direction of the weight is that of LoRA, and the length of each of its rows trains by itself."""


@dataclass(frozen=True)
class RsLora(Lora):
    """LoRA scaled by `alpha / sqrt(rank)`, so that the size of an update does not shrink with the rank."""


def inject(model: nn.Module, adapter: Lora, dtype: torch.dtype) -> None:
    """Puts adapters into `model` in place, and freezes all else but `modules_to_save`. Its interface stays as it is.

    The adapters are on the device of the layers, the meta device too, and as in peft of the dtype of the layer's
    weight, or of `dtype` where a layer has none in numbers. Raises ValueError in one line, beginning with the name of
    the attribute, for targets that the model does not have.
    """
    import_quantisers()
    with without_remarks():
        from peft import inject_adapter_in_model

    root = root_of(model)
    for name, _ in with_statistics(root):
        raise ValueError(
            f"targets: {name} is a batch norm, whose statistics would change in training and be lost with the frozen"
            " base: choose a model without"
        )
    targets = target_names(root, adapter.targets)
    experts = _expert_names(root, adapter)
    saved = saved_names(root, adapter.modules_to_save or (), [*targets, *experts])
    config = adapter.peft_config(short_names(root, targets), (), short_parameter_names(root, experts))
    # On the device to which peft moves each adapter.
    with warnings.catch_warnings(), next(root.parameters()).device:
        # About settings that peft corrects itself, such as that of transposed layers.
        warnings.simplefilter("ignore")
        inject_adapter_in_model(config, root, NAME)
    _check_places(root, adapter, targets, experts)
    if experts:
        from models.adapter_experts import take_over

        take_over(root, shared=adapter.experts == SHARED)
    # peft wraps such modules in a copy of each; training the modules themselves is the same and takes no more memory.
    config.modules_to_save = saved or None
    for _, layer in adapter_layers(root):
        weight = getattr(layer.get_base_layer(), "weight", None)
        own = weight.dtype if weight is not None and weight.is_floating_point() else dtype
        for child_name, child in layer.named_children():
            if child_name != "base_layer":
                child.to(own)
    for name in saved:
        root.get_submodule(name).requires_grad_(True)


def is_adapted(model: nn.Module) -> bool:
    """Tells whether `inject` has put adapters into `model`."""
    return hasattr(root_of(model), "peft_config")


def config_of(model: nn.Module) -> LoraConfig:
    """Returns peft's configuration of the adapters of `model`."""
    return root_of(model).peft_config[NAME]


def root_of(model: nn.Module) -> nn.Module:
    """Returns the model under whose names files have tensors: `model`, or the library's model inside it."""
    return next((inner for name in INNER if isinstance(inner := getattr(model, name, None), nn.Module)), model)


def adapter_layers(model: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    """Yields peft's layers, with their names, in order.

    One around several tensors of experts has one more inside, for each of these, as its `base_layer`.
    """
    from peft.tuners.lora import LoraLayer

    yield from ((name, module) for name, module in list(model.named_modules()) if isinstance(module, LoraLayer))


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Makes `model` the base inside the block: each layer with an adapter is replaced by its own base layer.

    So the base can be filled, loaded and saved under its own names, by code that knows nothing of adapters. The model
    is not to be called meanwhile. For a model without adapters it does nothing.
    """
    layers = list(_outermost(adapter_layers(model))) if is_adapted(model) else []
    try:
        for name, layer in layers:
            _replace(model, name, layer.get_base_layer())
        yield
    finally:
        for name, layer in layers:
            _replace(model, name, layer)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Makes `model` compute what its base does inside the block, as long as nothing but adapters trains.

    No parameter is touched: peft's own switch would freeze the adapters, which a mode takes for another model.
    """
    layers = [layer for _, layer in adapter_layers(root_of(model))]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@torch.no_grad()
def initialise_adapters(model: nn.Module, seed: int, device: torch.device | str | None = None) -> None:
    """Fills the adapters in place; the base must have its values.

    As in peft, A is uniform (Kaiming, a=sqrt(5)), B is zero, and the magnitudes of DoRA are the lengths of the rows of
    the base's weights: so the model computes what its base does. The numbers of A are a function of the seed and the
    parameter's name alone, as in `models.initialise`.

    Args:
        device: where numbers are computed before they are copied, one weight at a time; by default where the parameter
            is. Lengths may differ in the last bit between devices, so give the same for every offload mode.

    Raises ValueError if DoRA would divide by the length of a row of zeros, as the first weights of a modulation are.
    """
    draws = Draws(seed, device)
    for name, layer in adapter_layers(root_of(model)):
        first, second = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
        draws.uniform(first.detach(), f"{name}.lora_A", first[0].numel() ** -0.5)
        second.detach().zero_()
        if NAME in layer.lora_magnitude_vector:
            _fill_magnitude(name, layer, first.device if device is None else device)


def merge_adapter(model: nn.Module) -> None:
    """Adds the adapters to the weights of the base and takes them out of `model`, which is a plain model afterwards.

    Its parameters and their names are those of the base. Raises ValueError, with the model as it was, for a quantised
    base, for layers that share a weight and have an adapter each, as Zamba's, and where the base and the adapters are
    on different devices, as under a mode that streams: detach it first.
    """
    layers, owners = list(adapter_layers(model)), {}
    for name, layer in layers:
        devices = {str(parameter.device) for parameter in layer.parameters()}
        if len(devices) > 1 or "meta" in devices:
            raise ValueError(f"{name} is on {' and '.join(sorted(devices))}: merge a model that is on one device")
        weight = getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))
        if type(weight) is not nn.Parameter or not weight.is_floating_point():
            raise ValueError(f"{name} is quantised: merge the adapter into weights that are not")
        if (other := owners.setdefault(weight, name)) != name:
            raise ValueError(f"{name} and {other} have one weight and an adapter each: load the adapter with peft")
    with torch.no_grad():
        for _, layer in layers:
            layer.merge()
    for name, layer in _outermost(layers):
        _replace(model, name, layer.get_base_layer())
    del root_of(model).peft_config
    model.requires_grad_(True)


def _expert_names(root: nn.Module, adapter: Lora) -> list[str]:
    if adapter.experts not in (False, True, SHARED):
        raise ValueError(f"experts={adapter.experts}: give true, false or {SHARED}")
    if not adapter.experts:
        return []
    given = f"experts={str(adapter.experts).lower()}"
    # peft refuses both.
    if isinstance(adapter, Dora):
        raise ValueError(f"{given}: DoRA has no form for experts that are one tensor: take adapter=lora")
    if adapter.dropout:
        raise ValueError(
            f"dropout={adapter.dropout}: experts that are one tensor take none: give dropout=0 or experts=false"
        )
    names = expert_names(root)
    if not names:
        raise ValueError(f"{given}: the model has no experts that are one tensor: leave it false")
    return names


def _check_places(root: nn.Module, adapter: Lora, targets: Sequence[str], experts: Sequence[str]) -> None:
    """Raises ValueError if peft has put adapters elsewhere than at the layers `targets` and parameters `experts`."""
    found = list(adapter_layers(root))
    at_experts = [layer for _, layer in found if hasattr(layer, "parameter_name")]
    layers = [name for name, layer in found if not hasattr(layer, "parameter_name")]
    if layers != list(targets) or len(at_experts) != len(experts):
        rest = short_names(root, [name for name in targets if name in layers])
        advice = f": take targets=[{','.join(rest)}]" if len(rest) < len(short_names(root, targets)) else ""
        raise ValueError(f"targets={adapter.targets}: peft puts adapters elsewhere in a {type(root).__name__}{advice}")


def _outermost(layers: Iterable[tuple[str, LoraLayer]]) -> Iterator[tuple[str, LoraLayer]]:
    """Yields the layers that are in no other: those in the order of the model, the outer before the inner."""
    outer = None
    for name, layer in layers:
        if outer is None or not name.startswith(f"{outer}."):
            outer = name
            yield name, layer


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _fill_magnitude(name: str, layer: LoraLayer, device: torch.device | str) -> None:
    from peft.utils.integrations import dequantize_module_weight

    magnitude = layer.lora_magnitude_vector[NAME]
    weight = dequantize_module_weight(layer.get_base_layer()).detach().to(device)
    nothing = torch.zeros((), device=device, dtype=weight.dtype)
    lengths = magnitude.get_weight_norm(weight, nothing, layer.scaling[NAME])
    if not lengths.all():
        raise ValueError(f"{name} has rows of zeros, which have no direction: take another adapter, or trained weights")
    magnitude.weight.detach().copy_(lengths)
