"""The encoding of pictures is planned before any run: its shapes, bytes and time; and a run does what was planned."""

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.pipelines.latents import decoding, encoded
from models.pipelines.opening import encoders_of, open_pipeline
from models.pipelines.recording import CPU, Asked, NotTrainableError, Recorder
from models.pipelines.without_values import answering, parts_without_values
from offload.modes.layer_stream import LayerStream
from tests.models.helpers.tiny_pipelines import PIPELINES, saved
from tests.training.helpers.captioned import draw_pictures, given
from tests.training.helpers.in_process import components_of, composed, run_here
from tests.training.helpers.videos import draw_videos
from training.data.datasets import build_dataset
from training.errors import UserError
from training.planning import encoding
from training.planning.encoding import (
    TEXTS,
    VAE,
    PlannedEncoding,
    _Part,
    decoding_bytes,
    encoder_mode,
    planned_encoding,
)
from training.planning.fit import MisfitError
from training.planning.machine import machine_of
from training.planning.plan_only import plan_only
from training.run.encoding import encode_missing

SIZE = (64, 64)
EACH = [pytest.param(name, marks=() if name in ("flux", "qwen_image") else pytest.mark.slow) for name in PIPELINES]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lightering" / "encoded"


@pytest.fixture(scope="module")
def pipeline_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}
    return lambda name: folders.setdefault(name, folders.get(name) or saved(name, tmp_path_factory))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_pictures(tmp_path_factory.mktemp("pictures"))


