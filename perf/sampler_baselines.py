"""How others step the same simulators: a process that `bench_sampler.py` orders to step, and that answers with seconds.

``python perf/sampler_baselines.py libero|maniskill``: builds two environments in two processes with the simulator's own
(LIBERO: SubprocVectorEnv) or the usual (ManiSkill: gymnasium's AsyncVectorEnv) vector environment, says ``ready``, and then,
for every line with a number of steps on its standard input, resets, steps and answers with the seconds of the steps.
"""

from __future__ import annotations

import functools
import os
import sys
import time

import numpy as np

NUM_ENVS = 2
SIDE = 128
CHUNK = 8


def actions(action_dim: int) -> np.ndarray:
    """The chunk of actions (8, A) that everybody repeats."""
    return np.random.default_rng(0).uniform(-0.5, 0.5, (CHUNK, action_dim)).astype(np.float32)


def make_libero():
    """One LIBERO environment as its authors make it."""
    from libero.libero import benchmark
    from libero.libero.envs import OffScreenRenderEnv

    suite = benchmark.get_benchmark_dict()["libero_spatial"]()
    return OffScreenRenderEnv(
        bddl_file_name=suite.get_task_bddl_file_path(0), camera_heights=SIDE, camera_widths=SIDE, ignore_done=True
    )


def libero():
    """LIBERO's own vector environment; reset as its evaluation does."""
    from libero.libero import benchmark
    from libero.libero.envs import SubprocVectorEnv

    envs = SubprocVectorEnv([make_libero] * NUM_ENVS)
    states = benchmark.get_benchmark_dict()["libero_spatial"]().get_task_init_states(0)

    def reset():
        envs.seed(0)
        envs.reset()
        envs.set_init_state([states[0]] * NUM_ENVS)

    return envs, reset, 7


def make_maniskill():
    """One ManiSkill environment on the CPU, as its documentation makes them for gymnasium's vector environments."""
    import gymnasium
    import mani_skill.envs  # noqa: F401 - registers the tasks
    import torch
    from mani_skill.utils.wrappers import CPUGymWrapper

    torch.set_num_threads(1)
    env = gymnasium.make(
        "PushCube-v1",
        num_envs=1,
        sim_backend="physx_cpu",
        render_backend="cpu",
        obs_mode="rgb",
        control_mode="pd_ee_delta_pos",
        reward_mode="sparse",
        sensor_configs={"width": SIDE, "height": SIDE},
        max_episode_steps=100_000,
    )
    return CPUGymWrapper(env, ignore_terminations=True)


def maniskill():
    """Gymnasium's asynchronous vector environment, with its shared memory."""
    from gymnasium.vector import AsyncVectorEnv

    envs = AsyncVectorEnv([make_maniskill] * NUM_ENVS, context="spawn")
    return envs, functools.partial(envs.reset, seed=0), 4


def main() -> None:
    """Serve."""
    os.environ["OMP_NUM_THREADS"] = "1"
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the simulators print is no answer
    envs, reset, action_dim = {"libero": libero, "maniskill": maniskill}[sys.argv[1]]()
    chunk = actions(action_dim)
    answers.write("ready\n")
    for line in sys.stdin:
        reset()
        begin = time.monotonic()
        for step in range(int(line)):
            envs.step(np.stack([chunk[step % CHUNK]] * NUM_ENVS))
        answers.write(f"{time.monotonic() - begin}\n")
    envs.close()


if __name__ == "__main__":
    main()
