"""Record demonstrations of scripted experts as a LeRobot dataset (layout v2.1).

``python -m dvla.collect env=maniskill env.task=PushCube-v1 num_episodes=100 out=datasets/pushcube``

The experts play in the environment's own action space (`dvla.envs.scripted_arm`). Only their successes are kept, in the
order of the seeds, so the dataset does not depend on `num_workers`, but for traces of 1e-4 where the physics of a contact
remember the episode before (`dvla.envs.maniskill_setup.SimulatorOptions`). It is complete after every episode: Ctrl-C keeps
what there is.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra

from dvla.config import ConfigError, EnvConfig, RenderConfig, load_as
from dvla.datasets.demonstrations import Order, Played, play_seed
from dvla.datasets.lerobot_writer import LeRobotWriter
from dvla.entry import CONFIG_FOLDER
from dvla.envs.errors import EnvironmentSetupError, SimulationError
from dvla.envs.registry import EXPERTS, environment_arguments
from dvla.runtime.processes import die_with_parent
from dvla.runtime.stop_request import StopRequest
from dvla.telemetry.atomic_file import write_atomically
from dvla.telemetry.figures import duration, fixed
from dvla.telemetry.progress import Progress

if TYPE_CHECKING:
    from omegaconf import DictConfig

_HOPELESS = 20
"""Failures after which an expert that succeeds in less than a tenth of its episodes is given up."""


class Images(Enum):
    """Where pictures are kept."""

    video = "video"
    """H.264 files: small, nearly lossless."""
    parquet = "parquet"
    """PNG in the tables: exact, many times larger."""


@dataclass(kw_only=True, slots=True)
class CollectConfig:
    """What to record."""

    env: EnvConfig = field(default_factory=EnvConfig)
    render: RenderConfig = field(default_factory=RenderConfig)
    out: str = "???"
    """A folder that does not exist yet."""
    num_episodes: int = 100
    """Successful episodes to record."""
    seed: int = 2_000_000_000
    """Seed of the first initial state, the others follow. The default is far from the seeds of evaluations (from 1,000,000
    on); training draws its seeds from all 31 bits, so that a few in a million meet a demonstration."""
    num_workers: int = 1
    """Processes, each with a simulator."""
    images: Images = Images.video
    action_noise: float = 0.0
    """Standard deviation of noise on the executed actions (not on the gripper's). Recorded is what the expert would do
    without, so that the dataset shows recoveries (DART)."""
    pace: tuple[float, float] = (1.0, 1.0)
    """Share of the expert's speed, and of the noise, at which a demonstration is played: drawn for each between these two.
    People take their time, too; raise env.max_episode_steps for slow ones."""

    def __post_init__(self) -> None:
        """Check the fields."""
        for key in ("num_episodes", "num_workers"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key} must be at least 1")
        if not 0 <= self.seed < 2**32:
            raise ConfigError("seed must lie between 0 and 2^32 - 1")
        if self.action_noise < 0:
            raise ConfigError("action_noise must be at least 0")
        if len(self.pace) != 2 or not 0 < self.pace[0] <= self.pace[1] <= 1:
            raise ConfigError("pace must be two numbers above 0 and at most 1, the lower first")


class CollectError(RuntimeError):
    """The recording cannot go on; the message says why. What was recorded so far is complete."""


def demonstrator_arguments(config: CollectConfig) -> dict[str, Any]:
    """The environment's arguments, if there is an expert for it.

    Raises:
        ConfigError: There is none, or the dataset could not hold what it sees.
    """
    env = config.env
    if env.name not in EXPERTS:
        raise ConfigError(f"there are no experts for env.name={env.name}, only for {' and '.join(EXPERTS)}")
    asked = environment_arguments(env, config.render)
    arguments: dict[str, Any] = importlib.import_module(EXPERTS[env.name]).expert_arguments(asked)
    if not env.cameras:
        raise ConfigError("env.cameras is empty: a dataset needs pictures")
    if config.images is Images.video and (env.image_size[0] % 2 or env.image_size[1] % 2):
        raise ConfigError(f"env.image_size={list(env.image_size)}: videos need even sizes; or set images=parquet")
    return arguments


def collect(config: CollectConfig, stop: StopRequest) -> tuple[int, int]:
    """Record the dataset.

    Returns:
        Episodes recorded, fewer than asked for if `stop` was set, and failures of the expert among their seeds.

    Raises:
        ConfigError: Settings that cannot work.
        CollectError: A worker failed, or the expert does too often.
    """
    arguments = demonstrator_arguments(config)
    out = Path(config.out)
    staging = out / ".staging"
    try:
        out.mkdir(parents=True)
        staging.mkdir()
    except FileExistsError as error:
        raise ConfigError(f"out={out} exists: give a new folder") from error
    except OSError as error:
        raise ConfigError(f"out={out} cannot be made ({error.strerror}): give a folder that can be written") from error
    order = Order(
        env=config.env.name,
        arguments=arguments,
        terminate_on_success=config.env.terminate_on_success,
        action_noise=config.action_noise,
        pace=config.pace,
        videos=config.images is Images.video,
        staging=staging.resolve(),
    )
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of each worker
    workers = ProcessPoolExecutor(config.num_workers, multiprocessing.get_context("spawn"), die_with_parent)
    try:
        return _Recording(config, order, out).run(workers, stop)
    except BrokenProcessPool as error:
        raise CollectError(
            "a worker process died, perhaps for want of memory: see above, or lower num_workers"
        ) from error
    except (EnvironmentSetupError, SimulationError, OSError) as error:
        raise CollectError(f"a worker failed: {error}") from error
    finally:
        workers.shutdown(cancel_futures=True)
        shutil.rmtree(staging, ignore_errors=True)
        if not (out / "meta/info.json").exists():
            shutil.rmtree(out)  # not one episode


class _Recording:
    """Hands out seeds, and puts what comes back in the order of the seeds."""

    def __init__(self, config: CollectConfig, order: Order, out: Path) -> None:
        self._config, self._order, self._out = config, order, out
        self._writer: LeRobotWriter | None = None
        self._next_to_add = config.seed
        self._played: dict[int, Played] = {}  # which wait for a seed before them
        self._done = self._failed = 0

    def run(self, workers: ProcessPoolExecutor, stop: StopRequest) -> tuple[int, int]:
        """Go on until there are enough episodes, or until `stop`."""
        total = self._config.num_episodes
        seeds = count(self._config.seed)
        playing: dict[Future[Played], int] = {}
        with Progress(total, "episodes") as progress:
            while self._done < total and not stop.is_set():
                # No more than can be needed: all successes that come back become part of the dataset.
                needed = total - self._done - sum(played.success for played in self._played.values())
                while len(playing) < min(needed, self._config.num_workers):
                    seed = next(seeds)
                    # May start a process, which inherits the mask: Ctrl-C is for the parent.
                    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                    playing[workers.submit(play_seed, self._order, seed)] = seed
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                for future in wait(playing, timeout=0.5, return_when=FIRST_COMPLETED).done:
                    self._played[playing.pop(future)] = future.result()
                while self._next_to_add in self._played:
                    self._add(self._next_to_add, self._played.pop(self._next_to_add))
                    self._next_to_add += 1
                played = self._done + self._failed
                progress.update(self._done, f"success {fixed(self._done / played if played else None, 2)}")
        return self._done, self._failed

    def _add(self, seed: int, played: Played) -> None:
        """Let the next episode join the dataset, if it was a success."""
        if played.success:
            self._writer = self._writer or self._begin(played)
            self._writer.add(self._order.staging / str(seed), seed=seed)
            self._done += 1
            return
        self._failed += 1
        if self._failed >= _HOPELESS and self._failed > 9 * self._done:
            raise CollectError(
                f"the expert failed in {self._failed} of {self._done + self._failed} episodes: raise "
                f"env.max_episode_steps={self._config.env.max_episode_steps}, lower action_noise, or raise pace"
            )

    def _begin(self, played: Played) -> LeRobotWriter:
        config = self._config
        source: dict[str, Any] = {"env": config.env.name, "arguments": self._order.arguments, "seed": config.seed}
        source |= {"action_noise": config.action_noise, "pace": list(config.pace)}
        write_atomically(self._out / "meta/source.json", [json.dumps(source, indent=4)])
        return LeRobotWriter(self._out, played.layout, task=played.task, robot=played.robot)


def main() -> None:
    """Entry."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="collect_config", node=CollectConfig)

    @hydra.main(version_base="1.3", config_path=str(CONFIG_FOLDER), config_name="collect")
    def start(composed: DictConfig) -> None:
        stop = StopRequest()
        stop.install()
        begin = time.monotonic()
        try:
            config = load_as(CollectConfig, composed)
            done, failed = collect(config, stop)
        except (ConfigError, CollectError) as error:
            sys.stderr.write(f"dvla: error: {error}\n")
            sys.exit(2 if isinstance(error, ConfigError) else 1)
        sys.stdout.write(
            f"{'stopped: ' if stop.is_set() else ''}{done} episodes in {duration(time.monotonic() - begin)}, {failed} failed; "
            + (f"written to {config.out}\n" if done else "nothing written\n")
        )

    start()


if __name__ == "__main__":
    main()
