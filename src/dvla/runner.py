"""Read this first: builds planes and lanes, lets them run, stops them in order, and writes down what happened.

One call of `run` is one rank of one run:

1. agree with the other ranks (same config, one run folder) and start the simulators' processes;
2. build the policy: a sharded one for the learner, a plain replica for inference; load a checkpoint if there is one;
3. make the data plane (slots, tickets) and the weight plane (manifest, host buffers);
4. run the four lanes: overlapped on four threads, or in turn on this one;
5. stop in a fixed order: grpo, param_dist, inference, sampling, workers.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dvla.config import Config, ConfigError, Schedule, config_hash, to_plain
from dvla.envs.registry import expected_action_dim
from dvla.envs.simulators import open_simulators
from dvla.lanes.evaluation_episodes import EvaluationEpisodes, evaluation_tickets, states_of_tasks
from dvla.lanes.grpo import GrpoLane
from dvla.lanes.inference import InferenceLane
from dvla.lanes.lane import ErrorBoard, Lane
from dvla.lanes.learner import Learner
from dvla.lanes.meeting_points import MeetingPoints
from dvla.lanes.param_dist import ParamDistLane
from dvla.lanes.sampling import SamplingLane
from dvla.lanes.training_groups import TrainingGroups
from dvla.models.policy_source import check_policy, prepare_policy
from dvla.models.sharding import COMPUTE_DTYPE
from dvla.planes.data_plane import make_data_plane
from dvla.planes.exchange import WeightExchange
from dvla.planes.manifest import make_manifest
from dvla.planes.observations import SlotTensors
from dvla.planes.semaphore import Semaphore, StopFlag, Stopped
from dvla.planes.tickets import TicketBook
from dvla.planes.weights import HostBuffers, Replica, ShardWriter
from dvla.runtime import checkpoint, run_folder
from dvla.runtime.device import compute_threads, finish_copies
from dvla.runtime.failure import describe, first_failure
from dvla.runtime.world import World, join_world, require_same, restart_count
from dvla.telemetry.lane_clock import LaneClock
from dvla.telemetry.lane_names import LANES
from dvla.telemetry.logs import set_up_logging
from dvla.telemetry.reporter import Reporter
from dvla.telemetry.trace import Tracer

if TYPE_CHECKING:
    from collections.abc import Callable

    from dvla.envs.protocol import EnvSpec
    from dvla.runtime.stop_request import StopRequest

logger = logging.getLogger(__name__)

_SWITCH_INTERVAL_S = (
    0.0005  # Python work of one lane holds up the tensor work of another ten times less than by default
)
_JOIN_S = 5.0  # how long a lane may take to notice that the run failed; it may sit in a collective with a dead rank


def run(config: Config, stop_request: StopRequest) -> int:
    """Run this rank from beginning to end.

    Returns:
        The exit code of the process.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    world = join_world(config.device, config.runtime.collective_timeout_s, config.runtime.replicate_size)
    torch.set_num_threads(compute_threads(config.runtime.torch_threads, world.local_world_size))
    if config.runtime.cuda_graphs and world.device.type != "cuda":
        raise ConfigError("runtime.cuda_graphs needs a GPU: set it to false, or device=cuda")
    require_same(world, "configuration", config_hash(config))
    # What cannot work is refused before anything is written or started.
    config.slots_per_rank(world.world_size)
    check_policy(config.model, tuple(config.env.cameras), expected_action_dim(config.env, config.render))
    logs, resume_from = _open_run(config, world)
    reporter = Reporter(config, world)
    try:
        with reporter:
            outcome = _run_lanes(config, world, stop_request, reporter, logs, resume_from)
        reporter.finish(outcome, None)
    except BaseException as error:
        logger.error("the run failed", exc_info=error, extra={"file_only": True})
        with contextlib.suppress(OSError):  # a full disk must not hide what happened first
            rank, message = first_failure(logs, world.rank, describe(error))
            reporter.finish("failed", message if rank == world.rank else f"rank {rank}: {message}")
        raise
    return 0


