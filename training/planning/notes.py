"""The notes of a plan: what a run does not stream or adapt, and what the plan leaves out."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from models.adapter_targets import linear_names
from models.adapters import adapter_layers, config_of, is_adapted, root_of, without_adapters
from offload import WeightMode
from offload.knobs import format_bytes
from training.config.modes import weights_node
from training.config.schema import Precision
from training.parallel.world import ranks_of_host
from training.settle.components import Components
from training.tasks.causal_lm import CausalLM

# A smaller share is worth a note.
MOST = 0.9
# The most tensors, or modules, that are named, and the least share of the bytes of a tensor that is.
NAMED, SMALL = 3, 0.01
# Layers without an adapter that are named; those of one name in all blocks count once.
LAYERS_NAMED = 8
HOW = {"experts": " (adapter.experts=true gives them one)"}

# What hides positions from each other, in configurations of transformers.
WINDOWS = ("sliding_window", "attention_chunk_size")

ROUTERS = "model.overrides={output_router_logits:true}"

FOREIGN = "this system's own memory, copies and times are not planned: the plan is that of offload=none"

OWN = (
    "{count} devices: bytes of the device and copies are those of each, bytes of a host those of its {local} processes,"
    " each with its own copy; the time in which gradients are exchanged is not in the step"
)
SHARED = (
    "{count} devices: bytes of the device, copies and exchanges are those of each, bytes of the host those of its"
    " {local} processes, which share weights and states; {left_out} is not in the step, and each device is taken to"
    " have the whole speed of its links"
)


def notes_of(components: Components, reference_note: str | None = None, square_bytes: int = 0) -> list[str]:
    """Returns the notes in the order of a plan, with that on a reference among them.

    `square_bytes` are those of masks and scores of all pairs of tokens.
    """
    found = (
        note_of_ranks(components),
        note_of_sequence(components.config.parallel.sequence),
        FOREIGN if components.mode.foreign else None,
        reference_note,
        staying_note(components),
        unmatched_note(components),
        unadapted_note(components),
        experts_note(components),
        squares_note(components, square_bytes),
        positions_note(components),
    )
    return [note for note in found if note]


def _largest(nbytes: Mapping[str, int], everything: int) -> str:
    """Returns the names of the largest tensors, with their bytes; none where no one is worth it."""
    worth = [name for name, size in nbytes.items() if size >= SMALL * everything]
    largest = sorted(worth, key=nbytes.get, reverse=True)[:NAMED]
    return ", ".join(f"{name} ({format_bytes(nbytes[name])})" for name in largest)


def streamed_share(components: Components) -> float | None:
    """Returns the share of the bytes of parameters and buffers that stream; None for a mode that streams none."""
    footprint = components.footprint
    everything = footprint.host_weight_bytes + footprint.resident_bytes
    return footprint.host_weight_bytes / everything if footprint.units and everything else None


def staying_note(components: Components) -> str | None:
    """Returns a line with the largest tensors that stay on the device, where more stays than the user asked for."""
    share = streamed_share(components)
    key, mode = weights_node(components.config)
    weights = _weight_mode(components)
    if weights is not None and not weights.chosen(components.model):
        patterns = f"{key}.include={mode.include} and {key}.exclude={mode.exclude}"
        return f"nothing streams: {patterns} leave no module of the model"
    if share is None or share >= MOST or mode.get("resident") not in (None, 0, "0", "auto"):
        return None
    names = {id(t): name for name, t in (*components.model.named_parameters(), *components.model.named_buffers())}
    footprint = components.footprint
    # What trains stays by choice then.
    by_choice = mode.get("trained") == "device"
    others = (tensor for tensor in footprint.resident if not (by_choice and tensor.requires_grad))
    nbytes = {names.get(id(tensor), "a tensor"): tensor.nbytes for tensor in others}
    shown = _largest(nbytes, footprint.host_weight_bytes + footprint.resident_bytes)
    if not shown:
        return None
    advice = f"; {key}.outside=stream streams them too" if mode.get("outside") == "resident" else ""
    return f"{1 - share:.0%} of the weights stay on the device: {shown}{advice}"


def unmatched_note(components: Components) -> str | None:
    """Returns a line with the patterns of `include` and `exclude` that match no module which the mode cuts out.

    They are not refused: under another mode of a sweep they may match.
    """
    weights = _weight_mode(components)
    if weights is None or not weights.chosen(components.model):
        return None
    names = list(dict.fromkeys(point.name for point in weights.cut_points(components.model)))
    unmatched = [
        f"{key}={pattern}"
        for key, patterns in (("include", weights.include), ("exclude", weights.exclude))
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
    if not unmatched:
        return None
    prefix, _ = weights_node(components.config)
    some = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
    listed = ", ".join(f"{prefix}.{pattern}" for pattern in unmatched)
    return f"without effect: {listed}; the modules that the mode cuts out are {some}"


def _weight_mode(components: Components) -> WeightMode | None:
    weights = getattr(components.mode, "weights", components.mode)
    return weights if isinstance(weights, WeightMode) else None


def unadapted_note(components: Components) -> str | None:
    """Returns a line with the linear layers that neither have an adapter nor train in full, by their last names."""
    model = components.model
    if not is_adapted(model):
        return None
    root = root_of(model)
    adapted = {name for name, _ in adapter_layers(root)}
    full = tuple(f"{name}." for name in config_of(model).modules_to_save or ())
    with without_adapters(model):
        kinds = linear_names(root)
    left = {name: kind for name, kind in kinds.items() if name not in adapted and not f"{name}.".startswith(full)}
    shown = list(dict.fromkeys(_short(name, kind) for name, kind in left.items()))
    if not shown:
        return None
    more = f" and {len(shown) - LAYERS_NAMED} more" if len(shown) > LAYERS_NAMED else ""
    return f"no adapter: {', '.join(shown[:LAYERS_NAMED])}{more}"


def experts_note(components: Components) -> str | None:
    """Returns a line on the auxiliary loss of experts (Fedus et al. 2021), where the model leaves out its own."""
    config = getattr(root_of(components.model), "config", None)
    weight = getattr(components.model, "balance_weight", None)
    is_off = getattr(config, "output_router_logits", None) is False and weight
    # task=dpo has none.
    if not is_off or type(components.task) is not CausalLM:
        return None
    return f"auxiliary loss of experts: none, which TRL adds: {ROUTERS} adds it"


def squares_note(components: Components, nbytes: int) -> str | None:
    """Returns a line on the `nbytes` of masks and scores of all pairs of tokens, and what makes them; None for none."""
    if not nbytes:
        return None
    config, model, found = components.config, components.model, config_of_library(components)
    kind, asked = getattr(found, "model_type", type(model).__name__), config.model.get("attention")
    window = next((f"{name}={value}" for name in WINDOWS if (value := getattr(found, name, None))), None)
    if asked == "eager":
        why = "model.attention=eager: auto may need none"
    elif getattr(found, "_attn_implementation", None) == "eager":
        why = f"{kind} has eager attention by default"
    elif config.dataset.get("packed"):
        why = "masks of dataset.packed=true"
    else:
        why = f"masks of {f'{window} of ' if window else ''}{kind}"
    if config.precision == Precision.fp32 and getattr(getattr(model, "packing", None), "by_starts", False):
        why += "; precision=bf16 on a GPU needs no masks"
    size = f"{format_bytes(nbytes)} of the activations, and four times that at twice the length"
    return f"masks and scores of all pairs of tokens take {size}: {why}"


def positions_note(components: Components) -> str | None:
    """Returns a line where a row has more tokens than the files of the model say that it was made for."""
    config, found = components.config, config_of_library(components)
    most = getattr(found, "max_position_embeddings", None)
    if components.task.unit != "tokens" or config.dataset.get("packed") or not most or config.seq_len <= most:
        return None
    return f"seq_len={config.seq_len} is beyond the max_position_embeddings={most} of {found.model_type}"


def config_of_library(components: Components) -> object | None:
    """Returns the configuration of a text model of transformers; None for another model."""
    config = getattr(getattr(components.model, "hf", None), "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else None


def _short(name: str, kind: str) -> str:
    own = name.rpartition(".")[2]
    return f"router {own}" if kind == "router" and own != kind else f"{own}{HOW.get(kind, '')}"


def note_of_sequence(count: int) -> str | None:
    """Returns a line on sequences that ranks divide; None if they divide none."""
    if count == 1:
        return None
    return f"parallel.sequence={count}: each device computes 1/{count} of every sequence"


def note_of_ranks(components: Components) -> str | None:
    """Returns a line on the devices and hosts that the numbers of a plan belong to; None for one device."""
    if components.config.devices == 1:
        return None
    config, note = components.config, SHARED if components.shares_homes else OWN
    left_out = "what is summed after backward"
    if config.parallel.hosts > 1:
        left_out += ", or between hosts,"
    return note.format(count=config.devices, local=ranks_of_host(config), left_out=left_out)
