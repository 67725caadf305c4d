"""Models in bf16 are those that `from_pretrained(dtype=torch.bfloat16)` loads: dtypes and values, bit for bit."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from models.built_again import loose_tensors
from models.diffusion_network import DiffusersNetwork
from models.hf import TransformersModel, build_hf
from models.hf_source import TYPES
from models.library_dtypes import default_dtype, keep_float32, kept_by_diffusers
from tests.models.helpers.hf_models import MODELS, SINGLE, batch, task_of, trained
from tests.models.helpers.small_diffusion import SMALL, TIMES, build, inputs_of, small

HALF = torch.bfloat16
# Weights, tables or both in float32, a class without any, and one with a table of the state dict.
OFTEN = ("wan", "kandinsky5", "qwen", "qwen21", "krea2", "flux3", "skyreels", "cogvideox_image", "unet", "unet_motion")
CLASSES = [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in SMALL]
TINY = MODELS | SINGLE
# Weights in float32 by the rule of the class (and by its own code), tables that are made otherwise in bf16.
TYPES_OFTEN = ("ernie4_5_moe", "nemotron_h", "olmo_hybrid", "gemma", "openai-gpt", "resnet")
ALL_TYPES = [
    pytest.param(name, task, marks=() if name in TYPES_OFTEN else pytest.mark.slow)
    for task, types in TYPES.items()
    for name in types
]


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers, and tensors that are neither, by name."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    loose = {f"{name}[{k}]": each for name, all in loose_tensors(model).items() for k, each in enumerate(all)}
    return dict(named) | loose


def dtypes_of(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in tensors_of(model).items()}


def assert_same(ours: nn.Module, library: nn.Module) -> None:
    """Names, dtypes and values are the same."""
    assert dtypes_of(ours) == dtypes_of(library)
    for name, expected in tensors_of(library).items():
        assert torch.equal(tensors_of(ours)[name], expected), name


def in_bf16(name: str, folder: Path) -> DiffusersNetwork:
    """The model of `small(name)` as a run makes it, with the weights that are in `folder`."""
    with torch.device("meta"), default_dtype(HALF):
        model = build(name).eval()
    model.to_empty(device="cpu")
    model.fill_buffers()
    model.load(folder)
    return model


@pytest.mark.sampled
@pytest.mark.parametrize("name", CLASSES)
@torch.no_grad()
def test_a_class_of_diffusers_is_as_its_library_loads_it(tmp_path: Path, name: str):
    network = small(name).network
    for parameter in network.parameters():
        if parameter.ndim == 1:
            # Norms of ones are the same in bf16.
            parameter += torch.linspace(0, 0.1, len(parameter))
    network.save_pretrained(tmp_path)
    library = type(network).from_pretrained(tmp_path, torch_dtype=HALF)
    ours, theirs = in_bf16(name, tmp_path), small(name)
    theirs.network = library.eval()
    assert_same(ours.network, library)
    noisy, condition = inputs_of(name)
    velocity = ours(noisy, TIMES, **condition)
    assert velocity.isfinite().all()
    assert torch.equal(velocity, theirs(noisy, TIMES, **condition))


def in_bf16_hf(name: str, folder: Path) -> TransformersModel:
    source, values = TINY[name]
    with torch.device("meta"):
        model = build_hf(source, task_of(name), values, dtype=HALF).eval()
    model.to_empty(device="cpu")
    model.hf.tie_weights()
    model.fill_buffers()
    model.load(folder)
    return model


@pytest.mark.sampled
@pytest.mark.parametrize("name", TINY)
@torch.no_grad()
def test_a_model_of_transformers_is_as_its_library_loads_it(tmp_path: Path, name: str):
    model = trained(name).hf
    model.save_pretrained(tmp_path)
    library = type(model).from_pretrained(tmp_path, dtype=HALF)
    ours = in_bf16_hf(name, tmp_path)
    # Neither is a weight, and no file of transformers has them.
    assert_same(ours.hf, library)
    arguments = batch(name)
    if task_of(name) == "classification":
        images = arguments[0].to(HALF)
        expected = library(pixel_values=images)
        expected = expected.last_hidden_state if expected.get("logits") is None else expected.logits
        assert torch.equal(ours(images), expected)
    else:
        expected = library(input_ids=arguments[0]).logits
        assert torch.equal(ours.hf(input_ids=arguments[0]).logits, expected)
        assert ours(*arguments).isfinite()


@pytest.mark.parametrize(("name", "task"), ALL_TYPES)
def test_the_dtypes_of_every_architecture_of_transformers_are_its_librarys(name: str, task: str):
    """In the shape of the library's own configuration, on the meta device."""
    try:
        with torch.device("meta"):
            ours = build_hf(name, task, dtype=HALF).hf
    except ValueError as refused:
        pytest.skip(str(refused))
    stored = {
        key: torch.empty_like(tensor, dtype=torch.float32 if tensor.is_floating_point() else None)
        for key, tensor in ours.state_dict().items()
    }
    given = {"config": copy.deepcopy(ours.config), "state_dict": stored, "device_map": {"": "meta"}}
    library = type(ours).from_pretrained(None, dtype=HALF, **given)
    assert dtypes_of(ours) == dtypes_of(library)
    # From this attribute code of the library takes the dtype of what the model is given.
    assert ours.dtype == HALF


def test_default_dtype_ends_with_its_block_whatever_happens():
    with default_dtype(torch.float64):
        assert torch.ones(1).dtype == torch.float64
    with pytest.raises(RuntimeError), default_dtype(torch.float64):
        torch.ones(-1)
    assert torch.ones(1).dtype == torch.float32


def test_float32_is_kept_of_the_state_dict_alone():
    with default_dtype(HALF):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        model.register_buffer("table", torch.ones(2, dtype=torch.float64), persistent=False)
    keep_float32(model, lambda name: name in ("0.bias", "1.running_mean", "table"))
    wide = {name for name, dtype in dtypes_of(model).items() if dtype == torch.float32}
    assert wide == {"0.bias", "1.running_mean"}
    assert model.table.dtype == torch.float64
    assert model[1].num_batches_tracked.dtype == torch.int64


def test_diffusers_names_whole_parts_of_a_name():
    keeps = kept_by_diffusers(type("Named", (nn.Module,), {"_keep_in_fp32_modules": ["norm"]}))
    assert [keeps(name) for name in ("a.norm.weight", "a.norm1.weight", "norm")] == [True, False, True]
    assert kept_by_diffusers(type("One", (nn.Module,), {"_keep_in_fp32_modules": "norm"}))("norm.bias")
    assert not kept_by_diffusers(type("None_", (nn.Module,), {"_keep_in_fp32_modules": None}))("norm.bias")
