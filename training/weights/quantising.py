"""The quantised weights of a run: put into the model on the meta device, filled as all weights are.

Weights that were loaded and quantised are left in a file beside `model.weights` (`models.quantise_cache`), which the
next run reads in their place.
"""

import fnmatch
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import nn

from models.quantise import quantisable, quantise, settled
from models.quantise_cache import CacheFile, quantised_weights
from models.quantise_formats import FORMATS, Format
from offload import find_blocks
from training.config.schema import chosen_format, quantises
from training.errors import UserError, as_user_error, first_line

logger = logging.getLogger(__name__)


def quantise_blocks(model: nn.Module, config: DictConfig, dtype: torch.dtype) -> None:
    """Replaces the matrices in the blocks of `model`, on the meta device, by quantised ones, as config.quantize says.

    Only matrices of `dtype` are replaced: what a library keeps in float32 stays in float32. Raises UserError if no
    layer is chosen, a pattern matches none, nothing is left to train, or a package is missing.
    """
    if not quantises(config):
        return
    format = _format(config)
    chosen = f"quantize={format.name}"
    with as_user_error(""):
        blocks = [name for name, _ in find_blocks(model, key="quantize")]
    names = quantisable(model, blocks, config.quantize.include or (), config.quantize.exclude or ())
    names = [name for name in names if model.get_parameter(name).dtype == dtype]
    if not names:
        patterns = f"include={config.quantize.include}, exclude={config.quantize.exclude}"
        raise UserError(
            f"{chosen}: no linear layer of the model's blocks is chosen ({patterns}): quantize=none, or others"
        )
    known = {name.removesuffix(".weight") for name, _ in chain(model.named_modules(), model.named_parameters())}
    for key in ("include", "exclude"):
        for pattern in config.quantize[key] or ():
            if not fnmatch.filter(known, pattern):
                raise UserError(
                    f"quantize.{key}={pattern}: matches no layer: give a whole name, such as"
                    f" {names[0].removesuffix('.weight')}, or a pattern for whole names, such as '*.mlp.*'"
                )
    with as_user_error(f"{chosen}: "):
        format.check_package()
    quantise(model, names, format)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"{chosen}: nothing of the model is left to train: leave layers out with quantize.exclude")


@contextmanager
def quantised_from_cache(model: nn.Module, config: DictConfig, path: Path) -> Iterator[None]:
    """Surrounds loading. With quantize.cache, reads the quantised weights from the cache file beside `path`.

    If there is no such file yet, writes it after the block. Raises UserError for a file that does not fit.
    """
    cache = cache_of(model, config, path)
    if cache is None:
        yield
        return
    if not cache.exists:
        yield
        try:
            cache.write(model)
        except OSError as error:
            logger.warning("%s could not be written (%s): the next run quantises again", cache.path, first_line(error))
        return
    with as_user_error("quantize.cache=true: ", after=", or give quantize.cache=false"):
        cache.check()
        cache.read(model)
    logger.info("quantised weights of %s", cache.path)
    with settled(weight for _, weight in quantised_weights(model)):
        yield


def cache_of(model: nn.Module, config: DictConfig, path: Path) -> CacheFile | None:
    """Returns the file for the quantised weights beside those at `path`, None where the run has none."""
    if not (quantises(config) and config.quantize.cache):
        return None
    try:
        return CacheFile.beside(path, model)
    except (ValueError, FileNotFoundError):
        # Those of a pipeline are in a folder inside, and what is wrong with others, loading says.
        return None


def _format(config: DictConfig) -> Format:
    name, arguments = chosen_format(config)
    with as_user_error("quantize."):
        return FORMATS[name](**arguments)
