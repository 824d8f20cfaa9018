"""The two memory pools of a rank: what each may take, what it holds, and what to change when it runs out.

The *model* pool is for weights, optimiser and activations; the *environment* pool for simulators and episode slots. On a GPU
the model pool is torch's caching allocator, with a hard limit, and a batch simulator's tensors have a `torch.cuda.MemPool` of
their own: what comes and goes with its steps cannot fragment the model's memory, and its physics engine finds room. On a CPU,
and for simulators in worker processes, the pools are budgets of host memory, with the same figures.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Self

import torch

from dvla.runtime.gpu_memory import GpuMemory
from dvla.runtime.host_memory import HostMemory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dvla.config import Config, MemoryConfig

GIB = 2**30

_USABLE = 0.95
"""Share of a GPU that the pools may take: CUDA's context, kernels and NCCL's buffers need the rest."""

_ENVIRONMENT_SHARE = 0.25
"""Share of a GPU for a batch simulator, if the config does not say."""

_HOST_SIGNS = re.compile(r"can(no|')t allocate memory|std::bad_alloc", re.IGNORECASE)
"""What torch and the system say of the host's memory; numpy and Python raise `MemoryError`."""

_SIGNS = re.compile(r"out ?of ?(device|host)? ?memory|fail to allocate memory", re.IGNORECASE)
"""What torch, PhysX and Vulkan say of a GPU's."""


class MemoryPoolError(RuntimeError):
    """A pool ran out of memory, or cannot have its budget; the message names the pool and what to change."""


class Pool(Enum):
    """Members are called as in metrics."""

    model = "model"
    environment = "environment"


_KEYS = ("used_bytes", "reserved_bytes", "budget_bytes", "fragmentation")
MEMORY_TAGS = tuple(f"memory/{pool.name}/{key}" for pool in Pool for key in _KEYS)
"""Metrics of the pools."""

_REMEDIES = {
    Pool.model: "lower algo.micro_batch_size or runtime.max_batch, set runtime.precision=bf16 or "
    "runtime.activation_checkpointing=true, train less (model.freeze, model.lora_rank), or raise memory.model_fraction",
    Pool.environment: "lower runtime.num_envs, env.image_size, runtime.num_slots, algo.groups_per_step or "
    "algo.max_staleness, or raise memory.environment_gib",
}


@dataclass(frozen=True, slots=True)
class Usage:
    """What a pool holds, in bytes."""

    used: int
    reserved: int
    """Used, or kept for later use."""
    budget: int

    @property
    def fragmentation(self) -> float:
        """Share of what is reserved that is not in use."""
        return (self.reserved - self.used) / self.reserved if self.reserved else 0.0


