"""The two memory pools of a rank: what torch's allocator promises, and what `dvla.runtime.memory` makes of it."""

from __future__ import annotations

import threading

import torch

from dvla.config import Config, EnvConfig, MemoryConfig
from gpu.check import Findings, check

MIB, GIB = 2**20, 2**30
_NO_ALLOCATOR = "a CPU has no caching allocator to limit"


def _bytes(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def _runs_out(num_bytes: int, device: torch.device) -> torch.OutOfMemoryError | None:
    """The error of an allocation that must fail."""
    try:
        _bytes(num_bytes, device)
    except torch.OutOfMemoryError as error:
        return error
    return None


@check(gpu_only=_NO_ALLOCATOR)
def torch_keeps_its_limit(found: Findings) -> None:
    """Torch raises instead of reserving more than its limit, which can be moved, and growing batches do not fragment."""
    from dvla.runtime.gpu_memory import GpuMemory

    memory, device = GpuMemory(found.device), found.device
    kept = _bytes(256 * MIB, device)
    found.figure("device GiB", memory.total() / GIB)
    found.figure("occupied GiB", memory.occupied() / GIB)
    found.demand(memory.occupied() >= memory.torch_memory()[1] > 0, "what torch reserves counts as occupied")
    memory.limit_torch(GIB)
    found.demand(_runs_out(2 * GIB, device) is not None, "2 GiB do not fit under a limit of 1 GiB")
    found.demand(_runs_out(512 * MIB, device) is None, "512 MiB more do")
    memory.limit_torch(4 * GIB)
    found.demand(_runs_out(2 * GIB, device) is None, "2 GiB fit once the limit is 4 GiB")
    memory.limit_torch(memory.total())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    for step in range(1, 25):  # without segments that grow, every step would leave behind one that nothing fits into
        batch = [_bytes((step * 37 + part) * MIB, device) for part in range(4)]
        del batch
    peak = torch.cuda.max_memory_allocated(device)
    found.figure("growing batches, peak used MiB", peak / MIB)
    reserved = found.figure("growing batches, reserved MiB", memory.torch_memory()[1] / MIB)
    found.demand(reserved * MIB < 1.1 * peak, "growing batches reserve little more than the largest uses")
    found.demand(int(kept.sum()) == 0, "what was allocated before is untouched")


@check(gpu_only=_NO_ALLOCATOR)
def simulator_tensors_have_a_pool_of_their_own(found: Findings) -> None:
    """Tensors of a batch simulator lie in a pool that other threads do not touch and that is entered again and again."""
    from dvla.runtime.gpu_memory import GpuMemory

    memory, device = GpuMemory(found.device), found.device
    model = _bytes(64 * MIB, device)
    found.demand(memory.simulator_tensors() == (0, 0), "the pool begins empty")
    with memory.route():
        first = _bytes(128 * MIB, device)
        used, reserved = memory.simulator_tensors()
        others: list[torch.Tensor] = []
        other = threading.Thread(target=lambda: others.append(_bytes(64 * MIB, device)))
        other.start()
        other.join()
        found.demand(memory.simulator_tensors()[0] == used, "another thread allocates elsewhere meanwhile")
    found.demand(used >= 128 * MIB, "a tensor of the pool counts there")
    found.figure("pool reserved MiB", reserved / MIB)
    model = torch.cat((model, _bytes(64 * MIB, device)))
    found.demand(memory.simulator_tensors()[0] == used, "tensors outside of it count elsewhere")
    address = first.data_ptr()
    del first
    found.demand(memory.simulator_tensors()[0] < used, "a freed tensor counts no more")
    found.demand(_bytes(128 * MIB, device).data_ptr() != address, "the model does not take what the pool keeps")
    with memory.route():
        again = _bytes(128 * MIB, device)
    found.demand(again.data_ptr() == address, "the pool takes what it keeps")
    for _ in range(20):  # as a simulator's steps
        with memory.route():
            _bytes(32 * MIB, device)
    found.demand(memory.simulator_tensors()[1] <= reserved + 64 * MIB, "the pool does not grow with steps")
    found.demand(int(again.sum()) + int(model.sum()) == 0, "what lies in both is untouched")
    segments = torch.cuda.memory_snapshot()
    found.figure("expandable segments", sum(bool(segment.get("is_expandable")) for segment in segments))
    found.demand(any(segment.get("is_expandable") for segment in segments), "segments can grow in place")


@check()
def pools_name_who_ran_out(found: Findings) -> None:
    """Pools keep their budgets, and their errors say which of them ran out and what to change."""
    from dvla.runtime.memory import Memory, MemoryPoolError, Pool

    if not found.on_gpu:
        memory = Memory.open(Config(memory=MemoryConfig(environment_gib=1)), found.device, 1)
        memory.claim(Pool.environment, "small slots", 16 * MIB)
        try:
            memory.claim(Pool.environment, "large slots", 2 * GIB)
        except MemoryPoolError as error:
            found.demand("environment pool" in str(error), f"the error names the pool, not: {error}")
        else:
            found.demand(False, "2 GiB do not fit into 1 GiB")
        found.figure("environment used MiB", memory.usage()["memory/environment/used_bytes"] / MIB)
        return

    device, total = found.device, torch.cuda.mem_get_info(found.device)[1]
    config = Config(
        env=EnvConfig(options={"sim_backend": "gpu"}),
        memory=MemoryConfig(model_fraction=4 * GIB / total, environment_gib=2),
    )
    memory = Memory.open(config, device, 1)
    weights = _bytes(GIB, device)
    with memory.environment(512 * MIB):
        pictures = _bytes(512 * MIB, device)
    usage = memory.usage()
    for pool in Pool:
        for key in ("used", "budget"):
            found.figure(f"{pool.name} {key} MiB", usage[f"memory/{pool.name}/{key}_bytes"] / MIB)
    found.demand(abs(usage["memory/model/used_bytes"] - GIB) < 64 * MIB, "the model pool holds the weights")
    found.demand(usage["memory/environment/used_bytes"] >= 512 * MIB, "the environment pool holds the pictures")
    error = _runs_out(6 * GIB, device)
    found.demand(error is not None, "the model pool ends at its budget")
    if error is not None:
        explained = str(memory.explain(error))
        found.demand("the model pool ran out" in explained, f"the error names the model pool, not: {explained}")
    for what, wanted, declared in (("declared", 4 * GIB, 4 * GIB), ("undeclared", 8 * GIB, 0)):
        try:
            with memory.environment(declared):
                _bytes(wanted, device)
        except MemoryPoolError as refused:
            found.demand("the environment pool" in str(refused), f"{what}: the error names the pool, not: {refused}")
        else:
            found.demand(False, f"{what}: the environment pool refuses {wanted / GIB:.0f} GiB")
    _bytes(2 * GIB, device)  # still fits
    found.demand(int(weights.sum()) + int(pictures.sum()) == 0, "what lies in both is untouched")
