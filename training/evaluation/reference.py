"""The cached reference of a run of task=dpo: the log-probabilities that its model gives all answers before it trains.

All ranks compute them before the first step, under the run's offload mode. They are in host memory, and in a file of
the run's directory: a run that resumes has other weights, with which it cannot compute them again.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from offload import Attached
from training.batches import Batch, uploaded
from training.config.adapter import has_adapter
from training.errors import UserError
from training.evaluation.held_out import evaluating
from training.metrics.progress import phase
from training.parallel.ranks import Ranks
from training.runs.files import REFERENCE_FILE, write_whole
from training.settle.components import Components
from training.tasks.dpo import REFERENCE, answer_log_probs

# Microbatches of each rank between two looks at whether the run is to stop.
PARTS = 8
DATA, BEGINNING = "data_sha256", "beginning_sha256"


def fill_reference(
    components: Components, attached: Attached, dataset: object, ranks: Ranks, stopped: Callable[[], bool]
) -> bool:
    """Gives a task that needs it the table of the reference's log-probabilities, and writes it to the run's folder.

    Returns False once `stopped`. Raises UserError for log-probabilities that are not finite.
    """
    task, config = components.task, components.config
    if not task.needs_table:
        return True
    if task.table is None:
        with phase("computing the reference"):
            task.table = _computed(components, attached, dataset, ranks, stopped)
        if task.table is None:
            return False
    origin = {DATA: dataset.data_sha256, BEGINNING: beginning_of(config)}
    content = save({REFERENCE: task.table}, origin)
    write_whole(components.invocation.run_dir / REFERENCE_FILE, content, durable=True)
    return True


def saved_reference(checkpoint: Path, config: DictConfig, dataset: object) -> Tensor:
    """Reads the table of the reference's log-probabilities that the checkpoint's run has written: float32 [samples, 2].

    Raises UserError if the file is missing or damaged, or is of other data or other first weights.
    """
    path = checkpoint.parent.parent / REFERENCE_FILE
    advice = f"restore it, or begin a new run from these weights, model.weights={checkpoint}"
    try:
        with safe_open(path, "pt") as file:
            table, origin = file.get_tensor(REFERENCE), file.metadata() or {}
    except FileNotFoundError as error:
        raise UserError(f"resume={checkpoint}: {path} is missing, the reference of the run: {advice}") from error
    except (OSError, SafetensorError) as error:
        raise UserError(f"resume={checkpoint}: {path} cannot be read ({error}): {advice}") from error
    for key, value, what in (
        (DATA, dataset.data_sha256, "other data"),
        (BEGINNING, beginning_of(config), "a run that began from other weights"),
    ):
        if origin.get(key) != value:
            raise UserError(f"resume={checkpoint}: {path} is the reference of {what}: {advice}")
    if table.shape != (dataset.num_samples, 2) or table.dtype != torch.float32:
        raise UserError(f"resume={checkpoint}: {path} is not the reference of {dataset.num_samples} pairs: {advice}")
    return table


def beginning_of(config: DictConfig) -> str:
    """Returns a digest of the keys that decide from which weights a run begins."""
    node = OmegaConf.masked_copy(config, ["model", "adapter", "seed"])
    values = OmegaConf.to_container(node, resolve=True, enum_to_str=True)
    if has_adapter(config):
        # The files of a frozen base may lie elsewhere: checkpoints compare their contents.
        del values["model"]["weights"]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def log_probs_of_parts(
    model: nn.Module, parts: Sequence[Batch], device: torch.device, stopped: Callable[[], bool]
) -> list[Tensor] | None:
    """Returns the log-probabilities of the answers in each part, float32 [pairs, 2] on the CPU; None once `stopped`."""
    found = []
    with evaluating(model), torch.no_grad():
        for part in parts:
            if stopped():
                return None
            found.append(answer_log_probs(model, uploaded(part, device)).cpu())
    return found


def _computed(
    components: Components, attached: Attached, dataset: object, ranks: Ranks, stopped: Callable[[], bool]
) -> Tensor | None:
    config, model = components.config, attached.model
    # As in an evaluation: the largest microbatch of a step.
    rows = -(-config.batch_size // (config.microbatches * ranks.count))
    table = torch.full((dataset.num_samples, 2), torch.nan)
    batches = iter(dataset.every_sample(rows))
    with attached.inference():
        while parts := list(islice(batches, PARTS * ranks.count)):
            log_probs_of = partial(log_probs_of_parts, model, device=components.device, stopped=stopped)
            found = ranks.evaluate(parts, log_probs_of, "reference")
            if found is None:
                return None
            for part, log_probs in zip(parts, found, strict=True):
                table[part["index"]] = log_probs
    if not (finite := table.isfinite().all(1)).all():
        raise UserError(
            f"task.reference=cached: the model gives sample {int((~finite).nonzero()[0])} a log-probability that is"
            " not finite: take other weights, or precision=fp32"
        )
    return table
