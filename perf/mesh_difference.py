"""What light meshes save and what they change in the picture: run ``python perf/mesh_difference.py [task ...]``.

A task is the name of a LIBERO suite (all of its tasks, or those of ``libero_goal:0,3``) or of a ManiSkill task; without
any, the ones below. Each is played twice, with light and with full meshes, through the same random motion. Differences
are of the mean over pixels and colours, of 255, in the initial state and three later ones. CPU time is that of
`observe`, all cameras together, by the process's clock; pictures are 128 by 128.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from runs import RESULTS, machine

SIDE, MOMENTS, MOTION, REPEATS = 128, 4, 10, 7
MANISKILL = (
    "PushCube-v1", "PickCube-v1", "PullCube-v1", "StackCube-v1", "PlaceSphere-v1", "PegInsertionSide-v1",
    "LiftPegUpright-v1", "PokeCube-v1", "PullCubeTool-v1", "RollBall-v1", "PlugCharger-v1", "StackPyramid-v1",
)  # fmt: skip
LIBERO = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90:0,20,46,60,75")


def look(env: Any) -> np.ndarray:
    """The pictures of all cameras, (cameras, H, W, 3)."""
    images = np.zeros((len(env.spec.cameras), *env.spec.image_size, 3), np.uint8)
    env.observe(images, np.zeros(env.spec.state_dim, np.float32))
    return images


def cpu_ms(work: Callable[[], object]) -> float:
    """Median CPU time of `work`."""
    times = []
    for _ in range(REPEATS):
        begin = time.process_time()
        work()
        times.append(1e3 * (time.process_time() - begin))
    return statistics.median(times)


def compare(name: str, light: Any, full: Any, task: int) -> list[dict]:
    """Play one task in both environments."""
    random = np.random.default_rng(0)
    same = light.reset(task, 0) == full.reset(task, 0)
    differences = []
    for moment in range(MOMENTS):
        for action in random.uniform(-1, 1, (MOTION if moment else 0, light.spec.action_dim)):
            same &= light.step(action) == full.step(action)
        differences.append(np.abs(look(light).astype(int) - look(full)).mean(axis=(1, 2, 3)))
    if not same:
        raise AssertionError(f"{name}: light meshes changed the simulation")
    rows = [
        {"name": f"{name} difference {camera}", "value": round(float(value), 2), "unit": "of 255"}
        for camera, value in zip(light.spec.cameras, np.mean(differences, axis=0), strict=True)
    ]
    for meshes, env in (("light", light), ("full", full)):
        rows.append(
            {"name": f"{name} picture {meshes}", "value": round(cpu_ms(lambda e=env: look(e)), 1), "unit": "CPU-ms"}
        )
    return rows


def libero(suite: str) -> list[dict]:
    """Compare tasks of a suite; pictures without reflections are timed, too."""
    from dvla.envs.libero import LiberoEnv

    suite, _, wanted = suite.partition(":")
    light, full = (LiberoEnv(suite, image_size=(SIDE, SIDE), meshes=meshes) for meshes in ("light", "full"))
    plain = LiberoEnv(suite, image_size=(SIDE, SIDE), meshes="light", reflections=False)
    rows = []
    for task in [int(task) for task in wanted.split(",")] if wanted else range(len(light.spec.instructions)):
        rows += compare(f"{suite} {task}", light, full, task)
        plain.reset(task, 0)
        value = round(cpu_ms(lambda: look(plain)), 1)
        rows.append({"name": f"{suite} {task} picture light, no reflections", "value": value, "unit": "CPU-ms"})
    for env in (light, full, plain):
        env.close()
    return rows


def maniskill(task: str) -> list[dict]:
    """Compare one task."""
    from dvla.envs.maniskill import ManiSkillEnv

    make = {"task": task, "control_mode": "pd_joint_delta_pos", "cameras": ("base_camera",)}
    light, full = (ManiSkillEnv(**make, image_size=(SIDE, SIDE), meshes=meshes) for meshes in ("light", "full"))
    rows = compare(task, light, full, 0)
    if task == "PushCube-v1":
        small = ManiSkillEnv(**make, image_size=(64, 64))
        small.reset(0, 0)
        rows.append(
            {"name": f"{task} picture light 64", "value": round(cpu_ms(lambda: look(small)), 1), "unit": "CPU-ms"}
        )
    return rows


def main() -> None:
    """Measure, print and, when nothing was chosen, store."""
    os.environ.setdefault("LP_NUM_THREADS", "0")  # the rasteriser's time is then this process's
    chosen = sys.argv[1:]
    rows = []
    for name in chosen or (*LIBERO, *MANISKILL):
        for row in (libero if name.startswith("libero") else maniskill)(name):
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
            rows.append(row)
    if not chosen:
        content = {"machine": machine(), "command": "python perf/mesh_difference.py", "rows": rows}
        (RESULTS / "meshes.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
