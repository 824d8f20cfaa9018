"""N environments of one batch simulator in the rank's own process, used by the lanes like a `WorkerPool`.

They step together: a chunk runs when every episode that was observed has its actions. Environments without an episode, and
those whose episode ends within the chunk, are stepped along and nothing of them is recorded. What an episode leaves in its
slot is the same as from `dvla.envs.worker`.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import torch

from dvla.envs.errors import SimulationError
from dvla.envs.messages import Kind, Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from dvla.envs.batch_protocol import BatchEnvironment
    from dvla.envs.protocol import EnvSpec
    from dvla.planes.slots import SlotField


_ON_DEVICE = ("images", "state", "actions", "logprobs", "record.")


def batch_slots(layout: Sequence[SlotField], device: torch.device) -> dict[str, Tensor]:
    """The slot memory for a batch simulator: what policies see and decide on its device, what lanes count with on the host."""
    return {
        field.name: torch.zeros(
            field.shape,
            dtype=getattr(torch, field.dtype),
            device=device if field.name.startswith(_ON_DEVICE) else "cpu",
        )
        for field in layout
    }


class Bell:
    """Something to wait for with `dvla.planes.semaphore.wait_any`: readable from `ring` until `silence`."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __del__(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    def ring(self) -> None:
        """Wake who waits."""
        os.eventfd_write(self._fd, 1)

    def silence(self) -> None:
        """Take all rings so far."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return


@dataclass(slots=True)
class _Episode:
    """An episode under way; `decision` is the one whose actions it waits for, or that it executes."""

    slot: int
    decision: int = 0
    steps: int = 0


class BatchPool:
    """The batch simulator of a rank; its one `worker` is the bell that rings when there is something to do.

    The sampling lane's thread owns it and does the work, in `receive`; only `act` may be called from another thread.
    """

    def __init__(self, env: BatchEnvironment, *, terminate_on_success: bool) -> None:
        self._env, self._terminate_on_success = env, terminate_on_success
        self.workers = [Bell()]
        self._slots: dict[str, Tensor] = {}
        self._orders: list[Record] = []
        self._episodes: dict[int, _Episode] = {}  # by environment: observed, and not over
        self._ready: set[int] = set()  # environments of these whose actions are there
        self._lock = threading.Lock()  # guards the two above
        self._actions_written = torch.cuda.Event() if env.device.type == "cuda" else None

    def __enter__(self) -> Self:
        """Use the pool; leaving the block frees the simulator."""
        return self

    def __exit__(self, *_: object) -> None:
        """Free the simulator."""
        self.close()

    def close(self) -> None:
        """Free the simulator."""
        self._env.close()

    def spec(self) -> EnvSpec:
        """What the environments agree to be."""
        return self._env.spec

    def attach_tensors(self, slots: dict[str, Tensor]) -> None:
        """Take the slot memory: as `batch_slots` makes it, or all of it on the host, where other ranks read it, too."""
        self._slots = slots

    def generation(self, env: int) -> int:
        """How often the simulator of `env` was replaced: never."""
        return 0

    def overdue(self) -> list[tuple[Bell, Exception]]:
        """Nobody but the sampling lane itself simulates, so nobody it could find hanging."""
        return []

    def envs_of(self, worker: Bell) -> range:
        """All of them."""
        return range(self._env.num_envs)

    def beat(self, env: int) -> float:
        """It beats with the sampling lane's own pulse."""
        return 0.0

    def replace(self, worker: Bell) -> None:
        """A part of the rank's own process cannot be replaced: its errors end the run, and are never `WorkerError`s."""
        raise SimulationError(f"{self._env.spec.name}: a batch simulator cannot be replaced")

    def reset(self, env: int, slot: int, *, task: int, seed: int, ticket: int, film: int | None = None) -> None:
        """Begin an episode on environment `env`, at the next `receive`; there are no films of a batch."""
        self._orders.append(Record(Kind.reset, env, slot, 0, task, seed, ticket))
        self.workers[0].ring()

    def act(self, replies: Sequence[tuple[int, ...]]) -> None:
        """Release `replies`: (env, slot, decision, ...) whose actions lie, or will by this thread's stream, in their slots."""
        with self._lock:
            if self._actions_written is not None:
                self._actions_written.record()
            self._ready.update(env for env, *_ in replies)
            if len(self._ready) == len(self._episodes):
                self.workers[0].ring()

    @torch.inference_mode()
    def receive(self, worker: Bell) -> list[Record]:
        """Do what there is to do: run a chunk if all have their actions, begin the episodes ordered, observe once for both.

        Raises:
            SimulationError: The simulation diverged, or the policy's actions are not finite.
        """
        worker.silence()
        if self._actions_written is not None:
            torch.cuda.set_device(self._env.device)  # threads begin on the first one
        with self._lock:
            acting = sorted(self._ready) if len(self._ready) == len(self._episodes) else []
            if acting:
                self._ready.clear()
        # First the chunk: it would move those that begin now.
        times = [time.monotonic()]
        moved = self._run_chunk(acting) if acting else []
        times.append(time.monotonic())
        orders, self._orders = self._orders, []
        begun = [self._begin(order) for order in orders]
        times.append(time.monotonic())
        observed = [record for record in (*moved, *begun) if record.kind is Kind.observed]
        if observed:
            self._observe(observed)
        times.append(time.monotonic())
        chunk_s, resets_s, observe_s = (end - start for start, end in itertools.pairwise(times))
        if moved:
            chunk_s += observe_s
        else:
            resets_s += observe_s
        records = [replace(record, seconds=chunk_s) for record in moved]
        records += [replace(record, seconds=resets_s / len(begun)) for record in begun]
        return sorted(records, key=lambda record: record.env)

    def _begin(self, order: Record) -> Record:
        slots, slot = self._slots, order.slot
        initial = self._env.reset(order.env, order.task, order.seed)
        slots["ticket"][slot] = order.ticket
        slots["task"][slot] = order.task
        slots["num_decisions"][slot] = 0
        slots["success"][slot] = 0
        digest = hashlib.blake2b(initial, digest_size=16).digest()
        slots["initial_state"][slot] = torch.tensor(list(digest), dtype=torch.uint8)
        with self._lock:
            self._episodes[order.env] = _Episode(slot)
        return Record(Kind.observed, order.env, slot, 0)

    def _run_chunk(self, acting: list[int]) -> list[Record]:
        """Execute the actions of the environments `acting`, and write down what came of them."""
        env, slots = self._env, self._slots
        episodes = [self._episodes[number] for number in acting]
        left = [env.spec.max_episode_steps - episode.steps for episode in episodes]
        if self._actions_written is not None:
            torch.cuda.current_stream().wait_event(self._actions_written)
        rows, limit = torch.tensor([acting, left], device=env.device)
        of_slot, of_decision = torch.tensor(
            [[episode.slot for episode in episodes], [episode.decision for episode in episodes]],
            device=slots["actions"].device,
        )
        chunk = slots["actions"][of_slot, of_decision].to(env.device)
        actions = chunk.new_zeros((env.num_envs, *chunk.shape[1:]))
        actions[rows] = chunk
        executed, rewards = torch.zeros_like(rows), torch.zeros(len(acting), dtype=torch.float64, device=env.device)
        success, over = torch.zeros_like(rows, dtype=torch.bool), torch.zeros_like(rows, dtype=torch.bool)
        step_rewards = torch.zeros(chunk.shape[:2], dtype=torch.float64, device=env.device)
        # The outcome stays on the device until the chunk is done: asking after each step would halt the device each time.
        for step in range(min(chunk.shape[1], max(left))):
            outcome = env.step(actions[:, step])
            succeeds = outcome.success[rows]
            executed += ~over
            step_rewards[:, step] = torch.where(over, 0.0, outcome.reward[rows].double())
            rewards += step_rewards[:, step]
            success |= succeeds & ~over
            over = over | outcome.terminated[rows] | (succeeds & self._terminate_on_success) | (executed >= limit)
        sane = chunk.isfinite().flatten(1).all(1)
        flags = torch.stack([executed.double(), rewards, success.double(), over.double(), sane.double()], 1)
        told = torch.cat([flags, step_rewards], 1).tolist()
        return [self._note(*outcome) for outcome in zip(acting, episodes, told, strict=True)]

    def _note(self, env: int, episode: _Episode, told: list[float]) -> Record:
        """Write the outcome of one environment's chunk to its slot."""
        executed, reward, success, over, sane, *step_rewards = told
        slots, slot, decision = self._slots, episode.slot, episode.decision
        if not sane:
            raise SimulationError(f"{self._env.spec.name}: the policy's actions are not finite")
        if not math.isfinite(reward):
            raise SimulationError(f"the rewards of a chunk add up to {reward}: look at the environment's step")
        slots["executed_steps"][slot, decision] = int(executed)
        slots["rewards"][slot, decision] = reward
        slots["step_rewards"][slot, decision] = torch.tensor(step_rewards)
        slots["num_decisions"][slot] = decision + 1
        if success:
            slots["success"][slot] = 1
        if over:
            with self._lock:
                del self._episodes[env]
            return Record(Kind.finished, env, slot, decision)
        episode.steps += int(executed)
        episode.decision += 1
        return Record(Kind.observed, env, slot, episode.decision)

    def _observe(self, records: list[Record]) -> None:
        """Render once, and write the observations that `records` announce."""
        images, state = self._env.observe()
        home = self._slots["images"].device
        rows = torch.tensor([record.env for record in records], device=self._env.device)
        slots, decisions = torch.tensor([(record.slot, record.decision) for record in records], device=home).unbind(1)
        self._slots["images"][slots, decisions] = images[rows].to(home)
        self._slots["state"][slots, decisions] = state[rows].to(home)
        # Reading the answer waits for the device: then the pictures are there for lanes with other streams, too.
        if not state[rows].isfinite().all():
            raise SimulationError(f"{self._env.spec.name}: a state is not finite; the simulation has diverged")
