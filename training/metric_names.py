"""The names of all metrics, with their units."""

from dataclasses import dataclass
from typing import Literal

# Prefix of a metric's name in a summary: the value that the plan predicted.
PLANNED = "planned/"


@dataclass(frozen=True)
class Metric:
    """One measured quantity. `summary` is the statistic that stands for a whole run; None: not in the summary."""

    unit: str
    description: str
    summary: Literal["median", "mean", "max"] | None = None


# Of pairs of answers (task=dpo): beta times how much more probable an answer is than under the reference.
REWARDS = {
    "reward_chosen": Metric("", "mean reward of the chosen answers, of one batch"),
    "reward_rejected": Metric("", "mean reward of the rejected answers"),
    "reward_margin": Metric("", "mean of the one less the other"),
    "reward_accuracy": Metric("", "share of the pairs whose chosen answer has the larger reward"),
}
METRIC_KEYS: dict[str, Metric] = {
    "train/step": Metric("steps", "optimizer steps done, from 1"),
    "train/loss": Metric("", "mean loss of the step's batch: of text, nats a token"),
    **{f"{when}/{name}": metric for when in ("train", "eval") for name, metric in REWARDS.items()},
    "train/aux_loss": Metric("", "auxiliary loss of experts, without its weight in the loss, where the model adds it"),
    "train/grad_norm": Metric("", "L2 norm of all gradients before clipping"),
    "train/tokens": Metric("tokens", "trained on so far, those of a text that was read again too; no padding", "max"),
    "train/images": Metric("images", "trained on so far", "max"),
    "train/examples": Metric("examples", "trained on so far", "max"),
    "train/epoch": Metric("epochs", "passes over the dataset so far, where its length is known", "max"),
    "train/lr": Metric("", "learning rate of the first parameter group"),
    "eval/loss": Metric("", "mean loss of the held-out batches: of text, nats a token"),
    "eval/accuracy": Metric("", "share of the held-out examples whose label has the largest logit"),
    "train/skipped_steps": Metric("steps", "skipped because gradients were not finite", "max"),
    "perf/step_ms": Metric("ms", "time of one step, and of making its batch", "median"),
    "perf/tokens_per_s": Metric("tokens/s", "tokens trained in a second; no padding", "median"),
    "perf/images_per_s": Metric("images/s", "images trained on in a second", "median"),
    "perf/examples_per_s": Metric("examples/s", "examples trained on in a second", "median"),
    "perf/mfu": Metric("", "model FLOPs over the device's peak, 0 to 1, where that is known", "median"),
    "moe/load_imbalance": Metric("", "tokens of the busiest expert over those of the mean one, mean of layers", "mean"),
    "moe/load_imbalance_max": Metric("", "the same of the layer in which it is largest", "mean"),
    "moe/dead_experts": Metric("", "share of the experts that got no token in the step, mean of layers", "mean"),
    "moe/dead_experts_max": Metric("", "the same of the layer in which it is largest", "mean"),
    "moe/router_entropy": Metric("", "mean entropy of the softmax of router logits over its most, 0 to 1", "mean"),
    "moe/router_entropy_min": Metric("", "the same of the layer in which it is smallest", "mean"),
    "memory/vram_peak_gib": Metric("GiB", "peak of live tensors on the fullest GPU since the last record", "max"),
    "memory/vram_reserved_gib": Metric("GiB", "peak of the memory that its allocator held since then", "max"),
    "memory/host_pinned_gib": Metric("GiB", "page-locked host memory, of all ranks of a host", "max"),
    "memory/rss_gib": Metric("GiB", "resident host memory, of all ranks of a host", "max"),
    "transfer/h2d_gib": Metric("GiB/step", "copied from host to device", "mean"),
    "transfer/d2h_gib": Metric("GiB/step", "copied from device to host", "mean"),
    "transfer/activations_h2d_gib": Metric("GiB/step", "activations among the bytes of h2d_gib", "mean"),
    "transfer/activations_d2h_gib": Metric("GiB/step", "activations among the bytes of d2h_gib", "mean"),
    "transfer/stall_ms": Metric("ms", "compute waiting for copies, in one step", "median"),
    "transfer/files_gib": Metric("GiB/step", "weights read from their files", "mean"),
    "transfer/files_wait_ms": Metric("ms", "the host waiting for these reads, in one step", "median"),
    "optimizer/host_ms": Metric("ms", "updates on the optimizer's own thread, in one step", "mean"),
    "optimizer/wait_ms": Metric("ms", "the step waiting for these updates, while the device has no other work", "mean"),
    "optimizer/speculated": Metric("", "share of these updates that began before the norm was known", "mean"),
    "optimizer/undone": Metric("", "share of those that were undone, because their gradients were clipped", "mean"),
    "optimizer/undo_ms": Metric("ms", "undoing them, in one step", "mean"),
    "checkpoint/save_ms": Metric("ms", "the run waiting for its checkpoint to be saved, since the last record", "mean"),
    "eval/ms": Metric("ms", "time of one evaluation, which is in no other time", "mean"),
    "optimizer/gparams_per_s": Metric("Gparam/s", "parameters updated in a second of host_ms", "mean"),
}
# Metrics that only a summary has.
SUMMARY_KEYS: dict[str, Metric] = {
    "steps": Metric("steps", "optimizer steps done"),
    "devices": Metric("", "devices that shared each step, if there were several"),
    "perf/floor_ms": Metric("ms", "planned: no step of this work can be shorter; not known on the CPU"),
    "perf/floor_ratio": Metric("", "step time over that floor"),
    "train/first_loss": Metric("", "loss of the first step"),
    "train/final_loss": Metric("", "loss of the last logged step"),
    "eval/final_loss": Metric("", "loss of the last evaluation"),
    "eval/final_accuracy": Metric("", "accuracy of the last evaluation"),
    "checkpoint/best_step": Metric("steps", "done at the checkpoint that checkpoint.best keeps"),
}

# What speeds and totals count; each task has one of them.
UNITS = ("tokens", "images", "examples")

# Whole numbers.
COUNTS = (
    "train/step", "train/tokens", "train/images", "train/examples", "train/skipped_steps", "checkpoint/best_step",
    "steps", "devices",
)  # fmt: skip


def higher_is_better(metric: str) -> bool:
    """Tells whether a larger value of an evaluation's metric is the better one, by its name; that of a loss is not."""
    return "rejected" not in metric and any(word in metric for word in ("accuracy", "margin", "reward"))
