"""LIBERO's files give what the simulator gives: turned pictures, its state, its instruction."""

import json

import h5py
import numpy as np
import pytest
from recordings import episode, write_libero

from dvla.config import DataConfig
from dvla.datasets.reading import read_dataset
from dvla.datasets.recorded import DatasetError

EPISODES = [episode(seed, 3 + seed, actions=7, states=8) for seed in range(3)]
rng = np.random.default_rng(0)
for one in EPISODES:
    object.__setattr__(one, "images", rng.integers(0, 256, one.images.shape, np.uint8))


def read(path, **options):
    return read_dataset(DataConfig(paths=(str(path),), **options))


def test_demonstrations_come_back_as_the_simulator_shows_them(tmp_path):
    write_libero(tmp_path / "suite/pick_up_the_bowl_demo.hdf5", EPISODES[:2])
    write_libero(tmp_path / "suite/KITCHEN_SCENE3_turn_on_the_stove_demo.hdf5", EPISODES[2:])
    dataset = read(tmp_path / "suite")
    assert dataset.name == "suite"
    assert dataset.cameras == ("agentview", "wrist")
    assert dataset.gripper_open == -1.0
    assert dataset.instructions == ("turn on the stove", "pick up the bowl")
    for got, want in zip(dataset.episodes, [EPISODES[2], *EPISODES[:2]], strict=True):
        np.testing.assert_array_equal(got.states, want.states)
        np.testing.assert_array_equal(got.actions, want.actions)
        np.testing.assert_array_equal(np.stack(list(got.read_pictures())), want.images)


def test_one_file_one_camera_and_words_in_its_notes(tmp_path):
    notes = {"problem_info": json.dumps({"language_instruction": ["close", " the drawer"]})}
    file = write_libero(tmp_path / "task.hdf5", EPISODES[:1], attributes=notes)
    dataset = read(file, cameras=("wrist",))
    assert dataset.name == "task"
    assert dataset.instructions == ("close the drawer",)
    np.testing.assert_array_equal(np.stack(list(dataset.episodes[0].read_pictures())), EPISODES[0].images[:, 1:])


def remove(column):
    def change(root):
        del root["data/demo_1"][column]

    return change


def replace(column, values):
    def change(root):
        del root["data/demo_1"][column]
        root["data/demo_1"][column] = values

    return change


def link_to(other):
    """Instead of the actions: a link to those of another file, or to such a link."""

    def change(root):
        del root["data/demo_1/actions"]
        root["elsewhere"] = h5py.ExternalLink("other.hdf5", "data/demo_1/actions")
        root["data/demo_1/actions"] = other

    return change


def values_in_another_file(root):
    del root["data/demo_1/actions"]
    root["data/demo_1"].create_dataset("actions", (4, 7), "f4", external=[("other.bin", 0, h5py.h5f.UNLIMITED)])


def more_than_there_is_memory(root):
    del root["data/demo_1/actions"]
    root["data/demo_1"].create_dataset("actions", (2**40, 7), "f4", chunks=(64, 7))


def no_demonstrations(root):
    for demo in list(root["data"]):
        del root["data"][demo]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove("actions"), ["no data/demo_1/actions", "there is obs"]),
        (remove("obs/ee_states"), ["no data/demo_1/obs/ee_states"]),
        (remove("obs/eye_in_hand_rgb"), ["no data/demo_1/obs/eye_in_hand_rgb"]),
        (replace("obs/agentview_rgb", np.zeros((2, 8, 8, 3))), ["demo_1/obs/agentview_rgb", "(2, 8, 8, 3)", "(4, "]),
        (replace("actions", np.zeros(4)), ["demo_1/actions has the shape (4,)"]),
        (replace("actions", np.zeros((4, 6))), ["actions have 6 elements", "have 7"]),
        (link_to(h5py.ExternalLink("other.hdf5", "data/demo_1/actions")), ["demo_1/actions lies elsewhere"]),
        (link_to(h5py.SoftLink("/elsewhere")), ["demo_1/actions lies elsewhere"]),
        (values_in_another_file, ["demo_1/actions lies elsewhere"]),
        (more_than_there_is_memory, ["demo_1/actions has the shape"]),
        (no_demonstrations, ["no demonstrations"]),
    ],
)
def test_damage_is_told_by_file_and_column(tmp_path, damage, words):
    write_libero(tmp_path / "other.hdf5", EPISODES[:2])
    file = write_libero(tmp_path / "pick_it_demo.hdf5", EPISODES[:2])
    with h5py.File(file, "a") as root:
        damage(root)
    with pytest.raises(DatasetError) as caught:
        read(file)
    assert all(word in str(caught.value) for word in [str(file), *words]), caught.value


def test_a_torn_file_an_unknown_camera_and_no_instruction(tmp_path):
    file = write_libero(tmp_path / "pick_it_demo.hdf5", EPISODES[:1])
    with pytest.raises(DatasetError, match="no camera 'front'; they have agentview, wrist"):
        read(file, cameras=("front",))
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(DatasetError, match=r"pick_it_demo.hdf5: cannot be read as HDF5"):
        read(file)
    with pytest.raises(DatasetError, match="tells the instruction"):
        read(write_libero(tmp_path / "task.hdf5", EPISODES[:1]))
