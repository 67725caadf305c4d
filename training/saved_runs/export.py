"""Writes the model of a saved run in the form of its library: transformers', diffusers', peft's, or that of a Llama.

No memory is made for the model: it is built without values, and each tensor goes from the checkpoint's file, which is
mapped, to the new one. Beside its weights it has the files that it came with, else what its run knows. A model came
with files of its own where its run began with weights, or has the tokenizer of its source; one from the seed has the
tokenizer, the template and the ends of texts of its run.
"""

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from models import adapter_files as of_peft
from models.adapters import config_of, merge_adapter
from models.llama import Llama
from models.quantise import is_quantised
from models.safetensors_files import StoredTensor, open_file, split_into_files, write_tensors
from models.weights import INDEX_FILE, MAX_SHARD_BYTES, index_of, match_tensors, named_tensors, read_checkpoint_headers
from models.whole_folder import Fill, Write, bytes_of, refuse_present, write_whole_folder
from training.checkpoints.saving import hugging_face_config
from training.config.adapter import has_adapter
from training.config.schema import Precision, chosen_format, quantises
from training.data.chats.templates import Template
from training.data.library_tokenizer import TEMPLATE_FILE, files_in
from training.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_files
from training.errors import UserError, as_user_error
from training.runs.checkpoint_files import HUGGING_FACE_FILE, WEIGHTS_STEM
from training.runs.files import home_expanded
from training.runs.invocation import Invocation
from training.saved_runs.finding import (
    configuration,
    found,
    load_model,
    newest_checkpoint,
    refuse_damage,
    take_tokenizer,
)
from training.settle.components import Components, acquired, attached
from training.weights.averages import averages_in
from training.weights.files import GENERATION_FILE, SMALL_FILES
from training.weights.filling import fill_buffers
from training.weights.model_tokenizer import ends_of, origin_of, values_in
from training.weights.source import scheduler_given

Read = Callable[[str], Tensor]

logger = logging.getLogger(__name__)

# Keys of config.json that say how a model is used, and not what it is.
KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "use_cache")
# Those of a Llama of ours too, which has no other place for them.
KEPT_OF_LLAMA = (*KEPT, "max_position_embeddings")


def export(
    given: str, out: str, overrides: list[str], max_shard_bytes: int = MAX_SHARD_BYTES, merge: bool = False
) -> list[str]:
    """Writes the model of a run, or of one of its checkpoints, to the folder `out`; returns the names of its files.

    The folder is complete or not there. Weights have the dtypes of the run's model; a run with `ema` exports its
    averages. A run of an adapter exports the adapter alone, in peft's form; with `merge` the whole model with the
    adapter merged, which then needs room in host memory. `overrides` change the run's configuration. Raises UserError
    for everything that the user can fix.
    """
    run_dir, checkpoint = found(given)
    folder = home_expanded("OUT", out)
    try:
        refuse_present(folder)
        config, invocation = configuration(run_dir, overrides)
        checkpoint = checkpoint or newest_checkpoint(run_dir)
        refuse_damage(checkpoint, config)
        take_tokenizer(config, checkpoint)
        if has_adapter(config):
            files = _of_adapter(config, invocation, checkpoint, max_shard_bytes, merge)
            write_whole_folder(folder, files)
            return sorted(files)
        if merge:
            raise UserError(f"--merge: {run_dir} trained no adapter: leave --merge out")
        stored = read_checkpoint_headers(checkpoint)
        config.precision = Precision.bf16 if any(t.dtype == "BF16" for t in stored.values()) else Precision.fp32
        model = Components.of(config, invocation, torch.device("cpu")).model
        if is_quantised(model):
            raise UserError(
                f"{run_dir}: its weights are quantised, in a form that no library loads: begin a run with them,"
                f" quantize={chosen_format(config)[0]} model.weights={checkpoint}"
            )
        with reading(model, stored | averages_in(checkpoint, config.ema), checkpoint) as read:
            files = files_of(model, config, read, max_shard_bytes)
            write_whole_folder(folder, files)
    except ValueError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror or error}): give another place") from error
    return sorted(files)


