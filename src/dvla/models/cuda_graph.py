"""Inference as CUDA graphs: at small batches launching the kernels takes longer than running them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dvla.models.policy import Decision, Observation

Replay = Callable[[], None]
_WARM_UPS = 3


@dataclass(frozen=True, slots=True)
class _Captured:
    """A recorded call: where its inputs lie, how to run it, where its results lie."""

    inputs: tuple[Tensor, ...]
    replay: Replay
    decision: Decision


def capture_graph(call: Callable[[], Decision]) -> tuple[Replay, Decision]:
    """Record `call` on the current stream's device; its tensors stay where they are from one replay to the next."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other lanes go on using the device meanwhile: only what this thread does may spoil the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        decision = call()
    return graph.replay, decision


class GraphedAct:
    """`Policy.act`, captured once per batch size and replayed; batches are filled up to a power of two.

    Weights are read where they lie, so replacing them in place is all it takes to act with new ones.

    Args:
        policy: A policy whose `act` does nothing on the host that depends on the batch.
        capture: Makes a replay and its static results of a call.
    """

    def __init__(
        self, policy: Any, capture: Callable[[Callable[[], Decision]], tuple[Replay, Decision]] = capture_graph
    ) -> None:
        self._policy, self._capture = policy, capture
        self._captured: dict[int, _Captured] = {}

    def __call__(self, obs: Observation, keys: Tensor) -> Decision:
        """As `Policy.act`."""
        inputs = (obs.images, obs.state, obs.task, keys)
        batch = len(keys)
        size = 1 << (batch - 1).bit_length()
        if size not in self._captured:
            self._captured[size] = self._record(inputs, size)
        captured = self._captured[size]
        for static, given in zip(captured.inputs, inputs, strict=True):
            static[:batch].copy_(given)  # the rest keeps older rows, whose results nobody reads
        captured.replay()
        done = captured.decision
        return Decision(
            actions=done.actions[:batch].clone(),
            logprobs=done.logprobs[:batch].clone(),
            record={name: values[:batch].clone() for name, values in done.record.items()},
        )

    def _record(self, inputs: tuple[Tensor, ...], size: int) -> _Captured:
        images, state, task, keys = (x[:1].expand(size, *x.shape[1:]).clone() for x in inputs)
        observation = Observation(images=images, state=state, task=task)
        replay, decision = self._capture(lambda: self._policy.act(observation, keys))
        return _Captured((images, state, task, keys), replay, decision)
