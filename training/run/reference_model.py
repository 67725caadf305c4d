"""The second, frozen model that a task compares the one that trains with (`task.reference=copy`): memory and weights.

It has a mode of its own, of the run's kind, so it streams beside the first over the same streams. Its weights are those
that the run began from, also where the run resumes. No checkpoint has them: `reference.json` of the run's directory, in
the form of base.json, names them.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from threading import Thread
from typing import Self

from torch import nn

from offload import Attached, Counters, Streams
from offload.sharing import NO_SHARERS, Sharers
from training.checkpoints.base import BaseReference
from training.checkpoints.resuming import Checkpoint
from training.errors import UserError
from training.metrics.progress import phase
from training.run.attention import without_scores
from training.runs.files import REFERENCE_ORIGIN, write_whole
from training.settle.components import Components, attached
from training.weights.files import ModelWeights
from training.weights.filling import fill_buffers, fill_parameters


@dataclass(frozen=True)
class AttachedModels:
    """The model that trains under its mode, and its reference under one of its own."""

    trained: Attached
    reference: Attached | None = None

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Surrounds forwards of both models without gradients."""
        with self.trained.inference(), nullcontext() if self.reference is None else self.reference.inference():
            yield

    def counters(self) -> Counters:
        """Returns those of both, added up."""
        own = self.trained.counters()
        return own if self.reference is None else own + self.reference.counters()

    @property
    def reference_model(self) -> nn.Module | None:
        return None if self.reference is None else self.reference.model

    @property
    def shared_parameters(self) -> frozenset[nn.Parameter]:
        """The parameters of both models whose homes ranks share."""
        own = self.trained.shared_parameters
        return own if self.reference is None else own | self.reference.shared_parameters


@contextmanager
def attached_models(
    components: Components, streams: Streams, sharers: Sharers = NO_SHARERS
) -> Iterator[AttachedModels]:
    """Attaches the modes of the model and of its reference model, whose buffers it fills. Raises MemoryError.

    Inside the block attention of long sequences stores no scores: see `without_scores`.
    """
    compiler = Thread(target=import_module, args=("torch._dynamo",))
    if components.device.type == "cuda" and (components.recomputed_blocks or components.mode.recomputes):
        # Checkpoints of torch import its compiler. The seconds of that pass beside the allocation of memory.
        compiler.start()
    with without_scores(components), attached(components, streams, sharers) as trained:
        if compiler.ident is not None:
            # Where two threads import at once, one may see the other's modules half made.
            compiler.join()
        if components.reference is None:
            yield AttachedModels(trained)
            return
        with attached(components.reference, streams, sharers) as reference:
            fill_buffers(reference.model)
            components.task.reference_model = reference.model
            try:
                yield AttachedModels(trained, reference)
            finally:
                components.task.reference_model = None


@dataclass(frozen=True)
class ReferenceOrigin:
    """Where the values of a reference come from: the files of `weights`, or the seed if this is None.

    `base` names the files by their hashes, or the seed.
    """

    weights: ModelWeights | None
    base: BaseReference

    @classmethod
    def of(
        cls,
        components: Components,
        checkpoint: Checkpoint | None,
        weights: ModelWeights | None,
        base: BaseReference | None,
    ) -> Self | None:
        """Finds what filled a reference at first; None: there is none. Raises UserError if that is another."""
        config = components.config
        if components.reference is None:
            return None
        if base is not None:
            return cls(weights, base)
        weights = None if config.model.weights is None else ModelWeights.find(config.model.weights)
        with phase("hashing the reference"):
            base = BaseReference.of(config.seed, weights)
        if checkpoint is not None:
            key, run_dir = f"resume={checkpoint.folder}", checkpoint.folder.parent.parent
            if not (run_dir / REFERENCE_ORIGIN).is_file():
                raise UserError(
                    f"{key}: {run_dir / REFERENCE_ORIGIN} is missing, which names the weights of the reference: restore"
                    " it, take the task.reference that the run had, or begin a new run from these weights,"
                    f" model.weights={checkpoint.folder}"
                )
            base.check(run_dir, key, REFERENCE_ORIGIN)
        return cls(weights, base)

    def fill(self, components: Components) -> None:
        """Fills the reference, which has memory, and writes the file that names its weights."""
        reference = components.reference
        fill_parameters(reference.model, reference.config, components.device, self.weights)
        write_whole(components.invocation.run_dir / REFERENCE_ORIGIN, self.base.to_json(), durable=True)
