"""Finds the configuration of an architecture of transformers: by its model type, or in a folder with config.json.

Nothing is downloaded, and no code of a checkpoint is run: the classes are those of the installed transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
)

from models.hf_overrides import RefusedError, check_taken, merged_values, nearest
from models.json_files import read_object

CAUSAL_LM, CLASSIFICATION = "causal_lm", "classification"
# The model types that have a model for each task.
TYPES = {CAUSAL_LM: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, CLASSIFICATION: MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES}
CONFIG_FILE = "config.json"
# An override that is no key of a configuration, and the one of its values that transformers does not register.
EXPERTS, EAGER = "experts_implementation", "eager"
# The others are kernels of the Hub, for some GPUs and dtypes; deepgemm's have no gradients.
TRAINED_EXPERTS = (EAGER, "batched_mm", "grouped_mm")
# Causal language models by transformers' account that see later tokens unless they are given masks.
SEES_LATER_TOKENS = ("cpmant", "xlm", "xlnet")
# The keys by which others do; at "vision" the tokens of an image see each other.
SEES_ALL, IS_CAUSAL = "use_bidirectional_attention", "is_causal"
# The key of the language whose layers a model takes, X-MOD.
LANGUAGE = "default_language"
# By type, the keys with the values at which transformers' loss is the cross-entropy of next tokens, as here.
PLAIN_LOSS = {
    "bamba": {"z_loss_coefficient": (0.0, None)},
    "prophetnet": {"disable_ngram_loss": (True,), "eps": (0.0,)},
}
# The same of a classifier of any type: of others an image has several classes, or numbers.
OF_ONE_CLASS = {"problem_type": ("single_label_classification", None)}
# Architectures that seed torch anew in each forward, by a number that nobody chose.
NEVER_TWICE_ALIKE = ("reformer",)
# Architectures that transformers has among the image classifiers, and what their forward takes.
TAKES_NO_IMAGES = {
    "imagegpt": "colours as tokens",
    "shieldgemma2": "a text with its images",
    "siglip2": "patches with their places",
}
# Shapes of well-known models: the model type, and its configuration.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    # Qwen Team 2025, Qwen3-8B.
    "qwen3_8b": (
        "qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "max_position_embeddings": 40960,
        },
    ),
    # Qwen Team 2025, Qwen3-30B-A3B: of 128 experts a token uses eight.
    "qwen3_30b_a3b": (
        "qwen3_moe",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "max_position_embeddings": 40960,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        },
    ),
    # OpenAI 2025, gpt-oss-20b; transformers' defaults are those of gpt-oss-120b.
    "gpt_oss_20b": ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    # Zeng et al. 2025, GLM-4.5-Air, without its layer that predicts a second token; other values are the defaults.
    "glm_air": ("glm4_moe", {"head_dim": 128, "attention_bias": True, "rope_theta": 1e6}),
    # The layers of Mixtral 8x7B (Jiang et al. 2024), smaller: eight experts, of which a token uses two.
    "mixtral_small": (
        "mixtral",
        {
            "vocab_size": 32000,
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
        },
    ),
    # Radford et al. 2019, the smallest.
    "gpt2_124m": ("gpt2", {}),
    # Gu and Dao 2023, mamba-130m.
    "mamba_130m": ("mamba", {"vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 24}),
    # Dosovitskiy et al. 2021, ViT-L/16.
    "vit_l": (
        "vit",
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_labels": 1000,
        },
    ),
}


@dataclass(frozen=True)
class Source:
    """An architecture of transformers, with the values that its configuration begins with.

    Attributes:
        task: "causal_lm" or "classification".
        config_class: the class of its configuration.
        values: the keys of config.json; empty for a model type, whose values are the defaults of `config_class`.
        folder: the folder that was given, or None.
    """

    task: str
    config_class: type[PreTrainedConfig]
    values: Mapping[str, Any]
    folder: Path | None

    def config(self, overrides: Mapping[str, Any] | None = None) -> PreTrainedConfig:
        """Makes the configuration, with `overrides` in place of the source's values.

        A value that is itself a mapping is merged into the sub-configuration or the dict of that name. Values that
        the class derives from others (a list with the type of each layer) are derived after the overrides.
        `experts_implementation` says what of transformers computes the products of experts; by default it chooses.

        Raises ValueError if a key is unknown, or is decided elsewhere; a value has another type, or transformers
        refuses the values together. The message is one line.
        """
        overrides = dict(overrides or {})
        experts = overrides.pop(EXPERTS, None)
        if experts not in (None, *TRAINED_EXPERTS):
            kernels = ": only these train with torch alone" if experts in ALL_EXPERTS_FUNCTIONS else ""
            raise ValueError(f"{EXPERTS}={experts!r}: must be one of {', '.join(TRAINED_EXPERTS)}{kernels}")
        try:
            found = self.config_class.from_dict(dict(self.values))
            config = self.config_class.from_dict(merged_values(found, self.values, overrides))
            check_taken(config, overrides)
        except RefusedError as refused:
            raise ValueError(str(refused)) from None
        # Each class refuses values in its own way; some miss a package.
        except Exception as error:
            raise ValueError(f"the configuration of {self.config_class.model_type}: {one_line(error)}") from error
        config._experts_implementation = experts
        sees = getattr(config.get_text_config(), SEES_ALL, None)
        if self.task == CAUSAL_LM and sees in (True, "all"):
            raise ValueError(
                f"{SEES_ALL}={sees}: {config.model_type} sees later tokens too, so its loss would mean nothing: take"
                " another model, or null in model.overrides"
            )
        if self.task == CAUSAL_LM and not getattr(config.get_text_config(), IS_CAUSAL, True):
            raise ValueError(
                f"{IS_CAUSAL}=false: {config.model_type} sees later tokens too, so its loss would mean nothing: take"
                " another model, or true in model.overrides"
            )
        if getattr(config, LANGUAGE, "") is None and getattr(config, "languages", ()):
            raise ValueError(
                f"{LANGUAGE}=null: {config.model_type} has layers for each language: give that of the text in"
                f" model.overrides, one of {', '.join(config.languages)}"
            )
        of_loss = OF_ONE_CLASS if self.task == CLASSIFICATION else PLAIN_LOSS.get(config.model_type, {})
        for key, plain in of_loss.items():
            if (value := getattr(config, key, None)) not in plain:
                raise ValueError(
                    f"{key}={value}: {config.model_type} trains with another loss than cross-entropy, which is not"
                    f" computed here: take another model, or {plain[0]} in model.overrides"
                )
        for part in sub_configs(config):
            if hasattr(part, "use_cache"):
                part.use_cache = False
        if self.task == CAUSAL_LM and hasattr(config, "is_decoder"):
            # BERT and its kin would see later tokens too.
            config.is_decoder = True
        return config


def find_source(source: str, task: str) -> Source:
    """Returns the architecture that `source` names.

    Args:
        source: a model type of transformers ("qwen3", "gpt2", "vit"), a name in `SHAPES`, or a folder with config.json.
            A folder with the name of a model type is given as "./gpt2".
        task: "causal_lm" or "classification".

    Raises ValueError, in one line, if `source` is neither a model type nor such a folder; the file cannot be read;
    transformers has no class of this architecture for the task; or the weights are quantised.
    """
    if task not in TYPES:
        raise ValueError(f"task={task!r}: must be one of {', '.join(TYPES)}")
    folder = Path(source)
    if source in SHAPES:
        (model_type, values), folder = SHAPES[source], None
    elif source in CONFIG_MAPPING:
        values, folder = {}, None
        model_type = source
    elif folder.is_dir():
        if not (folder / CONFIG_FILE).exists():
            raise ValueError(f"{folder} has no {CONFIG_FILE}: give the folder of a model, or a model type")
        values = read_object(folder / CONFIG_FILE, "download it again")
        model_type = values.get("model_type")
    else:
        close = nearest(source, [*CONFIG_MAPPING, *SHAPES])
        raise ValueError(
            f"{source!r} is neither a model type of transformers nor a folder, nor OWNER/NAME of the Hub{close}"
        )
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"{source}: model_type={model_type!r} is not an architecture of the installed transformers"
            f"{nearest(str(model_type), CONFIG_MAPPING)}; code of a checkpoint is not run"
        )
    if values.get("quantization_config"):
        raise ValueError(f"{source}: the weights are quantised (quantization_config): take those in bf16 or float32")
    if task == CAUSAL_LM and model_type in SEES_LATER_TOKENS:
        raise ValueError(f"{model_type} sees later tokens too, so its loss would mean nothing: take another model")
    if model_type in NEVER_TWICE_ALIKE:
        raise ValueError(
            f"{model_type} draws a new seed in each forward, so no run could be repeated: take another model"
        )
    if task == CLASSIFICATION and model_type in TAKES_NO_IMAGES:
        raise ValueError(f"{model_type} takes {TAKES_NO_IMAGES[model_type]} and not images alone: take another model")
    if model_type not in TYPES[task]:
        others = [other for other in TYPES if model_type in TYPES[other]]
        advice = f"; it has one for model.task={others[0]}" if others else nearest(model_type, TYPES[task])
        raise ValueError(f"{model_type} has no model for task={task}{advice}")
    return Source(task, CONFIG_MAPPING[model_type], values, folder)


def same_again(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Makes a model of the same class with the same configuration, with `dtype` as torch's default."""
    # It sets the dtype in the configuration too.
    return type(model)._from_config(copy.deepcopy(model.config), dtype=dtype)


def sub_configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yields a configuration and all that are inside it."""
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            yield from sub_configs(part)


def one_line(error: BaseException) -> str:
    """Returns the message of an error in one line."""
    message = " ".join(str(error).split()) or type(error).__name__
    return f"there is no {message}" if isinstance(error, KeyError) else message
