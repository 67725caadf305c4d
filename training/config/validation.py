"""Checks what the types of the configuration cannot express: unknown keys, keys without a value, ranges, rules."""

import logging
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from typing import get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from offload.knobs import in_range, parse_bytes
from training.config.construct import check_optimizer, make_mode
from training.config.datasets import check_dataset
from training.config.declare import AUTO
from training.config.schema import SCHEMAS, Homes, Llama
from training.config.unknown_keys import unknown_key
from training.errors import UserError, as_user_error
from training.visible_text import visible

# A budget that is a smaller number is one whose unit was forgotten: no process runs in so few bytes.
LEAST_WITHOUT_UNIT = 2**20
# By key, the one that turns it on, that one's value while it is off, and another value of it for the warning.
TURNED_ON_BY = {
    "sample.prompt": ("sample.every", None, "N"),
    "sample.prompts": ("sample.every", None, "N"),
    "sample.tokens": ("sample.every", None, "N"),
    "sample.temperature": ("sample.every", None, "N"),
    "sample.top_p": ("sample.every", None, "N"),
    "parallel.homes": ("devices", 1, "N"),
    "parallel.timeout_s": ("devices", 1, "N"),
}

logger = logging.getLogger(__name__)


def check(config: DictConfig) -> None:
    """Raises UserError for mistakes that types cannot find, before anything is built. Modes check their own knobs."""
    try:
        OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {str(error).partition(chr(10))[0]}") from error
    for group, options in SCHEMAS.items():
        _check_option(config, group, group, options)
    if "weights" in config.offload:
        _check_option(config.offload, "weights", "offload.weights", SCHEMAS["offload"])
    sections = list(_sections(config))
    for key, node in sections:
        _check_keys(key, node)
    for key, node in sections:
        _check_ranges(key, node)
    _check_rules(config)
    make_mode(config.offload)
    check_optimizer(config.optimizer)


def _sections(config: DictConfig, prefix: str = "") -> Iterator[tuple[str, DictConfig]]:
    yield prefix, config
    for name in config:
        # A plain dict is free: what reads it checks it. What another key has is checked there.
        free = OmegaConf.is_missing(config, name) or OmegaConf.is_interpolation(config, name)
        free = free or not OmegaConf.is_dict(config[name])
        if not free and OmegaConf.get_type(config, name) is not dict:
            yield from _sections(config[name], f"{prefix}{name}.")


def _check_option(parent: DictConfig, name: str, key: str, options: Mapping[str, type]) -> None:
    """Raises UserError for what is no option or has another class than its option: configurations must not run code."""
    choose = f"choose an option with {key if key == name else f'offload@{key}'}=OPTION; --help lists them"
    node = None if OmegaConf.is_missing(parent, name) else parent.get(name)
    schema = OmegaConf.get_type(node) if OmegaConf.is_dict(node) else None
    if schema not in options.values():
        raise UserError(f"{key}={visible(node)}: is not an option: {choose}")
    for entry in fields(schema):
        if entry.name.startswith("_") and node.get(entry.name) != entry.default:
            raise UserError(f"{key}.{entry.name}={visible(node.get(entry.name))}: must not be set: {choose}")


def _check_keys(prefix: str, node: DictConfig) -> None:
    schema = OmegaConf.get_type(node)
    known = [entry.name for entry in fields(schema)] if schema is not dict else []
    for name in node:
        if name not in known:
            raise UserError(unknown_key(f"{prefix}{name}", known))
    for name in known:
        if name not in node:  # removed with ~, or nothing but ??? in YAML
            raise UserError(f"{prefix}{name} has no value: give it one, {prefix}{name}=VALUE; --help explains it")


def _check_ranges(prefix: str, node: DictConfig) -> None:
    for entry in fields(OmegaConf.get_type(node)):
        bounds = {bound: entry.metadata.get(bound) for bound in ("at_least", "above", "at_most")}
        value, kinds = node[entry.name], get_args(entry.type)
        if isinstance(value, str) and (float in kinds or any(bound is not None for bound in bounds.values())):
            words = (AUTO, *entry.metadata.get("words", ()))
            if value not in words:
                raise UserError(f"{prefix}{entry.name}={visible(value)}: must be a number, or {' or '.join(words)}")
        elif value is not None:
            with as_user_error("", after=", or null" if type(None) in kinds else ""):
                in_range(f"{prefix}{entry.name}", value, **bounds)


