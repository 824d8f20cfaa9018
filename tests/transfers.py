"""Small slot arrays, episodes that a seed fills, and whether an episode came over whole."""

from __future__ import annotations

import numpy as np

from dvla.envs.protocol import EnvSpec
from dvla.planes.slots import layout_bytes, slot_arrays, slot_layout

PER_EPISODE = ("ticket", "task", "num_decisions", "success", "initial_state", "beat")


def layout(num_slots, *, has_cameras=True):
    """Slots of three decisions."""
    spec = EnvSpec(
        name="x",
        cameras=("a", "b") if has_cameras else (),
        image_size=(5, 7) if has_cameras else (0, 0),
        state_dim=3,
        action_dim=2,
        max_episode_steps=10,
        instructions=("do",),
    )
    record = {"tokens": ((4, 2), "uint8")}
    return slot_layout(spec, num_slots=num_slots, max_decisions=3, num_action_chunks=4, record=record)


def make_arrays(num_slots, *, has_cameras=True):
    """Slot arrays in memory of their own."""
    fields = layout(num_slots, has_cameras=has_cameras)
    return slot_arrays(np.zeros(layout_bytes(fields), np.uint8), fields)


def fill_episode(arrays, slot, *, seed, length):
    """Write an episode of `length` decisions that is a function of `seed`; what lies behind its end is noise of its own."""
    rng = np.random.default_rng(seed)
    for array in arrays.values():
        values = rng.integers(0, 100, array[slot].shape)
        array[slot] = values.astype(array.dtype)
    arrays["num_decisions"][slot] = length


def same_episode(one, slot, other, other_slot):
    """Whether two slots hold the same episode, to the bit, up to its end."""
    length = int(one["num_decisions"][slot])
    return all(
        np.array_equal(array[slot], other[name][other_slot])
        if name in PER_EPISODE
        else np.array_equal(array[slot, :length], other[name][other_slot, :length])
        for name, array in one.items()
    )
