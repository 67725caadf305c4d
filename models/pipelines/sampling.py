"""Pictures by a pipeline's own call, with a network that is under a mode, and with prompts that were encoded before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from models.diffusion_scheduler import ADVICE, library
from models.json_files import read_object
from models.pipelines.opening import open_pipeline
from models.pipelines.recording import CPU, Asked, Recorder, moved
from models.quiet_imports import without_remarks


class _StoppedError(Exception):
    """Ends a picture that nobody waits for any more."""


class PipelineSampler:
    """Makes pictures with the pipeline in `folder`, whose guidance and VAE are its own.

    `network` is its transformer or UNet, `dtype` that of the VAE, which is on the device while a picture is decoded.
    `scheduler` is the file of the scheduler that says what the network predicts; None: the pipeline's own.
    """

    def __init__(
        self,
        folder: Path,
        network: nn.Module,
        dtype: torch.dtype,
        device: torch.device,
        scheduler: Path | None = None,
    ):
        parts = {}
        if scheduler is not None:
            kind = getattr(library(), read_object(scheduler, ADVICE)["_class_name"])
            with without_remarks():
                parts["scheduler"] = kind.from_pretrained(scheduler.parent)
        self._pipeline = open_pipeline(folder, network, dtype, without_text_encoders=True, parts=parts)
        self._recorder, self._device = Recorder(self._pipeline, network, device), device

    @torch.no_grad()
    def picture(
        self,
        prompt: str,
        encoded: Sequence[Any],
        size: tuple[int, int],
        steps: int,
        seed: int,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Tensor | None:
        """Returns a picture, float32 [3, height, width] from -1 to 1 on the CPU; None once `stopped` returns True.

        Args:
            encoded: what the pipeline's `encode_prompt` returned for `prompt`, in the order of its calls.
            size: height and width in pixels.
            steps: of the pipeline's scheduler.
            seed: decides the noise.
        """
        vae, asked = self._pipeline.vae, Asked((prompt,), size, size)
        results = iter(moved(list(encoded), self._device))

        def ended(pipeline: Any, step: int, time: Any, tensors: dict) -> dict:
            if stopped():
                raise _StoppedError
            return tensors

        others = {"generator": torch.Generator().manual_seed(seed), "callback_on_step_end": ended}
        given = self._recorder.given(asked, steps=steps, guidance=None, output_type="pt", **others)
        try:
            vae.to(self._device)
            with patch.object(self._pipeline, "encode_prompt", lambda *_, **__: next(results)):
                made = self._pipeline(**given)[0]
        except _StoppedError:
            return None
        finally:
            vae.to("cpu")
        # A video of one frame, or a picture.
        return made[0].reshape(3, *made.shape[-2:]).float().cpu() * 2 - 1


def encoded_prompt(recorder: Recorder, prompt: str, size: tuple[int, int]) -> list[Any]:
    """Returns what the pipeline's `encode_prompt` returns for `prompt` with its own guidance, on the CPU."""
    return moved(recorder.encoded(Asked((prompt,), size, size)), CPU)
