"""Each thread knows which microbatch it runs."""

from __future__ import annotations

import threading

from offload.torch_private.running_microbatch import running, running_microbatch


def test_a_microbatch_runs_in_its_thread_until_the_block_ends():
    seen = []
    assert running_microbatch() is None
    with running(3):
        assert running_microbatch() == 3
        thread = threading.Thread(target=lambda: seen.append(running_microbatch()))
        thread.start()
        thread.join()
        with running(4):
            assert running_microbatch() == 4
        assert running_microbatch() == 3
    assert running_microbatch() is None
    assert seen == [None]
