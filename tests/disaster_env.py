"""The real simulators with a disaster: the worker is killed in the middle of a reset, a chunk or a picture, once."""

from __future__ import annotations

import inspect
import os
import signal
import threading

from dvla.envs.libero import LiberoEnv
from dvla.envs.maniskill import ManiSkillEnv

_AFTER_S = 0.002  # each of the three takes longer than this, or dies a moment later in what follows


def with_disaster(environment):
    """A class that behaves as `environment`, with the options `place` ("reset", "step", "observe"), `count` and `marker`."""

    class Disaster(environment):
        def __init__(self, *args, place="", count=0, marker="", **options):
            super().__init__(*args, **options)
            self._place, self._left, self._marker = place, count, marker

        def _strike(self, place):
            if place != self._place:
                return
            self._left -= 1
            if self._left == 0:
                try:
                    os.close(os.open(self._marker, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    return
                threading.Timer(_AFTER_S, os.kill, (os.getpid(), signal.SIGKILL)).start()

        def reset(self, task, seed):
            self._strike("reset")
            return super().reset(task, seed)

        def step(self, action):
            self._strike("step")
            return super().step(action)

        def observe(self, images, state):
            self._strike("observe")
            return super().observe(images, state)

    own = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in ("place", "count", "marker")
    ]
    parameters = [*inspect.signature(environment).parameters.values()]
    Disaster.__signature__ = inspect.Signature(
        [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters] + own
    )
    return Disaster


DisasterManiSkill = with_disaster(ManiSkillEnv)
DisasterLibero = with_disaster(LiberoEnv)
