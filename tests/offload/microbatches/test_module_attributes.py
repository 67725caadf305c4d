"""Attributes of modules are, in the turns of each microbatch, what they would be one after another."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from torch import nn

from offload.microbatches.module_attributes import ModuleAttributes
from offload.torch_private.running_microbatch import SideBySideError


def test_each_reads_the_last_write_of_those_up_to_it():
    module = nn.Linear(1, 1)
    module.calls = 0
    attributes = ModuleAttributes([module], {})
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
    attributes = ModuleAttributes([module], {})
    with attributes.turn(0):
        pass
    attributes.end(1)
    assert vars(module) == before


def test_a_value_that_others_have_begun_with_may_not_change_again():
    module = nn.Linear(1, 1)
    module.is_on = module.own = True
    attributes = ModuleAttributes([module], {})
    with attributes.turn(0):
        module.is_on, module.own = False, 0
    with attributes.turn(1):
        assert not module.is_on
        module.own = 1
    with attributes.turn(0):
        module.own = 2
    with pytest.raises(SideBySideError, match=r"^is_on of a Linear is changed twice in a loss"), attributes.turn(0):
        module.is_on = True
    # Once: the others end in turns of theirs.
    with attributes.turn(0):
        module.is_on = False
    attributes.end(2)
    assert (module.is_on, module.own) == (False, 1)


def test_a_hook_of_another_microbatch_than_the_first_is_refused():
    module = nn.Linear(1, 1)
    attributes = ModuleAttributes([nn.ReLU(), module], {module: {module}})
    with attributes.turn(0):
        module.register_forward_hook(print)
    with attributes.turn(1):
        module.register_forward_pre_hook(print).remove()
    with pytest.raises(SideBySideError, match=r"^a hook on a Linear is registered in a loss"), attributes.turn(1):
        module.register_forward_pre_hook(print)


@pytest.mark.parametrize("outside", [False, True], ids=["in an entrance", "outside"])
@pytest.mark.parametrize("entered", [None, 0, 1])
def test_the_first_registers_hooks_for_good_where_no_other_has_been(outside: bool, entered: int | None):
    block = nn.Sequential(nn.Linear(1, 1))
    attributes = ModuleAttributes(block.modules(), {block: set() if outside else {block, block[0]}})
    for microbatch in range(2):
        with attributes.turn(microbatch):
            if entered == microbatch:
                attributes.entered(block, microbatch)
    attributes.entered(block, None)
    refused = pytest.raises(SideBySideError, match=r"^a hook on a Linear is registered in a loss")
    with refused if outside or entered == 1 else nullcontext(), attributes.turn(0):
        block[0].register_forward_hook(print)


@pytest.mark.parametrize("microbatch", [0, 1])
def test_a_hook_that_others_have_found_is_not_removed(microbatch: int):
    module = nn.Linear(1, 1)
    attributes = ModuleAttributes([module], {})
    with attributes.turn(0):
        hook = module.register_full_backward_hook(print)
    with attributes.turn(1):
        pass
    with pytest.raises(SideBySideError, match=r"^a hook on a Linear is removed in a loss"), attributes.turn(microbatch):
        hook.remove()
