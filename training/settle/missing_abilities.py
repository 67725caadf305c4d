"""Takes out of a configuration what the offload mode of the run cannot do."""

from omegaconf import DictConfig, OmegaConf

from offload import Mode
from training.config.declare import AUTO
from training.errors import UserError

# The keys that ask for an ability, each with the value that does without.
KEYS = {
    "checkpoints": {"checkpoint.every": None, "checkpoint.best": None, "ema": None},
    "evaluation": {"eval.every": None, "sample.every": None, "checkpoint.best": None},
    "clipping": {"clip_norm": None},
}

# The keys that a system with an update of its own does not read, though numbers depend on them, each with the values
# that change none.
NOT_READ_BY_OWN_UPDATES = {
    "optimizer.master": ("compact",),
    "optimizer.state_dtype": ("fp32",),
    "on_nonfinite": ("stop",),
}


def without_abilities(config: DictConfig, mode: Mode) -> tuple[DictConfig, tuple[str, ...]]:
    """Returns a copy of `config` without what `mode` lacks, and the notes of the run: those of the mode, and these.

    Keys that an update of its own does not read stay, and are noted. Raises UserError for `resume` and `devices`,
    without which the run would be another.
    """
    if not mode.foreign:
        return config, mode.notes
    option = type(mode).__name__
    if config.devices > 1:
        raise UserError(f"devices={config.devices}: {option} is compared on one device: take devices=1")
    if "checkpoints" in mode.lacks and config.resume not in (None, AUTO):
        raise UserError(f"resume={config.resume}: {option} cannot resume here: take resume=null")
    config, notes = config.copy(), list(mode.notes)
    for ability, values in KEYS.items():
        for key, value in values.items() if ability in mode.lacks else ():
            asked = OmegaConf.select(config, key)
            if asked != value:
                OmegaConf.update(config, key, value)
                notes.append(f"{key}={asked} is not applied")
    for key, plain in NOT_READ_BY_OWN_UPDATES.items() if mode.owns_update else ():
        asked = OmegaConf.select(config, key)
        if asked is not None and asked not in plain:
            notes.append(f"{key}={asked} is not applied")
    if "checkpoints" in mode.lacks:
        config.checkpoint.on_signal = False
    return config, tuple(notes)
