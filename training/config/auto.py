"""The value `auto`, for which a run chooses, and the keys that then hold its choice."""

from __future__ import annotations

AUTO = "auto"

# A run writes down what it took; one that was refused before that has auto there still.
SETTLED = (
    "precision",
    "microbatches",
    "offload.resident",
    "offload.weights.resident",
    "model.weights",
    "dataset.tokenizer",
)