def shapes(batch: dict[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in batch.items()}


@pytest.mark.parametrize("name", [*EACH, "videos"])
def test_a_plan_before_any_run_has_the_shapes_of_the_run(
    name: str, pipeline_of, pictures: Path, cache: Path, tmp_path: Path
):
    if name == "videos":
        overrides = given("ltx", pipeline_of("ltx"), draw_videos(tmp_path / "videos", 9), "dataset.frames=5")
    else:
        overrides = given(name, pipeline_of(name), pictures)
    components = components_of(*overrides)
    dataset = build_dataset(components.config, components.model, cache)
    with planned_encoding(dataset, components, machine_of(components), has_gpu=True) as plan:
        planned = components.task.meta_batch(components.config, 2)
    assert not cache.exists()
    encode_missing(dataset, components, plan)
    assert shapes(components.task.meta_batch(components.config, 2)) == shapes(planned)
    kept = sum(tensor.nbytes for file in cache.rglob("*.safetensors") for tensor in load_file(file).values())
    # Captions and pictures are taken to be as large as the largest.
    assert 0.5 * plan.kept_bytes < kept <= plan.kept_bytes
    with planned_encoding(dataset, components, machine_of(components), has_gpu=True) as again:
        assert again is None


class Peak(TorchDispatchMode):
    """Counts the bytes of storages that operations make, in steps of torch's CUDA allocator, and their `peak`."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._storages: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **kwargs or {})
        read = {
            tensor.untyped_storage().data_ptr() for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)
        }
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and tensor.nbytes and tensor.untyped_storage().data_ptr() not in read:
                self._add(tensor.untyped_storage())
        return found

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage.data_ptr(), -(-storage.nbytes() // 512) * 512

        def gone(_: object) -> None:
            del self._storages[key]
            self.live -= nbytes

        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, gone)
            self.live += nbytes
            self.peak = max(self.peak, self.live)


# Beside a tiny encoder of Z-Image, what attention makes of its mask, 1 MiB, is most; a plan leaves that out.
@pytest.mark.parametrize("name", EACH[:-1])
def test_the_peak_is_that_of_encoders_with_values(name: str, pipeline_of, pictures: Path):
    components = components_of(*given(name, pipeline_of(name), pictures))
    machine, network, folder = machine_of(components), components.model.network, components.model.folder
    without = open_pipeline(folder, network, components.dtype, parts=parts_without_values(folder, components.dtype))
    texts, vae = encoders_of(without, network)
    with answering(texts) as forwards:
        noise = Recorder(without, network, CPU).record(Asked(("a cube",), SIZE, SIZE)).noise[1:]
    encode = [lambda: encoded(vae, torch.empty(3, *SIZE, device="meta"), noise)]
    planned = [_Part.of(components, machine, False, {each.encoder: [each]}) for each in forwards]
    planned.append(_Part.of(components, machine, False, {vae: encode}))
    texts, vae = encoders_of(open_pipeline(folder, network, components.dtype), network)

    def peak(forward: Callable[[], object]) -> int:
        with torch.no_grad(), Peak() as counted:
            forward()
        return counted.peak

    assert peak(lambda: encoded(vae, torch.zeros(3, *SIZE), noise)) == planned.pop().moving_bytes
    for encoder, forward, plan in zip(texts, forwards, planned, strict=True):
        real = peak(lambda: encoder(*forward.arguments, **forward.keywords))  # noqa: B023
        # A plan has masks twice.
        assert real <= plan.moving_bytes <= 1.03 * real
    weights = sum(tensor.nbytes for tensor in (*vae.parameters(), *vae.buffers()))
    assert decoding_bytes(components, has_gpu=False) == weights + peak(decoding(vae, SIZE))


def test_encoders_stream_where_the_mode_can(pipeline_of, pictures: Path):
    components = components_of(
        *given("flux", pipeline_of("flux"), pictures), "offload=layer_stream", "offload.resident=1"
    )
    texts, _ = encoders_of(open_pipeline(components.model.folder, components.model.network, torch.float32), None)
    assert [type(encoder_mode(each.requires_grad_(False), components.config)) for each in texts] == [LayerStream] * 2
    part = _Part.of(components, machine_of(components), True, {texts[1].to("meta"): []})
    assert part.streams
    assert part.resident_bytes + part.moving_bytes < sum(tensor.nbytes for tensor in texts[1].parameters())


def test_what_does_not_fit_is_refused_before_anything_is_encoded(
    pipeline_of, pictures: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
):
    overrides = given("stable_diffusion", pipeline_of("stable_diffusion"), pictures)
    summary = plan_only(*composed(*overrides, "vram_budget=100KiB", run_dir=tmp_path))
    assert "encoding: vram_budget: " in summary["reason"]
    assert "take a smaller dataset.size, or encode where there is more (steps=1)" in summary["reason"]
    assert "DOES NOT FIT" in capsys.readouterr().out
    with pytest.raises(MisfitError, match=r"encoding: host_budget: .* take encode where there is more"):
        run_here(tmp_path / "run", *overrides, "host_budget=1MiB")
    assert not cache.exists()


def test_a_run_prints_its_plan_and_then_the_time_of_the_encoding(
    pipeline_of,
    pictures: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    knobs = "sample.every=2", "sample.prompts=[a cat]", "host_budget=1MiB", "force=true"
    run_here(tmp_path / "run", *given("sd3", pipeline_of("sd3"), pictures, *knobs))
    assert "force=true starts a run that does not fit: host_budget" in caplog.text
    assert "; encoding: host_budget: " in caplog.text
    printed = capsys.readouterr().out
    assert printed.count("Plan: ") == 1
    before, after = printed.split("encoded 6 pictures and 5 texts in ")
    assert "bound by " in before
    assert " s (planned 0.0 s), read the encoders in " in after


def test_encoders_that_need_values_are_encoded_before_the_plan(
    pipeline_of,
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    def needs(*_: object, **__: object) -> None:
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    monkeypatch.setattr(encoding, "parts_without_values", needs)
    run_here(tmp_path / "run", *given("sd3", pipeline_of("sd3"), pictures))
    printed = capsys.readouterr().out
    assert printed.index("encoded 6 pictures") < printed.index("Plan: ")
    assert "the encoding of pictures cannot be planned: Tensor.item() cannot be called on meta" in caplog.text
    with pytest.raises(UserError, match=r"^dataset=captioned: its pictures are not encoded yet.*begin a run first"):
        plan_only(*composed(*given("sd3", pipeline_of("sd3"), pictures, "dataset.size=96"), run_dir=tmp_path))


@pytest.mark.parametrize(
    ("part", "slots", "advice"),
    [
        (VAE, "offload.slots", "a smaller dataset.size, or"),
        (TEXTS, None, "offload=layer_stream, or"),
        (TEXTS, "offload.slots", "fewer offload.slots, or"),
    ],
)
def test_advice(part: str, slots: str | None, advice: str):
    sizes = {TEXTS: 1, VAE: 1} | {part: 2}
    plan = PlannedEncoding("", sizes, host_bytes=5, loaded_bytes=0, kept_bytes=0, seconds=0.0, slots=slots)
    assert plan.totals == {"vram_budget": 2, "host_budget": 5}
    assert plan.advice("vram_budget").startswith(advice)
    assert plan.advice("host_budget").startswith("encode where there is more")


def test_a_plan_refuses_a_pipeline_that_cannot_be_trained(pipeline_of, pictures: Path, tmp_path: Path, monkeypatch):
    def refused(*_: object) -> None:
        raise NotTrainableError("its network takes a list")

    monkeypatch.setattr(encoding.ToEncode, "calls", refused)
    with pytest.raises(UserError, match=r"^model\.source=.*: its network takes a list$"):
        plan_only(*composed(*given("sd3", pipeline_of("sd3"), pictures, "plan=true"), run_dir=tmp_path))
