"""dpo: trains a language model on pairs of answers, of which one is preferred (Rafailov et al. 2023).

The model is to prefer the chosen answer more than a reference does, which is the model that training begins from: the
loss is `-logsigmoid(beta * (chosen - rejected))`, where each of the two is the log-probability of an answer under the
model less that under the reference. The numbers are those of TRL's DPOTrainer.
"""

import inspect
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from hydra.utils import get_class
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from models.adapters import adapters_off, config_of
from models.loss import IGNORED_LABEL
from offload import KnobError
from offload.knobs import in_range, one_of
from training.batches import Batch, examples_in
from training.config.adapter import has_adapter
from training.errors import UserError
from training.tasks.causal_lm import CausalLM

REFERENCE, INDEX = "reference", "index"
AUTO, ADAPTER, CACHED, COPY = "auto", "adapter", "cached", "copy"
LOSSES = ("sigmoid", "robust", "ipo")
# Of transformers: their forwards read rates from the configuration, which is exported with the model.
DROPS_BY_CONFIG = ("blt", "falcon", "fuyu", "persimmon")


class DPO(CausalLM):
    """Direct preference optimisation. A batch has `input_ids` and `labels`, int64 [pairs, 2, L], the chosen answer
    first, whose padding is at the end, and `lengths` int64 [pairs, 2].

    `reference` float32 [pairs, 2] are the log-probabilities of the answers under the reference, summed over tokens. A
    dataset's batch has `index` int64 [pairs] instead, with which they are found in the table of all samples.

    Args:
        beta: how close the model stays to the reference; larger is closer.
        loss: sigmoid (Rafailov et al. 2023); robust, the same without the bias of flipped pairs (Chowdhury et al.
            2024); ipo, a square that pulls the margin of a token to 1 / (2 beta) (Azar et al. 2023).
        label_smoothing: the share of pairs that are taken to be flipped. Under loss=sigmoid these pull the other way
            (Mitchell 2023); loss=robust needs one, below 0.5.
        reference: the log-probabilities under the model that training begins from. adapter: computed in each step with
            the adapter switched off, so those of the base, whatever adapter.weights are. cached: computed once, for all
            pairs, before the first step. copy: computed in each step by a second, frozen model under a mode of its own,
            which has model.weights, whatever adapter.weights are. auto: adapter where an adapter begins from nothing,
            else cached.

    Raises KnobError if a value is out of range.
    """

    figures = ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy")
    score_names = ("loss", *figures)

    def __init__(
        self, *, beta: float = 0.1, loss: str = "sigmoid", label_smoothing: float = 0.0, reference: str = AUTO
    ):
        self.beta = in_range("beta", beta, above=0)
        self.loss_name = one_of("loss", loss, *LOSSES)
        self.label_smoothing = in_range("label_smoothing", label_smoothing, at_least=0, at_most=0.5)
        if label_smoothing and loss == "ipo":
            raise KnobError("label_smoothing", label_smoothing, "has no effect on loss=ipo: take 0")
        if loss == "robust" and not 0 < label_smoothing < 0.5:
            raise KnobError("label_smoothing", label_smoothing, "loss=robust needs one between 0 and 0.5")
        self.reference = one_of("reference", reference, AUTO, ADAPTER, CACHED, COPY)
        self.table: Tensor | None = None
        """float32 [samples, 2] on the CPU: those of a cached reference, once they are computed"""

    @property
    def looks_ahead(self) -> bool:
        return self.reference in (ADAPTER, COPY)

    @property
    def needs_table(self) -> bool:
        """True if `prepared` needs `table`, which the run fills before its first step."""
        return self.reference == CACHED

    @property
    def needs_copy(self) -> bool:
        return self.reference == COPY

    def prepared(self, batch: Batch, seed: int) -> Batch:
        """Replaces `index` by the `reference`, if there is a table, which a run has from before its first step on."""
        index = batch[INDEX]
        rest = {name: tensor for name, tensor in batch.items() if name != INDEX}
        if index.is_meta:
            return rest | {REFERENCE: torch.empty(batch["lengths"].shape, device="meta")}
        return rest if self.table is None else rest | {REFERENCE: self.table[index]}

    def ahead(self, model: nn.Module, batch: Batch) -> Batch:
        """Returns the batch with the `reference` that the model is without its adapter; a copy has none."""
        with adapters_off(model):
            return batch | {REFERENCE: answer_log_probs(model, batch)}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.loss_and_figures(model, batch)[0]

    def loss_and_figures(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
        if REFERENCE not in batch:
            raise RuntimeError("the reference of this batch is not computed yet")
        found = answer_log_probs(model, batch) - batch[REFERENCE]
        return self._losses(found, batch["labels"]).mean(), self._rewards(found.detach())

    def scores(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Returns `loss` and the rewards, as `loss_and_figures`. The model is in eval() and without gradients."""
        reference = model if self.reference_model is None else self.reference_model
        loss, figures = self.loss_and_figures(model, self.ahead(reference, batch) if self.looks_ahead else batch)
        return {"loss": loss} | dict(zip(self.figures, figures, strict=True))

    def _losses(self, found: Tensor, labels: Tensor) -> Tensor:
        """Returns the loss of each pair, [pairs]; `found` are log-probabilities less those of the reference."""
        if self.loss_name == "ipo":
            # Means of a token, as the authors of IPO do it (and TRL): sums would pull long answers less.
            per_token = found / (labels != IGNORED_LABEL).sum(-1).clamp(min=1)
            return (per_token[:, 0] - per_token[:, 1] - 1 / (2 * self.beta)) ** 2
        margin, flipped = self.beta * (found[:, 0] - found[:, 1]), self.label_smoothing
        right = -F.logsigmoid(margin)
        if not flipped:
            return right
        wrong = -F.logsigmoid(-margin)
        if self.loss_name == "robust":
            return ((1 - flipped) * right - flipped * wrong) / (1 - 2 * flipped)
        return (1 - flipped) * right + flipped * wrong

    def _rewards(self, found: Tensor) -> Sequence[Tensor]:
        """Returns the `figures`."""
        chosen, rejected = (self.beta * found).unbind(1)
        margin = chosen - rejected
        return chosen.mean(), rejected.mean(), margin.mean(), (margin > 0).float().mean()

    def weight(self, batch: Batch) -> int:
        """Returns the pairs, over which the loss is the mean, however long their answers are."""
        return examples_in(batch)

    def units(self, config: DictConfig) -> int:
        return config.batch_size * 2 * config.seq_len

    def meta_batch(self, config: DictConfig, examples: int) -> Batch:
        return self.prepared(super().meta_batch(config, examples), 0)

    def check_model(self, config: DictConfig, model: nn.Module) -> None:
        # Not at the top: composing imports the tasks, and these import safetensors.
        from training.tasks.text_samples import refuse_positions

        if not getattr(get_class(config.dataset._target_), "has_pairs", False):
            raise UserError("task=dpo: the dataset has no pairs of answers: take dataset=preferences, or another task")
        if "reduction" not in inspect.signature(model.forward).parameters:
            raise UserError(
                f"task=dpo: {type(model).__name__} does not return the log-probabilities of tokens: take a language"
                " model, model=hf or one of conf/model/llama*.yaml"
            )
        if get_class(config.offload._target_).foreign:
            raise UserError("task=dpo: other systems train without a reference: take offload=none, or another of ours")
        if getattr(model, "balances_experts", False):
            raise UserError(
                "task=dpo: has no auxiliary loss of experts: take model.overrides={output_router_logits: false}"
            )
        refuse_positions(model, config.seq_len, f"seq_len={config.seq_len}")
        if self.reference == ADAPTER:
            _check_adapter(config, model)

    def fit(self, config: DictConfig, model: nn.Module) -> dict[str, str]:
        # The reference has no dropout. TRL switches off that of modules, and leaves what forwards apply by function.
        config = getattr(getattr(model, "hf", None), "config", None)
        reads_config = getattr(config, "model_type", None) in DROPS_BY_CONFIG
        if reads_config and (rates := [key for key, value in config.to_dict().items() if "drop" in key and value]):
            given = ", ".join(f"{key}: 0.0" for key in rates)
            raise UserError(
                f"task=dpo: the reference has no dropout, and {config.model_type} has some: take"
                f" 'model.overrides={{{given}}}'"
            )
        # That of an adapter is what the user gives.
        of_model = [module for name, module in model.named_modules() if ".lora_dropout" not in name]
        found = [(module, *rate) for module in of_model for rate in _dropout_of(module)]
        for module, name, _ in found:
            setattr(module, name, 0.0)
        largest = max((rate for *_, rate in found), default=0.0)
        return {"dropout": f"0 and not {largest}, because the reference of task=dpo has none"} if found else {}


def _dropout_of(module: nn.Module) -> list[tuple[str, float]]:
    """Returns pairs (attribute, value): the probabilities above 0 with which a module drops something in training."""
    return [
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, float) and value and ("drop" in name or (name == "p" and isinstance(module, _DropoutNd)))
    ]


def answer_log_probs(model: nn.Module, batch: Batch) -> Tensor:
    """Returns the log-probabilities of a batch's answers, sums over the labelled tokens: float32 [pairs, 2]."""
    # As rows of one batch. No row sees another, and padding follows what is real, so nothing that counts sees it.
    ids, labels = batch["input_ids"].flatten(0, 1), batch["labels"].flatten(0, 1)
    return -model(ids, labels, reduction="none").sum(-1).view(batch["lengths"].shape)


def settled_reference(config: DictConfig) -> str:
    """Returns what `task.reference=auto` stands for in `config`."""
    begins_as_base = has_adapter(config) and config.adapter.weights is None
    return ADAPTER if begins_as_base and not config.adapter.get("modules_to_save") else CACHED


def _check_adapter(config: DictConfig, model: nn.Module) -> None:
    if not has_adapter(config):
        raise UserError("task.reference=adapter: the whole model trains: take task.reference=cached, or adapter=lora")
    if config_of(model).modules_to_save:
        raise UserError(
            "task.reference=adapter: adapter.modules_to_save train in full, so nothing has their old weights: take"
            " task.reference=cached"
        )
