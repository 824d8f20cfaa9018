"""A batch simulator that allocates its tensors in a memory pool of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import Tensor

    from dvla.envs.batch_protocol import BatchEnvironment, BatchStep


class BatchInPool:
    """The environments of `create`, with all they do done in the context `pool`.

    Args:
        create: Makes the simulator.
        pool: A context in which allocations of the calling thread belong to the simulator
            (`dvla.runtime.memory.Memory.environment`); entered anew for every call.
    """

    def __init__(
        self, create: Callable[[], BatchEnvironment], pool: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._pool = pool
        with pool():
            self._env = create()
        self.spec, self.num_envs, self.device = self._env.spec, self._env.num_envs, self._env.device

    def reset(self, env: int, task: int, seed: int) -> bytes:
        """As of the simulator."""
        with self._pool():
            return self._env.reset(env, task, seed)

    def step(self, actions: Tensor) -> BatchStep:
        """As of the simulator."""
        with self._pool():
            return self._env.step(actions)

    def observe(self) -> tuple[Tensor, Tensor]:
        """As of the simulator."""
        with self._pool():
            return self._env.observe()

    def close(self) -> None:
        """Free the simulator."""
        self._env.close()
