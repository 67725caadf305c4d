"""Refuses a model and batches whose shapes do not fit each other, before libraries notice it inside forward."""

from __future__ import annotations

import re

import torch

from offload.planning import left_as_found
from training.errors import UserError, first_line
from training.evaluation.held_out import evaluating
from training.planning.dry_step import examples_of_microbatch
from training.settle.components import Components

# What libraries and torch say of sizes, of numbers that count, and of ones that are missing (null in a configuration).
# Torch says so of a tensor without values too, but then it names meta tensors.
OF_SHAPES = re.compile(
    r"\b(shapes?|sizes?|channels?|dimensions?|reduction dim|output_size|out of range|divisible)\b"
    r"|must be \w+, not NoneType",
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
    # On tensors without values a model may raise any error.
    except Exception as error:
        if problem := _problem_of_shapes(error):
            chosen = components.invocation.choices
            raise UserError(
                f"model={chosen['model']} with dataset={chosen['dataset']}: sizes do not fit each other ({problem}):"
                " change those of the dataset, or of the model"
            ) from error


def refuse_sample_shape(components: Components) -> None:
    """Raises UserError if the model refuses the shape of samples that the user has given, as `refuse_shapes` does."""
    config = components.config
    shape = config.task.get("sample_shape")
    if shape is None:
        return
    try:
        with left_as_found(components.model), evaluating(components.model), torch.no_grad():
            for forward in components.task.sample_forwards(config, components.model):
                forward()
    except Exception as error:
        if problem := _problem_of_shapes(error):
            raise UserError(
                f"task.sample_shape={list(shape)}: the model takes no images of this shape ({problem}): take another,"
                " or null for the model's own"
            ) from error


def _problem_of_shapes(error: Exception) -> str | None:
    """Returns the message of an error that is about shapes, else None."""
    problem = first_line(error)
    known = isinstance(error, (ValueError, RuntimeError, TypeError, IndexError))
    return problem if known and OF_SHAPES.search(problem) and "meta" not in problem else None
