"""Episodes for evaluation: every (task, initial state) of a list exactly once a round, each on its own."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dvla.config import ConfigError
from dvla.planes.tickets import Ticket
from dvla.planes.transport import Kind, Parcel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from torch import Tensor

    from dvla.config import EvaluationConfig
    from dvla.envs.protocol import EnvSpec
    from dvla.lanes.episode_source import BeginningVersions
    from dvla.planes.transport import Transport

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


def evaluation_tickets(spec: EnvSpec, config: EvaluationConfig, *, sampler: int, num_samplers: int) -> list[Ticket]:
    """One sampling rank's share of all (task, initial state) pairs; the shares of all are disjoint and complete.

    The pairs come in blocks of a few states of each task in turn: a stopped evaluation has seen all tasks, and simulators
    seldom have to build another one. A pair's ticket, and so its noise, is the same whatever the number of ranks.

    Args:
        spec: The environment.
        config: Which episodes, and how they are played.
        sampler: Its number among the sampling ranks.
        num_samplers: How many there are.
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
        for task, state in pairs[sampler::num_samplers]
    ]


def outcome_of(parcel: Parcel, slots: Mapping[str, np.ndarray | Tensor]) -> Outcome:
    """How the episode that `parcel` (of kind `outcome`) is about ended, read from its slot."""
    (slot,) = parcel.slots
    length = int(slots["num_decisions"][slot])
    versions = slots["behavior_version"][slot, :length]
    return Outcome(
        task=parcel.task,
        seed=parcel.id,
        success=bool(slots["success"][slot]),
        steps=int(slots["executed_steps"][slot, :length].sum()),
        reward=float(slots["rewards"][slot, :length].sum()),
        first_version=int(versions.min()),
        last_version=int(versions.max()),
    )


class EvaluationEpisodes:
    """An `EpisodeSource` that plays its tickets once for every round it is asked for.

    Args:
        tickets: The episodes of a round.
        free: Slots for evaluation alone: training may hold all others while it waits for a round.
        learners: To the training ranks.
        home: The one of them that outcomes are for.
        versions: Which weights episodes of this rank begin with.
    """

    def __init__(
        self,
        tickets: Sequence[Ticket],
        *,
        free: Sequence[int],
        learners: Transport,
        home: int,
        versions: BeginningVersions,
    ) -> None:
        self._plan, self._learners, self._home, self._versions = tickets, learners, home, versions
        self._own, self._free = frozenset(free), list(free)
        self._rounds: deque[int] = deque()
        self._tickets: deque[Ticket] = deque()

    def take(self, parcel: Parcel) -> None:
        """Take in rounds, and slots that were freed."""
        if parcel.kind is Kind.round:
            self._rounds.append(parcel.version)
        elif parcel.kind is Kind.freed and parcel.slots[0] in self._own:
            self._free.extend(parcel.slots)

    def next(self) -> tuple[Ticket, int] | None:
        """The next episode of the round."""
        if not self._tickets and self._rounds:
            version = self._rounds.popleft()
            self._tickets.extend(
                replace(ticket, version=version, film=None if ticket.film is None else version) for ticket in self._plan
            )
        if not self._tickets or not self._free or not self._versions.may_begin(self._tickets[0].version):
            return None
        ticket = self._tickets.popleft()
        return replace(ticket, version=self._versions.begin(ticket.version)), self._free.pop()

    def finished(self, ticket: Ticket, slot: int) -> None:
        """Report the outcome; the slot is free again once it has been read."""
        self._learners.send(Parcel(Kind.outcome, self._home, (slot,), ticket.seed, ticket.task, ticket.version))
