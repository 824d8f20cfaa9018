"""Serial against overlapped, alternating in one run: run ``python perf/schedules.py``."""

from __future__ import annotations

import statistics

from runs import store, train

REPEATS = 3
SETTINGS = (
    "env=maniskill", "env.reward_mode=dense", "env.terminate_on_success=false", "env.max_episode_steps=24",
    "render.meshes=light", "model=openvla_oft_nano", "++model.options.use_proprio=true", "runtime.num_envs=16",
    "runtime.max_batch=8", "runtime.max_wait_s=0.1", "algo.num_steps=8",
)  # fmt: skip
SCHEDULES = {
    "serial": ("runtime.schedule=serial", "algo.max_staleness=0"),
    "overlapped": ("runtime.schedule=overlapped",),
}


def main() -> None:
    """Measure and store."""
    speed: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    for _ in range(REPEATS):
        for name, overrides in SCHEDULES.items():
            speed[name].append(train(*SETTINGS, *overrides)["env_steps_per_s_raw"])
    rows = [
        {"name": f"{name}.env_steps_per_s_raw", "unit": "1/s", "value": statistics.median(values), "all": values}
        for name, values in speed.items()
    ]
    ratio = statistics.median(speed["overlapped"]) / statistics.median(speed["serial"])
    store("schedules", [*rows, {"name": "overlap.vs_serial", "unit": "ratio", "value": ratio}])


if __name__ == "__main__":
    main()
