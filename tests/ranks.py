"""Run a function on several real ranks: spawned processes with gloo groups, a time limit, and errors brought back."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection


def free_port() -> int:
    """A TCP port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _enter(
    answer: Connection, function: Callable, rank: int, world_size: int, port: int, replicate_size: int, arguments: tuple
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    try:
        import torch

        from dvla.config import Device
        from dvla.runtime.world import join_world

        torch.set_num_threads(1)
        world = join_world(Device.cpu, 60.0, replicate_size)
        answer.send((True, function(world, *arguments)))
        answer.recv()  # leave together: a rank that ends early breaks collectives of the others
    except BaseException:
        answer.send((False, traceback.format_exc()))
    os._exit(0)


def run_ranks(
    function: Callable, world_size: int, *arguments: Any, timeout_s: float = 120.0, replicate_size: int = 1
) -> list[Any]:
    """Call ``function(world, *arguments)`` on `world_size` ranks; what each returned.

    Raises:
        AssertionError: A rank raised, died or took too long; the text holds its traceback.
    """
    context = multiprocessing.get_context("spawn")
    port = free_port()
    processes, ends = [], []
    try:
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_enter, args=(theirs, function, rank, world_size, port, replicate_size, arguments)
            )
            process.start()
            theirs.close()
            processes.append(process)
            ends.append(mine)
        results = []
        for rank, end in enumerate(ends):
            if not end.poll(timeout_s):
                raise AssertionError(f"rank {rank} gave no answer within {timeout_s} s")
            try:
                is_good, value = end.recv()
            except EOFError:
                raise AssertionError(f"rank {rank} died") from None
            assert is_good, f"rank {rank}:\n{value}"
            results.append(value)
        for end in ends:
            end.send(None)
        return results
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
