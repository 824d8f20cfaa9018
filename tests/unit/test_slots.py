import os

import numpy as np
import pytest

from dvla.envs.protocol import EnvSpec
from dvla.planes.slots import create_memory, layout_bytes, map_memory, slot_arrays, slot_layout

SPEC = EnvSpec(
    name="x",
    cameras=("a", "b"),
    image_size=(5, 7),
    state_dim=3,
    action_dim=2,
    max_episode_steps=10,
    instructions=("do",),
)


def make_layout(spec=SPEC):
    return slot_layout(spec, num_slots=4, max_decisions=3, num_action_chunks=4, record={"tokens": ((4, 2), "uint8")})


def test_two_mappings_share_one_memory():
    layout = make_layout()
    descriptor = create_memory("dvla-test", layout_bytes(layout))
    one = slot_arrays(map_memory(descriptor, layout_bytes(layout)), layout)
    two = slot_arrays(map_memory(descriptor, layout_bytes(layout)), layout)
    os.close(descriptor)
    assert one["images"].shape == (4, 3, 2, 5, 7, 3)
    assert one["record.tokens"].shape == (4, 3, 4, 2)
    one["images"][2, 1, 0, 4, 6] = (1, 2, 3)
    assert two["images"][2, 1, 0, 4, 6].tolist() == [1, 2, 3]


def test_no_field_reaches_into_another():
    layout = make_layout()
    memory = np.zeros(layout_bytes(layout), np.uint8)
    arrays = slot_arrays(memory, layout)
    for number, name in enumerate(arrays, start=1):
        arrays[name].view(np.uint8).fill(number)
    for number, name in enumerate(arrays, start=1):
        assert (arrays[name].view(np.uint8) == number).all(), name


def test_state_only_needs_no_picture_memory():
    spec = EnvSpec(
        name="x",
        cameras=(),
        image_size=(0, 0),
        state_dim=3,
        action_dim=2,
        max_episode_steps=10,
        instructions=("do",),
    )
    layout = make_layout(spec)
    arrays = slot_arrays(np.zeros(layout_bytes(layout), np.uint8), layout)
    assert arrays["images"].nbytes == 0
    assert layout_bytes(layout) < layout_bytes(make_layout())


def test_memory_leaves_no_name_behind():
    before = set(os.listdir("/dev/shm"))
    descriptor = create_memory("dvla-test", 4096)
    assert os.fstat(descriptor).st_mode & 0o777 == 0o600  # others could open /proc/PID/fd
    new = set(os.listdir("/dev/shm")) - before
    assert not [name for name in new if not name.startswith("sem.mp-")]  # of other tests, as in conftest.py
    os.close(descriptor)


def test_more_than_the_machine_has_is_refused_with_the_keys_to_change():
    with pytest.raises(MemoryError, match=r"runtime.num_slots.*env.image_size"):
        create_memory("dvla-test", 1 << 60)
