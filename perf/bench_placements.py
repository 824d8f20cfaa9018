"""Stages of the hybrid placement beside theory, and placements side by side: run ``python perf/bench_placements.py``.

Stages. Three ranks (sampling, inference, training), E environments in W workers, each of which steps its own in turn. A
chunk takes s in a simulator, a decision p in the policy, batches one after the other; both sleep. A round is one decision
for every environment. With S = s E/W and P = p E:

* one stage: nobody simulates while the policy decides, nor the reverse: S + P;
* n stages: no faster than a worker (S), the policy (P), or one stage goes round: its environments in one worker,
  m = ceil(E/W / n), then its decisions: max(S, P, m s + P/n). Where workers have environments of both of two stages,
  max(S, P); where they have one environment each, max(S + P/2, P).

`simulated_round` finds the same times by playing the queues; and those of `uneven`, where episodes last 5 to 20 decisions and
the next begins at once, in workers as `shared_workers`. These are the theory. `pipeline.*.vs_theory` is the theoretical time
of a round by the measured one, both over the middle of a run; `pipeline.*.gain` is the time with one stage by the time with
two. `free` are requests that wait for no stage: there is no one theory, what its batches are depends on how they began.
Seconds are medians.

Placements. `placements.*`: control steps a second of reach on two ranks, 32 environments altogether, medians; for
information only, as two cores make the ranks rivals.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
import sys
from collections import deque
from collections.abc import Sequence

from runs import store, train

REPEATS = 3
NUM_ENVS = 8
CHUNK = 4
ROUND_S = 0.16  # of the simulators, and of the policy: S = P
STAGES = (1, 2, 4, None)
EVEN = (40, 40)  # shortest and longest episode, decisions
UNEVEN = (5, 20)
SHAPES = {"shared_workers": 2, "own_workers": NUM_ENVS, "uneven": 2}  # W


def round_seconds(decided: Sequence[tuple[float, int]]) -> float:
    """Seconds that a decision for every environment takes, in the middle of a run.

    Args:
        decided: When each batch was decided, and its size.
    """
    cut = len(decided) // 5
    num_batches = (len(decided) - 2 * cut - 1) // 4 * 4  # in whole turns of the stages
    window = decided[cut : cut + num_batches + 1]
    return NUM_ENVS * (window[-1][0] - window[0][0]) / sum(size for _, size in window[1:])


def formula(num_workers: int, stages: int) -> float:
    """Seconds of a round by hand; simulators and policy take `ROUND_S` for it."""
    if stages == 1:
        return 2 * ROUND_S
    of_worker = NUM_ENVS // num_workers
    return max(ROUND_S, -(-of_worker // stages) * ROUND_S / of_worker + ROUND_S / stages)


def simulated_round(num_workers: int, stages: int, episode: tuple[int, int], num_episodes: int) -> float:
    """Seconds of a round by playing the queues, see above."""
    of_worker = NUM_ENVS // num_workers
    step_s, decide_s = ROUND_S / of_worker, ROUND_S / NUM_ENVS
    dice = random.Random(0)
    orders: list[deque[tuple[str, int]]] = [deque() for _ in range(num_workers)]
    busy = [False] * num_workers
    acting: list[set[int]] = [set() for _ in range(stages)]
    asking: list[list[int]] = [[] for _ in range(stages)]
    batches: deque[list[int]] = deque()
    deciding = False
    left = [0] * NUM_ENVS  # decisions until the episode ends
    decided: list[tuple[float, int]] = []
    events: list[tuple[float, int, str, list[int]]] = []  # when, in which order, what, environments
    count = itertools.count()
    now, num_begun = 0.0, 0

    def begin(env: int) -> None:
        nonlocal num_begun
        if num_begun < num_episodes:
            num_begun += 1
            left[env] = dice.randint(*episode)
            orders[env // of_worker].append(("reset", env))

    def work() -> None:
        """Let all begin that can."""
        nonlocal deciding
        for number, queue in enumerate(orders):
            if queue and not busy[number]:
                busy[number] = True
                what, env = queue.popleft()
                heapq.heappush(events, (now + (step_s if what == "step" else 0.0), next(count), what, [env]))
        if batches and not deciding:
            deciding = True
            batch = batches.popleft()
            heapq.heappush(events, (now + decide_s * len(batch), next(count), "decided", batch))

    for env in range(NUM_ENVS):
        begin(env)
    work()
    while events:
        now, _, what, envs = heapq.heappop(events)
        if what == "decided":
            deciding = False
            decided.append((now, len(envs)))
            for env in envs:
                orders[env // of_worker].append(("step", env))
        else:
            (env,) = envs
            stage = env % stages
            busy[env // of_worker] = False
            acting[stage].discard(env)
            left[env] -= what == "step"
            if left[env]:
                asking[stage].append(env)
            else:
                begin(env)
            if asking[stage] and not acting[stage]:
                batches.append(asking[stage])
                acting[stage] = set(asking[stage])
                asking[stage] = []
        work()
    return round_seconds(decided)


def measured_round(num_workers: int, stages: int | None, episode: tuple[int, int], num_episodes: int) -> float:
    """Seconds of a round of a real run."""
    shortest, longest = (CHUNK * decisions for decisions in episode)
    run = train(
        *("placement=hybrid", "placement.ratio='1:1:1'", f"placement.stages={'null' if stages is None else stages}"),
        *("env.name=delayed_env:DelayedEnv", f"env.max_episode_steps={longest}", f"++env.options.shortest={shortest}"),
        f"++env.options.seconds={ROUND_S * num_workers / NUM_ENVS / CHUNK}",
        *("model.name=delayed_policy:DelayedPolicy", f"++model.options.seconds={ROUND_S / NUM_ENVS}"),
        *(f"model.num_action_chunks={CHUNK}", f"algo.group_size={NUM_ENVS}", "algo.filter_zero_signal=false"),
        *("algo.num_steps=1", f"algo.groups_per_step={num_episodes // NUM_ENVS}", "algo.micro_batch_size=1024"),
        *(f"runtime.num_envs={NUM_ENVS}", f"runtime.num_workers={num_workers}", "runtime.balance=false"),
        *("telemetry.trace=true", "telemetry.tensorboard=false"),
        ranks=3,
    )
    decided = [span for span in run["spans"] if span["name"] == "decide"]
    assert sum(span["args"]["size"] for span in decided) >= num_episodes * episode[0]
    return round_seconds(sorted(((span["ts"] + span["dur"]) / 1e6, span["args"]["size"]) for span in decided))


def pipeline() -> list[dict]:
    """Measured and theoretical times of rounds."""
    cases = [(shape, stages, EVEN, NUM_ENVS) for shape in ("shared_workers", "own_workers") for stages in STAGES]
    cases += [("uneven", stages, UNEVEN, 8 * NUM_ENVS) for stages in (1, 2)]
    times: dict[tuple, list[float]] = {case: [] for case in cases}
    for _ in range(REPEATS):
        for case, seconds in times.items():
            seconds.append(measured_round(SHAPES[case[0]], *case[1:]))
            sys.stderr.write(f"{case}: {seconds}\n")
    medians = {case[:2]: statistics.median(seconds) for case, seconds in times.items()}
    rows = []
    for shape, stages, episode, num_episodes in cases:
        median = medians[shape, stages]
        if stages is None:
            rows.append(row(f"pipeline.{shape}.free_s", median, "s"))
            continue
        theory = simulated_round(SHAPES[shape], stages, episode, num_episodes)
        if episode == EVEN:
            assert abs(theory / formula(SHAPES[shape], stages) - 1) < 0.01, (shape, stages, theory)
        name = f"pipeline.{shape}.stages{stages}"
        rows += [
            row(f"{name}_s", median, "s"),
            row(f"{name}.theory_s", theory, "s"),
            row(f"{name}.vs_theory", theory / median, "ratio"),
        ]
        if stages == 2:
            rows.append(row(f"pipeline.{shape}.gain", medians[shape, 1] / median, "ratio"))
    return rows


def placements() -> list[dict]:
    """Control steps a second of every placement."""
    settings = {
        "mlp": ("algo.num_steps=40", "algo.groups_per_step=16", "algo.micro_batch_size=512"),
        "openvla_oft_nano": ("model=openvla_oft_nano", "env.cameras=[top]", "algo.num_steps=4"),
    }
    placed = {
        "colocated": ("runtime.num_envs=16",),
        "separated": ("placement=separated", "runtime.num_envs=32"),
        "hybrid": ("placement=hybrid", "placement.stages=2", "runtime.num_envs=32"),
    }
    speed: dict[str, list[float]] = {f"placements.{model}.{place}": [] for model in settings for place in placed}
    for _ in range(REPEATS):
        for model, overrides in settings.items():
            for place, more in placed.items():
                run = train("env=reach", *overrides, *more)
                speed[f"placements.{model}.{place}"].append(run["env_steps_per_s_raw"])
    return [row(name, statistics.median(values), "control steps/s") for name, values in speed.items()]


def row(name: str, value: float, unit: str) -> dict:
    """One line of output."""
    return {"name": name, "value": value, "unit": unit}


if __name__ == "__main__":
    store("bench_placements", pipeline() + placements())
