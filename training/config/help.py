"""The page of `python train.py --help`: its text, the offload modes, and the keys of a chosen option.

conf/hydra/help/train.yaml asks for the text as `${page:}`. That is conf/hydra/help/train.txt with its interpolations
filled in; among them are `${modes:}`, `${knobs:GROUP}` and `${given:}`, which follow from the code and from conf/.
"""

import json
import re
import textwrap
from collections.abc import Iterator

import yaml
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from offload.knobs import explanations
from training.config.modes import CONF, all_options
from training.config.schema import SCHEMAS

WIDTH = 120
PAGE = CONF / "hydra" / "help" / "train.txt"
# The groups whose keys every page has, explained by the docstrings of their classes.
ALWAYS = ("offload", "adapter", "task", "optimizer")
# The value of a key, in the brackets behind its explanation.
VALUE = re.compile(r"\[\$\{([\w.]+)\}\]")


def register() -> None:
    """Makes the resolvers known to OmegaConf."""
    OmegaConf.register_new_resolver("page", page, replace=True)
    OmegaConf.register_new_resolver("modes", modes, replace=True)
    OmegaConf.register_new_resolver("knobs", knobs, replace=True)
    OmegaConf.register_new_resolver("given", given, replace=True)


def page(_root_: DictConfig) -> str:
    """Returns the text of the page, with the values of the configuration. A dollar sign is doubled in it."""
    # OmegaConf asks in every composition, before the options are there.
    if "offload" not in _root_:
        return ""
    text = VALUE.sub(lambda found: f"[{_shown(OmegaConf.select(_root_, found[1]))}]", PAGE.read_text(encoding="utf-8"))
    return OmegaConf.create({"text": text}, parent=_root_).text


def modes() -> str:
    """Returns the options of the group `offload` with their descriptions, as part of the list of groups."""
    width = max(len(name) for name in all_options()) + 1
    lines = []
    for number, option in enumerate(all_options().values()):
        start = f"  {'' if number else 'offload':12}{option.name:{width}}"
        lines.append(_wrapped(start, option.description))
    return "\n".join(lines).lstrip()


def knobs(group: str, _root_: DictConfig) -> str:
    """Returns the keys of the option of `group` that is chosen, each with its explanation and its value."""
    rows = list(_rows(_root_[group], group, str(_root_.hydra.runtime.choices[group])))
    width = max((len(key) for key, _ in rows), default=0) + 2
    return "\n".join(_wrapped(f"  {key:{width}}", text) for key, text in rows).lstrip() or f"{group}: no keys"


def given(_root_: DictConfig) -> str:
    """Returns the keys of each further group of which the command line chooses an option, and what experiments set."""
    named = [override.partition("=")[0] for override in _root_.hydra.overrides.task]
    shown = [knobs(group, _root_) for group in SCHEMAS if group in named and group not in ALWAYS]
    if "experiment" in named:
        name = _root_.hydra.runtime.choices.experiment
        text = (CONF / "experiment" / f"{name}.yaml").read_text(encoding="utf-8")
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith("# @package")]
        shown.append("\n".join((f"experiment={name}", *(f"    {line}" for line in lines))).replace("$", "$$"))
    return "\n  ".join(shown)


def _rows(node: DictConfig, key: str, option: str) -> Iterator[tuple[str, str]]:
    schema, group = OmegaConf.get_type(node), key.partition(".")[0]
    if schema not in SCHEMAS[group].values():
        return
    if group in ALWAYS:
        # An adapter is explained where its keys are: one of them is no argument of its class.
        explained = explanations(schema) or (explanations(get_class(schema._target_)) if "_target_" in node else {})
    else:
        explained = _comments(group, option)
    for name in node:
        value = "required" if OmegaConf.is_missing(node, name) else node[name]
        if OmegaConf.is_dict(value) and OmegaConf.get_type(value) in SCHEMAS[group].values():
            yield from _rows(value, f"{key}.{name}", option)
        elif not name.startswith("_"):
            yield f"{key}.{name}", f"{explained.get(name, '')} [{_shown(value)}]".strip()


def _comments(group: str, option: str) -> dict[str, str]:
    """Returns the comment above each key of an option's file, and of the options that it begins with.

    Of keys that share a comment, the first has it.
    """
    path = CONF / group / f"{option}.yaml"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found: dict[str, str] = {}
    for base in (yaml.safe_load(text) or {}).get("defaults", ()):
        if isinstance(base, str) and base[0] not in "/_":
            found |= _comments(group, base.partition("@")[0])
    comment: list[str] = []
    for line in text.splitlines():
        if line.startswith("#"):
            comment.append(line.lstrip("# "))
        else:
            if name := re.match(r"\w+(?=:)", line):
                found[name[0]] = " ".join(comment) or found.get(name[0], "")
            comment = []
    return found


def _shown(value: object) -> str:
    """Returns a value as the command line takes it: null, true, false, '' for an empty text."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value) or "''"


def _wrapped(start: str, text: str) -> str:
    """Returns `start` and the text in lines of at most WIDTH characters. Dollar signs are doubled, as Hydra wants."""
    lines = textwrap.wrap(text, WIDTH - len(start), break_long_words=False) or [""]
    return ("\n" + " " * len(start)).join([start + lines[0], *lines[1:]]).replace("$", "$$")
