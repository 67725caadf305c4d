"""PipelineModel: the network of a pipeline of diffusers, called as its pipeline calls it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.diffusion_network import DiffusersNetwork, build_network, read_config
from models.diffusion_scheduler import STEPS, library
from models.json_files import read_object
from models.pipelines.calls import ASKED, NetworkCall
from models.pipelines.encoded import INDEX, EncodedFolder

NETWORKS = ("transformer", "unet")


class PipelineModel(DiffusersNetwork):
    """The transformer or UNet of a pipeline. Its conditions are those that `EncodedFolder` has for each picture.

    Attributes:
        network: the model itself, whose names of parameters are those of its files.
        folder: that of the pipeline.
        num_steps: the number of the scheduler's timesteps in training.
        overrides: values for keys of the network's configuration, other than in `folder`.
    """

    def __init__(self, network: nn.Module, folder: Path, num_steps: int, overrides: Mapping[str, Any] | None = None):
        super().__init__(network)
        self.folder, self.num_steps, self.overrides = folder, num_steps, overrides
        self._calls: dict[tuple[tuple[int, ...], torch.device], NetworkCall] = {}

    def encoded(self) -> EncodedFolder:
        """Returns what the pipeline's encoders have made in the network's dtype."""
        return EncodedFolder(self.folder, self.network.dtype, self.overrides)

    def forward(self, noisy: Tensor, timestep: Tensor, **condition: Tensor) -> Tensor:
        """Predicts what the scheduler of the pipeline expects: the velocity, noise.

        Args:
            noisy: [B, ...], in the shape in which the pipeline draws noise; converted to the model's dtype.
            timestep: float32 [B], from 0 (image) to 1 (noise); or int64 [B], the scheduler's steps.
            condition: the conditions of `NetworkCall.merged`, each behind `ASKED`.

        Returns:
            The prediction, of the shape of `noisy`, in the model's dtype.

        Raises ValueError for latents of a shape for which no picture was encoded.
        """
        call = self.call_of(noisy.shape[1:], noisy.device)
        batch = {name.removeprefix(ASKED): value for name, value in self._in_own_dtype(condition).items()}
        number = timestep * self.num_steps if timestep.is_floating_point() else timestep.float()
        noisy = noisy.to(self.network.dtype)
        return call.prediction(self.network(**call.filled(noisy, number, batch))[0], noisy)

    def call_of(self, noise: Sequence[int], device: torch.device) -> NetworkCall:
        """Returns the call for latents of the shape `noise`, [C, ...]. Raises ValueError where it is not known."""
        key = tuple(noise), device
        if key not in self._calls:
            call = self.encoded().call_of(noise)
            if call is None:
                raise ValueError(f"no picture with latents {list(noise)} is encoded: take dataset=captioned")
            self._calls[key] = call.on(device)
        return self._calls[key]

    def tokens(self, shape: Sequence[int]) -> int | None:
        """Returns the tokens of latents of `shape`, [C, ...]; None where the network does not take a sequence."""
        # Not that of a forward on values: a plan asks too, before its call is kept.
        call = self.call_of(shape, torch.device("meta"))
        return call.shape[0] if len(call.shape) == 2 else None


def build_pipeline(source: str | Path, overrides: Mapping[str, Any] | None = None) -> PipelineModel:
    """Builds the network of a pipeline without its weights, on the current default device.

    Args:
        source: the folder of a pipeline of diffusers, with model_index.json.
        overrides: values for keys of the network's configuration.

    Raises ValueError in one line for another folder, a pipeline without a network or with several, and as
    `build_network`.
    """
    folder = Path(source).expanduser()
    if not (folder / INDEX).is_file():
        raise ValueError(
            f"it has no {INDEX}: give the folder of a pipeline of diffusers, or OWNER/NAME of one on the Hub; of a"
            " UNet or DiT alone take model=diffusers"
        )
    index, diffusers = read_object(folder / INDEX, "download the pipeline again"), library()
    found = [name for name in index if name.startswith(NETWORKS) and index[name][0] is not None]
    if len(found) != 1 or found[0] not in NETWORKS:
        raise ValueError(f"{index['_class_name']} has the networks {', '.join(found) or 'none'}: one is trained here")
    if not isinstance(kind := index["_class_name"], str) or not hasattr(diffusers, kind):
        raise ValueError(f"{INDEX} names {kind}, which diffusers {diffusers.__version__} has not: take another")
    scheduler = read_object(folder / "scheduler" / "scheduler_config.json", "download the pipeline again")
    steps = scheduler.get("num_train_timesteps", STEPS)
    name, config = read_config(folder / found[0])
    return build_network(name, config, overrides, lambda network: PipelineModel(network, folder, steps, overrides))
