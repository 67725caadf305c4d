"""Values that suit what trains: how many parameters, from the seed, trained before, or frozen beside an adapter.

Options have `auto` for them, so that whatever else gives the key a value wins. `training.settle` counts the parameters.
"""

import math
from typing import Self

from omegaconf import DictConfig, OmegaConf

from training.config.adapter import has_adapter
from training.config.declare import AUTO

# From the seed, by the number of parameters below which a rate holds: of text 6e-4 and 3e-4 as GPT-3's (Brown et al.
# 2020, table 2.1), of images that of DiT (Peebles and Xie 2023). 1e-5, because the loss of a 7B model does not fall at
# 1e-4 after WARMUP steps.
SMALL = 50e6
FROM_SEED = {
    "text": {SMALL: 2e-3, 250e6: 6e-4, 3e9: 3e-4, math.inf: 1e-5},
    "images": {SMALL: 2e-3, 3e9: 1e-4, math.inf: 1e-5},
}
# Of all pretrained weights: that of diffusers' examples/text_to_image and within a factor of 2 of TRL's SFTConfig. Of
# an adapter: for images that of diffusers' train_text_to_image_lora.py and train_dreambooth_lora_flux.py, for text that
# of QLoRA (Dettmers et al. 2023) and of TRL's page on peft. DPO: Zephyr's recipes (Tunstall et al. 2023), config_full
# and config_qlora of the alignment handbook.
PRETRAINED = {"text": 1e-5, "images": 1e-5, "DPO": 5e-7}
ADAPTER = {"text": 2e-4, "images": 1e-4, "DPO": 5e-6}
# From the seed: 0.1 is GPT-3's. 0.01 is that of torch.optim.AdamW and of diffusers' scripts. None beside a frozen base:
# what decays there is the difference from it.
DECAY = {"text": 0.1, "images": 0.01}
DECAY_OF_PRETRAINED = 0.01
# Not a share of the steps: a run may be resumed with more of them, and goes on under the same warm-up.
WARMUP = 10
# Tokens of a sequence, as far as the model has positions.
SEQ_LEN, SHORT_SEQ_LEN = 2048, 256
RECOMPUTE_FROM = 500e6


class Choice(str):
    """A line with a value that was chosen for the user, and the reason.

    `value` and `brief`, the reason in a word, are for short plans.
    """

    value: str
    brief: str

    @classmethod
    def of(cls, value: object, why: str, brief: str) -> Self:
        found = cls(f"{value}, because {why}")
        found.value, found.brief = str(value), brief
        return found


def suit(config: DictConfig, parameters: int, *, is_text: bool, positions: int | None) -> dict[str, str]:
    """Replaces rates, warm-up and seq_len that are `auto` in `config`, and returns a Choice for each such key.

    `parameters` is the model's number of parameters, `positions` its most tokens in a sequence (None: any). For a small
    model that begins from the seed nothing is returned.
    """
    loaded, adapter, small = config.model.weights is not None, has_adapter(config), parameters < SMALL
    kind = "text" if is_text else "images"
    task = str(config.task._target_).rpartition(".")[2]
    of_task = task if task in ADAPTER else kind
    of_size = next(rate for below, rate in FROM_SEED[kind].items() if parameters < below)
    values = {
        "optimizer.lr": ADAPTER[of_task] if adapter else PRETRAINED[of_task] if loaded else of_size,
        "optimizer.weight_decay": 0.0 if adapter else DECAY_OF_PRETRAINED if loaded else DECAY[kind],
        "schedule.warmup": WARMUP if loaded or not small else 0,
        "seq_len": SHORT_SEQ_LEN if small else min(SEQ_LEN, positions or SEQ_LEN),
    }
    what = f"{shown(parameters)} {'pretrained ' if loaded else ''}parameters"
    from_seed = "" if loaded else " from the seed"
    why = f"an adapter beside {what} trains" if adapter else f"{what} train{from_seed}"
    brief = "adapter" if adapter else "pretrained" if loaded else shown(parameters)
    reasons = {}
    for key, value in values.items():
        if OmegaConf.select(config, key) != AUTO:
            continue
        OmegaConf.update(config, key, value)
        if key == "seq_len":
            if is_text and not small:
                reasons[key] = Choice.of(value, f"the model has {shown(parameters)} parameters", shown(parameters))
        elif loaded or adapter or not small:
            reasons[key] = Choice.of(f"{value:g}", why, brief)
    return reasons


def shown(parameters: int) -> str:
    """Returns a number of parameters for people to read: 8.2 B, 124 M, 0.8 M."""
    unit, name = (1e9, "B") if parameters >= 1e9 else (1e6, "M")
    return f"{parameters / unit:.{0 if parameters >= 10 * unit else 1}f} {name}"
