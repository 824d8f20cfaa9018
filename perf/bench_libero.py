"""Training beside the ceiling of its simulators: run ``python perf/bench_libero.py``.

LIBERO-Spatial, both cameras, chunks of 8, openvla_oft_nano, overlapped, two ranks with one worker each on two cores. The
ceiling is two such workers that are given random actions at once, without policy, lanes and learner; episodes are equally
long, and both play the same task. They take turns; `libero.vs_ceiling` are the control steps a second of training by the
ceiling's.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from runs import figure, store, train

from dvla.config import Config, EnvConfig, Meshes, ModelConfig, RenderConfig, RuntimeConfig
from dvla.envs.messages import Kind
from dvla.envs.simulators import open_simulators
from dvla.planes.data_plane import plan_slots, slots_of_own
from dvla.planes.semaphore import wait_any

REPEATS = 3
CEILING_S, WARM_S = 40.0, 15.0
STEPS, CHUNK, ENVS_OF_WORKER, WORKERS = 64, 8, 4, 2
SETTINGS = (
    *(
        "env=libero_spatial",
        f"env.max_episode_steps={STEPS}",
        "env.terminate_on_success=false",
        "+env.options.tasks=[0]",
    ),
    *("render.meshes=light", "model=openvla_oft_nano", f"model.num_action_chunks={CHUNK}"),
    *("algo.group_size=4", "algo.groups_per_step=4", "algo.num_steps=8", "algo.filter_zero_signal=false"),
    *(f"runtime.num_envs={ENVS_OF_WORKER}", "runtime.num_workers=1", "telemetry.trace=true"),
)


def ceiling(folder: Path) -> float:
    """Control steps a second of the workers alone."""
    env = EnvConfig(
        name="libero",
        task="libero_spatial",
        cameras=("agentview", "wrist"),
        image_size=(128, 128),
        max_episode_steps=STEPS,
        terminate_on_success=False,
        options={"tasks": [0]},
    )
    num_envs = ENVS_OF_WORKER * WORKERS
    config = Config(
        env=env,
        render=RenderConfig(meshes=Meshes.light),
        model=ModelConfig(num_action_chunks=CHUNK),
        runtime=RuntimeConfig(num_envs=num_envs, num_workers=WORKERS),
    )
    cpu, random = torch.device("cpu"), np.random.default_rng(0)
    with open_simulators(config, cpu, logs=folder, title="dvla:bench", videos=folder) as pool:
        actions = slots_of_own(plan_slots(config, pool.spec(), {}, num_envs), pool, cpu).arrays["actions"]

        def begin(env: int, number: int) -> None:
            pool.reset(env, env, task=0, seed=number, ticket=number)

        for env in range(num_envs):
            begin(env, env)
        number, steps, start = num_envs, 0, time.monotonic()
        while (now := time.monotonic()) < start + WARM_S + CEILING_S:
            for worker in wait_any(pool.workers, 1.0):
                for record in pool.receive(worker):
                    if now > start + WARM_S and record.decision:
                        steps += CHUNK
                    if record.kind is Kind.finished:
                        begin(record.env, number)
                        number += 1
                    else:
                        chunk = actions[record.env, record.decision]
                        chunk[:] = random.uniform(-1, 1, chunk.shape)
                        pool.act([(record.env, record.slot, record.decision, pool.generation(record.env))])
    return steps / CEILING_S


def training() -> float:
    """Control steps a second of training, without the first batches."""
    run = train(*SETTINGS)
    ends = sorted(span["ts"] + span["dur"] for span in run["spans"] if span["name"] == "report" and not span["pid"])
    begin, end = ends[1], ends[-1]
    chunks = [
        span
        for span in run["spans"]
        if span["name"] == "handle" and begin <= span["ts"] < end and (span["args"]["decision"] or 0) > 0
    ]
    return CHUNK * len(chunks) / (end - begin) * 1e6


def main() -> None:
    """Measure and store."""
    rates: dict[str, list[float]] = {"ceiling": [], "training": []}
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as folder:
            rates["ceiling"].append(ceiling(Path(folder)))
        rates["training"].append(training())
    pairs = zip(rates["training"], rates["ceiling"], strict=True)
    rows = [figure(f"libero.{name}", values, "control steps/s") for name, values in rates.items()]
    store("bench_libero", [*rows, figure("libero.vs_ceiling", [ours / most for ours, most in pairs], "ratio")])


if __name__ == "__main__":
    main()
