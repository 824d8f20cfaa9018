"""Pipelined stages: parts of a rank's environments that act together, one simulating while another is decided for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dvla.planes.transport import Parcel


class Stages:
    """Holds requests back until none of their stage is still acting; then they make one inference batch.

    An environment whose episode is over, or begins, is not waited for: it joins with its first observation.

    Args:
        num_stages: Stages; None lets every request pass at once.
    """

    def __init__(self, num_stages: int | None) -> None:
        self._num_stages = num_stages
        self._acting: list[set[int]] = [set() for _ in range(num_stages or 1)]
        self._asking: list[list[Parcel]] = [[] for _ in range(num_stages or 1)]

    def of(self, env: int) -> int:
        """The stage of an environment; a worker's neighbours differ, so that it simulates one while another is decided for."""
        return env % (self._num_stages or 1)

    def asks(self, request: Parcel) -> list[Parcel]:
        """An environment asks for a decision; the requests to send now."""
        if self._num_stages is None:
            return [request]
        self._acting[request.stage].discard(request.id)
        self._asking[request.stage].append(request)
        return self._complete(request.stage)

    def leaves(self, env: int) -> list[Parcel]:
        """The episode of an environment is over, or lost with its worker; the requests to send now."""
        stage = self.of(env)
        self._acting[stage].discard(env)
        self._asking[stage] = [request for request in self._asking[stage] if request.id != env]
        return self._complete(stage)

    def _complete(self, stage: int) -> list[Parcel]:
        if self._acting[stage]:
            return []
        together, self._asking[stage] = self._asking[stage], []
        self._acting[stage].update(request.id for request in together)
        return together
