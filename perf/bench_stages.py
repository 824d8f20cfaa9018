"""Overlap of stages that only wait: run ``python perf/bench_stages.py``.

One rank. Every stage sleeps, so that nothing competes for the cores, as where each has hardware of its own. Seconds of a
batch: simulators `SIMULATE_S` (two workers in parallel), decisions `DECIDE_S`, gradients `TRAIN_S`, distribution of the
weights `DISTRIBUTE_S`. arXiv 2605.13276 has equal times for rollout and training (OpenVLA-OFT, 1:1) and gives none for the
other two, which are taken to be small. Serial and overlapped runs alternate, and make pairs. `overlap.vs_slowest_lane` is the
time of an overlapped batch by what the slowest lane took of the serial one, `overlap.vs_slept` by the seconds it was told to
sleep; `overlap.vs_serial` is how many times faster than serial it is.
"""

from __future__ import annotations

from runs import batch_seconds, figure, store, train

REPEATS = 3
CHUNK, EPISODE, GROUP, GROUPS, WORKERS = (
    4,
    5,
    8,
    2,
    2,
)  # control steps, decisions, episodes, groups of a batch, processes
DECISIONS = EPISODE * GROUP * GROUPS
SIMULATE_S, DECIDE_S, TRAIN_S, DISTRIBUTE_S = 1.6, 0.4, 1.6, 0.2
SETTINGS = (
    *("env.name=delayed_env:DelayedEnv", f"env.max_episode_steps={CHUNK * EPISODE}"),
    f"++env.options.seconds={SIMULATE_S * WORKERS / DECISIONS / CHUNK}",
    *("model.name=delayed_policy:StagedPolicy", f"model.num_action_chunks={CHUNK}"),
    *(f"++model.options.act_s={DECIDE_S / DECISIONS}", f"++model.options.gradient_s={TRAIN_S / DECISIONS}"),
    *(f"algo.group_size={GROUP}", f"algo.groups_per_step={GROUPS}", "algo.filter_zero_signal=false"),
    *(
        "algo.num_steps=14",
        f"algo.micro_batch_size={GROUP * EPISODE}",
        f"runtime.num_envs={GROUP}",
        f"runtime.num_workers={WORKERS}",
    ),
    *("telemetry.trace=true", "telemetry.tensorboard=false", "run.checkpoint_every=1000", "runtime.max_wait_s=0"),
    "runtime.balance=false",
)
SLOW_LINK = f"lane=param_dist rank=0 point=gather do=slow seconds={DISTRIBUTE_S}"
SCHEDULES = {
    "serial": ("runtime.schedule=serial", "algo.max_staleness=0"),
    "overlapped": ("runtime.schedule=overlapped", "algo.max_staleness=1"),
}


LANES = {
    "sampling": ("collect",),
    "inference": ("decide",),
    "grpo": ("gradient", "optimise"),
    "param_dist": ("gather",),
}
"""What each lane does in the serial schedule, by its spans."""


def slowest_lane(run: dict) -> float:
    """Seconds of a batch that the slowest lane of a serial run was at work."""
    names = {name: lane for lane, own in LANES.items() for name in own}
    seconds = dict.fromkeys(LANES, 0.0)
    for span in run["spans"]:
        if span["name"] in names:
            seconds[names[span["name"]]] += span["dur"] / 1e6
    return max(seconds.values()) / run["policy_version"]


def main() -> None:
    """Measure and store."""
    runs: dict[str, list[dict]] = {name: [] for name in SCHEDULES}
    for _ in range(REPEATS):
        for name, overrides in SCHEDULES.items():
            runs[name].append(train(*SETTINGS, *overrides, ranks=1, module="faulty_train", FAULT=SLOW_LINK))
    serial, overlapped = ([batch_seconds(run) for run in runs[name]] for name in SCHEDULES)
    slowest = [slowest_lane(run) for run in runs["serial"]]
    slept = max(SIMULATE_S, DECIDE_S, TRAIN_S, DISTRIBUTE_S)
    store(
        "bench_stages",
        [
            figure("serial.batch_s", serial, "s"),
            figure("overlapped.batch_s", overlapped, "s"),
            figure("slowest_lane_s", slowest, "s"),
            figure("overlap.vs_slowest_lane", [a / b for a, b in zip(overlapped, slowest, strict=True)], "ratio"),
            figure("overlap.vs_slept", [seconds / slept for seconds in overlapped], "ratio"),
            figure("overlap.vs_serial", [a / b for a, b in zip(serial, overlapped, strict=True)], "ratio"),
        ],
    )


if __name__ == "__main__":
    main()
