"""The grpo lane: turns finished groups into gradients as they arrive, gradients into versions, versions into weights sent."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dvla.config import Algorithm
from dvla.lanes.balance import deal_groups
from dvla.lanes.batch_tally import BatchTally
from dvla.lanes.critic import Critic, decisions_of, values_per_decision
from dvla.lanes.evaluation_episodes import outcome_of
from dvla.lanes.evaluation_tally import EvaluationTally
from dvla.lanes.lane import Lane
from dvla.lanes.learner import MicroBatch
from dvla.planes.semaphore import StopFlag, Stopped, WaitTimeoutError, wait_any
from dvla.planes.transport import Kind, Parcel, TransportError
from dvla.planes.weights import Publication, learner_digest
from dvla.rl.advantages import group_advantages, has_signal
from dvla.rl.episodes import decision_weights, episode_returns
from dvla.runtime.device import finish_copies, use_own_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from torch import Tensor

    from dvla.config import Config
    from dvla.lanes.critic import Assessment
    from dvla.lanes.learner import Learner
    from dvla.lanes.meeting_points import MeetingPoints
    from dvla.planes.manifest import Manifest
    from dvla.planes.observations import SlotTensors
    from dvla.planes.shared_transport import SharedTransport
    from dvla.planes.tickets import TicketBook
    from dvla.planes.weights import ShardWriter
    from dvla.runtime.checkpoint_writer import CheckpointWriter
    from dvla.runtime.world import World
    from dvla.telemetry.lane_clock import LaneClock
    from dvla.telemetry.trace import Tracer

_LOOK_S = 5.0  # how often the ranks look at each other while training waits for an evaluation


@dataclass(slots=True)
class _Part:
    """Decisions of groups, a row each: those of one group, or one micro-batch."""

    slots: Tensor
    decisions: Tensor
    advantages: Tensor
    weights: Tensor
    old_values: Tensor | None = None
    returns: Tensor | None = None
    prox_logprobs: Tensor | None = None

    def columns(self) -> tuple[Tensor, ...]:
        """All that is known before the first gradient."""
        values = () if self.old_values is None or self.returns is None else (self.old_values, self.returns)
        return self.slots, self.decisions, self.advantages, self.weights, *values


@dataclass(frozen=True, slots=True)
class StepReport:
    """What happened in one batch, over all ranks."""

    policy_version: int
    tally: BatchTally
    values: dict[str, float | None]
    """Optimiser metrics, timings and what checkpoints cost by tag."""
    frames: np.ndarray | None
    """(T, cameras, H, W, 3) uint8: what the policy saw in the batch's first episode; None without cameras."""