def files_of(model: nn.Module, config: DictConfig, read: Read, max_shard_bytes: int) -> dict[str, Fill]:
    """Returns what fills each file of `model`, by name, in the form of its library.

    Raises UserError for a model of no library, and ValueError for one that its library cannot store.
    """
    if hasattr(model, "network"):
        from models.diffusion_files import diffusion_files, pipeline_of

        files = diffusion_files(model, max_shard_bytes, lambda name: read(f"network.{name}"))
        scheduler = scheduler_given(config.task.get("scheduler"), config.model)
        came = () if scheduler is None else filter(None, (scheduler, pipeline_of(scheduler)))
        return files | {file.name: bytes_of(file.read_bytes()) for file in came}
    companion_files, values, of_llama = companions(config)
    texts = {name: bytes_of(content) for name, content in companion_files.items()}
    if isinstance(model, Llama):
        return _llama_files(model, config, read, max_shard_bytes, of_llama) | texts
    if hasattr(model, "hf"):
        from models.hf_saving import hf_files

        return hf_files(model, max_shard_bytes, lambda name: read(f"hf.{name}"), values) | texts
    raise UserError(f"{type(model).__name__} is the model of no library: its checkpoint has its weights already")


def _of_adapter(
    config: DictConfig, invocation: Invocation, checkpoint: Path, max_shard_bytes: int, merge: bool
) -> dict[str, Fill]:
    if merge and quantises(config):
        # What would be merged are weights of few bits; the adapter fits the ones that they were made of, too.
        raise UserError(
            f"--merge: the base is quantised, quantize={chosen_format(config)[0]}: give quantize=none, which merges the"
            " adapter into the weights that were quantised"
        )
    # Where the weights are while they are filled changes nothing.
    components = Components.of(config, invocation, torch.device("cpu"))
    if not merge:
        texts = {} if hasattr(components.model, "network") else companions(config)[0]
        files = adapter_files(components.model, checkpoint, config.ema)
        return files | {name: bytes_of(text) for name, text in texts.items()}
    model, read = merged_model(components, checkpoint)
    return files_of(model, config, read, max_shard_bytes)


def adapter_files(model: nn.Module, checkpoint: Path, ema: float | None = None) -> dict[str, Fill]:
    """Returns what fills the files of the adapter of `model`, by name, in peft's form, which a checkpoint has already.

    `model` may be on the meta device. The adapter of a model of diffusers has one more file, for diffusers and ComfyUI,
    and in all its files alpha is the rank. Warns of what these programs do not read. With `ema`, the decay of the run's
    averages, the values are the averages.
    """
    averages = averages_in(checkpoint, ema)
    if not of_peft.is_of_diffusers(model):
        files = {name: _copy_of(checkpoint / name) for name in (of_peft.CONFIG_FILE, of_peft.WEIGHTS_FILE)}
        if averages:
            tensors = of_peft.adapter_values(checkpoint, averages)
            files[of_peft.WEIGHTS_FILE] = partial(write_tensors, tensors=tensors)
        return files
    config, file = config_of(model), of_peft.DIFFUSERS_FILE
    if config.use_dora:
        logger.warning("%s: diffusers and peft read DoRA; ComfyUI leaves its magnitudes out: give it --merge", file)
    if config.modules_to_save:
        logger.warning("%s lacks %s, which peft alone reads: give --merge", file, ", ".join(config.modules_to_save))
    return of_peft.shared_files(model, checkpoint, averages)


