"""The grpo lane: turns finished groups into gradients as they arrive, gradients into versions, versions into weights sent."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dvla.lanes.batch_tally import BatchTally
from dvla.lanes.evaluation_tally import EvaluationTally
from dvla.lanes.lane import Lane
from dvla.lanes.learner import MicroBatch
from dvla.planes.semaphore import Semaphore, StopFlag, Stopped, WaitTimeoutError, wait_any
from dvla.planes.weights import Publication, learner_digest
from dvla.rl.advantages import group_advantages, has_signal
from dvla.rl.episodes import decision_weights, episode_returns
from dvla.rl.losses import LossStats
from dvla.runtime.device import finish_copies, use_own_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from torch import Tensor

    from dvla.config import Config
    from dvla.lanes.learner import Learner
    from dvla.lanes.meeting_points import MeetingPoints
    from dvla.planes.manifest import Manifest
    from dvla.planes.observations import SlotTensors
    from dvla.planes.tickets import Group, TicketBook
    from dvla.planes.weights import ShardWriter
    from dvla.runtime.world import World
    from dvla.telemetry.lane_clock import LaneClock
    from dvla.telemetry.trace import Tracer

_LOOK_S = 5.0  # how often the ranks look at each other while training waits for an evaluation


@dataclass(slots=True)
class _Part:
    """Decisions of one group that make one micro-batch."""

    slots: Tensor
    decisions: Tensor
    advantages: Tensor
    weights: Tensor
    prox_logprobs: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepReport:
    """What happened in one batch, over all ranks."""

    policy_version: int
    tally: BatchTally
    values: dict[str, float]
    """Optimiser metrics and timings by tag."""
    frames: np.ndarray | None
    """(T, cameras, H, W, 3) uint8: what the policy saw in the batch's first episode; None without cameras."""


