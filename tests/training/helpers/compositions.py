"""Hydra reads and merges the same options of conf/ once: that takes most of a composition, and tests make thousands."""

from copy import deepcopy
from dataclasses import replace

from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository, IConfigRepository
from hydra._internal.defaults_list import DefaultsList, Overrides
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig

from tests import ROOT

_load = ConfigRepository.load_config
_list = config_loader_impl.create_defaults_list
_merge = ConfigLoaderImpl._compose_config_from_defaults_list
_loaded: dict[str, ConfigResult] = {}
_lists: dict[str, DefaultsList] = {}
_merged: dict[tuple, DictConfig] = {}


def remember_options() -> None:
    """Lets Hydra load each option, and merge those that a command line chooses, once. It sets values of keys each time.

    What is refused is not remembered, and neither is what another folder has a part in.
    """
    ConfigRepository.load_config = _remembered_load
    config_loader_impl.create_defaults_list = _remembered_list
    ConfigLoaderImpl._compose_config_from_defaults_list = _remembered_merge


def _remembered_load(self: ConfigRepository, config_path: str) -> ConfigResult | None:
    if not _is_of_conf(self):
        return _load(self, config_path)
    if config_path not in _loaded:
        found = _load(self, config_path)
        if found is None:
            return None
        _loaded[config_path] = found
    return deepcopy(_loaded[config_path])


def _remembered_list(
    repo: IConfigRepository, config_name: str, overrides_list: list[Override], **options: bool
) -> DefaultsList:
    if not _is_of_conf(repo):
        return _list(repo, config_name, overrides_list, **options)
    overrides = Overrides(repo, overrides_list)
    choices = (overrides.override_choices, overrides.append_group_defaults, overrides.deletions)
    key = repr((config_name, options, *choices))
    if key not in _lists:
        _lists[key] = _list(repo, config_name, overrides_list, **options)
    return replace(_lists[key], config_overrides=overrides.config_overrides)


def _remembered_merge(self: ConfigLoaderImpl, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
    if not _is_of_conf(repo):
        return _merge(self, defaults, repo)
    key = tuple((each.config_path, each.package, each.parent, each.is_self) for each in defaults)
    if key not in _merged:
        _merged[key] = _merge(self, defaults, repo)
    return deepcopy(_merged[key])


def _is_of_conf(repo: IConfigRepository) -> bool:
    return {source.path for source in repo.get_sources()} == {"hydra.conf", str(ROOT / "conf"), ""}
