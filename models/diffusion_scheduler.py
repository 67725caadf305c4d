"""The scheduler of a diffusion model, from the file of its pipeline: what the model predicts, at which times.

Each file is read as one of two classes, with which the training scripts of diffusers train: `DDPMScheduler` for models
that predict noise, images or v (Ho et al. 2020; Salimans and Ho 2022), and `FlowMatchEulerDiscreteScheduler` for those
of velocities. Nothing is downloaded.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from models.diffusion_files import PIPELINE_FILE, pipeline_of
from models.json_files import read_object
from models.quiet_imports import import_quantisers, without_remarks

if TYPE_CHECKING:
    from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler

    TrainingScheduler = DDPMScheduler | FlowMatchEulerDiscreteScheduler

# The number of steps on which most models were trained, which a network knows as 0 to 999.
STEPS = 1000
EPSILON, SAMPLE, V_PREDICTION = PREDICTIONS = ("epsilon", "sample", "v_prediction")
# Keys by which a model of noise has other times than the steps of its betas.
OTHER_TIMES = {"timestep_type": "continuous", "use_flow_sigmas": True}
ADVICE = "download it again"


def read_scheduler(file: Path) -> TrainingScheduler:
    """Returns the scheduler to train with, of a scheduler_config.json.

    Samplers of other classes put 2**-24 in the place of the last 0 of `alphas_cumprod`; that of training has 0.

    Raises ValueError in one line for a file that cannot be read, and a scheduler that is neither of the two kinds.
    """
    given = read_object(file, ADVICE)
    name = given.get("_class_name")
    diffusers = library()
    with without_remarks():
        kind = getattr(diffusers, name, None) if isinstance(name, str) else None
        if not (inspect.isclass(kind) and issubclass(kind, diffusers.SchedulerMixin)):
            raise ValueError(f"{file}: _class_name={name} is no scheduler of diffusers {diffusers.__version__}")
        try:
            sampler = kind.from_config(given)
            # With the defaults of its own class.
            config = sampler.config
            if name.startswith("FlowMatch") or config.get("prediction_type") == "flow_prediction":
                shift = config.get("shift", config.get("flow_shift", 1.0))
                made = of_config(diffusers.FlowMatchEulerDiscreteScheduler, config, shift=shift)
            else:
                made = of_config(diffusers.DDPMScheduler, config)
        # For values that do not fit, constructors raise errors of any type.
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"{file}: {name} cannot be made of it: {reason}") from error
    steps = made.config.num_train_timesteps
    if is_flow(made):
        if steps != STEPS:
            raise ValueError(f"{file}: num_train_timesteps={steps}: only {STEPS} is supported for velocities")
        return made
    alphas, prediction = getattr(sampler, "alphas_cumprod", None), config.get("prediction_type")
    other = next((key for key in OTHER_TIMES if config.get(key) == OTHER_TIMES[key]), None)
    if alphas is None or prediction not in PREDICTIONS or other:
        told = f" {other}={OTHER_TIMES[other]}" if other else ""
        raise ValueError(
            f"{file}: {name} with prediction_type={prediction}{told}: no task trains such a model: known are velocities"
            f" (FlowMatch...), and {', '.join(PREDICTIONS)} at whole steps"
        )
    if not torch.allclose(made.alphas_cumprod.to(alphas.dtype), alphas, rtol=0, atol=1e-6):
        # As of CogVideoX, which has keys of its own.
        made.alphas_cumprod = alphas
    return made


def library() -> ModuleType:
    """Returns diffusers, imported without remarks."""
    import_quantisers()
    with without_remarks():
        import diffusers
    return diffusers


def is_flow(scheduler: TrainingScheduler) -> bool:
    """Tells whether the model predicts velocities."""
    return type(scheduler).__name__.startswith("FlowMatch")


def of_config(kind: Callable[..., Any], config: Mapping[str, Any], **given: Any) -> Any:
    """Makes a scheduler of class `kind`, with what it takes of the configuration of another, and `given` values."""
    return kind(**{key: config[key] for key in inspect.signature(kind).parameters if key in config} | given)


def shifted(times: Tensor, shift: float) -> Tensor:
    """Returns times, 0 (image) to 1 (noise), moved towards noise by a `shift` above 1 (Esser et al. 2024)."""
    return shift * times / (1 + (shift - 1) * times)


def shift_by_tokens(file: Path, scheduler: FlowMatchEulerDiscreteScheduler) -> Callable[[int], float]:
    """Returns what computes the `mu` of `scheduler.time_shift` from the number of an image's tokens.

    It is the function of the module of the pipeline to which the scheduler's `file` belongs, with the scheduler's
    numbers; where it also depends on the number of steps, with the pipeline's default.

    Raises ValueError where no such pipeline is found, or it has no such function.
    """
    index = pipeline_of(file)
    if index is None:
        raise ValueError(f"{file}: use_dynamic_shifting: there is no {PIPELINE_FILE} beside it to tell the pipeline")
    name, diffusers = read_object(index, ADVICE).get("_class_name"), library()
    with without_remarks():
        pipeline = getattr(diffusers, name, None) if isinstance(name, str) else None
        module = sys.modules.get(getattr(pipeline, "__module__", ""))
    if empirical := getattr(module, "compute_empirical_mu", None):
        steps = inspect.signature(pipeline.__call__).parameters["num_inference_steps"].default
        return lambda tokens: empirical(tokens, steps)
    linear = getattr(module, "calculate_shift", None)
    if linear is None:
        raise ValueError(f"{index}: {name} of diffusers {diffusers.__version__} does not tell how times are shifted")
    config = scheduler.config
    numbers = {
        "base_seq_len": config.base_image_seq_len,
        "max_seq_len": config.max_image_seq_len,
        "base_shift": config.base_shift,
        "max_shift": config.max_shift,
    }
    taken = {key: numbers[key] for key in inspect.signature(linear).parameters if key in numbers}
    return lambda tokens: linear(tokens, **taken)
