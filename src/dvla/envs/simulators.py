"""The simulators of a rank: worker processes, or one batch simulator on the rank's GPU, used by the lanes alike."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol, Self

from dvla.config import Config, ConfigError
from dvla.envs.batch_in_pool import BatchInPool
from dvla.envs.batch_pool import BatchPool
from dvla.envs.pool import WorkerPool
from dvla.envs.registry import environment_arguments, environment_class

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch

    from dvla.envs.messages import Record
    from dvla.envs.protocol import EnvSpec
    from dvla.planes.semaphore import Selectable


class SimulatorPool(Protocol):
    """What the sampling lane (and, by `act`, the inference lane) asks of a rank's simulators; see `WorkerPool`."""

    @property
    def workers(self) -> Sequence[Selectable]:
        """What becomes readable when there is something to `receive`."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def spec(self) -> EnvSpec:
        """What all environments are."""

    def reset(self, env: int, slot: int, *, task: int, seed: int, ticket: int, film: int | None = None) -> None:
        """Begin an episode."""

    def act(self, replies: Sequence[tuple[int, int, int, int]]) -> None:
        """Go on with (env, slot, decision, generation); from any thread."""

    def receive(self, worker: Any) -> list[Record]:
        """What has become of the orders."""

    def generation(self, env: int) -> int:
        """How often the simulator was replaced."""

    def overdue(self) -> Sequence[tuple[Any, Exception]]:
        """Workers that hang, ended."""

    def envs_of(self, worker: Any) -> range:
        """The environments of a worker."""

    def beat(self, env: int) -> float:
        """When the simulator last moved."""

    def replace(self, worker: Any) -> None:
        """Put a new worker in the place of one that failed."""


def open_simulators(
    config: Config,
    device: torch.device,
    *,
    logs: Path,
    title: str,
    videos: Path,
    memory: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> WorkerPool | BatchPool:
    """Start the simulators of a rank.

    Args:
        config: The run.
        device: The rank's.
        logs: Folder of the workers' logs.
        title: Names the processes.
        videos: Folder of films.
        memory: The context in which a batch simulator allocates (`dvla.runtime.memory.Memory.environment`).

    Raises:
        ConfigError: The environment cannot be simulated like this.
    """
    env, runtime = config.env, config.runtime
    arguments = environment_arguments(env, config.render)
    if env.options.get("sim_backend") == "gpu":
        batch = getattr(environment_class(env.name), "batch", None)
        if batch is None:
            raise ConfigError(f"env.options.sim_backend=gpu: {env.name} cannot simulate batches")
        if config.evaluation.videos_per_task:
            raise ConfigError(
                "evaluation.videos_per_task: a batch on a GPU is not filmed, use env.options.sim_backend=cpu"
            )
        if config.placement.stages is not None:
            raise ConfigError(
                f"placement.stages={config.placement.stages}: a batch simulator steps all environments together, it cannot "
                "move in parts; set it to null"
            )
        simulator = BatchInPool(lambda: batch(runtime.num_envs, device, **arguments), memory)
        return BatchPool(simulator, terminate_on_success=env.terminate_on_success)
    return WorkerPool(
        env,
        config.render,
        num_envs=runtime.num_envs,
        num_workers=runtime.num_workers,
        logs=logs,
        setup_timeout_s=runtime.setup_timeout_s,
        step_timeout_s=runtime.step_timeout_s,
        title=title,
        videos=videos,
    )
