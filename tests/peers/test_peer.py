"""Every adapter has clear refusals and notes, leaves no traces in the model, and is planned as a resident model."""

import importlib.util
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig
from torch import nn

from offload import OwnOptimizer, acquire, release
from peers import peer
from peers.fsdp2 import FSDP2, AttachedFSDP2
from peers.peer import AttachedPeer, Peer, PeerError, clip, norm_of
from tests.models.helpers.tiny_pipelines import saved
from tests.peers.helpers.runs import EVERY_STEP, notes, refusal
from tests.training.helpers.captioned import draw_pictures, given
from tests.training.helpers.in_process import components_of, composed, run_here
from training.config.construct import make_mode
from training.config.modes import all_options
from training.errors import UserError


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).sum()


@pytest.fixture
def attached():
    with torch.device("meta"):
        model = Tied()
    found = dict(model.named_parameters(remove_duplicate=False))
    mode, streams = Peer(), acquire("cpu")
    mode.option, mode.attached = "peer", AttachedPeer
    yield mode.attach(model, streams), model, found
    release(streams)


def test_tied_weights_stay_tied_and_the_model_is_given_back(attached):
    peer, model, found = attached
    assert model.first.weight is model.second.weight
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    peer.detach()
    assert dict(model.named_parameters(remove_duplicate=False)) == found
    assert model.shift.is_meta


def test_the_arguments_of_a_loss_are_captured_without_hooks(attached):
    peer, model, _ = attached
    called = []
    model.register_forward_pre_hook(lambda *_: called.append("hook"))
    x = torch.ones(2, 3)

    def loss() -> torch.Tensor:
        value = model(x) * 0.25
        # The loop refuses a loss that nothing trains for (`loss_to_train`).
        assert value.requires_grad
        return value

    (argument,), weight = peer.captured(loss)
    assert (argument is x, weight, called) == (True, 0.25, [])
    nn.init.ones_(model.first.weight)
    assert model(x).item() == 54
    assert called == ["hook"]


def test_gradients_are_clipped_only_where_they_are_longer():
    gradients = [torch.full((2,), 3.0), torch.full((2, 2), 3.0)]
    norm = 54**0.5
    assert clip(gradients, None, measure=False) is None
    assert clip(gradients, 100.0, measure=False) == pytest.approx(norm)
    assert norm_of(gradients) == pytest.approx(norm)
    assert clip(gradients, 1.0, measure=True) == pytest.approx(norm)
    assert norm_of(gradients) == pytest.approx(1.0)
    assert norm_of([]) == 0.0


def test_a_missing_package_is_one_line_with_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peer, "find_spec", lambda name: None if name == "ramtorch" else importlib.util.find_spec(name))
    line = "offload=ramtorch: ramtorch is not installed: pip install -r requirements-peers.txt"
    assert refusal("offload=ramtorch") == line


@pytest.mark.parametrize(
    ("option", "package"),
    [
        ("deepspeed_zero3", "deepspeed"),
        ("fairscale", "fairscale"),
        ("roundpipe", "roundpipe"),
        ("torchao_optimizer", "torchao"),
    ],
)
def test_a_system_for_gpus_is_refused_on_a_cpu(option: str, package: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peer, "find_spec", lambda name: True)
    line = f"offload={option}: {package} runs on CUDA devices only, and device=cpu"
    assert refusal(f"offload={option}") == line


@pytest.mark.slow
def test_every_option_of_a_peer_is_a_class_with_its_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peer, "find_spec", lambda name: True)
    names = [name for name, option in all_options().items() if option.is_peer]
    assert len(names) == 7
    for name in names:
        mode = make_mode(components_config(name))
        assert (mode.option, mode.foreign) == (name, True)
        assert all(isinstance(note, str) for note in mode.notes)


def components_config(name: str) -> DictConfig:
    return composed(f"offload={name}")[0].offload


def test_a_model_with_frozen_weights_is_refused():
    problem = "is compared on models that train in full: take adapter=none quantize=none"
    assert refusal("offload=fsdp2", "adapter=lora") == f"offload=fsdp2: {problem}"


def test_weights_in_float32_beside_bf16_are_refused_where_the_system_has_one_dtype(tmp_path: Path, tmp_path_factory):
    job = given("wan", saved("wan", tmp_path_factory), draw_pictures(tmp_path), "precision=bf16")
    line = "computes with all weights in one dtype, and network.scale_shift_table is float32 beside bf16: take precisio"
    with pytest.raises(UserError, match=f"^offload=fsdp2: {line}n=fp32$"):
        components_of(*job, "offload=fsdp2")
    assert components_of(*job, "offload=fsdp2", "precision=fp32").mode.option == "fsdp2"
    assert components_of(*job, "offload=diffusers_group").mode.option == "diffusers_group"


def test_a_run_goes_without_what_the_system_lacks_and_notes_it(tmp_path: Path):
    asked = ("offload=diffusers_group", "clip_norm=1.0", "checkpoint.every=2")
    summary = run_here(tmp_path, *EVERY_STEP, *asked)
    assert summary["status"] == "ok"
    assert not (tmp_path / "checkpoints").exists()
    assert notes(tmp_path)[1:] == ["checkpoint.every=2 is not applied", "clip_norm=1.0 is not applied"]
    # Neither its plan nor its copies are known.
    assert not [name for name in summary if name.startswith(("planned/", "transfer/"))]
    with pytest.raises(UserError, match=r"^resume=runs/a: DiffusersGroup cannot resume here"):
        run_here(tmp_path / "2", *EVERY_STEP, "offload=diffusers_group", "resume=runs/a")


def test_the_dry_run_is_that_of_a_resident_model():
    resident, other = (components_of(*EVERY_STEP, f"offload={name}") for name in ("none", "fsdp2"))
    assert resident.footprint == other.footprint


def test_an_own_optimizer_hands_on_the_rate_that_a_schedule_set():
    seen = []
    optimizer = OwnOptimizer(0.5, lambda lr, measure: seen.append((lr, measure)))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1)
    assert optimizer.step(measure=True) is None
    assert seen == [(0.05, True)]


def test_fsdp2_needs_no_package_of_its_own():
    assert FSDP2().package == "torch"


def test_what_a_system_refuses_in_a_step_is_an_error_of_the_user(tmp_path: Path, monkeypatch):
    """As RoundPipe refuses parts of unequal size: without a traceback."""

    def refuse(self, loss, last):
        raise PeerError("offload.num_microbatch", 2, "does not divide 3 examples")

    monkeypatch.setattr(AttachedFSDP2, "microbatch", refuse)
    with pytest.raises(UserError, match=r"^offload\.num_microbatch=2: does not divide 3 examples$"):
        run_here(tmp_path, *EVERY_STEP, "offload=fsdp2")
