"""The parameter-distribution lane: makes published shards a whole version and hands it to inference."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dvla.lanes.lane import Lane
from dvla.planes.semaphore import Selectable, StopFlag, Stopped, wait_any
from dvla.planes.transport import Kind, Parcel
from dvla.planes.weights import Arrival, Publication

if TYPE_CHECKING:
    from dvla.lanes.meeting_points import MeetingPoints
    from dvla.planes.exchange import WeightExchange
    from dvla.planes.shared_transport import SharedTransport
    from dvla.telemetry.durations import Durations
    from dvla.telemetry.lane_clock import LaneClock
    from dvla.telemetry.trace import Tracer


class ParamDistLane(Lane):
    """Moves versions from the learners to the replicas.

    Owns: the exchange, with the gloo groups of the node and of the leaders; which host buffer is free.
    Consumes: published shards (`published`, or word of them from a training rank), the word that a version was applied
        (`staging_free`).
    Produces: whole versions (`arrived`), free host buffers (`host_free`), word of versions for ranks that do not train.
    Blocks on: `published`, `staging_free`, the param_dist lanes of the node; a leader also on the other leaders.
    Unblocked by: grpo (publishes), inference (applies), these lanes.

    Args:
        meet: Where it meets the lanes of its rank.
        stop: The rank's stop flag.
        exchange: The collective steps.
        trains: Whether this rank has a learner.
        infers: Whether this rank has a replica.
        peers: To the ranks this one tells of new versions, or, if it does not train, to the one that tells it.
        syncs: Takes the seconds from published to arrived, of each version.
    """

    name = "param_dist"

    def __init__(
        self,
        *,
        meet: MeetingPoints,
        stop: StopFlag,
        exchange: WeightExchange,
        trains: bool,
        infers: bool,
        peers: SharedTransport,
        syncs: Durations,
        clock: LaneClock,
        tracer: Tracer,
    ) -> None:
        super().__init__(clock, tracer)
        self._meet, self._stop, self._exchange = meet, stop, exchange
        self._trains, self._infers, self._peers = trains, infers, peers
        self._first = True
        self._syncs = syncs

    def step(self) -> None:
        """Distribute one version."""
        with self.clock.waiting("published", "grpo"):
            publication = self._next_publication()
        begin = time.monotonic()
        with (
            self.tracer.span("gather", version=publication.version),
            self.clock.doing(f"collective: gather version {publication.version}", "param_dist"),
        ):
            self._exchange.gather(publication)
        if self._infers:
            self.clock.beat()
            with self.clock.waiting("staging_free", "inference"):
                self._meet.staging_free.acquire("inference to apply the version before")
        with self.tracer.span("hand over", version=publication.version):
            if self._infers:
                self._meet.arrived.put(Arrival(publication.version, publication.buffer, publication.digest))
            self._syncs.add(time.monotonic() - begin)
            self.clock.count()
            # Once all replicas of the node have applied the version before, the next may be written (see HostBuffers).
            with self.clock.doing(f"collective: replicas apply what came before {publication.version}", "param_dist"):
                self._exchange.await_applied(publication)
            if not self._first:
                self._meet.host_free.release()
            self._first = False

    def _next_publication(self) -> Publication:
        """Wait for the learner. That takes as long as a step takes: idling is no fault, so there is no time limit.

        Raises:
            Stopped: There will be no more.
            TransportError: The training rank that tells this one died.
        """
        source: Selectable = self._meet.published.semaphore if self._trains else self._peers
        while True:
            wait_any([self._stop, source], 60.0)
            if self._stop.is_set():
                raise Stopped
            if self._trains:
                if len(self._meet.published):
                    return self._tell(self._meet.published.get())
            elif (parcel := self._peers.receive()) is not None:
                if parcel.kind is Kind.left:
                    raise Stopped
                return Publication(parcel.version, parcel.id, parcel.task or None)

    def _tell(self, publication: Publication | None) -> Publication:
        """Tell the ranks that do not train of a version, or that there will be no more."""
        if publication is None:
            self._peers.leave()
            raise Stopped
        for peer in self._peers.peers:
            digest = publication.digest or 0
            self._peers.send(
                Parcel(Kind.published, peer, id=publication.buffer, task=digest, version=publication.version)
            )
        return publication
