"""Real simulators: the same whatever the number of workers, and whole again after a worker was killed at work."""

import psutil
import pytest
from playing import make_config, play_episodes

from dvla.config import EnvConfig

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

SIMULATORS = {
    "maniskill": {"task": "PushCube-v1", "cameras": ("base_camera",)},
    "libero": {"task": "libero_spatial", "cameras": ("agentview", "wrist")},
}


def make(name, tmp_path, *, num_workers, disaster=None, **changes):
    # Few tasks: LIBERO takes a second or more to build each.
    options = {"reflections": False, "msaa": False, "tasks": (0, 1, 2)} if name == "libero" else {}
    if disaster:
        place, count = disaster
        options |= {"place": place, "count": count, "marker": str(tmp_path / "struck")}
    env = EnvConfig(
        name=f"disaster_env:Disaster{ {'maniskill': 'ManiSkill', 'libero': 'Libero'}[name] }",
        image_size=(64, 64),
        max_episode_steps=12,
        options=options,
        **SIMULATORS[name],
    )
    return make_config(env, meshes="light", num_envs=num_workers, num_workers=num_workers, **changes)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one worker plays, by simulator."""
    played = {}

    def get(name):
        if name not in played:
            folder = tmp_path_factory.mktemp(name)
            played[name] = play_episodes(make(name, folder, num_workers=1, episodes=EPISODES[name]), folder)
        return played[name]

    return get


EPISODES = {"maniskill": 8, "libero": 2}  # of each task: here LIBERO has three


def same(played, wanted):
    assert played.key() == wanted.key()
    assert played.seen == wanted.seen  # digests of every picture and state that was decided on


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["maniskill", pytest.param("libero", marks=pytest.mark.chaos_full)])
def test_states_and_pictures_do_not_depend_on_the_number_of_workers(alone, name, tmp_path):
    """Nor on two, of which one is killed (below)."""
    same(play_episodes(make(name, tmp_path, num_workers=4, episodes=EPISODES[name]), tmp_path), alone(name))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "disaster",
    [("reset", 2), ("step", 6), pytest.param(("observe", 3), marks=pytest.mark.chaos_full)],
    ids=lambda disaster: disaster[0],
)
@pytest.mark.parametrize("name", ["maniskill", "libero"])
def test_a_worker_killed_at_work_loses_and_doubles_nothing(alone, name, disaster, tmp_path):
    before = psutil.Process().children()
    config = make(name, tmp_path, num_workers=2, disaster=disaster, episodes=EPISODES[name])
    played = play_episodes(config, tmp_path)
    assert (tmp_path / "struck").exists()
    assert played.restarts == 1
    same(played, alone(name))
    assert psutil.Process().children() == before
