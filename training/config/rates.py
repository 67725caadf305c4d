"""Learning rate, weight decay and warm-up by what trains: weights from the seed, pretrained weights, or an adapter.

Options have `${from_seed:VALUE,NAME}` for them, so that whatever else gives the key a value wins.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from training.config.adapter import has_adapter
from training.config.declare import AUTO

# Of all pretrained weights, and of an adapter beside them. 1e-5 is that of diffusers' examples/text_to_image and within
# a factor of 2 of TRL's SFTConfig; 1e-4 that of diffusers' scripts for LoRA.
LR = (1e-5, 1e-4)
# By the class of the task. LoRA on language models: QLoRA (Dettmers et al. 2023), and TRL's page on peft. DPO: Zephyr's
# recipes (Tunstall et al. 2023), config_full and config_qlora of the alignment handbook.
LR_OF_TASK = {"CausalLM": (1e-5, 2e-4), "DPO": (5e-7, 5e-6)}
# 0.01 is that of torch.optim.AdamW and of diffusers' scripts. None beside a frozen base: what decays there is the
# difference from it.
WEIGHT_DECAY = (1e-2, 0.0)
# Not a share of the steps: a run may be resumed with more of them, and goes on under the same warm-up.
WARMUP = 10
KEYS = {"optimizer.lr": "lr", "optimizer.weight_decay": "weight_decay", "schedule.warmup": "warmup"}
RESOLVER = "from_seed"


def register() -> None:
    """Makes the resolver known to OmegaConf."""
    OmegaConf.register_new_resolver(RESOLVER, _from_seed, replace=True)


def pretrained(config: DictConfig) -> bool:
    """Tells whether the run of `config` begins from weights that were trained before.

    `auto` is taken for those of a folder with safetensors in it, or of a name with a slash, as names on the Hub are;
    `training.settle` looks closer, and replaces it.
    """
    weights = OmegaConf.select(config, "model.weights")
    if weights != AUTO:
        return weights is not None
    source = OmegaConf.select(config, "model.source") or ""
    folder = Path(source).expanduser()
    return "/" in source if not folder.is_dir() else next(folder.rglob("*.safetensors"), None) is not None


def fix_rates(config: DictConfig) -> dict[str, str]:
    """Writes into `config` the values of KEYS that nobody gave. Returns the reasons of those of pretrained weights."""
    reasons = {}
    for key in KEYS:
        group, name = key.split(".")
        if not str(OmegaConf.to_container(config[group])[name]).startswith(f"${{{RESOLVER}:"):
            continue
        config[group][name] = value = config[group][name]
        if pretrained(config):
            trained = "an adapter of pretrained weights trains" if has_adapter(config) else "pretrained weights train"
            reasons[key] = f"{value:g}, because {trained}"
    return reasons


def _from_seed(value: float, name: str, *, _root_: DictConfig) -> float:
    if not pretrained(_root_):
        return value
    task = str(OmegaConf.select(_root_, "task._target_")).rpartition(".")[2]
    of_all, of_adapter = {
        "lr": LR_OF_TASK.get(task, LR),
        "weight_decay": WEIGHT_DECAY,
        "warmup": (WARMUP, WARMUP),
    }[name]
    return of_adapter if has_adapter(_root_) else of_all