def budgets(config: MemoryConfig, *, gpu: int | None, host: int, is_batch: bool) -> dict[Pool, int]:
    """Bytes for each pool.

    Args:
        config: What the user gave.
        gpu: Bytes of the rank's GPU, if it has one.
        host: Bytes of host memory for this rank.
        is_batch: The simulator is on the GPU.

    Raises:
        MemoryPoolError: There is not so much.
    """
    fraction, gib = config.model_fraction, config.environment_gib
    model = None if fraction is None else int(fraction * (host if gpu is None else gpu))
    environment = None if gib is None else int(gib * GIB)
    if gpu is not None and not is_batch:  # each has a memory of its own
        model = int(_USABLE * gpu) if model is None else model
        environment = host if environment is None else environment
        fits = environment <= host
    elif model is None and environment is None and gpu is None:
        return {Pool.model: host, Pool.environment: host}  # no limits but the machine's
    else:
        usable = host if gpu is None else int(_USABLE * gpu)
        if environment is None:
            environment = int(_ENVIRONMENT_SHARE * usable) if model is None else usable - model
        model = usable - environment if model is None else model
        fits = min(model, environment) > 0 and model + environment <= (host if gpu is None else gpu)
    if not fits:
        place = (
            f"the GPU's {_size(gpu)}" if gpu is not None and is_batch else f"this rank's {_size(host)} of host memory"
        )
        raise MemoryPoolError(
            f"memory.model_fraction={fraction} and memory.environment_gib={gib} do not fit into {place}: lower one of them"
        )
    return {Pool.model: model, Pool.environment: environment}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, on whichever device."""
    return isinstance(error, torch.OutOfMemoryError) or _SIGNS.search(str(error)) is not None or _is_of_host(error)


def _is_of_host(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or _HOST_SIGNS.search(str(error)) is not None


class Memory:
    """The pools of this rank; `open` makes one.

    Args:
        budget: Bytes of each pool.
        host: The host's memory.
        gpu: The rank's GPU, if it has one.
        is_batch: The simulator is on the GPU.
    """

    def __init__(self, budget: dict[Pool, int], host: HostMemory, gpu: GpuMemory | None, *, is_batch: bool) -> None:
        self._budget, self._host, self._gpu = budget, host, gpu
        self._batch_gpu = gpu if is_batch else None
        self._claimed = dict.fromkeys(Pool, 0)
        # CUDA's context, NCCL and other programs: nobody's.
        self._base = gpu.occupied() - gpu.torch_memory()[1] if gpu else 0
        self._is_simulating = False
        self._outside = self._kept = 0  # of the simulator, when last looked at: outside of torch, and its tensors
        self._set_limit()

    @classmethod
    def open(cls, config: Config, device: torch.device, local_world_size: int, *, simulates: bool = True) -> Self:
        """Set up the pools of a rank; before its first tensor on a GPU.

        Args:
            config: The run.
            device: The rank's.
            local_world_size: Ranks that share the host's memory.
            simulates: The rank has simulators.

        Raises:
            MemoryPoolError: The budgets do not fit into its memory.
        """
        gpu, host = GpuMemory(device) if device.type == "cuda" else None, HostMemory()
        is_batch = simulates and gpu is not None and config.env.options.get("sim_backend") == "gpu"
        share = host.own() + host.free() // local_world_size
        budget = budgets(config.memory, gpu=gpu.total() if gpu else None, host=share, is_batch=is_batch)
        return cls(budget, host, gpu, is_batch=is_batch)

    def claim(self, pool: Pool, what: str, num_bytes: int) -> None:
        """Count `num_bytes` of host memory that are about to be taken; where the pool is a GPU's, only see if they are there.

        Raises:
            MemoryPoolError: The budget, or the host, has not so much left.
        """
        free, usage = self._host.free(), self._pools()[pool]
        if not self._is_on_gpu(pool):
            free = max(0, min(free, usage.budget - usage.used))
        if num_bytes > free:
            raise self._error(pool, usage, f"{what} would take {_size(num_bytes)} more, {_size(free)} are left")
        self._claimed[pool] += num_bytes

    @contextlib.contextmanager
    def environment(self, num_bytes: int = 0) -> Iterator[None]:
        """What the calling thread allocates in this context belongs to the environment; not to be nested.

        On a GPU the limit is then that of both pools together; afterwards, and for the model alone, it is hard.

        Args:
            num_bytes: What is known before: the size of the slots. Elsewhere than on a GPU it is claimed.

        Raises:
            MemoryPoolError: The environment pool ran out of memory.
        """
        try:
            if self._batch_gpu is None:
                if num_bytes > 0:
                    self.claim(Pool.environment, "the memory of episode slots", num_bytes)
                yield
                return
            if num_bytes > 0:
                usage = self._pools()[Pool.environment]
                if num_bytes > usage.budget - usage.used:
                    raise self._error(Pool.environment, usage, f"{_size(num_bytes)} more do not fit")
            self._is_simulating = True
            self._set_limit()
            try:
                with self._batch_gpu.route():
                    yield
            finally:
                self._is_simulating = False
                if num_bytes > 0 or self._kept == 0:  # the rest is little, and `usage` will see it
                    self._pools()
                self._set_limit()
        except MemoryPoolError:
            raise
        except Exception as error:
            if self._is_short(Pool.environment, error):
                raise self._error(Pool.environment, self._pools()[Pool.environment], str(error)) from error
            raise

    def usage(self) -> dict[str, float]:
        """The metrics of both pools; lets the limit follow them."""
        pools = self._pools()
        self._set_limit()
        values: dict[str, float] = {}
        for pool, usage in pools.items():
            for key in ("used", "reserved", "budget"):
                values[f"memory/{pool.name}/{key}_bytes"] = getattr(usage, key)
            values[f"memory/{pool.name}/fragmentation"] = usage.fragmentation
        return values

    def explain(self, error: BaseException) -> BaseException:
        """The error to show: where memory ran out, a `MemoryPoolError` caused by `error`; else `error` itself."""
        if isinstance(error, MemoryPoolError) or not self._is_short(Pool.model, error):
            return error
        pools = self._pools()
        # Physics engines ask nobody: one that took more than its budget is to blame for what others lack.
        at_fault = Pool.model
        if self._batch_gpu and pools[Pool.environment].used > pools[Pool.environment].budget:
            at_fault = Pool.environment
        explained = self._error(at_fault, pools[at_fault], str(error))
        explained.__cause__ = error
        for note in getattr(error, "__notes__", ()):
            explained.add_note(note)
        return explained

    def _is_short(self, pool: Pool, error: BaseException) -> bool:
        """Whether `error` says that the memory in which `pool` lies ran out; what runs out elsewhere speaks for itself."""
        return is_out_of_memory(error) and not (_is_of_host(error) and self._is_on_gpu(pool))

    def _is_on_gpu(self, pool: Pool) -> bool:
        return (self._gpu if pool is Pool.model else self._batch_gpu) is not None

    def _pools(self) -> dict[Pool, Usage]:
        model, environment = self._budget[Pool.model], self._budget[Pool.environment]
        claimed = self._claimed[Pool.environment]
        slots = Usage(claimed, claimed, environment)
        if self._gpu is None:
            reserved = self._host.own() + self._claimed[Pool.model]
            return {Pool.model: Usage(max(0, reserved - self._host.unused()), reserved, model), Pool.environment: slots}
        used, reserved = self._gpu.torch_memory()
        if self._batch_gpu is None:
            return {Pool.model: Usage(used, reserved, model), Pool.environment: slots}
        tensors, kept = self._batch_gpu.simulator_tensors()
        outside = max(0, self._gpu.occupied() - reserved - self._base)  # physics engine and renderer
        self._kept, self._outside = kept, outside
        return {
            Pool.model: Usage(max(0, used - tensors), max(0, reserved - kept), model),
            Pool.environment: Usage(tensors + outside, kept + outside, environment),
        }

    def _set_limit(self) -> None:
        """Torch may take the model's budget, and the tensors of a batch simulator."""
        if self._gpu is None:
            return
        limit = self._budget[Pool.model]
        if self._batch_gpu is not None:
            outside, kept = self._outside, self._kept
            limit += max(kept, self._budget[Pool.environment] - outside) if self._is_simulating else kept
        self._gpu.limit_torch(limit)

    def _error(self, pool: Pool, usage: Usage, reason: str) -> MemoryPoolError:
        place = "the GPU" if self._is_on_gpu(pool) else "the host"
        first = " ".join(reason.split())
        return MemoryPoolError(
            f"the {pool.name} pool ran out of memory on {place}: {_size(usage.used)} in use and "
            f"{_size(usage.reserved - usage.used)} kept of a budget of {_size(usage.budget)} ({first}): {_REMEDIES[pool]}"
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if abs(num_bytes) >= GIB // 10 else f"{num_bytes / 2**20:.1f} MiB"