def _open_run(config: Config, world: World) -> tuple[Path, Path | None]:
    """Rank 0 opens the run folder for all; (folder of this attempt's logs, checkpoint to resume from).

    Raises:
        ConfigError: It cannot be used; raised on every rank.
    """
    said: list[Any] = [None, None, None]
    if restart_count():  # ranks that torchrun starts again after a failure were told how to begin, not how to go on
        goes_on = config.resume == "none" or checkpoint.complete_checkpoints(config.checkpoints)
        config = replace(config, resume="auto" if goes_on else config.resume, run=replace(config.run, clean=False))
    torn: dict[Path, str] = {}
    if world.is_main:
        try:
            torn = checkpoint.torn_checkpoints(config.checkpoints) if config.resume == "auto" else {}
            found = checkpoint.find(config.resume, config.checkpoints)
            is_own = found is not None and found.resolve().is_relative_to(config.run.folder.resolve())
            if is_own and config.run.clean:
                raise ConfigError(f"run.clean=true would remove the checkpoint to resume from ({found}): leave one out")
            if found is not None:
                _require_same_policy(config, found)
            logs = run_folder.prepare(config, resuming=is_own or config.resume == "auto")
            said = [None, str(logs), str(found) if found else None]
        except ConfigError as error:
            said = [str(error), None, None]
    dist.broadcast_object_list(said, src=0, group=world.control_pg)
    if said[0] is not None:
        raise ConfigError(said[0])
    logs = Path(said[1])
    set_up_logging(world.rank, logs)
    for folder, fault in torn.items():
        logger.warning("checkpoint %s is torn and passed over: %s", folder, fault)
    return logs, Path(said[2]) if said[2] else None


def _policy_identity(config: Config) -> dict[str, Any]:
    """What decides which weights a checkpoint holds, and where the frozen ones, which it does not hold, come from."""
    model = to_plain(config)["model"]
    keys = ("name", "preset", "checkpoint", "freeze", "lora_rank", "lora_targets", "num_action_chunks", "options")
    identity = {f"model.{key}": model[key] for key in keys}
    if model["checkpoint"] is None and (model["freeze"] or model["lora_rank"]):
        identity["seed"] = config.seed
    return identity


def _require_same_policy(config: Config, folder: Path) -> None:
    """Refuse to resume from the checkpoint of another policy, before anything of the old run is touched."""
    saved = checkpoint.read_train_state(folder).get("policy")
    if saved is None:
        raise ConfigError(f"the checkpoint to resume from ({folder}) is of an older version of this program")
    for key, value in _policy_identity(config).items():
        if saved.get(key, value) != value:
            raise ConfigError(f"{key}={value}, but the checkpoint to resume from ({folder}) was made with {saved[key]}")


