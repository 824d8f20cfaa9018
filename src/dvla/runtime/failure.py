"""How a rank says that it failed: a file for the other ranks, lines for people, torchrun's error file for torchrun.

Ranks fail within moments of each other, but only the first has an error to look for; the others notice that it is gone. So
each writes its error down the moment it happens, all read what the others wrote, and all tell the same one.

Exit codes of a rank: 0 completed, or stopped as asked; 1 failed; 2 a setting cannot work; 3 the run stood still
(`dvla.runtime.supervisor`); 128 + n left at once on a second signal n.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Self

from dvla.telemetry.atomic_file import write_atomically

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)

EXIT_FAILED, EXIT_SETTING, EXIT_STALLED = 1, 2, 3

_SETTLE_S = 0.5  # the ranks of a run fail within moments of each other: give the first one time to write its file
_TIME = "dvla_time"
_NAMES_WHO_DIED = re.compile(r"TransportError: rank \d+ \(pid \d+\) died")
_CONSEQUENCE = re.compile(
    r"TransportError: .* (lost its route|left before)|WeightPlaneError: .* waited in vain|\w*Error: .*"
    r"(Connection (closed|reset) by peer|Broken pipe|[Ss]ocket (closed|timeout)|ncclRemoteError|communicator was aborted)",
    re.DOTALL,
)


def describe(error: BaseException) -> str:
    """The error in one line, with what was noted on its way (`BaseException.add_note`)."""
    text = " ".join(str(error).split())
    text += "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def note_lane(error: BaseException, lane: str) -> None:
    """Note on `error` where and when it happened: it is raised again on another thread, perhaps seconds later."""
    error.add_note(f"in lane {lane}")
    vars(error)[_TIME] = time.time()


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of a rank."""

    rank: int
    time: float
    """When it happened, in seconds since 1970."""
    message: str
    """One line."""
    traceback: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Self:
        """What happened on `rank`."""
        times = [vars(it)[_TIME] for it in (error, error.__cause__) if it is not None and _TIME in vars(it)]
        when = times[0] if times else time.time()
        return cls(rank, when, describe(error), "".join(traceback.format_exception(error)).rstrip())

    @property
    def order(self) -> tuple[int, float]:
        """Of several failures the least came first: clocks of nodes differ, but who lost a peer was never the first."""
        consequence = 1 if _NAMES_WHO_DIED.match(self.message) else 2 if _CONSEQUENCE.match(self.message) else 0
        return consequence, self.time

    def told_by(self, rank: int) -> str:
        """The message as `rank` tells it."""
        return self.message if rank == self.rank else f"rank {self.rank}: {self.message}"


class RunFailedError(Exception):
    """Raised from this rank's own error; `first` is the first of all ranks."""

    def __init__(self, first: Failure) -> None:
        super().__init__(first.message)
        self.first = first


def write_failure(folder: Path, failure: Failure) -> None:
    """Leave this rank's failure for the others in `folder`, in place of an earlier one; a full disk is passed over."""
    try:
        write_atomically(folder / f"failure_rank{failure.rank:05d}.json", [json.dumps(asdict(failure))])
    except OSError as error:
        logger.warning("cannot tell the other ranks: %s", error, extra={"file_only": True})


def settle(folder: Path, mine: Failure) -> list[Failure]:
    """Leave this rank's failure in `folder`, give the others a moment to do so too, and read all; the first comes first."""
    write_failure(folder, mine)
    time.sleep(_SETTLE_S)
    failures = {mine.rank: mine}
    try:
        found = [Failure(**json.loads(path.read_text())) for path in folder.glob("failure_rank*.json")]
    except OSError:
        found = []
    return sorted((failures | {failure.rank: failure for failure in found}).values(), key=lambda failure: failure.order)


def announce(first: Failure, rank: int, *, aloud: bool = True) -> None:
    """Say the first failure as the last words of this `rank`: to people if `aloud`, and in torchrun's report at the end."""
    ended = "error" if first.rank == rank else f"ended by the error of rank {first.rank}"
    if aloud:
        sys.stderr.write(f"dvla: rank {rank}: {ended}: {first.message}\n")
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        message = first.told_by(rank)
        extra = {"py_callstack": f"{first.traceback}\n{message}".lstrip(), "timestamp": str(int(first.time))}
        with open(path, "w") as file:  # noqa: PTH123 - torchrun's path, may be a device
            json.dump({"message": {"message": message, "extraInfo": extra}}, file)
