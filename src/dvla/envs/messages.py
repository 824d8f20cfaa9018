"""What a rank and its worker processes say to each other: fixed records over a Unix packet socket.

Only ids and wake-ups travel; observations, actions and results lie in the slots. A packet holds whole records, so one
packet can order several environments on.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum

MAX_PACKET = 1 << 16


class Kind(IntEnum):
    """Meaning of a record."""

    reset = 1
    """To the worker: begin the episode of `ticket` in `slot`."""
    act = 2
    """To the worker: the actions of `decision` lie in `slot`, go on. This is the semaphore `replies`."""
    observed = 3
    """From the worker: the observation of `decision` lies in `slot`."""
    finished = 4
    """From the worker: the episode in `slot` is over, its results lie there."""
    failed = 5
    """From the worker: an exception; its text follows the record."""
    film = 6
    """To the worker: as `reset`, and record the episode to a video of evaluation round `decision`."""


_RECORD = struct.Struct("<iiiiiqqd")
RECORD_BYTES = _RECORD.size


@dataclass(frozen=True, slots=True)
class Record:
    """One message about one environment."""

    kind: Kind
    env: int
    """Number of the environment within its worker."""
    slot: int
    decision: int = 0
    task: int = 0
    seed: int = 0
    ticket: int = 0
    seconds: float = field(default=0.0, compare=False)
    """From the worker: what the order took. From a batch simulator: what the chunk of all took, or the reset of this one."""

    def pack(self) -> bytes:
        """The record as bytes."""
        return _RECORD.pack(
            self.kind, self.env, self.slot, self.decision, self.task, self.seed, self.ticket, self.seconds
        )


def unpack(packet: bytes) -> tuple[list[Record], str]:
    """Records of a packet, and the error text that follows a `failed` one."""
    records = []
    for start in range(0, len(packet), RECORD_BYTES):
        kind, *rest = _RECORD.unpack_from(packet, start)
        record = Record(Kind(kind), *rest)
        records.append(record)
        if record.kind is Kind.failed:
            return records, packet[start + RECORD_BYTES :].decode(errors="replace")
    return records, ""