def _check_rules(config: DictConfig) -> None:
    sequence = config.parallel.sequence
    if sequence not in (1, config.devices):
        raise UserError(
            f"parallel.sequence={sequence}: must be 1, or devices={config.devices}: all ranks divide each sequence, or"
            " none do"
        )
    if sequence > 1 and config.parallel.hosts > 1:
        raise UserError(
            f"parallel.sequence={sequence} on parallel.hosts={config.parallel.hosts}: the ranks of one host divide"
            " sequences: take parallel.sequence=1"
        )
    parts, share = config.microbatches, config.batch_size // (config.devices // sequence)
    if not share:
        raise UserError(
            f"devices={config.devices}: must be at most batch_size={config.batch_size}, the sequences that they share"
        )
    if parts != AUTO and not (isinstance(parts, int) and 1 <= parts <= share):
        divided = f"batch_size={share}" if share == config.batch_size else f"{share}, batch_size over devices"
        raise UserError(
            f"microbatches={visible(parts)}: must be between 1 and {divided}, the sequences that it divides, or auto"
        )
    if config.parallel.hosts > config.devices:
        raise UserError(f"parallel.hosts={config.parallel.hosts}: must be at most devices={config.devices}")
    if config.parallel.homes == Homes.shared and config.devices % config.parallel.hosts:
        raise UserError(
            f"parallel.homes=shared with devices={config.devices} on parallel.hosts={config.parallel.hosts}: give as"
            " many devices on each host, or parallel.homes=own"
        )
    if config.devices > 1 and config.device.startswith("cuda:"):
        raise UserError(
            f"device={visible(config.device)} with devices={config.devices}: each rank takes the GPU of its number:"
            " give device=auto, and choose GPUs with CUDA_VISIBLE_DEVICES"
        )
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", config.device):
        raise UserError(f"device={visible(config.device)}: must be auto, cuda, cuda:N (N counts from 0) or cpu")
    for key, device in (("vram_budget", "GPU"), ("host_budget", "host")):
        if config[key] is not None:
            _check_budget(key, config[key], f"null for all of the {device}'s memory")
    if config.steps is None and config.epochs is None:
        raise UserError("steps=null: give steps=N, or epochs=N for passes over the dataset")
    if config.steps is not None and config.epochs is not None:
        raise UserError(f"steps={config.steps} epochs={config.epochs:g}: give one of them, and the other as null")
    if config.schedule.get("final", 0) > 1:
        raise UserError(f"schedule.final={config.schedule.final}: a share of the learning rate, it must be at most 1")
    if issubclass(OmegaConf.get_type(config.model), Llama):
        _check_llama(config.model)
    if config.model.get("weights") == AUTO and "source" not in config.model:
        raise UserError(f"model.weights={AUTO}: the model has no source: give a folder, a name on the Hub, or null")
    overrides = config.model.get("overrides")
    if overrides is not None and not OmegaConf.is_dict(overrides):
        raise UserError(f"model.overrides={overrides}: must be keys with values, {{num_hidden_layers: 4}}, or null")
    check_dataset(config.dataset)


def _check_budget(key: str, value: str | int, alternative: str) -> None:
    with as_user_error("", after=f", or {alternative}"):
        nbytes = parse_bytes(key, value)
    if str(value).strip().isdigit() and 0 < nbytes < LEAST_WITHOUT_UNIT:
        raise UserError(f"{key}={value}: is a number of bytes: give a unit, {key}={value}GiB, or {alternative}")


def _check_llama(model: DictConfig) -> None:
    heads = model.num_attention_heads
    if model.hidden_size % (2 * heads):
        raise UserError(
            f"model.hidden_size={model.hidden_size}: must be a multiple of {2 * heads},"
            f" twice model.num_attention_heads={heads}"
        )
    if heads % model.num_key_value_heads:
        raise UserError(
            f"model.num_key_value_heads={model.num_key_value_heads}: must divide model.num_attention_heads={heads}"
        )


def warn_of_keys_without_effect(config: DictConfig, given: Collection[str]) -> None:
    """Warns of each `given` key without effect. No error: one job of a sweep may turn off what the key belongs to."""
    for key, (switch, off, value) in TURNED_ON_BY.items():
        if key in given and OmegaConf.select(config, switch) == off:
            logger.warning("%s has no effect without %s=%s", key, switch, value)
