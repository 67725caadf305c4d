"""The message about a key that does not exist, and what to write for names of other programs."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from omegaconf import DictConfig, OmegaConf

# Of the keys and options of transformers, TRL, peft, diffusers and bitsandbytes: what has their meaning here.
HERE = {
    "learning_rate": "optimizer.lr=RATE",
    "lr_scheduler_type": "schedule=OPTION",
    "warmup_ratio": "schedule.warmup=N, in steps",
    "gradient_accumulation_steps": "microbatches=N, into which batch_size is divided",
    "per_device_train_batch_size": "batch_size=N, of all devices and microbatches together",
    "train_batch_size": "batch_size=N, of all devices and microbatches together",
    "gradient_checkpointing": "recompute=block",
    "max_grad_norm": "clip_norm=NORM",
    "max_steps": "steps=N",
    "num_train_epochs": "epochs=N",
    "max_length": "seq_len=N",
    "max_seq_length": "seq_len=N",
    "bf16": "precision=bf16",
    "fp16": "precision=bf16",
    "load_in_4bit": "quantize=nf4",
    "load_in_8bit": "quantize=int8",
    "torch_dtype": "precision=bf16",
    "packing": "dataset.packed=true",
    "output_dir": "hydra.run.dir=DIR",
    "resume_from_checkpoint": "resume=RUN, or resume=auto",
    "save_steps": "checkpoint.every=N",
    "eval_steps": "eval.every=N",
    "logging_steps": "log_every=N",
    "report_to": "tracking=OPTION",
    "model_name_or_path": "model=hf model.source=NAME, or of diffusers model=pipeline",
    "dataset_name": "dataset=hub dataset.name=NAME",
    "lora_r": "adapter=lora adapter.rank=N",
    "r": "adapter=lora adapter.rank=N",
    "lora_alpha": "adapter=lora adapter.alpha=N",
    "lora_dropout": "adapter=lora adapter.dropout=SHARE",
    "target_modules": "adapter=lora adapter.targets=[NAME]",
    "use_dora": "adapter=dora",
    "use_rslora": "adapter=rslora",
    "deepspeed": "offload=layer_stream, or to compare offload=deepspeed_zero3",
    "fsdp": "offload=layer_stream devices=N, or to compare offload=fsdp2",
    **dict.fromkeys(("gpus", "num_gpus", "nproc_per_node"), "devices=N"),
    **dict.fromkeys(("num_workers", "dataloader_num_workers"), "nothing: the run itself makes each batch in its step"),
    **dict.fromkeys(("compile", "torch_compile"), "nothing: models run uncompiled"),
    "attn_implementation": "model.attention=NAME",
    "train_text_encoder": "nothing: only the network trains",
    "adapter.targets=all-linear": "adapter.targets=null",
    "adapter=qlora": "adapter=lora quantize=nf4",
    "dataset=hub_images": "dataset=images dataset.folder=DIR; with captions dataset=captioned dataset.name=NAME",
    "quantize=4bit": "quantize=nf4, or int4",
    "quantize=8bit": "quantize=int8, or float8",
    **dict.fromkeys(
        (f"optimizer={name}" for name in ("adam8bit", "adamw8bit", "adam_8bit", "adamw_8bit", "paged_adamw_8bit")),
        "optimizer=host_adamw optimizer.state_dtype=int8",
    ),
}


def unknown_key(key: str, known: Iterable[str] | Mapping[str, Any]) -> str:
    """Returns one line about a key that does not exist: which key was probably meant, and which keys exist there.

    `known` are the names of the keys that exist there, or the node that has them, in which deeper keys are searched
    too. For a name that another program uses, the line says what to write here. It names options of the group with the
    key.
    """
    parent, _, name = key.rpartition(".")
    if name in HERE:
        return f"{key}: unknown key: write {HERE[name]}"
    prefix = f"{parent}." if parent else ""
    further = [f"{prefix}{path}" for path in _paths(known) if path.rpartition(".")[2] == name]
    known = sorted(name for name in known if not name.startswith("_") and name != "hydra")
    close = [f"{prefix}{match}" for match in get_close_matches(name, known, n=1)]
    meant = f" Did you mean {' or '.join(close + further)}?" if close + further else ""
    where = f"{parent}, as chosen," if parent else "the top level"
    there = f"Keys that {where} has: {', '.join(known)}" if known else f"{where} has no keys"
    return f"{key}: unknown key.{meant}{options_with(parent, name)} {there}"


def _paths(node: Any, prefix: str = "") -> Iterator[str]:
    """Yields the dotted paths of all keys below the keys of `node`; nothing if it is no node of a configuration."""
    if not isinstance(node, DictConfig):
        return
    for name in node:
        if name == "hydra" or OmegaConf.is_missing(node, name) or not OmegaConf.is_dict(node._get_node(name)):
            continue
        # One may be null, as some of Hydra are.
        for below in node[name] or ():
            yield f"{prefix}{name}.{below}"
        yield from _paths(node[name], f"{prefix}{name}.")


def options_with(parent: str, name: str) -> str:
    """Returns which options of the group `parent` have the key `name`, as part of a message; empty where none has."""
    # Not at the top: the schema imports torch, and this module is imported by programs that do without.
    from training.config.schema import SCHEMAS

    group = parent.partition(".")[0]
    # The modes of the weights are the options of their group too.
    if parent not in SCHEMAS and not parent.endswith(".weights"):
        return ""
    options = [
        option for option, schema in SCHEMAS.get(group, {}).items() if name in {entry.name for entry in fields(schema)}
    ]
    choice = group if parent == group else f"{group}@{parent}"
    return f" Options that have it: {choice}={' or '.join(options)}." if options else ""
