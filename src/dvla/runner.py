"""Read this first: builds planes and lanes, lets them run, stops them in order, and writes down what happened.

One call of `run` is one rank of one run. Its placement says whether it samples, infers, trains, or several of these:

1. agree with the other ranks (same config, one run folder) and start the simulators' processes;
2. build the policy: a sharded one for the learner, a plain replica for inference; load a checkpoint if there is one;
3. join the node: episode slots, links to the other ranks; the weight plane (manifest, host buffers);
4. run the lanes of its roles: overlapped on a thread each, or in turn on this one;
5. stop in a fixed order: grpo, param_dist, inference, sampling, workers.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dvla.config import Algorithm, Config, ConfigError, Placement, Schedule, WeightApplication, config_hash
from dvla.envs.batch_pool import BatchPool
from dvla.envs.registry import expected_action_dim
from dvla.envs.simulators import open_simulators
from dvla.lanes.balance import EnvLimit
from dvla.lanes.critic import values_per_decision
from dvla.lanes.episode_source import BeginningVersions
from dvla.lanes.evaluation_episodes import EvaluationEpisodes, evaluation_tickets, states_of_tasks
from dvla.lanes.grpo import GrpoLane
from dvla.lanes.inference import InferenceLane
from dvla.lanes.learner import Learner
from dvla.lanes.meeting_points import MeetingPoints
from dvla.lanes.param_dist import ParamDistLane
from dvla.lanes.rank_lanes import RankLanes
from dvla.lanes.sampling import SamplingLane
from dvla.lanes.stages import Stages
from dvla.lanes.training_groups import TrainingGroups
from dvla.models.policy import reads_images
from dvla.models.policy_source import check_policy, prepare_policy
from dvla.models.sharding import COMPUTE_DTYPE
from dvla.planes.data_plane import plan_slots
from dvla.planes.exchange import WeightExchange
from dvla.planes.manifest import make_manifest
from dvla.planes.node import join_node
from dvla.planes.observations import SlotTensors
from dvla.planes.semaphore import StopFlag
from dvla.planes.slots import SlotShares, layout_bytes
from dvla.planes.tickets import TicketBook
from dvla.planes.weights import HostBuffers, Replica, ShardWriter, num_host_buffers
from dvla.runtime.checkpoint_writer import CheckpointWriter
from dvla.runtime.device import compute_threads, finish_copies
from dvla.runtime.failure import Failure, RunFailedError, settle
from dvla.runtime.memory import Memory, Pool
from dvla.runtime.placement import ROLES, describe_placement, place
from dvla.runtime.resuming import open_run, require_same_policy, resume, saver
from dvla.runtime.supervisor import Supervisor
from dvla.runtime.world import World, join_world, require_same
from dvla.telemetry.durations import Durations
from dvla.telemetry.lane_clock import LaneClock
from dvla.telemetry.lane_names import LANES
from dvla.telemetry.reporter import Reporter
from dvla.telemetry.trace import Tracer

if TYPE_CHECKING:
    from dvla.envs.pool import WorkerPool
    from dvla.envs.protocol import EnvSpec
    from dvla.lanes.lane import Lane
    from dvla.planes.manifest import Manifest
    from dvla.planes.node import Node
    from dvla.planes.tickets import Ticket
    from dvla.runtime.stop_request import StopRequest

logger = logging.getLogger(__name__)

_SWITCH_INTERVAL_S = (
    0.0005  # Python work of one lane holds up the tensor work of another ten times less than by default
)


def run(config: Config, stop_request: StopRequest) -> int:
    """Run this rank from beginning to end.

    Returns:
        The exit code of the process.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    runtime = config.runtime
    world = join_world(config.device, runtime.collective_timeout_s, runtime.replicate_size, config.placement)
    memory = Memory.open(config, world.device, world.local_world_size, simulates=world.rank in world.roles.sampling)
    torch.set_num_threads(compute_threads(runtime.torch_threads, world.local_world_size))
    if runtime.cuda_graphs and world.device.type != "cuda":
        raise ConfigError("runtime.cuda_graphs needs a GPU: set it to false, or device=cuda")
    if runtime.apply_weights is WeightApplication.between_groups and any(
        world.roles.inference_of(sampler) != sampler for sampler in world.roles.sampling
    ):
        raise ConfigError(
            "runtime.apply_weights=between_groups needs a placement whose sampling ranks infer themselves"
        )
    require_same(world, "configuration", config_hash(config))
    # What cannot work is refused before anything is written or started.
    config.slots_per_sampler(world.num_learners, world.num_samplers)
    check_policy(config.model, tuple(config.env.cameras), expected_action_dim(config.env, config.render))
    with open_run(config, world, partial(require_same_policy, config)) as (logs, resume_from):
        _run_in_folder(config, world, memory, stop_request, logs, resume_from)
    return 0


