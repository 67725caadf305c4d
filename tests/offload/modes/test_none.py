"""none leaves a model on the device, and gives it back as it was."""

from offload.modes.none import Resident
from tests.offload.helpers.models import Stack, stack_inputs, under


def test_a_step_moves_nothing_and_gradients_are_on_the_device():
    model, mode = Stack(), Resident()
    with under(mode, model) as attached:
        before = attached.counters()
        with attached.step(norms=True):
            (loss,) = attached.accumulate([lambda: model(stack_inputs(0, 0)).square().mean()])
        assert not loss.requires_grad
        assert attached.counters() == before
        assert all(p.grad is not None for p in model.parameters())


def test_everything_is_resident():
    model = Stack()
    plan = Resident().footprint(model)
    assert plan.resident_bytes == sum(p.nbytes for p in model.parameters())
    assert (plan.units, plan.slot_bytes, plan.host_weight_bytes, plan.h2d_bytes, plan.d2h_bytes) == (0, 0, 0, 0, 0)
