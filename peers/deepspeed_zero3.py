"""deepspeed_zero3: DeepSpeed 0.19's ZeRO-3 with parameters and optimizer on the host (Rajbhandari et al. 2021).

Settings of its documentation (https://www.deepspeed.ai/docs/config-json/#zero-optimizations-for-fp16-training and
https://www.deepspeed.ai/tutorials/zero/): page-locked memory, overlap_comm, contiguous_gradients, DeepSpeedCPUAdam;
buckets and thresholds at their defaults. SuperOffload as in training/DeepSpeed-SuperOffload of DeepSpeedExamples, for a
Llama of 8 billion parameters on one GPU: there weights stay on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from offload import OwnOptimizer
from offload.knobs import knob
from peers.peer import Peer, adamw_group, set_rate
from peers.process_group import join_alone, leave


@dataclass(kw_only=True, eq=False)
class DeepSpeedZero3(Peer):
    """Parameters, gradients and states are on the host; each module's weights are gathered for its forward.

    Args:
        super_offload: updates run in a process of their own, as gradients arrive (Lian et al. 2025).
    """

    option: ClassVar[str] = "deepspeed_zero3"
    package: ClassVar[str] = "deepspeed"
    needs_cuda: ClassVar[bool] = True
    owns_update: ClassVar[bool] = True

    super_offload: bool = knob(False)

    @property
    def notes(self) -> tuple[str, ...]:
        beside = (
            "weights stay on the GPU; the memory of its update process is not counted",
            "updates begin inside backward, with the learning rate of the step before",
        )
        return ("it clips and measures the norm by itself, in the update", *(beside if self.super_offload else ()))

    def own_optimizer(self, groups: list[dict], clip_norm: float | None, microbatches: int) -> OwnOptimizer:
        join_alone(self._device)
        import deepspeed
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        self._engine, _, _, _ = deepspeed.initialize(
            model=self._model,
            optimizer=DeepSpeedCPUAdam(list(map(adamw_group, groups)), adamw_mode=True),
            config=self._config(next(self._model.parameters()).dtype, clip_norm, microbatches),
        )
        engine = self._engine

        def update(lr: float, measure: bool) -> float | None:
            set_rate(engine.optimizer, lr)
            # What SuperOffload updates on the GPU.
            set_rate(getattr(engine.optimizer, "backup_optimizer", engine.optimizer), lr)
            engine.step()
            norm = engine.get_global_grad_norm()
            return None if norm is None else float(norm)

        return OwnOptimizer(groups[0]["lr"], update)

    def microbatch(self, loss: Callable[[], Tensor], last: bool) -> Tensor:
        batch, weight = self.captured(loss)
        value = self._engine(*batch) * weight
        self._engine.backward(value, scale_wrt_gas=False)
        if not last:
            # It counts microbatches by these calls, and updates in the last.
            self._engine.step()
        return value.detach()

    def close(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.destroy()
            del self._engine
        leave()

    def _config(self, dtype: torch.dtype, clip_norm: float | None, microbatches: int) -> dict:
        on_host = {"device": "cpu", "pin_memory": True}
        zero = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True}
        if self.super_offload:
            # A fifth of the states stays on the GPU, in whole groups of parameters.
            beside = {"super_offload": True, "ratio": 0.8, "cpuadam_cores_perc": 0.9}
            sizes = {"sub_group_size": 400_000_000, "reduce_bucket_size": 400_000_000}
            zero |= {"overlap_comm": False, **sizes, "offload_optimizer": {**on_host, **beside}}
        else:
            zero |= {"offload_param": on_host, "offload_optimizer": on_host}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": microbatches,
            "gradient_clipping": clip_norm or 0.0,
            "bf16": {"enabled": dtype == torch.bfloat16},
            "zero_optimization": zero,
        }
