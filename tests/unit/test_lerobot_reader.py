"""LeRobot datasets of both generations give back what was recorded, and say what is wrong with them."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recordings import CAMERAS, episode, write_v2, write_v3

from dvla.config import DataConfig
from dvla.datasets.reading import read_dataset
from dvla.datasets.recorded import DatasetError

EPISODES = [episode(seed, length) for seed, length in ((0, 5), (1, 3), (2, 4))]
HAND = "observation.images.hand"


def read(*folders, **options):
    return read_dataset(DataConfig(paths=tuple(map(str, folders)), **options))


def pictures(one):
    return np.stack(list(one.read_pictures()))


@pytest.mark.parametrize("videos", [False, True], ids=["images", "videos"])
@pytest.mark.parametrize("layout", ["v2.1", "v3.0"])
def test_what_was_recorded_comes_back(tmp_path, layout, videos):
    if layout == "v2.1":
        folder = write_v2(tmp_path / "set", EPISODES, videos=videos)
        instructions = ["do it"] * 3
    else:
        instructions = ["push it", "lift it", "push it"]
        folder = write_v3(tmp_path / "set", EPISODES, videos=videos, tasks=instructions)
    dataset = read(folder)
    assert (dataset.name, dataset.cameras, dataset.image_size) == ("set", CAMERAS, (16, 24))
    assert (dataset.action_dim, dataset.state_dim, dataset.num_steps) == (4, 2, 12)
    assert dataset.instructions == tuple(dict.fromkeys(instructions))
    for got, want, instruction in zip(dataset.episodes, EPISODES, instructions, strict=True):
        np.testing.assert_array_equal(got.actions, want.actions)
        np.testing.assert_array_equal(got.states, want.states)
        assert got.actions.dtype == got.states.dtype == np.float32
        assert got.instruction == instruction
        difference = np.abs(pictures(got).astype(int) - want.images)
        assert difference.max() <= (3 if videos else 0)


def test_cameras_are_chosen_and_ordered_by_name_and_the_state_can_be_left_out(tmp_path):
    folder = write_v2(tmp_path / "set", EPISODES)
    dataset = read(folder, cameras=("hand", "observation.images.front"), state_key=None)
    assert dataset.cameras == ("hand", "front")
    assert dataset.state_dim == 0
    np.testing.assert_array_equal(pictures(dataset.episodes[1]), EPISODES[1].images[:, ::-1])
    assert read(folder, cameras=()).image_size == (0, 0)


def test_several_datasets_are_one(tmp_path):
    one, two = (write_v2(tmp_path / name, EPISODES[:n], task=name) for name, n in (("a", 1), ("b", 2)))
    dataset = read(one, two, name="both")
    assert dataset.name == "both"
    assert dataset.instructions == ("a", "b")
    assert [len(one) for one in dataset.episodes] == [5, 5, 3]
    assert dataset.fingerprint() != read(one).fingerprint()


def change_info(folder, **changes):
    path = folder / "meta/info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_table(path, change):
    pq.write_table(change(pq.read_table(path)), path)


def replace_column(name, values):
    return lambda table: table.set_column(table.column_names.index(name), name, values)


TABLE = "data/chunk-000/episode_000001.parquet"
VIDEO = f"videos/chunk-000/{HAND}/episode_000001.mp4"


def no_such_layout(folder):
    change_info(folder, codebase_version="v1.6")


def no_demonstrations(folder):
    (folder / "meta/episodes.jsonl").write_text("")


def column_missing(folder):
    change_table(folder / TABLE, lambda table: table.drop_columns(["action"]))


def mixed_action_dims(folder):
    rows = [[0.1] * 4, [0.1] * 7, [0.1] * 4]
    change_table(folder / TABLE, replace_column("action", pa.array(rows)))


def another_action_dim(folder):
    change_table(folder / TABLE, replace_column("action", pa.array([[0.1] * 7] * 3)))


def null_row(folder):
    change_table(folder / TABLE, replace_column("observation.state", pa.array([[0.0, 0.0], None, [0.0, 0.0]])))


def no_numbers(folder):
    change_table(folder / TABLE, replace_column("action", pa.array([["a"] * 4] * 3)))


def not_finite(folder):
    rows = [[0.0] * 4, [0.0, float("nan"), 0.0, 0.0], [0.0] * 4]
    change_table(folder / TABLE, replace_column("action", pa.array(rows, pa.list_(pa.float32()))))


def out_of_range(folder):
    rows = [[0.0] * 4, [0.0, 0.0, 2.5, 0.0], [0.0] * 4]
    change_table(folder / TABLE, replace_column("action", pa.array(rows, pa.list_(pa.float32()))))


def row_missing(folder):
    change_table(folder / TABLE, lambda table: table.slice(0, 2))


def unknown_task(folder):
    change_table(folder / TABLE, replace_column("task_index", pa.array([7, 7, 7])))


def torn_table(folder):
    path = folder / TABLE
    path.write_bytes(path.read_bytes()[:200])


def no_table(folder):
    (folder / TABLE).unlink()


def table_elsewhere(folder):
    folder.joinpath(TABLE).rename(folder.parent / "episode.parquet")
    change_info(folder, data_path="../episode.parquet")


def pattern_that_reaches_into_objects(folder):
    change_info(folder, data_path="{episode_index.__class__.__init__}.parquet")


def pattern_with_an_unknown_field(folder):
    change_info(folder, data_path="{secret}.parquet")


def chunks_of_nothing(folder):
    change_info(folder, chunks_size=0)


def no_object(folder):
    (folder / "meta/info.json").write_text("[" * 100_000)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (no_such_layout, ["meta/info.json", "v1.6", "v3.0"]),
        (no_demonstrations, ["no demonstrations"]),
        (column_missing, [TABLE, "no column 'action'", "observation.state"]),
        (mixed_action_dims, [TABLE, "'action'", "row 1 has 7 elements", "says 4"]),
        (another_action_dim, [TABLE, "'action'", "row 0 has 7 elements", "says 4"]),
        (null_row, [TABLE, "'observation.state'", "row 1 has nothing"]),
        (no_numbers, [TABLE, "'action'", "no numbers"]),
        (not_finite, [TABLE, "element 1 of actions", "step 1", "not finite"]),
        (out_of_range, [TABLE, "element 2 of actions", "2.5", "[-1, 1]"]),
        (row_missing, [TABLE, "2 rows", "episode 1 has 3"]),
        (unknown_task, [TABLE, "'task_index'", "[7]"]),
        (torn_table, [TABLE, "cannot be read"]),
        (no_table, [TABLE, "cannot be read"]),
        (table_elsewhere, ["meta/info.json", "'../episode.parquet' leads out of"]),
        (pattern_that_reaches_into_objects, ["{episode_index.__class__.__init__}.parquet", "cannot be read"]),
        (pattern_with_an_unknown_field, ["meta/info.json", "KeyError: 'secret'"]),
        (chunks_of_nothing, ["meta/info.json", "ZeroDivisionError"]),
        (no_object, ["meta/info.json", "nested too deeply"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damage_is_told_by_file_and_column(tmp_path, damage, words):
    folder = write_v2(tmp_path / "set", EPISODES)
    damage(folder)
    with pytest.raises(DatasetError) as caught:
        read(folder)
    assert all(word in str(caught.value) for word in words), caught.value


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def replace_by_a_shorter_one(path):
    shutil.copy(path.parent / "episode_000003.mp4", path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, "the video"),
        (lambda path: path.write_bytes(b"no video"), "cannot be read after 0 of 3"),
        (lambda path: path.unlink(), "cannot be read after 0 of 3"),
        (replace_by_a_shorter_one, "ends after 2 of 3 pictures"),
    ],
    ids=["truncated", "no video", "missing", "too short"],
)
def test_a_corrupt_video_is_told_by_file_and_camera(tmp_path, damage, words):
    folder = write_v2(tmp_path / "set", [*EPISODES, episode(3, 2)], videos=True)
    damage(folder / VIDEO)
    dataset = read(folder)
    pictures(dataset.episodes[0])
    with pytest.raises(DatasetError) as caught:
        pictures(dataset.episodes[1])
    assert all(word in str(caught.value) for word in (VIDEO, HAND, words)), caught.value


def test_a_picture_that_is_none_or_of_another_size(tmp_path):
    folder = write_v2(tmp_path / "set", EPISODES)
    change_table(folder / TABLE, replace_column(HAND, pa.array([{"bytes": b"x", "path": "x"}] * 3)))
    with pytest.raises(DatasetError, match=rf"{TABLE}: column '{HAND}', row 0: no picture"):
        pictures(read(folder).episodes[1])
    third = folder / TABLE.replace("1.parquet", "2.parquet")
    change_table(third, replace_column(HAND, pa.array([{"bytes": None, "path": "/etc/passwd"}] * 4)))
    with pytest.raises(DatasetError, match=r"'/etc/passwd' leads out of"):
        pictures(read(folder).episodes[2])
    features = json.loads((folder / "meta/info.json").read_text())["features"]
    for key in (HAND, "observation.images.front"):
        features[key]["shape"] = [32, 24, 3]
    change_info(folder, features=features)
    with pytest.raises(DatasetError, match=r"a picture of 16 x 24 pixels, meta/info.json says 32 x 24"):
        pictures(read(folder).episodes[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"action_key": "actions"}, "no column 'actions'; it has observation.images.front"),
        ({"state_key": "state"}, "no column 'state'"),
        ({"cameras": ("wrist",)}, "no camera 'wrist'; it has observation.images.front, observation.images.hand"),
    ],
)
def test_what_the_config_names_and_the_dataset_lacks(tmp_path, options, words):
    folder = write_v2(tmp_path / "set", EPISODES)
    with pytest.raises(DatasetError) as caught:
        read(folder, **options)
    assert words in str(caught.value)
    assert "meta/info.json" in str(caught.value)


def test_datasets_that_do_not_go_together(tmp_path):
    first = write_v2(tmp_path / "a", EPISODES)
    second = write_v2(tmp_path / "b", [episode(0, 5, actions=7)])
    with pytest.raises(DatasetError, match=r"b/data.*actions have 7 elements, those of .*/a/data.* have 4"):
        read(first, second, name="both")
    third = write_v2(tmp_path / "c", [episode(0, 5, size=(32, 32))])
    with pytest.raises(DatasetError, match=r"image_size of c are \(32, 32\), those of a \(16, 24\)"):
        read(first, third, name="both")
    with pytest.raises(DatasetError, match=r"holds neither meta/info.json \(LeRobot\) nor \*.hdf5 \(LIBERO\)"):
        read(tmp_path / "nothing")


def test_v3_notes_that_do_not_fit_the_table(tmp_path):
    folder = write_v3(tmp_path / "set", EPISODES, videos=True, tasks=["a", "b", "a"])
    notes = folder / "meta/episodes/chunk-000/file-000.parquet"
    change_table(notes, replace_column("length", pa.array([4, 4, 4])))
    with pytest.raises(DatasetError, match=r"file-000.parquet: 5 rows; by the notes in meta/, episode 0 has 4"):
        read(folder)
    change_table(notes, lambda table: table.drop_columns([f"videos/{HAND}/from_timestamp"]))
    with pytest.raises(DatasetError, match=rf"file-000.parquet: no column 'videos/{HAND}/from_timestamp'"):
        read(folder)