def _run_in_folder(
    config: Config, world: World, memory: Memory, stop_request: StopRequest, logs: Path, resume_from: Path | None
) -> None:
    """Run the lanes, and write down how they ended.

    Raises:
        ConfigError: A setting cannot work.
        RunFailedError: A rank, perhaps another one, failed.
    """
    reporter = Reporter(config, world)
    try:
        with reporter:
            outcome = _run_lanes(config, world, memory, stop_request, reporter, logs, resume_from)
        if config.telemetry.trace and config.telemetry.report:
            with contextlib.suppress(RuntimeError):  # a rank that was lost now has no trace, or an old one
                dist.barrier(group=world.control_pg)  # the report is of the traces of all ranks
        reporter.finish(outcome, None)
    except BaseException as first:
        error = memory.explain(first)
        logger.error("the run failed", exc_info=error, extra={"file_only": True})
        failures, summary = settle(logs, Failure.of(world.rank, error)), config.run.folder / "summary.json"
        with contextlib.suppress(OSError):  # a full disk must not hide what happened first
            writer = None
            if world.main_rank not in {failure.rank for failure in failures} and not summary.exists():
                writer = min(failure.rank for failure in failures)  # the main rank was killed
            reporter.finish("failed", failures[0].told_by(world.rank), writer=writer)
        if isinstance(error, ConfigError):
            raise error from error.__cause__
        raise RunFailedError(failures[0]) from error


