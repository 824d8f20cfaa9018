"""One demonstration after the other, in a process of its own: play, and stage for the dataset what succeeds."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dvla.datasets.lerobot_layout import DatasetLayout
from dvla.datasets.lerobot_writer import Episode, stage_episode
from dvla.envs.protocol import Environment
from dvla.envs.registry import EXPERTS, environment_class


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What to play, and how; the same for all episodes."""

    env: str
    """Key of `dvla.envs.registry.EXPERTS`."""
    arguments: dict[str, Any]
    """Of that environment."""
    terminate_on_success: bool
    action_noise: float
    pace: tuple[float, float]
    videos: bool
    staging: Path
    """Folder for finished episodes, each in a folder named by its seed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """How an episode ended, and what the environment is."""

    success: bool
    layout: DatasetLayout
    task: str
    robot: str


_simulators: list[Any] = []  # the only one of this process, once it is made


def play_seed(order: Order, seed: int) -> Played:
    """Play the episode that begins in the initial state of `seed`; a worker process does nothing else."""
    experts = importlib.import_module(EXPERTS[order.env])
    if not _simulators:
        _simulators.append(environment_class(order.env)(**order.arguments))
    (env,) = _simulators
    env.reset(0, seed)
    robot = experts.robot(env)
    layout = DatasetLayout(
        fps=robot.control_freq,
        cameras=env.spec.cameras,
        image_size=env.spec.image_size,
        videos=order.videos,
        state_names=tuple(f"{name}.{n}" for name, size in env.state_layout for n in range(size)),
        action_names=robot.action_names,
    )
    pace = np.random.default_rng((seed, 1)).uniform(*order.pace)
    episode = demonstrate(
        env,
        experts.play(env, pace),
        noise=order.action_noise * pace,
        rng=np.random.default_rng(seed),
        terminate_on_success=order.terminate_on_success,
    )
    success = bool(episode.successes.any())
    if success:
        stage_episode(order.staging / str(seed), episode, layout)
    return Played(success=success, layout=layout, task=env.spec.instructions[0], robot=robot.name)


def demonstrate(
    env: Environment,
    expert: Iterator[np.ndarray],
    *,
    noise: float,
    rng: np.random.Generator,
    terminate_on_success: bool,
) -> Episode:
    """Play one episode from the state that `env` is in.

    Args:
        env: The environment, just reset.
        expert: An action for each state it comes to, without end.
        noise: Standard deviation of what is added to all elements of an executed action but the last, the gripper's.
            The expert's own action is what is recorded, so that the dataset shows how to correct oneself (DART, arXiv
            1703.09327).
        rng: Draws the noise.
        terminate_on_success: End with the first success instead of the time limit.
    """
    spec = env.spec
    steps: list[tuple[Any, ...]] = []
    for action in expert:
        images = np.empty((len(spec.cameras), *spec.image_size, 3), np.uint8)
        state = np.empty(spec.state_dim, np.float32)
        env.observe(images, state)
        executed = action.copy()
        executed[:-1] += noise * rng.standard_normal(action.size - 1)
        step = env.step(executed.clip(-1.0, 1.0))
        steps.append((images, state, action, np.float32(step.reward), step.success))
        if step.terminated or (step.success and terminate_on_success) or len(steps) == spec.max_episode_steps:
            break
    return Episode(*(np.stack(values) for values in zip(*steps, strict=True)))
