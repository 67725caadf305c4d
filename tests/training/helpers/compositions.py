"""Hydra reads and merges the same options of conf/ once: that takes most of a composition, and tests make thousands."""

import copy
import io
import pickle
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository, IConfigRepository
from hydra._internal.defaults_list import DefaultsList, Overrides
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig

from tests import ROOT

_parse = OverridesParser.parse_rule
_load = ConfigRepository.load_config
_list = config_loader_impl.create_defaults_list
_merge = ConfigLoaderImpl._compose_config_from_defaults_list


class Snapshot:
    """Copies an object of OmegaConf's by `load`, in a fifth of the time of a deepcopy: it is pickled once.

    Its classes stay themselves: those that modes and optimizers declare are in no module, where pickle would find them.
    """

    def __init__(self, found: object):
        self._classes: list[type] = []
        file = io.BytesIO()
        pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
        pickler.persistent_id = self._kept
        pickler.dump(found)
        self._bytes = file.getvalue()

    def load(self) -> Any:
        unpickler = pickle.Unpickler(io.BytesIO(self._bytes))
        unpickler.persistent_load = self._classes.__getitem__
        return unpickler.load()

    def _kept(self, each: object) -> int | None:
        if not isinstance(each, type):
            return None
        self._classes.append(each)
        return len(self._classes) - 1


_parsed: dict[str, Override] = {}
_loaded: dict[str, Snapshot] = {}
_lists: dict[str, DefaultsList] = {}
_merged: dict[tuple, Snapshot] = {}


def remember_options() -> None:
    """Lets Hydra parse each override, load each option, and merge those that a command line chooses, once.

    It sets values of keys each time.

    What is refused is not remembered, and neither is what another folder has a part in.
    """
    OverridesParser.parse_rule = _remembered_parse
    ConfigRepository.load_config = _remembered_load
    config_loader_impl.create_defaults_list = _remembered_list
    ConfigLoaderImpl._compose_config_from_defaults_list = _remembered_merge


def _remembered_parse(self: OverridesParser, text: str, rule_name: str) -> Any:
    if rule_name != "override":
        return _parse(self, text, rule_name)
    if text not in _parsed:
        _parsed[text] = _parse(self, text, rule_name)
    return copy.deepcopy(_parsed[text])


def _remembered_load(self: ConfigRepository, config_path: str) -> ConfigResult | None:
    if not _is_of_conf(self):
        return _load(self, config_path)
    if config_path not in _loaded:
        found = _load(self, config_path)
        if found is None:
            return None
        _loaded[config_path] = Snapshot(found)
    return _loaded[config_path].load()


def _remembered_list(
    repo: IConfigRepository, config_name: str, overrides_list: list[Override], **options: bool
) -> DefaultsList:
    if not _is_of_conf(repo):
        return _list(repo, config_name, overrides_list, **options)
    overrides = Overrides(repo, overrides_list)
    choices = (overrides.override_choices, overrides.append_group_defaults, overrides.deletions)
    key = repr((config_name, options, *choices))
    if key not in _lists:
        # A third of a composition makes what fills in `${...}`, which no list of conf/ has; one that had would fail.
        with patch.object(defaults_list, "_create_interpolation_map", lambda *_: None):
            _lists[key] = _list(repo, config_name, overrides_list, **options)
    return replace(_lists[key], config_overrides=overrides.config_overrides)


def _remembered_merge(self: ConfigLoaderImpl, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
    if not _is_of_conf(repo):
        return _merge(self, defaults, repo)
    key = tuple((each.config_path, each.package, each.parent, each.is_self) for each in defaults)
    if key not in _merged:
        _merged[key] = Snapshot(_merge(self, defaults, repo))
    return _merged[key].load()


def _is_of_conf(repo: IConfigRepository) -> bool:
    return {source.path for source in repo.get_sources()} == {"hydra.conf", str(ROOT / "conf"), ""}
