"""Episode slots: the memory in which an episode lives from its first frame to its gradient.

One anonymous shared-memory file per rank holds all slots. A worker process maps it and renders into it, the inference lane
reads observations and writes actions there, the learner trains from it: a frame is written once. The file has no name, so a
killed run leaves nothing behind.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import psutil

from dvla.planes.anonymous_memory import create_anonymous_memory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dvla.envs.protocol import EnvSpec

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class SlotField:
    """One array of the slot memory; its first axis is the slot."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int


@dataclass(frozen=True, slots=True)
class SlotShares:
    """Which slots of a memory are whose: first those for training, sampler by sampler, then those for evaluation."""

    training: int
    """Slots of each sampling rank for training."""
    evaluation: int
    """And for evaluation."""
    num_samplers: int
    """Sampling ranks that share the memory."""
    sampler: int
    """The number of this one among them."""

    @property
    def total(self) -> int:
        """All slots."""
        return self.num_samplers * (self.training + self.evaluation)

    def for_training(self) -> range:
        """The training slots of this sampling rank."""
        return range(self.sampler * self.training, (self.sampler + 1) * self.training)

    def for_evaluation(self) -> range:
        """Its evaluation slots."""
        first = self.num_samplers * self.training + self.sampler * self.evaluation
        return range(first, first + self.evaluation)


def slot_layout(
    spec: EnvSpec,
    *,
    num_slots: int,
    max_decisions: int,
    num_action_chunks: int,
    record: Mapping[str, tuple[tuple[int, ...], str]],
) -> list[SlotField]:
    """Arrays of the slot memory in order, for N slots of T decisions with chunks of K actions.

    Args:
        spec: Sizes of observation and action.
        num_slots: N.
        max_decisions: T.
        num_action_chunks: K.
        record: Shape and numpy dtype name, per decision, of what the policy remembers of it.
    """
    per_decision = (num_slots, max_decisions)
    actions = (*per_decision, num_action_chunks, spec.action_dim)
    wanted: list[tuple[str, tuple[int, ...], str]] = [
        # written by the worker
        ("images", (*per_decision, len(spec.cameras), *spec.image_size, 3), "uint8"),
        ("state", (*per_decision, spec.state_dim), "float32"),
        ("executed_steps", per_decision, "int32"),  # control steps of the chunk that were run
        ("rewards", per_decision, "float32"),  # sum over these steps
        ("step_rewards", (*per_decision, num_action_chunks), "float32"),  # of these steps
        ("ticket", (num_slots,), "int64"),
        ("task", (num_slots,), "int64"),
        ("num_decisions", (num_slots,), "int64"),
        ("success", (num_slots,), "uint8"),  # at any step of the episode
        ("initial_state", (num_slots, 16), "uint8"),  # digest
        ("beat", (num_slots,), "float64"),  # monotonic time at which the simulator was last seen to move
        # written by the inference lane
        ("actions", actions, "float32"),
        ("logprobs", actions, "float32"),
        ("behavior_version", per_decision, "int64"),
        *((f"record.{name}", (*per_decision, *shape), dtype) for name, (shape, dtype) in record.items()),
    ]
    fields, offset = [], 0
    for name, shape, dtype in wanted:
        fields.append(SlotField(name, shape, dtype, offset))
        size = math.prod(shape) * np.dtype(dtype).itemsize
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    return fields


def layout_bytes(layout: list[SlotField]) -> int:
    """Bytes of the whole slot memory."""
    last = layout[-1]
    return last.offset + math.prod(last.shape) * np.dtype(last.dtype).itemsize


def create_memory(name: str, num_bytes: int) -> int:
    """Make an anonymous shared-memory file (only this user's processes and those it is handed to can reach it).

    Returns:
        Its file descriptor.

    Raises:
        MemoryError: The machine has too little memory for it.
    """
    available = psutil.virtual_memory().available
    if num_bytes > available:
        raise MemoryError(
            f"{name} needs {num_bytes / 2**20:.0f} MiB of shared memory, {available / 2**20:.0f} MiB are free: lower "
            "runtime.num_slots, algo.groups_per_step, algo.max_staleness or env.image_size"
        )
    return create_anonymous_memory(name, num_bytes)


def map_memory(descriptor: int, num_bytes: int) -> np.ndarray:
    """Map shared memory; (num_bytes,) uint8. The mapping outlives the descriptor."""
    return np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)


def slot_arrays(memory: np.ndarray, layout: list[SlotField]) -> dict[str, np.ndarray]:
    """The slot memory as named arrays that share it."""
    arrays = {}
    for field in layout:
        num_bytes = math.prod(field.shape) * np.dtype(field.dtype).itemsize
        arrays[field.name] = memory[field.offset : field.offset + num_bytes].view(field.dtype).reshape(field.shape)
    return arrays
