"""The sampler beside others and by itself: run ``python perf/bench_sampler.py``.

* `sampler.<simulator>[_light].ratio`: control steps a second of the sampler (2 workers, chunks of 8, lanes included, a policy
  that repeats a chunk) over those of the simulator's own or usual vector environment with the same 2 environments and
  actions, both after their resets; LIBERO spatial with two cameras, ManiSkill PushCube with one, 128 by 128. All are
  built first and then take turns; ratios are of medians.
* `roundtrip.*`: from a complete observation to the beginning of the action, through sampling lane, inference lane and a
  policy that looks at one pixel, with one environment; medians.
* `sampler.overhead_frac`: share of the wall time, up to its last step, that a worker spends neither in its simulator
  (ManiSkill, light meshes) nor in the policy, at 2 workers.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from runs import store
from sampler_baselines import CHUNK, NUM_ENVS, SIDE, actions
from torch import nn

from dvla.config import Config, EnvConfig, Meshes, ModelConfig, RenderConfig, RuntimeConfig
from dvla.envs.simulators import open_simulators
from dvla.lanes.balance import EnvLimit
from dvla.lanes.inference import InferenceLane
from dvla.lanes.lane import ErrorBoard
from dvla.lanes.meeting_points import MeetingPoints
from dvla.lanes.sampling import SamplingLane
from dvla.lanes.stages import Stages
from dvla.models.policy import Decision
from dvla.planes.data_plane import plan_slots, slots_of_own
from dvla.planes.manifest import make_manifest
from dvla.planes.observations import SlotTensors
from dvla.planes.semaphore import StopFlag
from dvla.planes.shared_transport import SharedTransport, local_links
from dvla.planes.tickets import Ticket
from dvla.planes.weights import Replica
from dvla.telemetry.lane_clock import LaneClock
from dvla.telemetry.trace import Tracer

ROUNDS = 5
STEPS = {"libero": (16, 96), "maniskill": (64, 384)}  # of each environment and round: baseline, ours
CPU = torch.device("cpu")


class RepeatingPolicy(nn.Module):
    """The same chunk for ever, after a look at one pixel of every picture."""

    def __init__(self, action_dim: int) -> None:
        super().__init__()
        self.record_spec: dict = {}
        self.chunk = torch.from_numpy(actions(action_dim))
        self.seconds = 0.0

    def act(self, obs, keys, *, greedy=False):
        """Decide, and count the time of it."""
        begin = time.monotonic()
        if obs.images.numel():
            obs.images[..., 0, 0, 0].sum()
        chunk = self.chunk.expand(len(keys), *self.chunk.shape)
        decision = Decision(chunk, torch.zeros_like(chunk), {})
        self.seconds += time.monotonic() - begin
        return decision


class OneEpisodeEach:
    """One episode for every environment; then `on_end` is called."""

    def __init__(self, num_envs: int, task: int, seed: int, on_end: Callable[[], None]) -> None:
        self._num_left, self._on_end = num_envs, on_end
        self._orders = deque((Ticket(number, 0, number, task, seed + number), number) for number in range(num_envs))

    def take(self, parcel):
        """Nobody sends anything but a farewell."""

    def next(self):
        """The next episode."""
        return self._orders.popleft() if self._orders else None

    def finished(self, ticket, slot):
        """Nobody wants the results."""
        self._num_left -= 1
        if not self._num_left:
            self._on_end()


class Sampler:
    """Our simulators, kept, and lanes, made anew for every measurement."""

    def __init__(self, stack: ExitStack, env: EnvConfig, meshes: str, num_envs: int, folder: Path) -> None:
        self.config = Config(
            env=env,
            render=RenderConfig(meshes=Meshes[meshes]),
            model=ModelConfig(num_action_chunks=CHUNK),
            runtime=RuntimeConfig(num_envs=num_envs, num_workers=num_envs, max_wait_s=0.0),
        )
        logs = Path(tempfile.mkdtemp(dir=folder))
        self.pool = stack.enter_context(open_simulators(self.config, CPU, logs=logs, title="dvla:bench", videos=logs))
        self.spec = self.pool.spec()
        self.policy = RepeatingPolicy(self.spec.action_dim)
        self.data = slots_of_own(plan_slots(self.config, self.spec, {}, num_envs), self.pool, CPU)

    def seconds(self, on_start: Callable[[], None] = lambda: None, *, task: int = 0, seed: int = 0) -> float:
        """Time from when all environments are reset and observed (`on_start`) to when all episodes are over."""
        num_envs, stop = self.config.runtime.num_envs, StopFlag()
        meet = MeetingPoints.create(stop=stop, timeout_s=600)
        learners, learner = (SharedTransport(0, [link], stop, 600) for link in local_links(0, stop))
        common = {"pool": self.pool, "stop": stop, "num_envs": num_envs, "clock": LaneClock()}
        tracer = Tracer(0, False)
        sampling = SamplingLane(
            **common,
            sources=[OneEpisodeEach(num_envs, task, seed, learner.leave)],  # the lane ends when the learner leaves
            stages=Stages(None),
            learners=learners,
            home=0,
            ask=meet.requests.put,
            inferrer=0,
            replies=None,
            max_worker_failures=0,
            wait_timeout_s=600,
            note_restart=lambda: None,
            limit=EnvLimit(num_envs, num_envs),
            tracer=tracer.for_lane("sampling"),
        )
        inference = InferenceLane(
            **common,
            rank=0,
            replica=Replica(self.policy, make_manifest(self.policy, torch.float32), CPU),
            host=None,
            slots=SlotTensors(self.data.tensors, CPU),
            samplers=None,
            meet=meet,
            device=CPU,
            seed=0,
            stages=None,
            balances=False,
            runtime=self.config.runtime,
            group_size=num_envs,
            applied_version=0,
            tracer=tracer.for_lane("inference"),
        )
        errors = ErrorBoard(stop)
        sampler = sampling.start(errors)
        while len(meet.requests) < num_envs and not stop.is_set():
            time.sleep(0.001)  # the resets: not part of what is measured
        self.policy.seconds = 0.0
        on_start()
        begin = time.monotonic()
        decider = inference.start(errors)
        sampler.join()
        seconds = time.monotonic() - begin
        stop.set()
        decider.join()
        for transport in (learners, learner):
            transport.close()
        if errors.first is not None:
            raise errors.first
        return seconds


class Baseline:
    """The process of `sampler_baselines.py`."""

    def __init__(self, stack: ExitStack, name: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("sampler_baselines.py")), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        stack.callback(self._end)
        self._answer()

    def _end(self) -> None:
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> str:
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError("the baseline failed, see above")
        return line

    def seconds(self, steps: int) -> float:
        """Time of so many steps of every environment."""
        self._process.stdin.write(f"{steps}\n")
        return float(self._answer())


def environment(name: str, max_episode_steps: int) -> EnvConfig:
    """What is compared."""
    settings = {
        "libero": {"task": "libero_spatial", "cameras": ("agentview", "wrist")},
        "maniskill": {"task": "PushCube-v1", "cameras": ("base_camera",)},
    }[name]
    return EnvConfig(
        name=name,
        image_size=(SIDE, SIDE),
        max_episode_steps=max_episode_steps,
        terminate_on_success=False,
        **settings,
    )


def compare(name: str, folder: Path) -> list[dict]:
    """Ours with full and light meshes beside the baseline."""
    theirs, ours = STEPS[name]
    with ExitStack() as stack:
        baseline = Baseline(stack, name)
        samplers = {
            meshes: Sampler(stack, environment(name, ours), meshes, NUM_ENVS, folder) for meshes in ("full", "light")
        }
        rates: dict[str, list[float]] = {"baseline": [], "full": [], "light": []}
        for round_ in range(ROUNDS + 1):  # the first one warms up
            rates["baseline"].append(NUM_ENVS * theirs / baseline.seconds(theirs))
            for meshes, sampler in samplers.items():
                rates[meshes].append(NUM_ENVS * ours / sampler.seconds())
            sys.stderr.write(f"{name} {round_}: { ({key: round(values[-1], 1) for key, values in rates.items()}) }\n")
    medians = {key: statistics.median(values[1:]) for key, values in rates.items()}
    rows = [row(f"sampler.{name}.baseline", medians["baseline"], "control steps/s")]
    for meshes, suffix in (("full", ""), ("light", "_light")):
        rows.append(row(f"sampler.{name}{suffix}.rate", medians[meshes], "control steps/s"))
        rows.append(row(f"sampler.{name}{suffix}.ratio", medians[meshes] / medians["baseline"], "ratio"))
    return rows


def round_trips(folder: Path) -> list[dict]:
    """From an observation to its action, for three sizes of observations, in turn."""
    sizes = {"small": (), "3mb": (1024, 1024), "30mb": (3200, 3200)}
    times: dict[str, list[float]] = {name: [] for name in sizes}
    with ExitStack() as stack:
        samplers = {
            name: Sampler(
                stack,
                EnvConfig(
                    name="sampler_envs:FrameEnv",
                    cameras=("camera",) if size else (),
                    image_size=size or (1, 1),
                    max_episode_steps=40 * CHUNK,
                ),
                "full",
                1,
                folder,
            )
            for name, size in sizes.items()
        }
        for _ in range(ROUNDS + 1):
            for name, sampler in samplers.items():
                sampler.seconds()
                times[name] += sampler.data.arrays["state"][0, 2:, 0].tolist()  # the first decision waits for its lane
    skipped = len(times["small"]) // (ROUNDS + 1)
    return [
        row(f"roundtrip.{name}_ms", 1e3 * statistics.median(values[skipped:]), "ms") for name, values in times.items()
    ]


def overhead(folder: Path) -> list[dict]:
    """What is neither simulator nor policy."""
    clocks = folder / "clocks"
    clocks.mkdir()
    os.environ["BENCH_FOLDER"] = str(clocks)
    env = environment("maniskill", STEPS["maniskill"][1])
    env.name = "sampler_envs:TimedManiSkill"
    shares = []
    with ExitStack() as stack:
        sampler = Sampler(stack, env, "light", NUM_ENVS, folder)

        def read() -> list[list[float]]:
            files = sorted(clocks.iterdir())
            return [torch.from_file(str(path), size=2, dtype=torch.float64).tolist() for path in files]

        for _ in range(ROUNDS + 1):
            start: list = []
            sampler.seconds(lambda start=start: start.extend((time.monotonic(), read())))
            begin, before = start
            for (inside_before, _), (inside, end) in zip(before, read(), strict=True):
                shares.append(1.0 - (inside - inside_before + sampler.policy.seconds) / (end - begin))
    return [row("sampler.overhead_frac", statistics.median(shares[NUM_ENVS:]), "share of wall time")]


def row(name: str, value: float, unit: str) -> dict:
    """One line of output."""
    return {"name": name, "value": value, "unit": unit}


def main() -> None:
    """Measure and store."""
    torch.set_num_threads(1)
    sys.setswitchinterval(0.0005)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    wanted = sys.argv[1:] or ["roundtrip", "overhead", "maniskill", "libero"]
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in wanted:
            rows += {"roundtrip": round_trips, "overhead": overhead}.get(
                part, lambda folder, part=part: compare(part, folder)
            )(folder)
    if sys.argv[1:]:
        for line in rows:
            sys.stdout.write(f"{line}\n")
    else:
        store("bench_sampler", rows)


if __name__ == "__main__":
    main()
