"""Staleness is bounded by who may start and who is trained first; nothing is thrown away for its age.

Two pure rules, one for each end of a group's life. The sampling lane asks `may_start` before it begins a
group, the learner asks `choose_group` whenever it wants the next one. Together they keep the promise that no
group is trained on more than `max_staleness` optimiser steps after the weights it began with. A group that
began at version v is *due* in the batch of version ``v + max_staleness`` at the latest:

* `may_start` lets no more than ``(v + max_staleness + 1) * groups_per_step`` undropped groups begin at
  version v or before: that many have room in the batches up to the one in which the last of them is due;
* `choose_group` keeps that room. While the groups due in the next few batches leave a place to spare, the
  first finished goes first, however young. When they fill these batches to the last place, only they may be
  taken.

Each rule alone is too weak. Admission alone is AReaL's rule (arXiv 2505.24298) and bounds only the *number*
of groups ahead: fast groups could overtake a slow one for ever. Putting a group first only once it is due
fails too, from max_staleness 2 on: younger groups may have taken places of earlier batches, and then more
groups are due at once than one batch can hold. Dropping stale groups instead would bias the data towards
short episodes.

The hazard is which version to pass. A group acts with the weights that have *arrived* at the sampling side,
which may lag the learner: `may_start` and `begun_at` take that version, `choose_group` takes the learner's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def may_start(
    groups_started: int,
    groups_dropped: int,
    policy_version: int,
    *,
    max_staleness: int,
    groups_per_step: int,
) -> bool:
    """Say whether one more group may begin now.

    Args:
        groups_started: Groups begun so far in the whole run, dropped ones included.
        groups_dropped: Those of them that were, or will be, left out of every batch (no signal, lost in a
            crash).
        policy_version: Version of the weights the group would begin with; one version is one batch.
        max_staleness: Optimiser steps that may lie between a group's beginning and its training; 0 is
            on-policy.
        groups_per_step: Groups in the batch of one optimiser step.
    """
    return groups_started - groups_dropped < (policy_version + max_staleness + 1) * groups_per_step


def choose_group(
    finished: Sequence[int],
    begun_at: Mapping[int, int],
    *,
    groups_taken: int,
    max_staleness: int,
    groups_per_step: int,
) -> int | None:
    """Pick the group the learner takes next, or None when it has to wait.

    Args:
        finished: Ids of the finished groups that the learner has not taken yet, in order of finishing.
        begun_at: Version each group not yet taken began with, by id; running groups are in it too.
        groups_taken: Groups the learner has taken so far in the whole run: the batches done, and what the
            present one has already; without the dropped ones.
        max_staleness: As in `may_start`.
        groups_per_step: As in `may_start`.

    Returns:
        The first finished of the groups that fill the next batches to the last place, None while all of these
        still run. Where no batch is filled like this, the first finished, None when nothing is finished.
    """
    for num_due, version in enumerate(sorted(begun_at.values()), start=1):
        places = (version + max_staleness + 1) * groups_per_step - groups_taken
        if num_due >= places:
            return next((group for group in finished if begun_at[group] <= version), None)
    return finished[0] if finished else None
