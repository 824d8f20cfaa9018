"""Evaluation by itself: simulators, a replica with fixed weights, the sampling and the inference lane, a table.

The episodes are dealt out to the ranks beforehand (`dvla.lanes.evaluation_episodes`), so that each is played exactly once
whatever the number of ranks, workers and environments.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dvla.config import Config, ConfigError, config_hash
from dvla.envs.registry import expected_action_dim
from dvla.envs.simulators import open_simulators
from dvla.lanes.balance import EnvLimit
from dvla.lanes.episode_source import BeginningVersions
from dvla.lanes.evaluation_episodes import (
    EvaluationEpisodes,
    Outcome,
    evaluation_tickets,
    outcome_of,
    states_of_tasks,
)
from dvla.lanes.inference import InferenceLane
from dvla.lanes.lane import ErrorBoard, Lane
from dvla.lanes.meeting_points import MeetingPoints
from dvla.lanes.sampling import SamplingLane
from dvla.lanes.stages import Stages
from dvla.models.policy import reads_images
from dvla.models.policy_source import check_policy
from dvla.models.sharding import COMPUTE_DTYPE
from dvla.models.trained import trained_policy
from dvla.planes.data_plane import plan_slots, slots_of_own
from dvla.planes.manifest import make_manifest
from dvla.planes.observations import SlotTensors
from dvla.planes.semaphore import StopFlag, WaitTimeoutError, wait_any
from dvla.planes.shared_transport import SharedTransport, local_links
from dvla.planes.transport import Kind, Parcel
from dvla.planes.weights import Replica
from dvla.runtime.checkpoint import read_train_state
from dvla.runtime.device import compute_threads
from dvla.runtime.failure import describe
from dvla.runtime.world import World, join_world, require_same
from dvla.telemetry.atomic_file import write_atomically
from dvla.telemetry.confidence import success_interval
from dvla.telemetry.lane_clock import LaneClock
from dvla.telemetry.logs import set_up_logging
from dvla.telemetry.progress import Progress
from dvla.telemetry.trace import Tracer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dvla.envs.batch_pool import BatchPool
    from dvla.envs.pool import WorkerPool
    from dvla.envs.protocol import EnvSpec
    from dvla.runtime.stop_request import StopRequest

logger = logging.getLogger(__name__)

RESULTS = "evaluation.json"


@dataclasses.dataclass(frozen=True, slots=True)
class Played:
    """What a rank has played."""

    outcomes: list[Outcome]
    """In the order of their ends."""
    restarts: int
    """Workers that were replaced."""
    error: BaseException | None
    """Of the first lane that failed: then not all episodes were played."""


def evaluate(config: Config, checkpoint: Path | None, out: Path | None, stop_request: StopRequest) -> int:
    """Evaluate on this rank; rank 0 shows and writes the results of all.

    Args:
        config: Environment, model, and how to run them.
        checkpoint: Whose weights to take; None for those the model begins with.
        out: A new folder for the results; None for one beside the checkpoints.
        stop_request: Ends it early, with the results so far.

    Returns:
        The exit code of the process.

    Raises:
        Exception: The first error of any lane; the results so far are written before.
    """
    begin = time.monotonic()
    runtime = config.runtime
    world = join_world(config.device, runtime.collective_timeout_s)
    torch.set_num_threads(compute_threads(runtime.torch_threads, world.local_world_size))
    require_same(world, "configuration", config_hash(config) + str(checkpoint))
    check_policy(config.model, tuple(config.env.cameras), expected_action_dim(config.env, config.render))
    of_run: dict[str, Any] = {"policy_version": 0, "config": {"seed": config.seed}}
    if checkpoint is not None:
        of_run = read_train_state(checkpoint.resolve())
    version = of_run["policy_version"]
    folder = _make_folder(config, checkpoint, version, out, world)
    set_up_logging(world.rank, folder / "logs")
    title = f"dvla:eval:r{world.rank}"
    with open_simulators(config, world.device, logs=folder / "logs", title=title, videos=folder / "videos") as pool:
        spec = pool.spec()
        require_same(world, "environment", repr(spec))
        # Frozen weights may be random ones: they come from the seed of the run, whatever this evaluation's is.
        seed = of_run["config"]["seed"]
        policy = trained_policy(config.model, spec=spec, seed=seed, checkpoint=checkpoint)
        replica = policy.to(world.device, COMPUTE_DTYPE[runtime.precision]).requires_grad_(False)
        played = play(config, world, spec, pool, replica, version, stop_request)
    everything: list[Any] = [None] * world.world_size
    said = (played.outcomes, played.restarts, describe(played.error) if played.error else None)
    dist.all_gather_object(everything, said, group=world.control_pg)
    if world.is_main:
        results = [outcome for part, _, _ in everything for outcome in part]
        errors = [f"rank {rank}: {error}" for rank, (_, _, error) in enumerate(everything) if error]
        is_whole = len(results) == sum(states_of_tasks(spec, config.evaluation.episodes_per_task))
        summary = {
            "exit": "failed" if errors else "completed" if is_whole else "stopped",
            "error": errors[0] if errors else None,
            "checkpoint": str(checkpoint.resolve()) if checkpoint else config.model.checkpoint,
            "policy_version": version,
            "model": f"{config.model.name}/{config.model.preset}",
            "env": spec.name,
            "meshes": config.render.meshes.name,
            "greedy": config.evaluation.greedy,
            "device": world.device.type,
            "world_size": world.world_size,
            "worker_restarts": sum(restarts for _, restarts, _ in everything),
            "wall_s": time.monotonic() - begin,
            **summarise(results, spec.instructions),
        }
        print(table(summary), flush=True)  # first: the disk may be full
        write_atomically(folder / RESULTS, [json.dumps(summary, indent=1) + "\n"])
        print(f"results: {folder}")
    if played.error is not None:
        raise played.error
    return 0


def _make_folder(config: Config, checkpoint: Path | None, version: int, out: Path | None, world: World) -> Path:
    """Rank 0 makes the folder of the results for all.

    Raises:
        ConfigError: It cannot be made; raised on every rank.
    """
    said: list[Any] = [None, None]
    if world.is_main:
        name = f"{config.env.task}_step_{version:06d}" if checkpoint else f"{config.model.name}_{config.env.task}"
        root = checkpoint.resolve().parents[1] if checkpoint else Path(config.run.root)
        place, number = root / "evaluations" / name, 1
        while said == [None, None]:
            try:
                (out or place).mkdir(parents=True)
                said = [None, str(out or place)]
            except FileExistsError:  # an earlier evaluation of the same weights, or one that runs now, is kept
                number += 1
                place = place.with_name(f"{name}_{number}")
                if out:
                    said = [f"out={out} exists: give a new folder", None]
            except OSError as error:
                said = [f"cannot make the folder {out or place} ({error.strerror}): give another one with out=…", None]
    dist.broadcast_object_list(said, src=world.main_rank, group=world.control_pg)
    if said[0] is not None:
        raise ConfigError(said[0])
    return Path(said[1])


def play(
    config: Config,
    world: World,
    spec: EnvSpec,
    pool: WorkerPool | BatchPool,
    policy: Any,
    version: int,
    stop_request: StopRequest,
) -> Played:
    """Play this rank's share of the episodes.

    Args:
        config: Which episodes, and how to run them.
        world: This rank.
        spec: The environment.
        pool: Its simulators, built and not attached yet.
        policy: A frozen policy on the rank's device; decides as the weights of `version`.
        version: Written down with every decision.
        stop_request: Ends it early.

    """
    runtime = config.runtime
    data = slots_of_own(plan_slots(config, spec, policy.record_spec, runtime.num_envs), pool, world.device)
    tickets = evaluation_tickets(
        spec, config.evaluation, sampler=world.sampler(world.rank), num_samplers=world.num_samplers
    )
    stop = StopFlag()
    meet = MeetingPoints.create(stop=stop, timeout_s=runtime.wait_timeout_s)
    ends = local_links(world.rank, stop)
    learners, here = (SharedTransport(world.rank, [end], stop, runtime.wait_timeout_s) for end in ends)
    restarts: list[None] = []
    tracer = Tracer(world.rank, False)
    lanes: list[Lane] = [
        SamplingLane(
            pool=pool,
            sources=[
                EvaluationEpisodes(
                    tickets,
                    free=range(runtime.num_envs),
                    learners=learners,
                    home=world.rank,
                    versions=BeginningVersions(),
                ),
            ],
            stages=Stages(None),
            learners=learners,
            home=world.rank,
            inferrer=world.rank,
            ask=meet.requests.put,
            replies=None,
            stop=stop,
            num_envs=runtime.num_envs,
            limit=EnvLimit(runtime.num_envs, runtime.num_envs),
            max_worker_failures=runtime.max_worker_failures,
            wait_timeout_s=runtime.wait_timeout_s,
            note_restart=lambda: restarts.append(None),
            clock=LaneClock(),
            tracer=tracer.for_lane("sampling"),
        ),
        InferenceLane(
            rank=world.rank,
            replica=Replica(policy, make_manifest(policy, COMPUTE_DTYPE[runtime.precision]), world.device),
            host=None,
            slots=SlotTensors(data.tensors, world.device, with_images=reads_images(policy)),
            pool=pool,
            samplers=None,
            meet=meet,
            stop=stop,
            device=world.device,
            seed=config.seed,
            num_envs=runtime.num_envs,
            stages=None,
            runtime=dataclasses.replace(runtime, cuda_graphs=False),
            balances=False,
            group_size=config.algo.group_size,
            applied_version=version,
            clock=LaneClock(),
            tracer=tracer.for_lane("inference"),
        ),
    ]
    here.send(Parcel(Kind.round, world.rank, version=version))
    errors = ErrorBoard(stop, world.rank)
    threads = [lane.start(errors) for lane in lanes]
    outcomes: list[Outcome] = []

    def read() -> None:
        while (parcel := here.receive()) is not None:
            outcomes.append(outcome_of(parcel, data.tensors))
            here.free(parcel)

    unit = "episodes" if world.world_size == 1 else f"episodes of rank 0 of {world.world_size}"
    with Progress(len(tickets), unit, enabled=world.is_main and config.telemetry.console) as progress:
        while len(outcomes) < len(tickets) and not stop_request.is_set() and not stop.is_set():
            wait_any([here, stop, stop_request], 1.0)
            read()
            rate = sum(outcome.success for outcome in outcomes) / max(len(outcomes), 1)
            progress.update(len(outcomes), f"success rate {rate:.3f}")
    stop.set()
    deadline = time.monotonic() + runtime.wait_timeout_s
    for lane, thread in zip(lanes, threads, strict=True):
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            limit = f"did not end within {runtime.wait_timeout_s:.0f} s"
            errors.report(
                lane.name, WaitTimeoutError(f"{limit}; raise runtime.wait_timeout_s if a decision takes longer")
            )
    read()
    data.close()
    error = errors.first
    if error is not None:
        logger.error("the evaluation failed: %s", describe(error))
        logger.info("its traceback", exc_info=error, extra={"file_only": True})
    return Played(outcomes, len(restarts), error)


def summarise(outcomes: Sequence[Outcome], instructions: Sequence[str]) -> dict[str, Any]:
    """Success by task and over all, with 95 % confidence intervals, and every episode."""

    def gist(part: Sequence[Outcome]) -> dict[str, Any]:
        successes = sum(outcome.success for outcome in part)
        low, high = success_interval(successes, len(part))
        return {
            "episodes": len(part),
            "successes": successes,
            "success_rate": successes / len(part) if part else None,
            "interval": [low, high],
            "mean_steps": sum(outcome.steps for outcome in part) / len(part) if part else None,
            "mean_return": sum(outcome.reward for outcome in part) / len(part) if part else None,
        }

    return {
        **gist(outcomes),
        "tasks": [
            {"task": task, "instruction": words, **gist([outcome for outcome in outcomes if outcome.task == task])}
            for task, words in enumerate(instructions)
        ],
        "outcomes": [dataclasses.asdict(o) for o in sorted(outcomes, key=lambda o: (o.task, o.seed))],
    }


def table(summary: dict[str, Any]) -> str:
    """The results for people."""
    rows = [(f"{part['task']:2d}", part, part["instruction"]) for part in summary["tasks"]]
    if len(rows) > 1:
        rows.append(("all", summary, ""))
    lines = [
        f"{summary['exit']}: {summary['model']} at step {summary['policy_version']} in {summary['env']}, "
        f"{summary['episodes']} episodes",
        "task  success  95 % interval   episodes  steps  instruction",
    ]
    for name, part, words in rows:
        if part["episodes"]:
            low, high = part["interval"]
            numbers = f"{part['success_rate']:7.3f}  {low:.3f} to {high:.3f}  {part['episodes']:8d}  {part['mean_steps']:5.0f}"
        else:
            numbers = f"{'-':>7}  {'-':>14}  {0:8d}  {'-':>5}"
        lines.append(f"{name:>4}  {numbers}  {words}".rstrip())
    return "\n".join(lines)
