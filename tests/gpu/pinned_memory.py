"""Shared memory that `dvla.runtime.device.pin` page-locks: fast copies, beside computation, from several processes."""

from __future__ import annotations

import multiprocessing
import os
import time

import torch

from dvla.planes.slots import create_memory, map_memory
from gpu.check import Findings, check
from gpu.shared_memory import pinned, shared_memory
from gpu.timing import gigabytes_per_second, median_seconds


@check()
def pinned_memory_is_fast(found: Findings) -> None:
    """Pinning shared memory makes copies to and from the device faster; unpinning undoes it."""
    device, size = found.device, (512 if found.on_gpu else 16) * 2**20
    memory = shared_memory(size)
    host, there = torch.from_numpy(memory), torch.zeros(size, dtype=torch.uint8, device=device)

    def to_device() -> None:
        there.copy_(host, non_blocking=True)

    def to_host() -> None:
        host.copy_(there, non_blocking=True)

    found.demand(not host.is_pinned(), "memory is not pinned before it is pinned")
    pageable = found.figure("to device before GB/s", gigabytes_per_second(to_device, size, device))
    with pinned(memory, device):
        found.demand(host.is_pinned() or not found.on_gpu, "torch sees that the memory is pinned")
        found.demand(host[size // 3 : size // 2].is_pinned() or not found.on_gpu, "a part of pinned memory is pinned")
        fast = found.figure("to device pinned GB/s", gigabytes_per_second(to_device, size, device))
        found.figure("to host pinned GB/s", gigabytes_per_second(to_host, size, device))
        found.demand(fast > 1.2 * pageable or not found.on_gpu, "pinned copies are at least 1.2 times as fast")
    found.demand(not host.is_pinned(), "memory is not pinned any more after unpinning")
    memory[:] = 7
    to_device()
    found.demand(bool((there == 7).all()), "a copy after unpinning brings what lies there now")
    with pinned(memory, device):  # as the next run in the same process would
        found.demand(host.is_pinned() or not found.on_gpu, "memory can be pinned again")


@check(gpu_only="a CPU has no copy engine beside its cores")
def pinned_copies_overlap_with_compute(found: Findings) -> None:
    """A copy from pinned memory returns at once and runs beside the kernels of another stream."""
    device, size = found.device, 2**30
    memory = shared_memory(size)
    host, there = torch.from_numpy(memory), torch.empty(size, dtype=torch.uint8, device=device)
    factor = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    product = torch.empty_like(factor)
    copying, computing = torch.cuda.Stream(device), torch.cuda.Stream(device)
    issue_seconds = []

    def copy() -> None:
        with torch.cuda.stream(copying):
            begin = time.perf_counter()
            there.copy_(host, non_blocking=True)
            issue_seconds.append(time.perf_counter() - begin)

    def multiply(times: int) -> None:
        with torch.cuda.stream(computing):
            for _ in range(times):
                torch.mm(factor, factor, out=product)

    def both(times: int) -> None:
        copy()
        multiply(times)

    with pinned(memory, device):
        copy_s = median_seconds(copy, device)
        times = max(1, round(copy_s / (median_seconds(lambda: multiply(50), device) / 50)))
        multiply_s = median_seconds(lambda: multiply(times), device)
        both_s = median_seconds(lambda: both(times), device)
        issue_s = sorted(issue_seconds)[len(issue_seconds) // 2]
    found.figure("copy ms", copy_s * 1e3)
    found.figure("compute ms", multiply_s * 1e3)
    found.figure("both ms", both_s * 1e3)
    found.figure("call of the copy ms", issue_s * 1e3)
    hidden = found.figure("share hidden", (copy_s + multiply_s - both_s) / min(copy_s, multiply_s))
    found.demand(issue_s < copy_s / 4, "the call of an asynchronous copy returns long before the copy ends")
    found.demand(hidden > 0.5, "at least half of the shorter of the two is hidden behind the other")


def _read_and_write(pid: int, descriptor: int, size: int, device: torch.device) -> None:
    """Another process: maps and pins the same memory, reads it through the device and writes it back, doubled."""
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    memory = map_memory(opened, size)
    os.close(opened)
    host = torch.from_numpy(memory)
    with pinned(memory, device):
        assert host.is_pinned() or device.type == "cpu"
        host.copy_(host.to(device, non_blocking=True) * 2)


@check()
def two_processes_pin_the_same_memory(found: Findings) -> None:
    """Two processes pin one memfd at the same time; each reads through the device what the other wrote through it."""
    device, size = found.device, (64 if found.on_gpu else 4) * 2**20
    descriptor = create_memory("dvla-check", size)
    memory = map_memory(descriptor, size)
    host = torch.from_numpy(memory)
    want = torch.randint(0, 128, (size,), dtype=torch.uint8, device=device)
    with pinned(memory, device):
        host.copy_(want)
        other = multiprocessing.get_context("spawn").Process(
            target=_read_and_write, args=(os.getpid(), descriptor, size, device)
        )
        begin = time.perf_counter()
        other.start()
        other.join(45)
        if other.is_alive():
            other.kill()
        found.figure("second process s", time.perf_counter() - begin)
        found.demand(other.exitcode == 0, f"the second process pins, reads and writes (it ended with {other.exitcode})")
        found.demand(torch.equal(host.to(device), want * 2), "what the other wrote is read through the device")
    os.close(descriptor)
