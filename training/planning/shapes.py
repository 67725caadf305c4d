"""Refuses a model and batches whose shapes do not fit each other, before libraries notice it inside forward."""

from __future__ import annotations

import re

import torch

from offload.planning import left_as_found
from training.components import Components
from training.errors import UserError, first_line
from training.planning.dry_step import examples_of_microbatch

# What libraries and torch say of sizes, of numbers that count, and of ones that are missing (null in a configuration).
# Torch says so of a tensor without values too, but then it names meta tensors.
OF_SHAPES = re.compile(
    r"\b(shapes?|sizes?|channels?|dimensions?|output_size|out of range|divisible)\b|must be \w+, not NoneType",
    re.IGNORECASE,
)


def refuse_shapes(components: Components) -> None:
    """Raises UserError if the model refuses the shapes of a microbatch, or has sizes that contradict.

    Its forward runs on the meta device, without a mode. A forward that fails there for another reason may still run on
    values, and is not refused.
    """
    config = components.config
    try:
        with left_as_found(components.model), torch.no_grad():
            batch = components.task.meta_batch(config, examples_of_microbatch(config))
            components.task.loss(components.model, batch)
    except (ValueError, RuntimeError, TypeError, IndexError) as error:
        problem = first_line(error)
        if OF_SHAPES.search(problem) and "meta" not in problem:
            chosen = components.invocation.choices
            raise UserError(
                f"model={chosen['model']} with dataset={chosen['dataset']}: sizes do not fit each other ({problem}):"
                " change those of the dataset, or of the model"
            ) from error
    # On tensors without values a model may raise any error.
    except Exception:
        return