class GrpoLane(Lane):
    """Trains.

    Owns: the learner (sharded policy, optimiser), the learner mesh, the control group.
    Consumes: finished groups (`groups`), outcomes of evaluation episodes (`outcomes`), free host buffers (`host_free`).
    Produces: free slots (`slots_free`), room for other groups (`admission`), evaluation rounds (`rounds`), published
        shards (`published`), reports, checkpoints.
    Blocks on: `groups`, the grpo lanes of the other ranks, `host_free`.
    Unblocked by: sampling (a group), the other ranks, param_dist (a buffer), a stop request.
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
        meet: MeetingPoints,
        stop: StopFlag,
        stop_request: StopFlag,
        policy_version: int,
        saved_version: int | None,
        on_step: Callable[[StepReport], None],
        on_evaluation: Callable[[dict[str, float]], None],
        evaluated_states: Sequence[int],
        num_own_episodes: int,
        owes_final_evaluation: bool,
        save: Callable[[int, dict[str, Any]], None],
        clock: LaneClock,
        tracer: Tracer,
    ) -> None:
        super().__init__(clock, tracer)
        self._config, self._algo, self._world = config, config.algo, world
        self._learner, self._manifest, self._writer = learner, manifest, writer
        self._slots, self._book, self._meet, self._stop = slots, book, meet, stop
        self._stop_request, self._on_step, self._save = stop_request, on_step, save
        self._groups_per_batch = config.groups_per_rank(world.world_size)
        self._max_dropped = -(-self._algo.max_dropped_per_step // world.world_size)
        self._finished: list[Group] = []
        self._held: list[Group] = []  # trained on, needed again by the batch's next epoch
        self._gaps: list[Tensor] = []
        self._on_evaluation, self._evaluated_states = on_evaluation, evaluated_states
        self._num_own_episodes, self._owes_final_evaluation = num_own_episodes, owes_final_evaluation
        self._evaluation: EvaluationTally | None = None
        self._restarts_counted = 0
        self._publications = 0
        self._has_stream = False
        self._cursor = book.cursor()  # as of the last version: groups begun since are lost with a stop, and begin anew
        self._saved_version = saved_version
        self.policy_version = policy_version
        self.outcome: str | None = None
        """`completed` or `stopped` once the lane has ended by itself."""
        self.wait_for: Callable[[Semaphore, float], bool] = self._block_for
        """How to wait for what sampling produces; the serial schedule samples instead of blocking."""
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
                if self._saved_version != self.policy_version:
                    self._checkpoint()  # the evaluation may take long: a run killed in it has lost nothing
                self._evaluate_alone()
            self._end("completed")
        begin = time.monotonic()
        tally = BatchTally(loss=LossStats.zeros(self._learner.device))
        parts: list[_Part] = []
        waited, frames = 0.0, None
        for index in range(self._groups_per_batch):
            waiting = time.monotonic()
            group = self._next_group(tally)
            waited += time.monotonic() - waiting
            if group is not None and index == 0:
                frames = self._film(group)
            group_parts = [] if group is None else self._cut(group, tally)
            rounds = self._agree(len(group_parts), stop=group is None)
            self._train(group_parts, rounds, tally, is_last_group=index == self._groups_per_batch - 1)
            parts += group_parts
            if group is not None and self._algo.update_epochs == 1:
                self._free_slots(group)
            elif group is not None:
                self._held.append(group)
        timings = {"time/wait_groups_s": waited, "time/publish_s": 0.0}
        metrics = self._finish_step()
        for _ in range(1, self._algo.update_epochs):
            self._train(parts, self._agree(len(parts), stop=False, may_stop=False), tally, is_last_group=True)
            metrics = self._finish_step()
        while self._held:
            self._free_slots(self._held.pop())
        # Nobody samples with the last version, unless it is evaluated.
        if self.policy_version < self._algo.num_steps or self._config.run.eval_every:
            timings["time/publish_s"] = self._timed(self.publish)
        tally.worker_restarts = self._meet.worker_restarts - self._restarts_counted
        self._restarts_counted += int(tally.worker_restarts)
        tally.logprob_gap_max = max(map(float, self._gaps))
        self._gaps.clear()
        tally.reduce(self._world.control_pg)
        self._cursor = self._book.cursor()
        timings["time/step_s"] = time.monotonic() - begin
        self.clock.count()
        self._on_step(StepReport(self.policy_version, tally, timings | metrics, frames))
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
        with self.tracer.span("optimise", version=self.policy_version + 1):
            metrics = self._learner.step(self.policy_version)
        self.policy_version += 1
        return metrics

    def _timed(self, work: Callable[[], None]) -> float:
        begin = time.monotonic()
        work()
        return time.monotonic() - begin

    # -- evaluation --------------------------------------------------------------------------------------------------

    def _begin_evaluation(self) -> None:
        """Begin a round with the weights just published; all ranks do so at the same version."""
        self._evaluation = EvaluationTally(self._evaluated_states, self.policy_version)
        if self._num_own_episodes:
            self._meet.rounds.put(self.policy_version)

    def _look_at_evaluation(self) -> None:
        """Take in the outcomes since the last look; report the round once all ranks have finished it."""
        if self._evaluation is None:
            return
        while (outcome := self._meet.outcomes.try_get()) is not None:
            self._evaluation.add(outcome)
        if self._evaluation.reduce(self._world.control_pg):
            self._on_evaluation(self._evaluation.metrics())
            self._evaluation = None

    def _evaluate_alone(self) -> None:
        """Evaluate exactly this version: training waits until all ranks are done, or one of them is to stop."""
        while self._evaluation is not None:  # a round of an earlier version goes on
            self._await_evaluation()
        self._begin_evaluation()
        while self._evaluation is not None:
            self._await_evaluation()

    def _await_evaluation(self) -> None:
        """Wait for this rank's share of the round, but not for long: then look with the others at how far all are."""
        assert self._evaluation is not None
        deadline = time.monotonic() + _LOOK_S
        while self._evaluation.num_own() < self._num_own_episodes and time.monotonic() < deadline:
            outcome = self._meet.outcomes.try_get()
            if outcome is not None:
                self._evaluation.add(outcome)
            elif self._stop_request.is_set():
                break
            else:
                self.wait_for(self._meet.outcomes.semaphore, deadline - time.monotonic())
        self._agree(0, stop=False)
        self._look_at_evaluation()

    # -- groups ------------------------------------------------------------------------------------------------------

    def _next_group(self, tally: BatchTally) -> Group | None:
        """The next group to train on, dropping those without a signal; None when the run is asked to stop."""
        while not self._stop_request.is_set():
            chosen = self._book.choose([group.id for group in self._finished])
            if chosen is not None:
                group = next(group for group in self._finished if group.id == chosen)
                self._finished.remove(group)
                returns, success_rate = tally.add_episodes(group, self._slots.tensors)
                self._book.note(group.task, success_rate)
                is_kept = not self._algo.filter_zero_signal or tally.groups_dropped >= self._max_dropped
                if is_kept or has_signal(returns):
                    self._book.take(group.id)
                    return group
                tally.groups_dropped += 1
                self._book.drop(group.id)
                self._free_slots(group)
                self._meet.admission.release()
            elif (arrived := self._meet.groups.try_get()) is not None:
                self._finished.append(arrived)
            else:
                timeout_s = self._config.runtime.wait_timeout_s
                if not self.wait_for(self._meet.groups.semaphore, timeout_s):
                    raise WaitTimeoutError(
                        f"lane grpo waited {timeout_s:.0f} s for a finished group at version {self.policy_version}; raise "
                        "runtime.wait_timeout_s if sampling can take that long"
                    )
        return None

    def _block_for(self, semaphore: Semaphore, seconds: float) -> bool:
        with self.clock.waiting():
            is_ready = wait_any([self._stop, self._stop_request, semaphore], max(0.0, seconds))
        if self._stop.is_set():
            raise Stopped
        return bool(is_ready)

    def _free_slots(self, group: Group) -> None:
        finish_copies(self._learner.device)
        for slot in group.slots:
            self._meet.slots_free.put(slot)

    def _film(self, group: Group) -> np.ndarray | None:
        """The frames of a group's first episode; its slot will soon hold another one."""
        slot = group.slots[0]
        images = self._slots.tensors["images"][slot, : int(self._slots.tensors["num_decisions"][slot])]
        return images.cpu().numpy().copy() if images.numel() and self._world.is_main else None

    # -- micro-batches -----------------------------------------------------------------------------------------------

    def _cut(self, group: Group, tally: BatchTally) -> list[_Part]:
        """The decisions of a group, cut into micro-batches."""
        members = torch.tensor(group.slots)
        lengths = self._slots.tensors["num_decisions"][members]
        returns = episode_returns(self._slots.tensors["rewards"][members], lengths)
        advantages = group_advantages(returns, normalize_by_std=self._algo.normalize_by_std)
        weights = decision_weights(
            lengths,
            length_normalization=self._algo.length_normalization,
            max_decisions=self._config.max_decisions,
        )
        slots = members.repeat_interleave(lengths)
        decisions = torch.cat([torch.arange(length) for length in lengths.tolist()])
        tally.add_staleness(self.policy_version - self._slots.tensors["behavior_version"][slots, decisions])
        columns = (slots, decisions, advantages.repeat_interleave(lengths), weights.repeat_interleave(lengths))
        size = self._algo.micro_batch_size
        return [_Part(*part) for part in zip(*(column.split(size) for column in columns), strict=True)]

    def _padding(self) -> _Part:
        """A micro-batch without weight, for a rank that has fewer than the others."""
        zero = torch.zeros(1, dtype=torch.int64)
        return _Part(zero, zero, torch.zeros(1), torch.zeros(1))

    def _agree(self, num_parts: int, *, stop: bool, may_stop: bool = True) -> int:
        """The largest number of micro-batches any rank has; ends the run when any rank is to stop."""
        wish = torch.tensor([num_parts, int(may_stop and (stop or self._stop_request.is_set()))])
        with self.tracer.span("agree"), self.clock.waiting():
            dist.all_reduce(wish, dist.ReduceOp.MAX, group=self._world.control_pg)
        if wish[1]:
            self._learner.abandon()
            self._end("stopped")
        return int(wish[0])

    def _train(self, parts: list[_Part], rounds: int, tally: BatchTally, *, is_last_group: bool) -> None:
        """Accumulate the gradient of `parts`, padded to `rounds` micro-batches."""
        device = self._learner.device
        for index in range(rounds):
            part = parts[index] if index < len(parts) else self._padding()
            versions = self._slots.tensors["behavior_version"][part.slots, part.decisions]
            executed = self._slots.tensors["executed_steps"][part.slots, part.decisions]
            steps = torch.arange(self._config.model.num_action_chunks)
            batch = MicroBatch(
                observation=self._slots.observation(part.slots, part.decisions),
                record=self._slots.record(part.slots, part.decisions),
                behavior_logprobs=self._slots.gather("logprobs", part.slots, part.decisions),
                prox_logprobs=part.prox_logprobs,
                advantages=part.advantages.to(device),
                weights=part.weights.to(device),
                action_mask=(steps[None, :] < executed[:, None]).to(device),
                is_current=(versions == self.policy_version).to(device),
            )
            with self.tracer.span("gradient", size=len(part.slots)):
                logprobs, stats, gap = self._learner.accumulate(batch, is_last=is_last_group and index == rounds - 1)
            tally.loss.add_(stats)
            self._gaps.append(gap)  # read at the end of the batch: reading now would wait for the device
            if self._algo.update_epochs > 1 and part.prox_logprobs is None:
                part.prox_logprobs = logprobs

    # -- weights and checkpoints -------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Write this rank's shards into the next host buffer and hand it to param_dist."""
        with self.clock.waiting():
            self._meet.host_free.acquire("param_dist to send the version before the last")
        buffer = self._publications % self._writer.num_buffers
        self._publications += 1
        with self.tracer.span("publish", version=self.policy_version):
            parameters = self._learner.parameters()
            self._writer.write(parameters, buffer)
            verify = self._config.runtime.verify_weights
            digest = learner_digest(self._manifest, parameters) if verify else None
        self._meet.published.put(Publication(self.policy_version, buffer, digest))
        self.after_publish()

    def _checkpoint(self) -> None:
        with self.tracer.span("checkpoint", version=self.policy_version):
            self._save(self.policy_version, self._cursor)
        self._saved_version = self.policy_version

    def _end(self, outcome: str) -> None:
        if self._saved_version != self.policy_version:
            self._checkpoint()
        self.outcome = outcome
        raise Stopped
