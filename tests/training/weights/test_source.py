"""`model.source=OWNER/NAME`: configuration and weights come from a stand-in for the Hub, by the real client."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from models.diffusion import build_diffusion
from models.hf_files import load_hf
from models.weights import load_weights
from tests.models.helpers.hf_models import trained
from tests.models.helpers.saving import save_diffusion, save_hf
from tests.models.helpers.unets import UNET as TINY
from tests.test_any_model import COMMON, UNET
from tests.training.helpers.hub_server import ask_here, hub_server
from tests.training.helpers.in_process import components_of, run_here
from training.checkpoints.base import BaseReference
from training.checkpoints.state import read_state
from training.errors import UserError
from training.weights.files import ModelWeights
from training.weights.source import local_source, scheduler_of, source_digest, weights_of_source

TINY_UNET = {**TINY, "num_class_embeds": 4}
SHARD_BYTES = 3000
ONE_STEP = (*COMMON, "steps=1", "checkpoint.every=1")


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """A language model in shards, a pipeline whose model is one part of it, and a model without safetensors."""
    folder = tmp_path_factory.mktemp("repositories")
    save_hf(trained("gpt2"), folder / "gpt2", SHARD_BYTES)
    torch.manual_seed(0)
    unet = build_diffusion("UNet2DModel", TINY_UNET)
    save_diffusion(unet, folder / "pipeline" / "unet", SHARD_BYTES)
    other = {"README.md": b"#", "pytorch_model.bin": b"\x80", "original/model.safetensors": b"other"}
    variant = {
        "unet/diffusion_pytorch_model.fp16.safetensors": b"half",
        "vae/config.json": b"{}",
        "vae/a.safetensors": b"",
        "model_index.json": b"{}",
        "scheduler/scheduler_config.json": b'{"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}',
    }
    earlier = trained("gpt2")
    for parameter in earlier.parameters():
        parameter.data.mul_(0.5)
    save_hf(earlier, folder / "earlier", SHARD_BYTES)
    return {
        "me/gpt2": files_in(folder / "gpt2") | other,
        "me/gpt2@v0/first": files_in(folder / "earlier"),
        "me/pipeline": files_in(folder / "pipeline") | other | variant | {"whole.safetensors": b"all"},
        "me/old": {"config.json": b'{"model_type": "gpt2"}', "pytorch_model.bin": b"\x80"},
        "me/data": {"README.md": b"#"},
    }


# Nobody answers there.
NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def hub(repositories: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The stand-in, and the cache of the client."""
    with hub_server(repositories) as address:
        ask_here(monkeypatch, address, tmp_path / "cache")
        yield tmp_path / "cache"


def downloaded(cache: Path) -> set[str]:
    return {
        path.relative_to(snapshot).as_posix()
        for snapshot in cache.glob("*/snapshots/*")
        for path in snapshot.rglob("*.*")
    }


