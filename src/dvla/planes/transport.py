"""How orders, observations, actions and finished groups get from one set of ranks to another: one interface, two ways.

* `dvla.planes.shared_transport`: the ranks are on one node (or are one) and map one slot memory. Ids pass through a Unix
  socket, or within a process through a channel.
* `dvla.planes.collective_transport`: the ranks share no memory. What the slots hold travels, too, into slots of the
  receiver.

A sender hands the slots of a group over with `send` and has them back when a `freed` parcel arrives; the receiver frees
them with `free`. So slots bound what is in flight: no transport holds more than its senders had slots.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

from dvla.planes.semaphore import Stopped, WaitTimeoutError, wait_any

if TYPE_CHECKING:
    from dvla.planes.semaphore import StopFlag


class Kind(IntEnum):
    """What a parcel says about its slots."""

    group = 1
    """To the training rank: all episodes of group `id`, whose slots now are its own until it frees them."""
    request = 2
    """To the inference rank: the observation of `decision` lies in the slot, which is lent until the reply."""
    reply = 3
    """To the sampling rank: the actions of `decision` lie in the slot it had lent."""
    order = 4
    """To the sampling rank: sample group `id`; it may begin once the weights of `version` are in use."""
    freed = 5
    """To the sampling rank: the slots of group `id` may hold other episodes."""
    left = 6
    """The peer has closed in order: nothing more comes from it."""
    round = 7
    """To the sampling rank: evaluate `version`, or a newer one, on all evaluation episodes."""
    outcome = 8
    """To the training rank: the evaluation episode of `task` and initial state `id` is over; like a group of one slot."""
    wish = 9
    """To the training rank: this rank was asked to stop the run."""
    published = 10
    """To a rank that infers but does not train: shards of `version` lie, or will, in host buffer `id`, digest `task`."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """Ids; what they are about lies in the slots."""

    kind: Kind
    peer: int
    """The rank it goes to or came from."""
    slots: tuple[int, ...] = ()
    """In the memory of the rank that holds this object; a group's are ordered by member."""
    id: int = 0
    """Number of the group; of a request and its reply the environment."""
    task: int = 0
    version: int = 0
    """The weights that its decisions are made with, or newer ones."""
    decision: int = 0
    """Of a request and its reply."""
    greedy: bool = False
    """Of a request: whether it asks for the likeliest actions."""
    generation: int = 0
    """Of a request and its reply: of the environment's worker, so that a reply for one that was replaced is known."""
    stage: int = 0
    """Of a request: of those of one stage at a time an inference batch is made."""
    remote: tuple[int, ...] = ()
    """The same slots as the peer counts them, on a parcel that was received."""

    def answer(self, kind: Kind) -> Parcel:
        """The parcel of `kind` that answers this one, about the same slots."""
        return replace(self, kind=kind)


class TransportError(RuntimeError):
    """A peer died or sent what it must not; the message says who."""


class Transport(Protocol):
    """One rank's end. Any thread may send and free; one thread receives."""

    def fileno(self) -> int:
        """Descriptor that is readable while `receive` has something to return or to raise."""

    def send(self, parcel: Parcel) -> None:
        """Pass `parcel` to its peer. That the peer is gone shows at the next `receive`."""

    def receive(self) -> Parcel | None:
        """The next parcel, in the order sent by each peer; None when there is none. Never waits.

        Raises:
            TransportError: A peer died.
        """

    def free(self, group: Parcel) -> None:
        """Give the slots of a received group back."""

    def close(self) -> None:
        """Tell the peers that nothing more comes, and let go of what the end holds."""


def receive_within(transport: Transport, stop: StopFlag, seconds: float, waiting_for: str) -> Parcel:
    """The next parcel, waiting for it. A lane that waits for more than parcels has `wait_any`, as every end is selectable.

    Raises:
        Stopped: The run is stopping.
        TransportError: A peer died.
        WaitTimeoutError: Nothing came within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        is_ready = wait_any([stop, transport], max(0.0, deadline - time.monotonic()))
        if stop.is_set():
            raise Stopped
        if not is_ready:
            lane = threading.current_thread().name.removeprefix("dvla-")
            raise WaitTimeoutError(
                f"lane {lane} waited {seconds:.0f} s for {waiting_for}; raise runtime.wait_timeout_s if the work can "
                "take that long"
            )
        if (parcel := transport.receive()) is not None:
            return parcel
