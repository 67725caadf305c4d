"""Attributes of modules are, in the turns of each microbatch, what they would be one after another."""

from __future__ import annotations

from torch import nn

from offload.microbatches.module_attributes import ModuleAttributes


def test_each_reads_the_last_write_of_those_up_to_it():
    module = nn.Linear(1, 1)
    module.calls = 0
    attributes = ModuleAttributes([module])
    for microbatch in range(3):
        with attributes.turn(microbatch):
            assert module.calls == microbatch
            module.calls += 1
            if microbatch == 1:
                module.late = "of 1"
    with attributes.turn(0):
        assert module.calls == 1
        assert not hasattr(module, "late")
        module.calls = 10
    with attributes.turn(2):
        assert (module.calls, module.late) == (3, "of 1")
        del module.late
    attributes.end(3)
    assert module.calls == 3
    assert not hasattr(module, "late")


def test_nothing_written_is_nothing_changed():
    module = nn.Linear(1, 1)
    before = dict(vars(module))
    attributes = ModuleAttributes([module])
    with attributes.turn(0):
        pass
    attributes.end(1)
    assert vars(module) == before
