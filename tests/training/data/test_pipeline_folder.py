"""`model.source=OWNER/NAME` of a pipeline: diffusers downloads it from a stand-in for the Hub, by the real client."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from diffusers import DiffusionPipeline
from huggingface_hub import constants, errors

from tests.models.helpers.tiny_pipelines import saved
from tests.training.helpers.captioned import draw_pictures, overrides_of
from tests.training.helpers.hub_server import ask_here, hub_server
from tests.training.helpers.in_process import components_of, run_here
from tests.training.helpers.results import losses
from training.data.pipeline_folder import pipeline_folder
from training.errors import UserError

# Nobody answers there.
NOBODY = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("pixart", tmp_path_factory)


@pytest.fixture
def hub(pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The stand-in, and the cache of the client."""
    files = {path.relative_to(pipeline).as_posix(): path.read_bytes() for path in pipeline.rglob("*.*")}
    others = {"transformer/diffusion_pytorch_model.fp16.safetensors": b"half", "vae/diffusion_pytorch_model.bin": b""}
    pickled = {name: content for name, content in files.items() if not name.endswith(".safetensors")}
    repositories = {
        "me/pipe": files | others | {"whole.safetensors": b"all"},
        "me/model": {"config.json": b"{}"},
        "me/pickled": pickled | {"vae/diffusion_pytorch_model.bin": b""},
    }
    with hub_server(repositories) as address:
        ask_here(monkeypatch, address, tmp_path / "cache")
        yield tmp_path / "cache"


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.*")}


def test_diffusers_downloads_what_the_pipeline_needs_once(hub: Path, pipeline: Path, monkeypatch: pytest.MonkeyPatch):
    folder = pipeline_folder("me/pipe")
    assert files_in(folder) == files_in(pipeline)
    ask_here(monkeypatch, NOBODY, hub)
    assert pipeline_folder("me/pipe") == folder
    assert pipeline_folder("me/pipe@main") == folder


def test_a_copy_that_lacks_a_part_is_completed(hub: Path, pipeline: Path, monkeypatch: pytest.MonkeyPatch):
    snapshot = pipeline_folder("me/pipe")
    shutil.rmtree(snapshot / "vae")
    shutil.rmtree(snapshot.parents[1] / "trees", ignore_errors=True)
    assert files_in(pipeline_folder("me/pipe")) == files_in(pipeline)


def test_a_cache_without_a_list_of_files_is_read_offline(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    repository = tmp_path / "cache" / "models--me--pipe"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("1" * 40)
    shutil.copytree(pipeline, repository / "snapshots" / ("1" * 40))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert pipeline_folder("me/pipe") == repository / "snapshots" / ("1" * 40)


def test_a_run_has_the_losses_of_one_from_the_folder(
    hub: Path, pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "encoded"))
    pictures = draw_pictures(tmp_path / "pictures")
    run_here(tmp_path / "local", *overrides_of(pipeline, pictures, "noise_prediction"))
    given = overrides_of(Path("me/pipe"), pictures, "noise_prediction")
    run_here(tmp_path / "online", *given)
    ask_here(monkeypatch, NOBODY, hub)
    run_here(tmp_path / "offline", *given, "offload=layer_stream")
    assert losses(tmp_path / "local") == losses(tmp_path / "online") == losses(tmp_path / "offline")
    config = components_of(*given).config
    assert config.model.source == config.model.weights == "me/pipe"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("me/none", "no such file or folder here; as a name on the Hub: no such model on the Hub; check the spelling"),
        ("me/pipe@v9", ".*: that model has no such revision: give a branch, a tag or a commit"),
        ("me/model", r".*: that model has no model_index\.json: take model=diffusers, or a pipeline"),
        ("me/pickled", r".*: that model has no \.safetensors file: choose one that has"),
    ],
)
def test_what_the_hub_lacks_is_one_line(hub: Path, source: str, problem: str):
    with pytest.raises(UserError, match=rf"^model\.source={source}: {problem}") as refusal:
        pipeline_folder(source)
    assert "\n" not in str(refusal.value)


def test_without_permission_or_network_it_says_what_to_do(hub: Path, monkeypatch: pytest.MonkeyPatch):
    def refuses(*_: object, **__: object) -> None:
        raise errors.GatedRepoError.__new__(errors.GatedRepoError)

    with monkeypatch.context() as patched:
        patched.setattr(DiffusionPipeline, "download", refuses)
        with pytest.raises(UserError, match=r"^model\.source=me/pipe: needs its owner's permission; ask for it on"):
            pipeline_folder("me/pipe")
    ask_here(monkeypatch, NOBODY, hub)
    with pytest.raises(UserError, match=r"^model\.source=me/pipe: .*did not answer.*`hf download me/pipe --local-dir"):
        pipeline_folder("me/pipe")


def test_what_is_here_or_is_no_name_is_a_path(pipeline: Path):
    assert pipeline_folder(str(pipeline)) == pipeline
    assert pipeline_folder("flux_small") == Path("flux_small")
