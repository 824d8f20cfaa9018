"""Reach, of which one worker stands still within a reset or a step, once a file says that it is time."""

from __future__ import annotations

import inspect
from pathlib import Path

from standing import stand

from dvla.envs.reach import ReachEnv


class StandingReach(ReachEnv):
    """Reach with two options of its own.

    Args:
        place: "reset" or "step", where to stand.
        armed: The file that says that it is time; whoever takes it away stands, behind one with `.standing` added to its name.
    """

    def __init__(self, *args, place: str = "", armed: str = "", **options) -> None:
        super().__init__(*args, **options)
        self._place, self._armed = place, Path(armed)

    def reset(self, task, seed):
        self._look("reset")
        return super().reset(task, seed)

    def step(self, action):
        self._look("step")
        return super().step(action)

    def _look(self, place):
        if place != self._place or not self._armed.exists():
            return
        try:
            self._armed.unlink()
        except FileNotFoundError:  # another worker was faster
            return
        stand(self._armed.with_name(self._armed.name + ".standing"))


StandingReach.__signature__ = inspect.Signature(
    [
        *inspect.signature(ReachEnv).parameters.values(),
        *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default="") for name in ("place", "armed")),
    ]
)
