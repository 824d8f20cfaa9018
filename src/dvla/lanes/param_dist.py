"""The parameter-distribution lane: makes published shards a whole version and hands it to inference."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dvla.lanes.lane import Lane
from dvla.planes.semaphore import StopFlag, Stopped, wait_any
from dvla.planes.weights import Arrival, Publication

if TYPE_CHECKING:
    from dvla.lanes.meeting_points import MeetingPoints
    from dvla.planes.exchange import WeightExchange
    from dvla.telemetry.lane_clock import LaneClock
    from dvla.telemetry.trace import Tracer


class ParamDistLane(Lane):
    """Moves versions from the learners to the replicas.

    Owns: the exchange, with the gloo groups of the node and of the leaders; which host buffer is free.
    Consumes: published shards (`published`), the word that a version was applied (`staging_free`).
    Produces: whole versions (`arrived`), free host buffers (`host_free`).
    Blocks on: `published`, `staging_free`, the param_dist lanes of the node; a leader also on the other leaders.
    Unblocked by: grpo (publishes), inference (applies), these lanes.
    """

    name = "param_dist"

    def __init__(
        self,
        *,
        meet: MeetingPoints,
        stop: StopFlag,
        exchange: WeightExchange,
        clock: LaneClock,
        tracer: Tracer,
    ) -> None:
        super().__init__(clock, tracer)
        self._meet, self._stop, self._exchange = meet, stop, exchange
        self._first = True
        self.sync_seconds: list[float] = []
        """Published to arrived, of each version."""

    def step(self) -> None:
        """Distribute one version."""
        with self.clock.waiting():
            publication = self._next_publication()
        if publication is None:
            raise Stopped
        begin = time.monotonic()
        with self.tracer.span("gather", version=publication.version):
            self._exchange.gather(publication)
        with self.clock.waiting():
            self._meet.staging_free.acquire("inference to apply the version before")
        with self.tracer.span("hand over", version=publication.version):
            self._meet.arrived.put(Arrival(publication.version, publication.buffer, publication.digest))
            self.sync_seconds.append(time.monotonic() - begin)
            self.clock.count()
            # Once all replicas of the node have applied the version before, the next may be written (see HostBuffers).
            self._exchange.await_applied(publication)
            if not self._first:
                self._meet.host_free.release()
            self._first = False

    def _next_publication(self) -> Publication | None:
        """Wait for the learner. That takes as long as a step takes: idling is no fault, so there is no time limit."""
        while not len(self._meet.published):
            wait_any([self._stop, self._meet.published.semaphore], 60.0)
            if self._stop.is_set():
                raise Stopped
        return self._meet.published.get()
