"""A policy by itself: observations under several names, and what is wrong with one."""

import numpy as np
import pytest
import torch

from dvla.envs.protocol import EnvSpec
from dvla.models.policy import Decision
from dvla.robot_policy import RobotPolicy

K, A = 2, 3
LIBERO = ("agentview", "wrist")


class Telling(torch.nn.Module):
    """Keeps what it is asked; acts the sum of the state."""

    def act(self, obs, keys, *, greedy=False):
        self.asked, self.keys, self.greedy = obs, keys.tolist(), greedy
        return Decision(obs.state.sum().expand(1, K, A).bfloat16(), torch.zeros(1, K, A), {})


def make(cameras=LIBERO, instructions=("push it", "pull it"), state_dim=8, **options):
    spec = EnvSpec(
        name="test",
        cameras=cameras,
        image_size=(4, 4) if cameras else (0, 0),
        state_dim=state_dim,
        action_dim=A,
        max_episode_steps=10,
        instructions=instructions,
    )
    policy = Telling()
    return policy, RobotPolicy(policy, spec, device=torch.device("cpu"), **options)


def picture(value, size=(6, 5)):
    return np.full((*size, 3), value, np.uint8)


OBSERVATION = {"agentview": picture(1), "wrist": picture(2), "state": np.arange(8.0), "prompt": "pull it"}


@pytest.mark.parametrize("cameras", [LIBERO, LIBERO[::-1]])
def test_names_of_cameras_and_of_openpi_mean_the_same(cameras):
    policy, robot = make(cameras)
    of_openpi = {
        "observation/image": picture(1),
        "observation/wrist_image": picture(2),
        "observation/state": list(range(8)),
        "prompt": "pull it",
        "episode": object(),
    }
    for obs in (OBSERVATION, of_openpi):
        actions = robot.infer(obs)["actions"]
        assert (actions.shape, actions.dtype, actions[1, 2]) == ((K, A), np.float32, 28.0)
        seen = policy.asked
        assert (seen.images.shape, seen.images.dtype) == ((1, 2, 6, 5, 3), torch.uint8)
        assert seen.images[0, :, 0, 0, 0].tolist() == [1 if name == "agentview" else 2 for name in cameras]
        assert (seen.state.dtype, seen.state[0].tolist()) == (torch.float32, list(range(8)))
        assert seen.task.tolist() == [1]


def test_openpi_names_are_for_cameras_that_are_clear():
    keys = {name: make((name, *others))[1].description["observation_keys"] for name, *others in (["top"], ["a", "b"])}
    assert keys["top"][:2] == [["top", "observation/image"], ["state", "observation/state"]]
    assert keys["a"][:2] == [["a"], ["b"]]


def test_the_only_prompt_need_not_be_said_and_a_policy_may_want_nothing_else():
    policy, robot = make((), ("push it",), 0)
    robot.infer({})
    assert (policy.asked.images.shape[:2], policy.asked.state.shape) == ((1, 0), (1, 0))


def test_every_decision_has_noise_of_its_own_and_the_same_in_the_same_order():
    noise = []
    for _ in range(2):
        policy, robot = make(seed=3, greedy=False)
        for _ in range(2):
            robot.infer(OBSERVATION)
            noise += policy.keys
        assert policy.greedy is False
    assert noise[:2] == noise[2:]
    assert noise[0] != noise[1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"wrist": None}, r"wrist must be a picture"),
        ({"wrist": picture(1) / 255}, r"wrist must be a picture \(H, W, 3\) uint8, not \(6, 5, 3\) float64"),
        ({"agentview": picture(1).transpose(2, 0, 1)}, r"agentview must be a picture"),
        ({"wrist": picture(1, (3, 3))}, r"pictures differ in size: \(6, 5, 3\), \(3, 3, 3\)"),
        ({"state": np.zeros(7)}, r"state must be 8 finite numbers, not \(7,\)"),
        ({"state": np.full(8, np.nan)}, r"state must be 8 finite numbers"),
        ({"prompt": "dance"}, r"prompt must be one of: 'push it', 'pull it'; not 'dance'"),
        ({"prompt": ["push it"]}, r"prompt must be one of"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, words):
    with pytest.raises(ValueError, match=words):
        make()[1].infer(OBSERVATION | change)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("wrist", "no 'wrist' or 'observation/wrist_image'; it has: agentview"),
        ("state", "no 'state' or 'observation/state'"),
        ("prompt", "prompt must be one of: 'push it', 'pull it'; not None"),
    ],
)
def test_what_is_missing_is_named(key, words):
    with pytest.raises(ValueError, match=words):
        make()[1].infer({name: value for name, value in OBSERVATION.items() if name != key})
