"""Starts the other ranks of a run as processes of their own, and ends them with it.

The process of `python train.py devices=N` is rank 0 itself. torchrun would put a process above it, which ends ranks 30
seconds after a signal, too early for a large checkpoint. A run that torchrun started has its ranks already.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from omegaconf import DictConfig

from training.errors import UserError
from training.parallel.ranks import ALONE, Ranks
from training.parallel.world import World
from training.runs.signals import PARENT_VARIABLE, SIGNALS

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
# A rank that is ready has imported torch and the libraries of models, which takes long on a slow disk.
START_S = 600
# Ranks that were told that the run is over have only to release their memory.
END_S = 5


@contextmanager
def connected(config: DictConfig, world: World | None) -> Iterator[Ranks]:
    """Connects this process, rank 0, with the other ranks of the run, which wait for its orders.

    A run on one device has no other rank. Raises UserError if there are too few devices, or a rank does not start.
    """
    if config.devices == 1:
        yield ALONE
        return
    # First, because they import torch, which takes seconds.
    followers = Followers(config.devices) if world is None else None
    try:
        with _joined(config, world, followers) as group:
            yield group
        if followers is not None:
            followers.end()
    finally:
        if followers is not None:
            followers.kill()


@contextmanager
def _joined(config: DictConfig, world: World | None, followers: Followers | None) -> Iterator[Ranks]:
    # Importing it takes time, and a run on one device needs nothing of it.
    import torch.distributed as dist

    from training.parallel.devices import take_seat
    from training.parallel.group import Group
    from training.parallel.messages import Messages, from_first

    world = world or World(0, config.devices, 0, config.devices)
    device, timeout_s = config.device, config.parallel.timeout_s
    own, cores = take_seat(device, world)
    if followers is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=followers.store(), rank=0, world_size=config.devices)
    try:
        from_first((device, timeout_s))
        messages = Messages(timeout_s, world.host, followers and followers.cause)
        group = Group(own, messages, followers and followers.kill, cores)
        yield group
        group.close()
    except BaseException:
        if followers is not None:
            # First, because they may be in the middle of an exchange with this one.
            followers.kill()
        if own.type == "cpu":
            # NCCL would wait for the others; the end of the process ends it.
            dist.destroy_process_group()
        raise


class Followers:
    """The processes of ranks 1 to `count` - 1, which this one starts. Raises UserError if the system refuses one."""

    def __init__(self, count: int):
        self._count = count
        self._store = None
        # It listens from now on: a port that was only found to be free might be another's when the store is made.
        self._listener = socket.create_server((HOST, 0))
        self._port = self._listener.getsockname()[1]
        self._processes: dict[int, subprocess.Popen] = {}
        for rank in range(1, count):
            try:
                self._processes[rank] = self._start(rank)
            except OSError as error:
                self.kill()
                raise UserError(
                    f"devices={count}: the process of rank {rank} could not be started ({error.strerror}): end other"
                    " programs, or give fewer devices"
                ) from error

    def store(self):
        """Returns the store by which ranks find each other, once all have started. Raises UserError if one does not."""
        from torch.distributed import TCPStore

        self._store = TCPStore(
            HOST,
            self._port,
            self._count,
            is_master=True,
            timeout=timedelta(seconds=START_S),
            wait_for_workers=False,
            master_listen_fd=self._listener.detach(),
        )
        deadline = time.monotonic() + START_S
        for rank in self._processes:
            while not self._store.check([f"ready{rank}"]):
                if cause := self.cause(rank, wait_s=0.05):
                    raise UserError(f"rank {rank}: {cause}")
                if time.monotonic() > deadline:
                    raise UserError(f"rank {rank}: not started within {START_S} s: end other programs, and start again")
        return self._store

    def cause(self, rank: int, wait_s: float = 1.0) -> str | None:
        """Returns why the process of `rank` has ended; None if it still runs after `wait_s` seconds."""
        try:
            status = self._processes[rank].wait(wait_s)
        except subprocess.TimeoutExpired:
            return None
        if status >= 0:
            return f"its process has ended (exit status {status}): its messages are above"
        name = signal.Signals(-status).name
        return f"its process was killed ({name})" + (
            ", as the kernel does when the host is out of memory" if name == "SIGKILL" else ""
        )

    def kill(self) -> None:
        """Ends the processes at once."""
        self._listener.close()
        for process in self._processes.values():
            process.kill()
            process.wait()

    def end(self) -> None:
        """Waits for the processes a moment, and kills those that are left."""
        deadline = time.monotonic() + END_S
        for process in self._processes.values():
            try:
                process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                self.kill()

    def _start(self, rank: int) -> subprocess.Popen:
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._count),
            "LOCAL_WORLD_SIZE": str(self._count),
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(self._port),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            PARENT_VARIABLE: str(os.getpid()),
        }
        # In the process group of the run, so that a sweep that kills the group leaves none behind.
        # It finds the user's own options as this process does.
        command = [sys.executable, "-m", "training.run.follow", *sys.argv[1:]]
        # It inherits that, because Ctrl-C reaches it too, long before it can ignore signals. Those that come here
        # meanwhile are delivered afterwards.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