def _run_lanes(
    config: Config, world: World, stop_request: StopRequest, reporter: Reporter, logs: Path, resume_from: Path | None
) -> str:
    """Build everything, run the lanes until they end; `completed` or `stopped`."""
    runtime, algo = config.runtime, config.algo
    reporter.phase(
        f"starting simulators of {config.env.name}: {runtime.num_envs} a rank, "
        f"in {runtime.num_workers} worker process{'es' * (runtime.num_workers > 1)}"
    )
    pool = open_simulators(
        config, world.device, logs=logs, title=f"dvla:r{world.rank}", videos=config.run.folder / "videos"
    )
    with pool:
        spec = pool.spec()
        require_same(world, "environment", repr(spec))

        origin = config.model.checkpoint or config.model.preset
        reporter.phase(f"building {config.model.name} ({origin})")
        source = prepare_policy(config.model, spec=spec, seed=config.seed)
        policy = source.policy
        if runtime.cuda_graphs and "prompt_ids" in policy.record_spec:
            raise ConfigError("runtime.cuda_graphs cannot record prompts with the state in them (discrete_state_input)")
        dtype = COMPUTE_DTYPE[runtime.precision]
        manifest = make_manifest(policy, dtype)
        require_same(world, "layout of the weights", str(manifest.digest()))
        replica = Replica(source.replica(world.device, dtype), manifest, world.device)
        if runtime.compile_inference:
            from dvla.models.compute_options import compile_layers  # imports transformers, which not every model needs

            compile_layers(replica.policy)
        num_states = states_of_tasks(spec, config.evaluation.episodes_per_task)
        tickets = evaluation_tickets(spec, config.evaluation, rank=world.rank, world_size=world.world_size)
        num_slots = config.slots_per_rank(world.world_size)
        num_evaluation_slots = min(runtime.num_envs, len(tickets)) if config.run.eval_every else 0
        data = make_data_plane(
            config, spec, policy.record_spec, pool, world.device, num_slots=num_slots + num_evaluation_slots
        )
        if source.load is None:
            policy = policy.to(world.device)
        learner = Learner(policy, world, algo, runtime, frozen=source.frozen, load=source.load)
        host = HostBuffers(manifest, world.node_pg, world.device)
        writer = ShardWriter(manifest, learner.parameters(), host, world.device)

        book = _make_book(config, world, num_tasks=len(spec.instructions))
        policy_version, saved_version = 0, None
        if resume_from:
            policy_version, saved_version = _resume(config, world, resume_from, learner, book, reporter)

        stop = StopFlag()
        meet = MeetingPoints.create(
            num_envs=runtime.num_envs,
            num_slots=num_slots,
            stop=stop,
            timeout_s=runtime.wait_timeout_s,
            num_evaluation_episodes=len(tickets),
        )
        slots = SlotTensors(data.tensors, world.device)

        tracer = Tracer(world.rank, config.telemetry.trace)
        clocks = {name: LaneClock() for name in LANES}
        sampling = SamplingLane(
            pool=pool,
            sources=[
                EvaluationEpisodes(
                    tickets, slots=data.arrays, free=range(num_slots, num_slots + num_evaluation_slots), meet=meet
                ),
                TrainingGroups(
                    slots=data.arrays,
                    book=book,
                    meet=meet,
                    group_size=algo.group_size,
                    update_epochs=algo.update_epochs,
                ),
            ],
            meet=meet,
            stop=stop,
            num_envs=runtime.num_envs,
            max_worker_failures=runtime.max_worker_failures,
            wait_timeout_s=runtime.wait_timeout_s,
            clock=clocks["sampling"],
            tracer=tracer.for_lane("sampling"),
        )
        inference = InferenceLane(
            replica=replica,
            host=host,
            slots=slots,
            pool=pool,
            meet=meet,
            stop=stop,
            device=world.device,
            seed=config.seed,
            max_batch=runtime.max_batch,
            max_wait_s=runtime.max_wait_s,
            verify_weights=runtime.verify_weights,
            cuda_graphs=runtime.cuda_graphs,
            clock=clocks["inference"],
            tracer=tracer.for_lane("inference"),
        )
        param_dist = ParamDistLane(
            meet=meet,
            stop=stop,
            exchange=WeightExchange(world, manifest, writer.extents, host.buffers),
            clock=clocks["param_dist"],
            tracer=tracer.for_lane("param_dist"),
        )
        grpo = GrpoLane(
            config=config,
            world=world,
            learner=learner,
            manifest=manifest,
            writer=writer,
            slots=slots,
            book=book,
            meet=meet,
            stop=stop,
            stop_request=stop_request,
            policy_version=policy_version,
            saved_version=saved_version,
            on_step=reporter.step,
            on_evaluation=reporter.evaluation,
            evaluated_states=num_states,
            num_own_episodes=len(tickets),
            owes_final_evaluation=bool(config.run.eval_every) and not reporter.is_evaluated(algo.num_steps),
            save=_saver(config, world, spec, learner, reporter),
            clock=clocks["grpo"],
            tracer=tracer.for_lane("grpo"),
        )
        reporter.training_starts(
            clocks=clocks,
            sync_seconds=param_dist.sync_seconds,
            weight_bytes=manifest.num_bytes,
            num_slots=num_slots,
            num_free_slots=lambda: len(meet.slots_free),
            policy_version=policy_version,
        )
        finish_copies(world.device)  # the lanes have streams of their own
        try:
            if runtime.schedule is Schedule.serial:
                _run_serial(grpo, param_dist, inference, sampling)
            else:
                _run_overlapped([sampling, inference, grpo, param_dist], meet, stop)
        finally:
            reporter.training_ends(groups_lost=book.num_open())
            if config.telemetry.trace:
                tracer.write(config.run.folder / "traces" / f"rank{world.rank:05d}.json")
            host.close()
            data.close()
        assert grpo.outcome is not None
        return grpo.outcome


