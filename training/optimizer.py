"""AdamW on the parameters where they live, with float32 masters for those of lower precision."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

# Elements updated at a time. Their float32 gradient stays in the host's cache, which is three times as fast there as
# a copy of a whole large gradient; a GPU wants larger pieces, and 64 MiB of scratch is little to it.
HOST_TILE = 1 << 21
DEVICE_TILE = 1 << 24


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW (Loshchilov and Hutter 2019) on host and device parameters, mixed in one model.

    A bf16 or fp16 parameter is updated through a float32 master (Micikevicius et al. 2018), because alone it stands
    still where an update is below its resolution. float32 parameters are updated in place. State of a parameter, on
    its device: `step` (float32 scalar), `exp_avg` and `exp_avg_sq` (float32, the parameter's shape, contiguous) and,
    unless the parameter can be its own, `master` (likewise). Made at the first step, from the parameter's value then:
    weights of lower precision that are written later, other than by `load_state_dict`, are overwritten by the master.

    Scratch is one tile of float32 gradient, never a whole model's.

    Args:
        params: parameters or groups of them, as for any torch optimizer.
        lr, betas, eps, weight_decay: as torch.optim.AdamW; a group may have its own, and a scheduler may change them.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Iterable[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ):
        super().__init__(params, lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Updates every parameter that has a gradient; `closure` evaluates the loss first, which is returned.

        The version counter of each updated parameter rises, so that whoever keeps copies of weights can tell.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(_fresh_state(parameter))
        if "master" not in state and not _is_own_master(parameter):
            state["master"] = parameter.detach().float().contiguous()
        master = state.get("master", parameter)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        tile = HOST_TILE if parameter.device.type == "cpu" else DEVICE_TILE
        casts = parameter.grad.dtype != torch.float32
        scratch = torch.empty(
            min(tile, parameter.numel()) if casts else 0, dtype=torch.float32, device=parameter.device
        )
        stretches = _stretches(tile, master, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        for weight, gradient, exp_avg, exp_avg_sq in stretches:
            if casts:
                gradient = scratch[: gradient.numel()].copy_(gradient)
            # The kernel under torch.optim.AdamW(fused=True), whose wrappers would count a step for each tile.
            torch._fused_adamw_(
                [weight],
                [gradient],
                [exp_avg],
                [exp_avg_sq],
                [],
                [state["step"]],
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )
        if master is not parameter:
            parameter.copy_(master)
        else:
            # The fused kernels leave it alone.
            torch.autograd.graph.increment_version(parameter)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict()` returned, tensors moved to the parameters' devices, and otherwise shared with it.

        State of torch's own AdamW loads too; the masters that it lacks are made at the next step.
        """
        # torch would round float32 state of a bf16 parameter to bf16, so it gets the settings alone.
        super().load_state_dict({**state_dict, "state": {}})
        saved_ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(saved_ids, parameters, strict=True):
            if index in state_dict["state"]:
                self.state[parameter] = {
                    name: value.to(parameter.device, torch.float32).contiguous()
                    for name, value in state_dict["state"][index].items()
                }


def _fresh_state(parameter: Tensor) -> dict[str, Tensor]:
    options = {"dtype": torch.float32, "device": parameter.device}
    return {
        "step": torch.zeros((), **options),
        "exp_avg": torch.zeros(parameter.shape, **options),
        "exp_avg_sq": torch.zeros(parameter.shape, **options),
    }


def _is_own_master(parameter: Tensor) -> bool:
    # The kernel walks memory: on tensors of unlike strides it would pair up elements that do not belong together.
    return parameter.dtype == torch.float32 and parameter.is_contiguous()


def _stretches(size: int, *tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """The same `size` elements of each tensor, from first to last, as 1-D views (of a copy if not contiguous)."""
    return zip(*(tensor.contiguous().view(-1).split(size) for tensor in tensors), strict=True)
