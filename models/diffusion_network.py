"""A network of diffusers of any class: builds it without weights, fills its buffers, and initialises or loads it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from models.attention_kernels import avoid_cudnn_attention
from models.built_again import fill_buffers
from models.diffusion_files import CONFIG_FILE, file_of
from models.diffusion_initialise import initialise_diffusion
from models.json_files import as_json, read_object
from models.library_dtypes import default_dtype, keep_float32, kept_by_diffusers
from models.quiet_imports import import_quantisers, without_remarks
from models.safetensors_files import StoredTensor
from models.weights import load_weights, matched_weights


class DiffusersNetwork(nn.Module):
    """A network of diffusers, `network`, whose names of parameters are those of its files.

    Attributes:
        condition_shapes: the shape of one example of each condition that the model needs, by name: () for `labels`,
            which are int64; all others are floating point. None where the configuration does not tell them.
        optional_conditions: the names of conditions that the model takes and does not need; None as above.
        sample_shape: the shape of one image, [C, H, W]; None where the model takes any size.
        num_labels: the number of labels with an embedding, "no label" included; None for a model without labels.
        takes_steps: whether `timestep` may be whole numbers of steps.
    """

    condition_shapes: Mapping[str, tuple[int | None, ...]] | None = None
    optional_conditions: tuple[str, ...] | None = None
    sample_shape: tuple[int, ...] | None = None
    num_labels: int | None = None
    takes_steps: bool = True
    # The standard deviations of first weights, by patterns of layers' names (`models.diffusion_initialise`).
    first_stds: Mapping[str, float] = MappingProxyType({})

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def fill_buffers(self) -> None:
        """Fills the buffers of a model that was built on the meta device, with the values that the CPU would give.

        Weights are not touched. As in `from_pretrained`, buffers outside the state dict are computed in the model's
        dtype; those inside are rounded to it, as values from files are. Raises ValueError for random buffers.
        """
        fill_buffers(self.network, partial(self._same_again, self.network.dtype), self._same_again)

    def initialise(self, seed: int, device: torch.device | None = None) -> None:
        """Fills the weights by `seed`, as `models.diffusion_initialise.initialise_diffusion` says."""
        initialise_diffusion(self.network, self._same_again, self.first_stds, seed, device)

    def load(self, path: Path) -> None:
        """Copies weights into the parameters and persistent buffers, as `models.weights.load_weights` does.

        `path` is a .safetensors file, an index, the folder of a model, or that of a pipeline.
        """
        load_weights(self.network, file_of(path))

    def matched(self, path: Path) -> tuple[dict[str, Tensor], dict[str, StoredTensor]]:
        """Returns what `models.weights.matched_weights` returns for the files that `load` reads."""
        return matched_weights(self.network, file_of(path))

    def _same_again(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        with default_dtype(dtype):
            return type(self.network).from_config(self.network.config)

    def _in_own_dtype(self, condition: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # Not the dtype of the first parameter, which the class may keep in float32.
        dtype = self.network.dtype
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in condition.items()}


Built = TypeVar("Built", bound=DiffusersNetwork)


def build_network(
    name: str,
    config: Mapping[str, Any],
    overrides: Mapping[str, Any] | None,
    wrapped: Callable[[nn.Module], Built],
    check: Callable[[Mapping[str, Any]], None] = lambda config: None,
) -> Built:
    """Builds a network without weights, on the current default device (`with torch.device("meta")`), and wraps it.

    Args:
        name: a class of diffusers.
        config: the values of its configuration, such as those of a config.json; missing keys have their defaults.
        overrides: values for keys of the configuration, which replace those of `config`.
        wrapped: makes the result of the network.
        check: is given the configuration with defaults and overrides, and may raise ValueError.

    Raises:
        ValueError: one line about a key that the class does not have, with the closest names, a value that it does not
            take, or a package that it needs.
    """
    avoid_cudnn_attention()
    import_quantisers()
    with without_remarks():
        import diffusers

        # Diffusers imports the module of a class when the class is first read, and may log then.
        made = getattr(diffusers, name)
    keys = dict(inspect.signature(made.__init__).parameters)
    del keys["self"]
    for key in config:
        if key == "quantization_config" and config[key]:
            raise ValueError(f"its weights are quantised: take those of {name} in bf16 or float32, and quantize=nf4")
        if key not in keys and config[key] not in (None, False):
            raise ValueError(
                f"{CONFIG_FILE} has {key}={config[key]}, which {name} of diffusers {diffusers.__version__}"
                " does not know: install a fitting version"
            )
    overrides = as_json(overrides or {})
    for key in overrides:
        if key not in keys:
            close = get_close_matches(key, keys, n=3)
            meant = f" Did you mean {' or '.join(close)}?" if close else ""
            raise ValueError(f"{key}={overrides[key]}: {name} has no such key.{meant} It has {', '.join(keys)}")
    values = {key: value for key, value in config.items() if key in keys} | overrides
    defaults = {key: one.default for key, one in keys.items() if one.default is not one.empty}
    if (defaults | values).get("concat_padding_mask") and not diffusers.utils.is_torchvision_available():
        raise ValueError(
            f"{name} resizes its mask of padding (concat_padding_mask=true) with torchvision, which is not installed:"
            " pip install torchvision, of the release that fits your torch"
        )
    try:
        check(defaults | values)
        network = made(**values)
        keep_float32(network, kept_by_diffusers(made), torch.get_default_dtype())
        if empty := next((name for name, each in network.named_parameters() if not each.numel()), None):
            raise ValueError(f"{empty} would have the shape {list(network.get_parameter(empty).shape)}")
        return wrapped(network)
    # For values that do not fit, constructors raise errors of any type.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{name} cannot be built with {values}: {reason}") from error


def read_config(folder: Path) -> tuple[str, dict[str, Any]]:
    """Reads the config.json in `folder`: returns the name of the class, and the values of its configuration.

    Raises ValueError in one line for a file that cannot be read, or names no class.
    """
    file = folder / CONFIG_FILE
    config = read_object(file, "download it again")
    if not isinstance(config.get("_class_name"), str):
        raise ValueError(f"{file} names no class of diffusers: give the folder of a model that diffusers saved")
    return config["_class_name"], {key: value for key, value in config.items() if not key.startswith("_")}
