"""Faults on purpose, at a point of a lane of a rank: words that say which, and a tracer that brings them about.

A fault is e.g. ``lane=grpo rank=1 point=gradient step=3 do=hang``. Points are the spans of `dvla.telemetry.trace`, so the
program itself holds nothing for faults. Words:

* ``lane``, ``rank``, ``point``: where; other words than those below must agree with what is shown with the span, as
  ``greedy=True``. Words with blanks are quoted as in a shell.
* ``step``: the policy version that the rank must have published (0, the one it begins with), and ``call``: which pass of the
  point from then on (1, the first).
* ``stand``: a file; the lane first stands still at the point until somebody has removed it (`standing.stand`).
* ``do``: what then happens, see `DEEDS`. ``file`` and ``seconds`` say more.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from standing import stand

from dvla.telemetry.trace import Tracer


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, where and when."""

    lane: str
    rank: int
    point: str
    do: str
    step: int = 0
    call: int = 1
    stand: Path | None = None
    file: Path | None = None
    seconds: float = 0.0
    shown: dict[str, str] = field(default_factory=dict)
    """What must be shown with the span."""

    def is_at(self, lane: str, rank: int, point: str, shown: dict[str, Any]) -> bool:
        """Whether a span is the point of this fault."""
        is_there = (lane, rank, point) == (self.lane, self.rank, self.point)
        return is_there and all(str(shown.get(name)) == value for name, value in self.shown.items())


def parse(text: str) -> Fault:
    """The fault that `text` describes.

    Raises:
        ValueError: It describes none.
    """
    kinds = {"rank": int, "step": int, "call": int, "stand": Path, "file": Path, "seconds": float}
    values: dict[str, Any] = {}
    for word in shlex.split(text):
        name, mark, value = word.partition("=")
        if not mark or name in values:
            raise ValueError(f"{word!r} is no word of a fault, or one too many: {text}")
        values[name] = kinds.get(name, str)(value)
    own = {name: values.pop(name) for name in Fault.__slots__ if name in values}
    if missing := [name for name in ("lane", "rank", "point", "do") if name not in own]:
        raise ValueError(f"the fault does not say {', '.join(missing)}: {text}")
    if own["do"] not in DEEDS:
        raise ValueError(f"do={own['do']} is none of {', '.join(DEEDS)}")
    if own["do"] == "corrupt" and own["point"] not in DAMAGES:
        raise ValueError(f"nothing can be corrupted at {own['point']}, only at {', '.join(DAMAGES)}")
    return Fault(**own, shown=values)


def inject(fault: Fault) -> None:
    """Have it happen in this process, if this is its rank."""
    span = Tracer.span
    published, calls = 0, 0

    def faulty(self: Tracer, name: str, /, **args: Any) -> Any:
        nonlocal published, calls
        if name == "publish":
            published = args["version"]
        block = span(self, name, **args)
        if published < fault.step or not fault.is_at(self._lane, self._rank, name, args):
            return block
        calls += 1
        if calls != fault.call and not (fault.do == "slow" and calls > fault.call):
            return block
        return _struck(block, fault, sys._getframe(1).f_locals)

    Tracer.span = faulty


@contextmanager
def _struck(block: Any, fault: Fault, context: dict[str, Any]) -> Iterator[None]:
    with block:
        if fault.stand is not None:
            stand(fault.stand)
        DEEDS[fault.do](fault)
        yield
        if fault.do == "corrupt":
            DAMAGES[fault.point](context)


# -- what can happen -------------------------------------------------------------------------------------------------


def _raise(_: Fault) -> None:
    raise ValueError("the arm fell off")


def _kill(_: Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang(_: Fault) -> None:
    _lock_twice(ctypes.CDLL(None))


def _hold(_: Fault) -> None:
    _lock_twice(ctypes.PyDLL(None))


def _lock_twice(library: ctypes.CDLL) -> None:
    mutex = ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def _slow(fault: Fault) -> None:
    time.sleep(fault.seconds)


def _touch(fault: Fault) -> None:
    fault.file.touch()


def _go_on(_: Fault) -> None:
    pass


DEEDS = {
    "raise": _raise,
    "kill": _kill,
    "hang": _hang,
    "hold": _hold,  # hang with the interpreter's lock
    "slow": _slow,  # from now on at every pass
    "corrupt": _go_on,  # what the block has made, when it is left
    "touch": _touch,
    "go": _go_on,
}


def _corrupt_checkpoint(context: dict[str, Any]) -> None:
    """Turn over a byte of a part that this rank has written and hashed."""
    part = min(context["temporary"].glob(f"__{os.environ['RANK']}_*"))
    with part.open("r+b") as file:
        (before,) = file.read(1)
        file.seek(0)
        file.write(bytes([before ^ 255]))


def _corrupt_weights(context: dict[str, Any]) -> None:
    """Change a weight of the version that this rank has just written for others."""
    context["self"]._writer._places[context["buffer"]][0].view(-1)[0].add_(1.0)


DAMAGES = {"checkpoint write": _corrupt_checkpoint, "publish": _corrupt_weights}
"""By point: what damages its work, given the variables of the function whose block it is."""