def merged_model(components: Components, checkpoint: Path) -> tuple[nn.Module, Read]:
    """Returns the base with the adapter merged, in host memory, and what reads its tensors by name.

    Raises UserError if the base is not that of the checkpoint, or the adapter cannot be merged.
    """
    with acquired(components.device) as streams, attached(components, streams) as attachment:
        model = attachment.model
        fill_buffers(model)
        load_model(model, checkpoint, components.config, torch.device("cpu"))
    with as_user_error("--merge: "):
        merge_adapter(model)
    tensors = model.state_dict()
    return model, tensors.__getitem__


def _copy_of(path: Path) -> Fill:
    def fill(write: Write) -> None:
        with open(path, "rb") as file:
            for piece in iter(lambda: file.read(shutil.COPY_BUFSIZE), b""):
                write(piece)

    return fill


@contextmanager
def reading(model: nn.Module, stored: dict[str, StoredTensor], checkpoint: Path) -> Iterator[Read]:
    """Gives a function that reads a stored tensor of `model` by any of its names, in the dtype that `model` has for it.

    Raises ValueError if the stored tensors do not fit `model`.
    """
    tensors = named_tensors(model)
    targets = match_tensors(tensors, stored, checkpoint)
    source_of = {id(tensor): source for source, tensor in targets.items()}
    places = {name: (source_of[id(tensor)], tensor.dtype) for tensor, names in tensors for name in names}
    with ExitStack() as stack:
        files = dict.fromkeys(stored[source].file for source in targets)
        handles = {file: stack.enter_context(open_file(file)) for file in files}

        def read(name: str) -> Tensor:
            source, dtype = places[name]
            return handles[stored[source].file].get_tensor(source).to(dtype)

        yield read


def _llama_files(
    model: Llama, config: DictConfig, read: Read, max_shard_bytes: int, values: dict[str, Any]
) -> dict[str, Fill]:
    tensors = {names[0]: tensor.detach() for tensor, names in named_tensors(model)}
    parts = split_into_files(WEIGHTS_STEM, tensors, max_shard_bytes)
    files: dict[str, Fill] = {name: partial(write_tensors, tensors=part, read=read) for name, part in parts.items()}
    files[HUGGING_FACE_FILE] = bytes_of(hugging_face_config(config, values))
    if len(parts) > 1:
        files[INDEX_FILE] = bytes_of(index_of(parts))
    return files


def companions(config: DictConfig) -> tuple[dict[str, bytes], dict[str, Any], dict[str, Any]]:
    """Returns the files beside the weights, by name, and values for config.json: of any model, and of our own Llama.

    Raises UserError for a file that cannot be read.
    """
    origin = origin_of(config)
    files: dict[str, bytes] = {}
    tokenizer = None
    if origin is not None:
        files = {name: (origin / name).read_bytes() for name in SMALL_FILES if (origin / name).is_file()}
    if "tokenizer" in config.dataset:
        tokenizer = load_tokenizer(config.dataset.tokenizer)
        files |= tokenizer_files(config.dataset.tokenizer, config.seq_len)
        files |= _template(config, tokenizer)
    elif origin is not None:
        files |= {name: file.read_bytes() for name, file in files_in(origin).items()}
    came = values_in(origin)
    of_llama, values = ({key: came[key] for key in keys if key in came} for keys in (KEPT_OF_LLAMA, KEPT))
    if tokenizer is not None and not ends_of(origin):
        begin = tokenizer.begin[0] if len(tokenizer.begin) == 1 else None
        ends = {"bos_token_id": begin, "eos_token_id": tokenizer.end_of_text_id}
        # A checkpoint has nulls.
        of_llama |= ends
        values |= ends
        files[GENERATION_FILE] = json.dumps(ends, indent=2).encode()
    return files, values, of_llama


def _template(config: DictConfig, tokenizer: Tokenizer) -> dict[str, bytes]:
    """Returns the file of the template that the run rendered chats with, unless it is the tokenizer's own."""
    if "template" not in config.dataset:
        return {}
    text = Template(tokenizer, config.dataset.template).text()
    return {} if text == tokenizer.pretrained.chat_template else {TEMPLATE_FILE: text.encode()}
