"""Compares the model of a run with the config.json beside its weights: values that files of weights do not have.

Shapes alone would fit with another base of the rotary angles, another epsilon or another activation, and give other
numbers without a word.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torch import nn

from models.llama import Llama
from training.errors import UserError, as_user_error
from training.runs.files import CONFIG_FILE as RUN_CONFIG_FILE
from training.runs.files import home_expanded
from training.weights.files import CONFIG_FILE, KEY, part_in
from training.weights.model_tokenizer import folder_of, model_of_run, values_in
from training.weights.source import local_source

LLAMA = "llama"
# The keys of its configuration that our Llama has, under the same names.
LLAMA_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "rope_theta", "rms_norm_eps", "tie_word_embeddings",
)  # fmt: skip
# The most keys that a message names.
NAMED = 4
# Values that our Llama has one of.
FIXED = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "attention_dropout": 0.0}
# Keys that change nothing of what a forward computes, or that decide how a model begins and is used.
WITHOUT_EFFECT = {
    "architectures", "chunk_size_feed_forward", "dtype", "id2label", "is_decoder", "label2id",
    "max_position_embeddings", "output_attentions", "output_hidden_states", "pretraining_tp", "problem_type",
    "return_dict", "router_aux_loss_coef", "task_specific_params", "transformers_version", "use_cache",
}  # fmt: skip
ENDS_WITHOUT_EFFECT = ("_token_id", "range", "init_std")
# Ends of keys that decide how a model is trained: overrides may give others than the files have.
OF_TRAINING = ("dropout", "dropout_prob", "pdrop", "layerdrop", "output_router_logits")


def refuse_other_architecture(config: DictConfig, model: nn.Module) -> None:
    """Raises UserError if the config.json beside `model.weights` describes another model than `model`.

    The message names the keys that differ, and overrides that make them equal. The config.json of a model on the Hub is
    read only if it is in the client's cache.
    """
    given = config.model.weights
    if given is None or (folder := folder_of(KEY, given)) is None:
        return
    if isinstance(model, Llama):
        if values := values_in(folder):
            _refuse_other_llama(config, values, folder if home_expanded(KEY, given).exists() else given)
    elif "source" in config.model and folder != folder_of("model.source", config.model.source):
        _refuse_other_source(config, model, folder)


def _refuse_other_llama(config: DictConfig, values: Mapping[str, Any], place: str | Path) -> None:
    found, ours = _llama_values(values, place), dict(config.model)
    differs = [key for key in LLAMA_KEYS if found[key] != ours[key]]
    cannot = [f"{key}={value}" for key, value in found.items() if key not in LLAMA_KEYS]
    if cannot:
        raise UserError(
            f"{KEY}={config.model.weights}: its {CONFIG_FILE} has {', '.join(cannot[:NAMED])}, which the Llama of this"
            f" repository does not compute: take model=hf model.source={place}"
        )
    if differs:
        listed = ", ".join(f"{key}={found[key]} and not {ours[key]}" for key in differs)
        mended = " ".join(f"model.{key}={str(found[key]).lower()}" for key in differs)
        raise UserError(f"{KEY}={config.model.weights}: its {CONFIG_FILE} has {listed}: give {mended}")


def _llama_values(values: Mapping[str, Any], place: str | Path) -> dict[str, Any]:
    """Returns LLAMA_KEYS as a config.json has them, in the old spelling or the new, and what our Llama has not."""
    model_type = values.get("model_type")
    if model_type != LLAMA:
        return {"model_type": model_type, **dict.fromkeys(LLAMA_KEYS)}
    from transformers import LlamaConfig

    # Each value may be refused in its own way.
    with as_user_error(f"{KEY}={place}: its {CONFIG_FILE} is refused (", Exception, after="): download it again"):
        read = LlamaConfig.from_dict(dict(values))
    rope = dict(read.rope_parameters)
    kind, theta = rope.get("rope_type"), rope.get("rope_theta")
    found = {key: theta if key == "rope_theta" else getattr(read, key) for key in LLAMA_KEYS}
    others = {key: getattr(read, key) for key, value in FIXED.items() if getattr(read, key) != value}
    if kind != "default":
        others["rope_type"] = kind
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        others["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if read.head_dim != read.hidden_size // read.num_attention_heads:
        others["head_dim"] = read.head_dim
    return found | others


def _refuse_other_source(config: DictConfig, model: nn.Module, folder: Path) -> None:
    if hasattr(model, "network"):
        described = dict(_leaves(values_in(folder / part_in(folder)))), str(folder), None
    else:
        described = _of_transformers(config, folder)
    if described is None:
        return
    found, source, overrides = described
    ours = dict(_leaves(dict(model.network.config) if hasattr(model, "network") else model.hf.config.to_dict()))
    given = {key for key, _ in _leaves(config.model.get("overrides") or {}) if key.endswith(OF_TRAINING)}
    differs = [key for key in found if key in {*ours} - given and _plain(found[key]) != _plain(ours[key])]
    if differs:
        listed = ", ".join(f"{key}={found[key]} and not {ours[key]}" for key in differs[:NAMED])
        more = f" and {len(differs) - NAMED} more" if len(differs) > NAMED else ""
        changed = "" if config.model.overrides == overrides else f" model.overrides={as_override(overrides)}"
        raise UserError(
            f"{KEY}={config.model.weights}: its {CONFIG_FILE} has {listed}{more}: take model.source={source}{changed}"
        )


def _of_transformers(config: DictConfig, folder: Path) -> tuple[dict[str, Any], str, Any] | None:
    """Returns the values of the configuration of the model whose weights are in `folder`, its source and overrides.

    Returns None if no file in `folder` tells them.
    """
    source, overrides = str(folder), None
    if (folder / RUN_CONFIG_FILE).is_file():
        run = model_of_run(folder, f"{KEY}={folder}")
        if "source" not in run:
            return None
        source, overrides = local_source(run["source"]), run.get("overrides")
    elif not (folder / CONFIG_FILE).is_file():
        return None
    from models.hf_source import find_source

    with as_user_error(f"{KEY}={config.model.weights}: "):
        found = find_source(source, config.model.task).config(overrides).to_dict()
    on_hub = not home_expanded(KEY, config.model.weights).exists()
    of_run = (folder / RUN_CONFIG_FILE).is_file()
    return dict(_leaves(found)), config.model.weights if on_hub and not of_run else source, overrides


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the keys of a configuration, and of those inside it, that decide what a forward computes."""
    for key, value in values.items():
        if not isinstance(key, str) or key.startswith("_"):
            continue
        if key in WITHOUT_EFFECT or key.endswith(ENDS_WITHOUT_EFFECT):
            continue
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def as_override(value: Any) -> str:
    """Returns a value as the command line has it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {as_override(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_override, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
