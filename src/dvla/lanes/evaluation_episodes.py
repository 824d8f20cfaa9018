"""Episodes for evaluation: every (task, initial state) of a list exactly once a round, each on its own."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dvla.config import ConfigError
from dvla.planes.tickets import Ticket

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from dvla.config import EvaluationConfig
    from dvla.envs.protocol import EnvSpec
    from dvla.lanes.meeting_points import MeetingPoints
    from dvla.planes.semaphore import Selectable

_FIRST_ID = 1 << 48
"""Ticket numbers of evaluation begin here, beyond all of training's: they are keys of noise."""
_UNLISTED = 50
"""Initial states of a task whose simulator has no list of them."""
_BLOCK = 10
"""States of one task that are played one after the other."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an evaluation episode ended."""

    task: int
    seed: int
    success: bool
    steps: int
    """Control steps."""
    reward: float
    """Sum over the episode."""
    first_version: int
    """The oldest weights that decided in it."""
    last_version: int


def states_of_tasks(spec: EnvSpec, wanted: int | None) -> list[int]:
    """How many initial states of each task to evaluate: `wanted`, or else all that are listed, or else 50.

    Raises:
        ConfigError: More are wanted than the simulator lists.
    """
    if not spec.num_initial_states:
        return [wanted or _UNLISTED] * len(spec.instructions)
    fewest = min(spec.num_initial_states)
    if wanted is not None and wanted > fewest:
        raise ConfigError(f"evaluation.episodes_per_task={wanted}: {spec.name} has a task with {fewest} initial states")
    return [wanted or listed for listed in spec.num_initial_states]


def evaluation_tickets(spec: EnvSpec, config: EvaluationConfig, *, rank: int, world_size: int) -> list[Ticket]:
    """This rank's share of all (task, initial state) pairs; the shares of all ranks are disjoint and complete.

    The pairs come in blocks of a few states of each task in turn: a stopped evaluation has seen all tasks, and simulators
    seldom have to build another one. A pair's ticket, and so its noise, is the same whatever the number of ranks.

    Args:
        spec: The environment.
        config: Which episodes, and how they are played.
        rank: This rank.
        world_size: Number of ranks.
    """
    num_states = states_of_tasks(spec, config.episodes_per_task)
    first_seed = 0 if spec.num_initial_states else config.seed
    pairs = [(task, state) for task, count in enumerate(num_states) for state in range(count)]
    pairs.sort(key=lambda pair: (pair[1] // _BLOCK, *pair))
    return [
        Ticket(
            id=_FIRST_ID + task * (1 << 24) + state,
            group=-1,
            member=0,
            task=task,
            seed=first_seed + state,
            greedy=config.greedy,
            film=0 if state < config.videos_per_task else None,
        )
        for task, state in pairs[rank::world_size]
    ]


class EvaluationEpisodes:
    """An `EpisodeSource` that plays its tickets once for every version put into `rounds`.

    Args:
        tickets: The episodes of a round.
        slots: The episode slots.
        free: Those that are for evaluation alone: training may hold all others while it waits for a round.
        meet: Where versions come from and outcomes go.
    """

    def __init__(
        self, tickets: Sequence[Ticket], *, slots: dict[str, np.ndarray], free: Sequence[int], meet: MeetingPoints
    ) -> None:
        self._plan, self._slots, self._free, self._meet = tickets, slots, list(free), meet
        self._tickets: deque[Ticket] = deque()
        self._version = -1

    def next(self) -> tuple[Ticket, int] | None:
        """The next episode of the round, once its version is in use."""
        if not self._tickets and (version := self._meet.rounds.try_get()) is not None:
            self._version = version
            self._tickets.extend(
                ticket if ticket.film is None else replace(ticket, film=version) for ticket in self._plan
            )
        if not self._tickets or self._meet.applied_version < self._version:
            return None
        return (self._tickets.popleft(), self._free.pop()) if self._free else None

    def opens_with(self) -> Sequence[Selectable]:
        """A round; within one, new weights (and the end of one of its episodes)."""
        return [self._meet.admission] if self._tickets else [self._meet.rounds.semaphore]

    def is_exhausted(self) -> bool:
        """Whether no round is under way or waits."""
        return not self._tickets and not len(self._meet.rounds)

    def finished(self, ticket: Ticket, slot: int) -> None:
        """Report the outcome and free the slot."""
        slots, length = self._slots, int(self._slots["num_decisions"][slot])
        versions = slots["behavior_version"][slot, :length]
        self._meet.outcomes.put(
            Outcome(
                task=ticket.task,
                seed=ticket.seed,
                success=bool(slots["success"][slot]),
                steps=int(slots["executed_steps"][slot, :length].sum()),
                reward=float(slots["rewards"][slot, :length].sum()),
                first_version=int(versions.min()),
                last_version=int(versions.max()),
            )
        )
        self._free.append(slot)