class GrpoLane(Lane):
    """Trains.

    Owns: the learner (sharded policy, optimiser), the learner mesh, the group of the training ranks, the ticket book.
    Consumes: finished groups and outcomes of evaluation episodes from sampling ranks, free host buffers (`host_free`).
    Produces: orders of groups, free slots, evaluation rounds; published shards (`published`), reports, checkpoints.
    Blocks on: sampling ranks, the grpo lanes of the other ranks, `host_free`.
    Unblocked by: sampling (a group, an outcome), the other ranks, param_dist (a buffer), a stop request.

    A group is ordered as soon as its version is published: a sampling rank begins it without asking, and its first
    decision waits for the weights to arrive there.
    """

    name = "grpo"

    def __init__(
        self,
        *,
        config: Config,
        world: World,
        learner: Learner,
        manifest: Manifest,
        writer: ShardWriter,
        slots: SlotTensors,
        book: TicketBook,
        samplers: SharedTransport,
        count_restarts: Callable[[], int],
        groups_of_samplers: Callable[[], tuple[list[float], list[float]]],
        can_move: bool,
        meet: MeetingPoints,
        stop: StopFlag,
        stop_request: StopFlag,
        policy_version: int,
        on_step: Callable[[StepReport], None],
        on_evaluation: Callable[[dict[str, float]], None],
        evaluated_states: Sequence[int],
        num_own_episodes: int,
        owes_final_evaluation: bool,
        save: Callable[[int, dict[str, Any]], None],
        checkpoints: CheckpointWriter,
        clock: LaneClock,
        tracer: Tracer,
    ) -> None:
        super().__init__(clock, tracer)
        self._config, self._algo, self._world = config, config.algo, world
        self._learner, self._manifest, self._writer = learner, manifest, writer
        self._slots, self._book, self._meet, self._stop = slots, book, meet, stop
        self._stop_request, self._on_step, self._save, self._checkpoints = stop_request, on_step, save, checkpoints
        self._samplers, self._count_restarts = samplers, count_restarts
        self._groups_of_samplers, self._can_move, self._moved = groups_of_samplers, can_move, 0
        self._homes = [rank for rank in samplers.peers if world.roles.home_of(rank) == world.rank]
        self._groups_per_batch = config.groups_per_learner(world.num_learners)
        self._max_dropped = -(-self._algo.max_dropped_per_step // world.num_learners)
        self._finished: list[Parcel] = []
        self._ordered: Counter[int] = Counter()  # by sampling rank: groups whose slots have not been freed
        self._held: list[Parcel] = []  # trained on, needed again by the batch's next epoch
        self._gaps: list[Tensor] = []
        is_ppo = config.algo.name is Algorithm.ppo
        self._critic = Critic(config, learner, slots, world.learners_pg) if is_ppo else None
        self._on_evaluation, self._evaluated_states = on_evaluation, evaluated_states
        self._num_own_episodes, self._owes_final_evaluation = num_own_episodes, owes_final_evaluation
        self._evaluation: EvaluationTally | None = None
        self._restarts_counted = 0
        self._publications = 0
        self._has_stream = False
        self._compiles = config.runtime.compile_learner  # the first micro-batch does
        self._cursor = book.cursor()  # as of the last version: groups begun since are lost with a stop, and begin anew
        self.policy_version = policy_version
        self.outcome: str | None = None
        """`completed` or `stopped` once the lane has ended by itself."""
        self.wait_for: Callable[[float], bool] = self._block_for
        """How to wait, at most so many seconds, for what sampling produces; the serial schedule samples meanwhile."""
        self.after_publish: Callable[[], None] = lambda: None
        """What follows a publication on this thread; the serial schedule distributes it."""

    # -- one batch ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Train on one batch and publish the new weights, or end: all steps done, or a stop agreed by all ranks."""
        if not self._has_stream:
            use_own_stream(self._learner.device)
            self._has_stream = True
        is_over = self.policy_version >= self._algo.num_steps
        if self._publications == 0 and (not is_over or self._owes_final_evaluation):
            self.publish()  # the starting weights go the way all weights go
            if self._config.run.eval_every and self.policy_version == 0:
                self._evaluate_alone()
        if is_over:
            if self._owes_final_evaluation:
                self._save_if_new()  # the evaluation may take long: a run killed in it has lost nothing
                self._evaluate_alone()
            self._end("completed")
        self._order()
        begin = time.monotonic()
        tally = BatchTally.zeros(num_tasks=len(self._evaluated_states), device=self._learner.device)
        parts: list[_Part] = []
        rest: list[_Part] = []  # decisions that wait for the next group's
        waited, frames = 0.0, None
        for index in range(self._groups_per_batch):
            waiting = time.monotonic()
            group = self._next_group(tally)
            waited += time.monotonic() - waiting
            if group is not None and index == 0:
                frames = self._film(group)
            if self._critic is not None:
                self._value(self._critic, group)
                continue
            is_last_group = index == self._groups_per_batch - 1
            with self.tracer.span("cut"):
                own = [] if group is None else [*rest, self._decisions(group, tally)]
                # Slots that are kept for another epoch anyway may as well wait until they fill a micro-batch.
                group_parts, rest = self._cut(own, keep_rest=self._algo.keeps_batch and not is_last_group)
            rounds = self._agree(len(group_parts), stop=group is None)
            self._train(group_parts, rounds, tally, is_last_group=is_last_group)
            parts += group_parts
            if group is not None and self._algo.keeps_batch:
                self._held.append(group)
            elif group is not None:
                self._free_slots(group)
        timings = {"time/wait_groups_s": waited, "time/publish_s": 0.0}
        if self._critic is not None:
            with self.clock.doing("collective: advantages", "grpo"):
                assessments, judged = self._critic.assess(self._held)
            timings |= judged
            of_groups = zip(self._held, assessments, strict=True)
            parts, _ = self._cut([self._decisions(group, tally, assessment) for group, assessment in of_groups])
            self._train(parts, self._agree(len(parts), stop=False, may_stop=False), tally, is_last_group=True)
        metrics = self._finish_step()
        for _ in range(1, self._algo.update_epochs):
            self._train(parts, self._agree(len(parts), stop=False, may_stop=False), tally, is_last_group=True)
            metrics = self._finish_step()
        while self._held:
            self._free_slots(self._held.pop())
        # Nobody samples with the last version, unless it is evaluated.
        if self.policy_version < self._algo.num_steps or self._config.run.eval_every:
            timings["time/publish_s"] = self._timed(self.publish)
        self._cursor = self._book.cursor()
        self._order()
        tally.groups_moved, self._moved = self._moved, 0
        restarts = self._count_restarts()
        tally.worker_restarts, self._restarts_counted = restarts - self._restarts_counted, restarts
        tally.logprob_gap_max = max(map(float, self._gaps))
        self._gaps.clear()
        with self.tracer.span("add up"), self.clock.doing("collective: add up the batch", "grpo"):
            tally.reduce(self._world.learners_pg)
        timings["time/step_s"] = time.monotonic() - begin
        self.clock.count()
        values = timings | metrics | self._checkpoints.metrics()
        with self.tracer.span("report"):
            self._on_step(StepReport(self.policy_version, tally, values, frames))
        self._look_at_evaluation()
        if self._is_due(self._config.run.checkpoint_every):
            self._checkpoint()
        every, is_over = self._config.run.eval_every, self.policy_version >= self._algo.num_steps
        if every and not is_over and self._evaluation is None and self._is_due(every):
            self._begin_evaluation()

    def _is_due(self, every: int) -> bool:
        """Whether this batch has reached or passed a multiple of `every` optimiser steps."""
        return self.policy_version // every > (self.policy_version - self._algo.update_epochs) // every

    def _finish_step(self) -> dict[str, float]:
        with (
            self.tracer.span("optimise", version=self.policy_version + 1),
            self.clock.doing("collective: optimise", "grpo"),
        ):
            metrics = self._learner.step(self.policy_version)
        self.policy_version += 1
        self.clock.beat()
        return metrics

    def _timed(self, work: Callable[[], None]) -> float:
        begin = time.monotonic()
        work()
        return time.monotonic() - begin

    # -- evaluation --------------------------------------------------------------------------------------------------

    def _begin_evaluation(self) -> None:
        """Begin a round with the weights just published; all ranks do so at the same version."""
        self._evaluation = EvaluationTally(self._evaluated_states, self.policy_version)
        for sampler in self._homes:
            self._samplers.send(Parcel(Kind.round, sampler, version=self.policy_version))

    def _look_at_evaluation(self) -> None:
        """Take in the outcomes since the last look; report the round once all ranks have finished it."""
        if self._evaluation is None:
            return
        self._read()
        with self.clock.doing("collective: how far the evaluation is", "grpo"):
            is_over = self._evaluation.reduce(self._world.learners_pg)
        if is_over:
            self._on_evaluation(self._evaluation.metrics())
            self._evaluation = None

    def _evaluate_alone(self) -> None:
        """Evaluate exactly this version: training waits until all ranks are done, or one of them is to stop."""
        while self._evaluation is not None:  # a round of an earlier version goes on
            self._await_evaluation()
        with self.tracer.span("evaluate", version=self.policy_version):
            self._begin_evaluation()
            while self._evaluation is not None:
                self._await_evaluation()

    def _await_evaluation(self) -> None:
        """Wait for this rank's share of the round, but not for long: then look with the others at how far all are."""
        assert self._evaluation is not None
        deadline = time.monotonic() + _LOOK_S
        while self._evaluation.num_own() < self._num_own_episodes and time.monotonic() < deadline:
            if self._stop_request.is_set():
                break
            self.wait_for(deadline - time.monotonic())
            self._read()
        self._agree(0, stop=False)
        self._look_at_evaluation()

    # -- groups ------------------------------------------------------------------------------------------------------

    def _order(self, *, is_batch: bool = True) -> None:
        """Order every group that may begin with the weights published last.

        Args:
            is_batch: The other training ranks do the same at this moment.
        """
        batch_version = self.policy_version // self._algo.update_epochs
        started = []
        while (group_and_task := self._book.start_group(batch_version)) is not None:
            started.append(group_and_task)
        samplers = self._deal([group for group, _ in started], is_batch=is_batch) if started else []
        for (group, task), sampler in zip(started, samplers, strict=True):
            self._ordered[sampler] += 1
            self._samplers.send(Parcel(Kind.order, sampler, id=group, task=task, version=self.policy_version))

    def _deal(self, groups: Sequence[int], *, is_batch: bool) -> list[int]:
        """Which sampling rank each of `groups` is for: by turns, or by how busy and fast they are."""
        roles, rank = self._world.roles, self._world.rank
        if not self._can_move or len(roles.sampling) == 1:
            return self._deal_in_turn(groups)
        turns = [roles.sampler_of(rank, group // self._world.num_learners) for group in groups]
        # The training ranks of the node order at the same moment, so each deals for all and takes its own.
        step = len(roles.training) if is_batch else 1
        own = roles.training.index(rank) if is_batch else 0
        loads, seconds = self._groups_of_samplers()
        turn = roles.sampling.index(turns[0]) - own
        dealt = deal_groups(step * len(groups), loads, seconds, turn)[own::step]
        chosen = [roles.sampling[index] for index in dealt]
        self._moved += sum(one != other for one, other in zip(chosen, turns, strict=True))
        return chosen

    def _deal_in_turn(self, groups: Sequence[int]) -> list[int]:
        """By turns, but first to those with fewest groups of this rank: drops must not heap them up beyond a rank's slots."""
        ordered, dealt = self._ordered.copy(), []
        for group in groups:
            turns = self._world.roles.samplers_in_turn(self._world.rank, group // self._world.num_learners)
            dealt.append(min(turns, key=ordered.__getitem__))
            ordered[dealt[-1]] += 1
        return dealt

    def _read(self) -> None:
        """Take in what sampling ranks have sent.

        Raises:
            TransportError: One of them died, or left.
        """
        while (parcel := self._samplers.receive()) is not None:
            if parcel.kind is Kind.group:
                self._finished.append(parcel)
            elif parcel.kind is Kind.outcome:
                assert self._evaluation is not None
                self._evaluation.add(outcome_of(parcel, self._slots.tensors))
                self._samplers.free(parcel)
            elif parcel.kind is Kind.wish:
                self._stop_request.set()
            elif parcel.kind is Kind.left:
                raise TransportError(f"sampling rank {parcel.peer} left before the run's end")

    def _next_group(self, tally: BatchTally) -> Parcel | None:
        """The next group to train on, dropping those without a signal; None when the run is asked to stop."""
        while not self._stop_request.is_set():
            self._read()
            chosen = self._book.choose([group.id for group in self._finished])
            if chosen is not None:
                group = next(group for group in self._finished if group.id == chosen)
                self._finished.remove(group)
                returns, success_rate = tally.add_episodes(group, self._slots.tensors)
                self._book.note(group.task, success_rate)
                is_kept = not self._algo.filter_zero_signal or tally.groups_dropped >= self._max_dropped
                if is_kept or has_signal(returns):
                    self._book.take(group.id)
                    self.clock.beat()
                    return group
                tally.groups_dropped += 1
                self._book.drop(group.id)
                self._free_slots(group)
                self._order(is_batch=False)
            else:
                timeout_s = self._config.runtime.wait_timeout_s
                with self.clock.doing("a finished group", "sampling"):
                    if not self.wait_for(timeout_s):
                        raise WaitTimeoutError(
                            f"lane grpo waited {timeout_s:.0f} s for a finished group at version {self.policy_version}; "
                            "raise runtime.wait_timeout_s if sampling can take that long"
                        )
        return None

    def _block_for(self, seconds: float) -> bool:
        with self.clock.waiting("a finished group or evaluation", "sampling"):
            is_ready = wait_any([self._stop, self._stop_request, self._samplers], max(0.0, seconds))
        if self._stop.is_set():
            raise Stopped
        return bool(is_ready)

    def _free_slots(self, group: Parcel) -> None:
        finish_copies(self._learner.device)
        self._ordered[group.peer] -= 1
        self._samplers.free(group)

    def _film(self, group: Parcel) -> np.ndarray | None:
        """The frames of a group's first episode; its slot will soon hold another one."""
        slot = group.slots[0]
        images = self._slots.tensors["images"][slot, : int(self._slots.tensors["num_decisions"][slot])]
        return images.cpu().numpy().copy() if images.numel() and self._world.is_main else None

    # -- micro-batches -----------------------------------------------------------------------------------------------

    def _value(self, critic: Critic, group: Parcel | None) -> None:
        """Compute the values of a group and keep it until the batch is complete; without one, the run ends."""
        looks = [] if group is None else critic.looks(group)
        rounds = self._agree(len(looks), stop=group is None)
        assert group is not None
        with self.tracer.span("value", size=rounds), self.clock.doing("collective: values", "grpo"):
            critic.value(looks, rounds)
        self._held.append(group)

    def _decisions(self, group: Parcel, tally: BatchTally, assessment: Assessment | None = None) -> _Part:
        """All decisions of a group; without an assessment, its members judge each other."""
        members = torch.tensor(group.slots)
        lengths = self._slots.tensors["num_decisions"][members]
        weights = decision_weights(
            lengths,
            length_normalization=self._algo.length_normalization,
            max_decisions=self._config.max_decisions,
        )
        slots, decisions = decisions_of(members, lengths)
        weights = weights.repeat_interleave(lengths)
        if assessment is None:
            returns = episode_returns(self._slots.tensors["rewards"][members], lengths)
            of_members = group_advantages(returns, normalize_by_std=self._algo.normalize_by_std)
            tally.add_agreement(of_members, self._slots.tensors["success"][members])
            advantages = of_members.repeat_interleave(lengths)
            columns: tuple[Tensor, ...] = (slots, decisions, advantages, weights)
        else:
            row = torch.arange(len(members)).repeat_interleave(lengths)
            per_value = assessment.advantages[row, decisions]
            advantages = per_value.mean(1)
            columns = (
                *(slots, decisions, per_value, weights),
                *(assessment.values[row, decisions], assessment.returns[row, decisions]),
            )
        tally.add_trained(self.policy_version - self._slots.tensors["behavior_version"][slots, decisions], advantages)
        return _Part(*columns)

    def _cut(self, decisions: Sequence[_Part], *, keep_rest: bool = False) -> tuple[list[_Part], list[_Part]]:
        """Micro-batches of `decisions`, one after another; and what is left of them where an incomplete one is to be kept."""
        if not decisions:
            return [], []
        columns = [torch.cat(column) for column in zip(*(part.columns() for part in decisions), strict=True)]
        size = self._algo.micro_batch_size
        parts = [_Part(*part) for part in zip(*(column.split(size) for column in columns), strict=True)]
        return (parts[:-1], parts[-1:]) if keep_rest and len(parts[-1].slots) < size else (parts, [])

    def _padding(self) -> _Part:
        """A micro-batch without weight, for a rank that has fewer than the others."""
        zero = torch.zeros(1, dtype=torch.int64)
        if self._critic is None:
            return _Part(zero, zero, torch.zeros(1), torch.zeros(1))
        none = torch.zeros(1, values_per_decision(self._config))
        return _Part(zero, zero, none, torch.zeros(1), none, none)

    def _agree(self, num_parts: int, *, stop: bool, may_stop: bool = True) -> int:
        """The largest number of micro-batches any rank has; ends the run when any rank is to stop."""
        wish = torch.tensor([num_parts, int(may_stop and (stop or self._stop_request.is_set()))])
        with self.tracer.span("agree"), self.clock.waiting("collective: agree on micro-batches and a stop", "grpo"):
            dist.all_reduce(wish, dist.ReduceOp.MAX, group=self._world.learners_pg)
        if wish[1]:
            self._learner.abandon()
            self._end("stopped")
        return int(wish[0])

    def _train(self, parts: list[_Part], rounds: int, tally: BatchTally, *, is_last_group: bool) -> None:
        """Accumulate the gradient of `parts`, padded to `rounds` micro-batches."""
        for index in range(rounds):
            part = parts[index] if index < len(parts) else self._padding()
            with (
                self.tracer.span("gradient", size=len(part.slots)),
                self.clock.doing("collective: gradient", "grpo", is_patient=self._compiles),
            ):
                logprobs, stats, gap = self._learner.accumulate(
                    self._micro_batch(part), is_last=is_last_group and index == rounds - 1
                )
            self._compiles = False
            self.clock.beat()
            tally.loss.add_(stats)
            self._gaps.append(gap)  # read at the end of the batch: reading now would wait for the device
            if self._algo.update_epochs > 1 and part.prox_logprobs is None:
                part.prox_logprobs = logprobs

    def _micro_batch(self, part: _Part) -> MicroBatch:
        versions = self._slots.tensors["behavior_version"][part.slots, part.decisions]
        executed = self._slots.tensors["executed_steps"][part.slots, part.decisions]
        steps = torch.arange(self._config.model.num_action_chunks)
        device = self._learner.device
        return MicroBatch(
            observation=self._slots.observation(part.slots, part.decisions),
            record=self._slots.record(part.slots, part.decisions),
            behavior_logprobs=self._slots.gather("logprobs", part.slots, part.decisions),
            prox_logprobs=part.prox_logprobs,
            advantages=part.advantages.to(device),
            weights=part.weights.to(device),
            action_mask=(steps[None, :] < executed[:, None]).to(device),
            is_current=(versions == self.policy_version).to(device),
            old_values=None if part.old_values is None else part.old_values.to(device),
            returns=None if part.returns is None else part.returns.to(device),
        )

    # -- weights and checkpoints -------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Write this rank's shards into the next host buffer and hand it to param_dist."""
        with self.clock.waiting("host_free", "param_dist"):
            self._meet.host_free.acquire("param_dist to send the version before the last")
        buffer = self._publications % self._writer.num_buffers
        self._publications += 1
        with self.tracer.span("publish", version=self.policy_version), self.clock.doing("publish", "grpo"):
            self._writer.write(buffer)
            verify = self._config.runtime.verify_weights
            digest = learner_digest(self._manifest, self._learner.parameters()) if verify else None
        self._meet.published.put(Publication(self.policy_version, buffer, digest))
        self.after_publish()

    def _checkpoint(self) -> None:
        self._await_save()
        with (
            self.tracer.span("checkpoint", version=self.policy_version),
            self.clock.doing("collective: checkpoint", "grpo", is_patient=True),
        ):
            self._save(self.policy_version, self._cursor)

    def _save_if_new(self) -> None:
        """Save this version, unless it lies on the disk; a save of it may be under way, and may fail."""
        self._await_save()
        if self._checkpoints.saved_version != self.policy_version:
            self._checkpoint()

    def _await_save(self) -> None:
        """Wait for the save under way; nobody can tell how long a disk may take."""
        with self.clock.waiting("until the last checkpoint is written", is_patient=True):
            self._checkpoints.wait()

    def _end(self, outcome: str) -> None:
        self._save_if_new()
        self._await_save()
        self._checkpoints.finish()
        self.outcome = outcome
        raise Stopped
