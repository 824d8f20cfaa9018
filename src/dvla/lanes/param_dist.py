"""The parameter-distribution lane: makes published shards a whole version and hands it to inference."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dvla.lanes.lane import Lane
from dvla.planes.semaphore import StopFlag, Stopped, wait_any
from dvla.planes.weights import Arrival, Publication, WeightPlaneError

if TYPE_CHECKING:
    from dvla.lanes.meeting_points import MeetingPoints
    from dvla.planes.manifest import Manifest
    from dvla.telemetry.lane_clock import LaneClock
    from dvla.telemetry.trace import Tracer


class ParamDistLane(Lane):
    """Moves versions from the learners to the replicas.

    Owns: the gloo weight group; which host buffer is free.
    Consumes: published shards (`published`), the word that a version was applied (`staging_free`).
    Produces: whole versions (`arrived`), free host buffers (`host_free`).
    Blocks on: `published`, `staging_free`, the other ranks of the weight group.
    Unblocked by: grpo (publishes), inference (applies), the param_dist lanes of the other ranks.
    """

    name = "param_dist"

    def __init__(
        self,
        *,
        meet: MeetingPoints,
        stop: StopFlag,
        manifest: Manifest,
        weights_pg: dist.ProcessGroup,
        clock: LaneClock,
        tracer: Tracer,
    ) -> None:
        super().__init__(clock, tracer)
        self._meet, self._stop, self._manifest, self._group = meet, stop, manifest, weights_pg
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
            self._agree(publication.version)  # all ranks have written: the version is whole
        with self.clock.waiting():
            self._meet.staging_free.acquire("inference to apply the version before")
        with self.tracer.span("hand over", version=publication.version):
            self._meet.arrived.put(Arrival(publication.version, publication.buffer, publication.digest))
            self.sync_seconds.append(time.monotonic() - begin)
            self.clock.count()
            # Once no replica of the node reads the version before, its buffer may be written again.
            self._agree(publication.version)
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

    def _agree(self, version: int) -> None:
        """Wait for the other ranks of the weight group, and check that they mean the same transfer."""
        mine = torch.tensor([version, self._manifest.digest()])
        low, high = mine.clone(), mine.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN, group=self._group)
        dist.all_reduce(high, dist.ReduceOp.MAX, group=self._group)
        if not torch.equal(low, high):
            raise WeightPlaneError(
                f"ranks publish different weights: versions {low[0]} to {high[0]}, manifests {low[1]:x} to {high[1]:x}"
            )
