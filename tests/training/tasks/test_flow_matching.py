"""Flow matching: its random numbers, its loss against the formulas, and its samples against known velocities."""

import math
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from offload import KnobError
from training.batches import split_into
from training.tasks.flow_matching import FlowMatching

CLASSES = 3
CPU = torch.device("cpu")


def batch_of(count: int, **others: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"images": torch.rand(count, 1, 4, 4, generator=generator) * 2 - 1, **others}


def labelled(count: int) -> dict[str, Tensor]:
    return batch_of(count, labels=torch.arange(count) % CLASSES)


class Linear(nn.Module):
    """A velocity that is linear in the image, the time and the label's number."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.tensor([0.5, -0.25, 0.125]))
        self.calls: list[tuple[Tensor, Tensor, dict[str, Tensor]]] = []

    def forward(self, noisy: Tensor, timestep: Tensor, **condition: Tensor) -> Tensor:
        self.calls.append((noisy.detach(), timestep, condition))
        labels = condition.get("labels", torch.zeros(len(noisy)))
        a, b, c = self.factors
        return a * noisy + (b * timestep + c * labels).view(-1, 1, 1, 1)


class Exact(nn.Module):
    """The velocity field whose only image is `target`: at (x, t) it is (x - target) / t."""

    sample_shape = (1, 4, 4)

    def __init__(self, targets: Tensor):
        super().__init__()
        self.targets = targets

    def forward(self, noisy: Tensor, timestep: Tensor, labels: Tensor) -> Tensor:
        return (noisy - self.targets[labels].view(-1, 1, 1, 1)) / timestep.view(-1, 1, 1, 1)


class TestPrepared:
    def test_numbers_depend_on_seed_and_place_alone(self) -> None:
        task = FlowMatching(null_class=CLASSES, drop_condition=0.5)
        large, again, other = (task.prepared(labelled(6), seed) for seed in (5, 5, 6))
        small = task.prepared(labelled(4), 5)
        for name in ("noisy", "target", "timestep", "labels"):
            assert torch.equal(large[name], again[name])
            assert torch.equal(large[name][:4], small[name])
        assert not torch.equal(large["target"], other["target"])
        assert not torch.equal(large["timestep"], other["timestep"])
        assert len(large["target"].unique()) == large["target"].numel()

    def test_the_layout_of_images_in_memory_changes_nothing(self) -> None:
        task = FlowMatching()
        images = torch.rand(2, 3, 4, 4)
        last = images.contiguous(memory_format=torch.channels_last)
        assert torch.equal(task.prepared({"images": images}, 0)["noisy"], task.prepared({"images": last}, 0)["noisy"])

    def test_it_takes_nothing_from_the_global_generator(self) -> None:
        state = torch.random.get_rng_state()
        FlowMatching().prepared(batch_of(2), 0)
        assert torch.equal(state, torch.random.get_rng_state())

    @pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (1.5, 0.25)])
    def test_times_are_logit_normal_and_noise_is_normal(self, mean: float, std: float) -> None:
        task = FlowMatching(timestep_mean=mean, timestep_std=std)
        prepared = task.prepared({"images": torch.zeros(4000, 1, 1, 1)}, 0)
        noise, times = prepared["target"], prepared["timestep"]
        assert torch.equal(prepared["noisy"], times.view(-1, 1, 1, 1) * noise)
        assert noise.mean().item() == pytest.approx(0, abs=0.06)
        assert noise.std().item() == pytest.approx(1, abs=0.04)
        assert times.dtype == torch.float32
        logits = torch.logit(times.double())
        assert logits.mean().item() == pytest.approx(mean, abs=0.06)
        assert logits.std().item() == pytest.approx(std, rel=0.04)

    def test_meta_batches_have_the_same_shapes_and_dtypes(self) -> None:
        task = FlowMatching(null_class=CLASSES)
        batch = {**labelled(2), "images": labelled(2)["images"].bfloat16()}
        real = task.prepared(batch, 0)
        meta = task.prepared({name: tensor.to("meta") for name, tensor in batch.items()}, 0)
        assert {k: (v.shape, v.dtype) for k, v in real.items()} == {k: (v.shape, v.dtype) for k, v in meta.items()}
        assert all(tensor.is_meta for tensor in meta.values())


class TestLoss:
    def test_it_is_the_error_of_the_velocity_between_image_and_noise(self) -> None:
        task, model = FlowMatching(null_class=CLASSES), Linear()
        given = labelled(5)
        batch = task.prepared(given, 0)
        tensors = (given["images"], batch["target"], batch["timestep"], batch["labels"])
        expected = 0.0
        for x, v, t, label in zip(*(each.tolist() for each in tensors), strict=True):
            for a, b in zip(chain(*x[0]), chain(*v[0]), strict=True):
                point = (1 - t) * a + t * (a + b)
                expected += (0.5 * point - 0.25 * t + 0.125 * label - b) ** 2
        assert task.loss(model, batch).item() == pytest.approx(expected / (5 * 16), rel=1e-5)
        _, timestep, condition = model.calls[0]
        assert torch.equal(timestep, batch["timestep"])
        assert list(condition) == ["labels"]

    def test_microbatches_make_the_same_gradient(self) -> None:
        task, whole, parts = FlowMatching(null_class=CLASSES), Linear(), Linear()
        batch = task.prepared(labelled(6), 0)
        task.loss(whole, batch).backward()
        for part in split_into(batch, 3):
            (task.loss(parts, part) / 3).backward()
        assert torch.allclose(whole.factors.grad, parts.factors.grad, rtol=1e-5)

    def test_a_model_in_low_precision_has_a_loss_in_float32(self) -> None:
        class Low(nn.Module):
            def forward(self, noisy: Tensor, timestep: Tensor) -> Tensor:
                assert (noisy.dtype, timestep.dtype) == (torch.float32, torch.float32)
                return noisy.bfloat16()

        task = FlowMatching()
        assert task.loss(Low(), task.prepared(batch_of(2), 0)).dtype == torch.float32


class TestSamples:
    targets = torch.tensor([-1.0, 0.0, 1.0, 0.5])

    def test_euler_reaches_the_image_of_each_label(self) -> None:
        task = FlowMatching(null_class=CLASSES, sample_count=4, guidance=1.0, sample_steps=5)
        images = task.images(Exact(self.targets), 0, CPU)
        assert images.shape == (4, 4, 4, 1)
        assert images.dtype == torch.uint8
        # 0 lies between two levels: rounding errors of the steps decide.
        assert images[[0, 2, 3]].unique().tolist() == [0, 255]
        assert set(images[1].unique().tolist()) <= {127, 128}

    def test_guidance_goes_beyond_the_prediction_with_the_label(self) -> None:
        # From 0.5, without label, past the label's: 0.5 + 1.5 * (0 - 0.5) = -0.25.
        task = FlowMatching(null_class=CLASSES, sample_count=2, guidance=1.5, sample_steps=4)
        levels = task.images(Exact(self.targets), 0, CPU)[1].unique()
        assert set(levels.tolist()) <= {95, 96}
        assert math.isclose((-0.25 + 1) * 127.5, 95.6, abs_tol=0.1)

    def test_without_dropping_there_is_no_guidance(self) -> None:
        options = {"null_class": CLASSES, "sample_count": 3, "sample_steps": 2}
        model = Exact(self.targets[:CLASSES])
        free = FlowMatching(**options, guidance=3.0, drop_condition=0).images(model, 0, CPU)
        assert torch.equal(free, FlowMatching(**options, guidance=1.0).images(model, 0, CPU))

    def test_a_model_without_labels_is_called_without(self) -> None:
        model = Linear().requires_grad_(False)
        model.condition_shapes = {}
        FlowMatching(null_class=CLASSES, sample_count=2, sample_steps=2, sample_shape=(1, 4, 4)).images(model, 0, CPU)
        assert [condition for _, _, condition in model.calls] == [{}, {}]

    def test_steps_go_from_noise_at_one_to_zero(self) -> None:
        model = Linear()
        with torch.no_grad():
            FlowMatching(sample_count=2, sample_steps=4, sample_shape=(1, 4, 4)).images(model, 7, CPU)
        assert [timestep.tolist() for _, timestep, _ in model.calls] == [[t, t] for t in (1.0, 0.75, 0.5, 0.25)]
        first = model.calls[0][0]
        assert first.std().item() == pytest.approx(1, abs=0.4)
        assert model.calls[1][0][0, 0, 0, 0].item() == pytest.approx(
            first[0, 0, 0, 0].item() - 0.25 * (0.5 * first[0, 0, 0, 0].item() - 0.25)
        )

    def test_images_depend_on_seed_and_place_alone(self) -> None:
        model = Linear().requires_grad_(False)
        options = {"sample_steps": 2, "sample_shape": (1, 4, 4)}
        some, more = (FlowMatching(sample_count=n, **options).images(model, 7, CPU) for n in (2, 5))
        assert torch.equal(some, more[:2])
        assert not torch.equal(more[0], more[1])

    def test_it_stops_between_steps(self) -> None:
        model, answers = Exact(self.targets), iter([False, False, True])
        task = FlowMatching(null_class=CLASSES, sample_count=2)
        assert task.images(model, 0, CPU, lambda: next(answers)) is None
        assert next(answers, None) is None

    def test_what_is_not_finite_is_an_error(self) -> None:
        task = FlowMatching(null_class=CLASSES, sample_count=2)
        with pytest.raises(ValueError, match="not finite"):
            task.images(Exact(torch.full((4,), math.nan)), 0, CPU)

    def test_the_sampler_makes_one_picture(self) -> None:
        task = FlowMatching(null_class=CLASSES, sample_count=4, sample_steps=2)
        model = Exact(self.targets)
        sample = task.sampler(CONFIG, model).sample(model, CPU, lambda: False)
        assert sample.picture.shape == (11, 11, 3)
        assert sample.caption == "4 images, 2 steps of Euler's method"
        assert task.sampler(CONFIG, model).sample(model, CPU, lambda: True) is None


CONFIG = SimpleNamespace(seed=0, sample=SimpleNamespace(every=5))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timestep_mean", math.nan),
        ("timestep_mean", 11),
        ("timestep_std", -1.0),
        ("null_class", 0),
        ("drop_condition", 1.5),
        ("sample_steps", 0),
        ("guidance", -1.0),
        ("sample_count", 0),
        ("sample_shape", [3, 8]),
        ("sample_shape", [3, 8, 0]),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: object) -> None:
    with pytest.raises(KnobError) as caught:
        FlowMatching(**{name: value})
    assert caught.value.knob == name