@pytest.mark.slow
def test_a_language_model_begins_with_its_weights_and_then_needs_no_network(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    job = (*ONE_STEP, "model=hf", "model.source=me/gpt2", "optimizer.lr=0", "precision=fp32")
    job = (*job, "model.weights=auto", "seq_len=8")
    run_here(tmp_path / "online", *job)
    own = trained("gpt2")
    load_weights(own, tmp_path / "online" / "checkpoints" / "step-00000001")
    assert all(torch.equal(a, b) for a, b in zip(own.parameters(), trained("gpt2").parameters(), strict=True))
    names = downloaded(hub)
    assert {"config.json", "model.safetensors.index.json"} < names
    assert not names & {"README.md", "pytorch_model.bin", "original/model.safetensors"}
    ask_here(monkeypatch, NOBODY, hub)
    run_here(tmp_path / "offline", *job, "offload=layer_stream")
    states = [read_state(tmp_path / name / "checkpoints" / "step-00000001") for name in ("online", "offline")]
    assert states[0].step == states[1].step == 1


def test_a_revision_is_taken_where_one_is_given(hub: Path, monkeypatch: pytest.MonkeyPatch):
    halves = trained("gpt2")
    whole = components_of("model=hf", "model.source=me/gpt2", "seq_len=8", "dataset=synthetic")
    ModelWeights.find(whole.config.model.weights).path()
    parts = components_of("model=hf", "model.source=me/gpt2@v0/first", "seq_len=8", "dataset=synthetic")
    assert parts.config.model.weights == "me/gpt2@v0/first"
    weights = ModelWeights.find(parts.config.model.weights)
    load_hf(halves, weights.path())
    for now, full in zip(halves.parameters(), trained("gpt2").parameters(), strict=True):
        assert torch.equal(now, full * 0.5)
    base = BaseReference.of(0, weights)
    assert (base.name, base.revision) == ("me/gpt2", "v0/first")
    ask_here(monkeypatch, NOBODY, hub)
    assert ModelWeights.find("me/gpt2@v0/first").path() == weights.path()
    with pytest.raises(UserError, match="or run `hf download me/gpt2 --revision v2 --local-dir DIR` where there is"):
        local_source("me/gpt2@v2")


def test_a_pipeline_has_its_model_in_a_part(hub: Path, tmp_path: Path):
    unet = tuple(o for o in UNET if not o.startswith(("model.source", "model.overrides")))
    run_here(tmp_path / "run", *ONE_STEP, *unet, "model.source=me/pipeline", "precision=fp32", "optimizer.lr=0")
    torch.manual_seed(0)
    own, found = build_diffusion("UNet2DModel", TINY_UNET), build_diffusion("UNet2DModel", TINY_UNET)
    load_weights(found, tmp_path / "run" / "checkpoints" / "step-00000001")
    assert all(torch.equal(a, b) for a, b in zip(own.parameters(), found.parameters(), strict=True))
    assert {name.partition("/")[0] for name in downloaded(hub)} == {"unet", "scheduler", "model_index.json"}
    assert not any("fp16" in name for name in downloaded(hub))
    assert "task.shift" in (tmp_path / "run" / "plan.json").read_text()


def test_the_scheduler_is_that_of_the_weights_before_that_of_the_source(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "own" / "scheduler").mkdir(parents=True)
    file = tmp_path / "own" / "scheduler" / "scheduler_config.json"
    file.write_text("{}")

    def found(weights: str | None, source: str) -> Path | None:
        return scheduler_of(OmegaConf.create({"weights": weights, "source": source}))

    assert found(None, "UNet2DModel") is None
    assert found(None, "me/gpt2") is None
    assert found(str(file.parents[1]), "me/pipeline") == file
    of_hub = found("me/pipeline", str(file.parents[1]))
    assert of_hub == found("me/gpt2", "me/pipeline")
    assert json.loads(of_hub.read_text())["shift"] == 3
    with pytest.raises(UserError, match=r"^model.weights=me/absent: no such file or folder here; .* no such model on"):
        found("me/absent", "UNet2DModel")
    local_source("me/gpt2")
    ask_here(monkeypatch, NOBODY, hub)
    assert found("me/gpt2", "me/pipeline") == of_hub


def test_a_plan_needs_the_configuration_alone(hub: Path):
    tiny = ("model=hf", "model.source=me/gpt2", "model.overrides={n_layer: 1}", "seq_len=8")
    components = components_of(*tiny, "dataset=synthetic")
    assert len(components.model.hf.transformer.h) == 1
    assert downloaded(hub) == {"config.json"}
    assert components.config.model.source == components.config.model.weights == "me/gpt2"
    assert components.settled.reasons["model.weights"] == "me/gpt2, those of model.source"


def test_the_digest_of_a_source_is_that_of_the_file_that_makes_the_model(tmp_path: Path):
    def digest(model: dict) -> str | None:
        return source_digest(OmegaConf.create(model))

    assert (digest({"hidden_size": 16}), digest({"source": "gpt2"}), digest({"source": "UNet2DModel"})) == (None,) * 3
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "config.json").write_text("{}")
    of_a_part = digest({"source": str(tmp_path)})
    assert of_a_part == digest({"source": str(tmp_path / "unet")})
    (tmp_path / "unet" / "config.json").write_text('{"a": 1}')
    assert digest({"source": str(tmp_path)}) not in (None, of_a_part)


def test_what_auto_stands_for(tmp_path: Path, repositories: dict):
    for name, content in repositories["me/gpt2"].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)

    def chosen(source: str) -> str | None:
        return weights_of_source(OmegaConf.create({"source": source}))

    assert [chosen(source) for source in ("gpt2", "UNet2DModel", "me/x", str(tmp_path))] == [
        None,
        None,
        "me/x",
        str(tmp_path),
    ]
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(UserError, match=r"index\.json is not JSON: download it again, or give model\.weights=null"):
        chosen(str(tmp_path))
    for file in tmp_path.glob("model*"):
        file.unlink()
    with pytest.raises(UserError, match=r"has its weights as pytorch_model\.bin and not as \.safetensors, which"):
        chosen(str(tmp_path))
    (tmp_path / "pytorch_model.bin").unlink()
    assert chosen(str(tmp_path)) is None
    lines = components_of("model=hf", "model.source=gpt2", "dataset=synthetic").settled.reasons
    assert lines["model.weights"].startswith("the weights begin from the seed")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (
            "me/none",
            r"model\.source=me/none: no such file or folder here; as a name on the Hub: no such model on the Hub",
        ),
        ("me/data", r"model\.source=me/data: .*: that model has no config\.json: choose one that has"),
        (
            "me/gpt2@v9",
            r"model\.source=me/gpt2@v9: .*: that model has no such revision: give a branch, a tag or a commit",
        ),
        ("me/old", r"model\.weights=me/old: .*: that model has no \.safetensors file: choose one that has"),
    ],
)
@pytest.mark.slow
def test_what_the_hub_lacks_is_one_line(hub: Path, tmp_path: Path, source: str, problem: str):
    with pytest.raises(UserError, match=problem) as refusal:
        run_here(tmp_path / "run", *ONE_STEP, "model=hf", f"model.source={source}")
    assert "\n" not in str(refusal.value)


def test_an_empty_name_is_refused():
    with pytest.raises(UserError, match=r"^model\.source=: give a model type, a class or a folder"):
        local_source("")
