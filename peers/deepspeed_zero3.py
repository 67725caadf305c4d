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
from peers.peer import AttachedPeer, Peer, adamw_group, set_rate
from peers.process_group import join_alone, leave


class AttachedDeepSpeed(AttachedPeer):
    """A model that a DeepSpeed engine has."""

    def own_optimizer(self, groups: list[dict], clip_norm: float | None, microbatches: int) -> OwnOptimizer:
        join_alone(self.device)
        import deepspeed
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam(list(map(adamw_group, groups)), adamw_mode=True)
        config = self._config(next(self.model.parameters()).dtype, clip_norm, microbatches)
        self._engine = engine = deepspeed.initialize(model=self.model, optimizer=optimizer, config=config)[0]

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
        if self.mode.super_offload:
            # A fifth of the states stays on the GPU, in whole groups of parameters.
            zero |= {"overlap_comm": False, "sub_group_size": 400_000_000, "reduce_bucket_size": 400_000_000}
            zero["offload_optimizer"] = on_host | {"super_offload": True, "ratio": 0.8, "cpuadam_cores_perc": 0.9}
        else:
            zero |= {"offload_param": on_host, "offload_optimizer": on_host}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": microbatches,
            "gradient_clipping": clip_norm or 0.0,
            "bf16": {"enabled": dtype == torch.bfloat16},
            "zero_optimization": zero,
        }


@dataclass(kw_only=True, eq=False)
class DeepSpeedZero3(Peer):
    """Parameters, gradients and states are on the host; each module's weights are gathered for its forward.

    Args:
        super_offload: updates run in a process of their own, as gradients arrive (Lian et al. 2025).
    """

    attached = AttachedDeepSpeed
    option: ClassVar[str] = "deepspeed_zero3"
    package: ClassVar[str] = "deepspeed"
    needs_cuda: ClassVar[bool] = True
    owns_update: ClassVar[bool] = True
    one_dtype: ClassVar[bool] = True
    super_offload: bool = knob(False)

    @property
    def notes(self) -> tuple[str, ...]:
        by_itself = "it clips and measures the norm by itself, in the update"
        beside = "weights stay on the GPU; the memory of its update process is not counted"
        early = "updates begin inside backward, with the learning rate of the step before"
        return (by_itself, beside, early) if self.super_offload else (by_itself,)