def _make_book(config: Config, world: World, *, num_tasks: int) -> TicketBook:
    return TicketBook(
        seed=config.seed,
        rank=world.rank,
        world_size=world.world_size,
        group_size=config.algo.group_size,
        groups_per_batch=config.groups_per_rank(world.world_size),
        max_staleness=config.algo.max_staleness,
        num_tasks=num_tasks,
        num_batches=config.num_batches,
        task_sampling=config.algo.task_sampling.name,
    )


def _resume(
    config: Config, world: World, folder: Path, learner: Learner, book: TicketBook, reporter: Reporter
) -> tuple[int, int | None]:
    """Put learner, tickets and counts back to where the checkpoint in `folder` was taken.

    Returns:
        Its policy version, and the same again if this run has it as a checkpoint of its own, else None.
    """
    reporter.phase(f"resuming from {folder}")
    checkpoint.load(folder, model=learner.model, optimizer=learner.optimizer, group=world.control_pg)
    state = checkpoint.read_train_state(folder)
    version: int = state["policy_version"]
    book.restore(**_cursor(state["cursors"], world), batches_done=version // config.algo.update_epochs)
    reporter.restore(state["report"])
    if world.is_main:
        checkpoint.take_back(config.checkpoints, version)
    return version, version if folder.resolve().parent == config.checkpoints.resolve() else None


def _saver(
    config: Config, world: World, spec: EnvSpec, learner: Learner, reporter: Reporter
) -> Callable[[int, dict[str, Any]], None]:
    """What the grpo lane calls to save version `policy_version`, from which the rank's groups go on at `cursor`."""

    def save(policy_version: int, cursor: dict[str, Any]) -> None:
        cursors: list[dict[str, Any]] = [{}] * world.world_size
        dist.all_gather_object(cursors, cursor, group=world.control_pg)
        checkpoint.save(
            config.checkpoints,
            policy_version=policy_version,
            model=learner.model,
            optimizer=learner.optimizer,
            train_state={
                "policy_version": policy_version,
                "cursors": cursors,
                "report": reporter.state(),
                "env_spec": asdict(spec),
                "policy": _policy_identity(config),
            },
            keep=config.run.keep_checkpoints,
            group=world.control_pg,
        )

    return save


def _cursor(saved: list[dict[str, Any]], world: World) -> dict[str, Any]:
    """Where this rank's groups go on: where they were, or past all of them when the number of ranks changed."""
    if len(saved) == world.world_size:
        return saved[world.rank]
    return saved[0] | {"next_group": max(cursor["next_group"] for cursor in saved) + world.rank}


def _run_overlapped(lanes: list[Lane], meet: MeetingPoints, stop: StopFlag) -> None:
    """Run every lane on a thread of its own until grpo ends or one fails.

    Raises:
        Exception: The first error of any lane.
    """
    errors = ErrorBoard(stop)
    threads = {lane.name: lane.start(errors) for lane in lanes}
    while threads["grpo"].is_alive() and not stop.is_set():
        threads["grpo"].join(0.5)
    if errors.first is None:
        meet.published.put(None)  # lets the exchange under way, in which other ranks take part, come to its end
        threads["param_dist"].join()
    stop.set()
    deadline = time.monotonic() + _JOIN_S
    for name in ("grpo", "param_dist", "inference", "sampling"):
        threads[name].join(max(0.0, deadline - time.monotonic()))
    if errors.first is not None:
        lane, error = errors.first
        error.add_note(f"in lane {lane}")
        raise error


def _run_serial(grpo: GrpoLane, param_dist: ParamDistLane, inference: InferenceLane, sampling: SamplingLane) -> None:
    """Run the lanes in turn on this thread, each on everything there is, in a fixed order: reproducible to the bit."""

    def distribute() -> None:
        with grpo.clock.waiting():
            with param_dist.clock.busy():
                param_dist.step()
            with inference.clock.busy():
                inference.apply_arrived()

    def sample(semaphore: Semaphore, seconds: float) -> bool:
        with grpo.clock.waiting():
            with sampling.clock.busy():
                sampling.step_together()
            with inference.clock.busy():
                inference.step_all()
        return True

    grpo.after_publish = distribute
    grpo.wait_for = sample
    with contextlib.suppress(Stopped), grpo.clock.busy():
        while True:
            grpo.step()