def _run_lanes(
    config: Config,
    world: World,
    memory: Memory,
    stop_request: StopRequest,
    reporter: Reporter,
    logs: Path,
    resume_from: Path | None,
) -> str:
    """Build everything, run the lanes until they end; `completed` or `stopped`."""
    runtime, algo, roles, rank = config.runtime, config.algo, world.roles, world.rank
    samples, infers, trains = (rank in getattr(roles, role) for role in ROLES)
    with contextlib.ExitStack() as closing:
        pool = fault = None
        if samples:
            reporter.phase(
                f"starting simulators of {config.env.name}: {runtime.num_envs} a rank, "
                f"in {runtime.num_workers} worker process{'es' * (runtime.num_workers > 1)}"
            )
            videos = config.run.folder / "videos"
            try:
                pool = open_simulators(
                    config, world.device, logs=logs, title=f"dvla:r{rank}", videos=videos, memory=memory.environment
                )
                closing.enter_context(pool)
            except ConfigError as error:  # the other ranks, one of which says it, must hear of it
                fault = str(error)
        spec = _agree_on_spec(world, pool, fault, reporter)

        origin = config.model.checkpoint or config.model.preset
        reporter.phase(f"building {config.model.name} ({origin})")
        source = prepare_policy(config.model, spec=spec, seed=config.seed)
        policy = source.policy
        if runtime.cuda_graphs and "prompt_ids" in policy.record_spec:
            raise ConfigError("runtime.cuda_graphs cannot record prompts with the state in them (discrete_state_input)")
        dtype = COMPUTE_DTYPE[runtime.precision]
        manifest = make_manifest(policy, dtype)
        require_same(world, "layout of the weights", str(manifest.digest()))
        if world.is_main:
            _show_placement(config, world, manifest, reporter)

        stop = StopFlag()
        is_shared = not isinstance(pool, BatchPool) or config.placement.name is not Placement.colocated
        shares = SlotShares(
            training=config.slots_per_sampler(world.num_learners, world.num_samplers),
            evaluation=runtime.num_envs if config.run.eval_every else 0,
            num_samplers=len(roles.sampling) if is_shared else 1,
            sampler=roles.sampling.index(rank) if samples and is_shared else 0,
        )
        layout = plan_slots(config, spec, policy.record_spec, shares.total)
        own_bytes = layout_bytes(layout) // shares.num_samplers if samples else 0
        if is_shared:
            memory.claim(Pool.environment, "the memory of episode slots", own_bytes)
        with contextlib.nullcontext() if is_shared else memory.environment(own_bytes):
            node = join_node(world, layout, pool, stop, is_shared=is_shared, timeout_s=runtime.wait_timeout_s)
        slots = SlotTensors(node.data.tensors, world.device, with_images=reads_images(policy))
        meet = MeetingPoints.create(stop=stop, timeout_s=runtime.wait_timeout_s)
        tracer = Tracer(rank, config.telemetry.trace)
        clocks = {name: LaneClock(tracer=tracer.for_lane(name)) for name in LANES}
        lanes: dict[str, Lane] = {}

        host = None
        if trains or infers:
            num_bytes = num_host_buffers(world.device) * manifest.num_bytes
            memory.claim(Pool.model, "the weight plane's host buffers", num_bytes // len(roles.with_weights))
            host = HostBuffers(manifest, world.weights_pg, world.device)
        if infers:
            replica = Replica(source.replica(world.device, dtype), manifest, world.device)
            if runtime.compile_inference:
                from dvla.models.compute_options import (
                    compile_layers,
                )  # imports transformers, which not all models need

                compile_layers(replica.policy)
            lanes["inference"] = InferenceLane(
                rank=rank,
                replica=replica,
                host=host,
                slots=slots,
                pool=pool,
                samplers=node.askers if node.askers.peers else None,
                meet=meet,
                stop=stop,
                device=world.device,
                seed=config.seed,
                num_envs=runtime.num_envs * len(roles.samplers_of(rank)),
                stages=config.placement.stages,
                runtime=runtime,
                balances=config.balances,
                group_size=algo.group_size,
                clock=clocks["inference"],
                tracer=tracer.for_lane("inference"),
            )
        if pool is not None:
            lanes["sampling"] = _make_sampling(
                config, world, spec, pool, node, shares, meet, stop, clocks["sampling"], tracer
            )
        learner, extents = None, []
        if trains and host is not None:
            if source.load is None:
                policy = policy.to(world.device)
            num_values = values_per_decision(config) if algo.name is Algorithm.ppo else 0
            learner = Learner(
                policy,
                world,
                algo,
                runtime,
                frozen=source.frozen,
                load=source.load,
                num_values=num_values,
                seed=config.seed,
            )
            writer = ShardWriter(manifest, learner.parameters(), host, world.device)
            extents = writer.extents
        exchange = WeightExchange(world, manifest, extents, host.buffers if host else [], delta=runtime.weight_deltas)
        syncs = Durations()
        if host is not None:
            lanes["param_dist"] = ParamDistLane(
                meet=meet,
                stop=stop,
                exchange=exchange,
                trains=trains,
                infers=infers,
                peers=node.weights,
                syncs=syncs,
                clock=clocks["param_dist"],
                tracer=tracer.for_lane("param_dist"),
            )
        policy_version, book = 0, None
        if learner is not None:
            book = _make_book(config, world, num_tasks=len(spec.instructions))
            saved_version = None
            if resume_from:
                policy_version, saved_version = resume(config, world, resume_from, learner, book, reporter)
            checkpoints = CheckpointWriter(
                config.checkpoints,
                keep=config.run.keep_checkpoints,
                group=world.checkpoint_pg,
                overlaps=runtime.schedule is Schedule.overlapped,
                timeout_s=runtime.collective_timeout_s,
                saved_version=saved_version,
                warn=reporter.warn,
                tracer=tracer.for_lane("checkpoint"),
            )
            homes = [sampler for sampler in roles.sampling if roles.home_of(sampler) == rank]
            lanes["grpo"] = GrpoLane(
                config=config,
                world=world,
                learner=learner,
                manifest=manifest,
                writer=writer,
                slots=slots,
                book=book,
                samplers=node.samplers,
                count_restarts=lambda: sum(node.board.restarts(world.local(sampler)) for sampler in homes),
                groups_of_samplers=partial(node.board.groups, [world.local(sampler) for sampler in roles.sampling]),
                can_move=_can_move(config, world, shares),
                meet=meet,
                stop=stop,
                stop_request=stop_request,
                policy_version=policy_version,
                on_step=reporter.step,
                on_evaluation=reporter.evaluation,
                evaluated_states=states_of_tasks(spec, config.evaluation.episodes_per_task),
                num_own_episodes=sum(len(_evaluation_tickets(config, world, spec, sampler)) for sampler in homes),
                owes_final_evaluation=bool(config.run.eval_every) and not reporter.is_evaluated(algo.num_steps),
                save=saver(config, world, spec, learner, reporter, checkpoints),
                checkpoints=checkpoints,
                clock=clocks["grpo"],
                tracer=tracer.for_lane("grpo"),
            )

        for clock in clocks.values():
            clock.start(busy=runtime.schedule is Schedule.overlapped)
        reporter.training_starts(
            lane_uses=lambda: {n: clocks[n].total() if n in lanes else node.board.use(n) for n in LANES},
            syncs=syncs,
            weight_bytes=manifest.num_bytes,
            num_slots=shares.training * len(roles.sampling),
            num_free_slots=node.board.free_slots,
            policy_version=policy_version,
            memory_usage=node.board.memory,
        )
        finish_copies(world.device)  # the lanes have streams of their own
        rank_lanes = RankLanes(lanes, node, meet, stop, world, memory.usage)
        supervisor = Supervisor(
            world=world,
            runtime=runtime,
            logs=logs,
            board=node.board,
            clocks={name: lane.clock for name, lane in lanes.items()},
            state=rank_lanes.state,
            stop=stop,
            stop_request=stop_request,
            finish=reporter.fail,
        )
        try:
            with supervisor:
                if runtime.schedule is Schedule.serial:
                    rank_lanes.run_serial()
                else:
                    rank_lanes.run_overlapped(stop_request, supervisor.note_error)
        finally:
            for clock in clocks.values():
                clock.stop()
            reporter.training_ends(groups_lost=book.num_open() if book else 0)
            if config.telemetry.trace:
                try:
                    tracer.write(config.run.folder / "traces" / f"rank{rank:05d}.json")
                except OSError as error:  # a full disk
                    reporter.warn(f"there is no trace of rank {rank}: {error}")
            if host:
                host.close()
            if rank_lanes.ended_well:  # else the peers are to notice
                node.close()
        return rank_lanes.outcome()


def _agree_on_spec(world: World, pool: WorkerPool | BatchPool | None, fault: str | None, reporter: Reporter) -> EnvSpec:
    """What the environments are, on ranks that have none, too.

    Raises:
        ConfigError: They differ between ranks, or a rank cannot have them (its `fault`); raised on every rank.
    """
    if pool is None:
        reporter.phase("waiting for the simulators of the sampling ranks")
    said: list[tuple[EnvSpec | None, str | None]] = [(None, None)] * world.world_size
    dist.all_gather_object(said, (pool.spec() if pool else None, fault), group=world.control_pg)
    if faults := [other for _, other in said if other is not None]:
        raise ConfigError(faults[0])
    specs = [spec for spec, _ in said]
    first = specs[world.main_sampler]
    different = [rank for rank, spec in enumerate(specs) if spec not in (None, first)]
    if different:
        raise ConfigError(
            f"ranks {different} have another environment than rank {world.main_sampler}: start all with the same command"
        )
    assert first is not None
    return first


def _show_placement(config: Config, world: World, manifest: Manifest, reporter: Reporter) -> None:
    gradient_bytes = (
        sum(math.prod(entry.shape) for entry in manifest.entries) * 4 * 2 * (world.num_nodes - 1) // world.num_nodes
    )
    lines = describe_placement(
        place(config.placement, world.local_world_size),
        name=config.placement.name.name,
        num_nodes=world.num_nodes,
        local_world_size=world.local_world_size,
        weight_bytes=manifest.num_bytes,
        gradient_bytes=gradient_bytes,
    )
    reporter.say(lines)


def _evaluation_tickets(config: Config, world: World, spec: EnvSpec, sampler: int) -> list[Ticket]:
    """What the sampling rank `sampler`, of this node, plays in an evaluation round."""
    if not config.run.eval_every:
        return []
    number = world.sampler(sampler)
    return evaluation_tickets(spec, config.evaluation, sampler=number, num_samplers=world.num_samplers)


def _make_sampling(
    config: Config,
    world: World,
    spec: EnvSpec,
    pool: WorkerPool | BatchPool,
    node: Node,
    shares: SlotShares,
    meet: MeetingPoints,
    stop: StopFlag,
    clock: LaneClock,
    tracer: Tracer,
) -> SamplingLane:
    rank, roles, runtime, local_rank = world.rank, world.roles, config.runtime, world.local_rank
    keeps_groups = runtime.apply_weights is WeightApplication.between_groups
    home, inferrer = roles.home_of(rank), roles.inference_of(rank)
    can_move = _can_move(config, world, shares)
    versions = BeginningVersions(keeps_groups=keeps_groups)
    return SamplingLane(
        pool=pool,
        sources=[
            EvaluationEpisodes(
                _evaluation_tickets(config, world, spec, rank),
                free=shares.for_evaluation(),
                learners=node.learners,
                home=home,
                versions=versions,
            ),
            TrainingGroups(
                slots=node.data.arrays,
                free=shares.for_training(),
                seed=config.seed,
                group_size=config.algo.group_size,
                learners=node.learners,
                sharing=roles.training if can_move else roles.learners_of(rank),
                versions=versions,
                note_free=partial(node.board.note_free_slots, local_rank),
                note_pace=partial(node.board.note_groups, local_rank),
                note_end=meet.group_ends.put if keeps_groups else lambda _group: None,
            ),
        ],
        stages=Stages(config.placement.stages),
        learners=node.learners,
        home=home,
        inferrer=inferrer,
        ask=meet.requests.put if inferrer == rank else node.inferrer.send,
        replies=None if inferrer == rank else node.inferrer,
        stop=stop,
        num_envs=runtime.num_envs,
        limit=EnvLimit(runtime.num_workers if config.balances else runtime.num_envs, runtime.num_envs),
        max_worker_failures=runtime.max_worker_failures,
        wait_timeout_s=runtime.wait_timeout_s,
        note_restart=partial(node.board.count_restart, local_rank),
        clock=clock,
        tracer=tracer.for_lane("sampling"),
    )


def _can_move(config: Config, world: World, shares: SlotShares) -> bool:
    """Whether any rank of the node may sample for any other: slots are shared, with room for a group of every learner."""
    is_shared = shares.num_samplers == len(world.roles.sampling)
    return config.moves_groups and is_shared and shares.training >= len(world.roles.training) * config.algo.group_size


def _make_book(config: Config, world: World, *, num_tasks: int) -> TicketBook:
    return TicketBook(
        seed=config.seed,
        learner=world.learner,
        num_learners=world.num_learners,
        groups_per_batch=config.groups_per_learner(world.num_learners),
        max_staleness=config.algo.max_staleness,
        num_tasks=num_tasks,
        num_batches=config.num_batches,
        task_sampling=config.algo.task_sampling.name,
    )
