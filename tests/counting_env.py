"""An environment whose observations tell exactly what it was asked to do, for tests of the data plane."""

from __future__ import annotations

import os
import signal
import time

import numpy as np

from dvla.envs.protocol import EnvSpec, Step


class CountingEnv:
    """State: (seed mod 1000, task, steps taken, sum of first action elements). Ends early when told by the action.

    An action whose first element is above 0.99 succeeds; option `fault` makes it misbehave.

    `disaster` = "<kill|hang|raise|nan|freeze> <reset|step|observe> <n>" strikes at the n-th such call of a worker; with a
    `marker`, a path, only the first worker that comes so far, once; else each time.
    """

    def __init__(
        self,
        task,
        cameras,
        image_size,
        max_episode_steps,
        reward_mode,
        num_tasks=1,
        fault="",
        disaster="",
        marker="",
    ):
        self.disaster = disaster.split()
        self.marker = marker
        self.calls = 0
        self.spec = EnvSpec(
            name="counting",
            cameras=cameras,
            image_size=image_size if cameras else (0, 0),
            state_dim=4,
            action_dim=2,
            max_episode_steps=max_episode_steps,
            instructions=tuple(f"task {number}" for number in range(num_tasks)),
        )
        if fault == "build":
            raise RuntimeError("no simulator today")
        if fault == "ask":
            input("May I download the assets? [y/n] ")
        self.fault = fault
        self.resets = 0
        self.values = np.zeros(4, np.float32)

    def strike(self, place):
        if not self.disaster or self.disaster[1] != place:
            return False
        self.calls += 1
        if self.calls != int(self.disaster[2]):
            return False
        if self.marker:
            try:
                os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return False
        match self.disaster[0]:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hang":
                time.sleep(1e6)
            case "raise":
                raise ValueError("the arm fell off")
        return True

    def reset(self, task, seed):
        self.strike("reset")
        self.resets += 1
        self.values = np.array([seed % 1000, task, 0, 0], np.float32)
        if self.fault == "unreproducible":
            return os.urandom(8)
        return self.values.tobytes()

    def step(self, action):
        assert action.dtype == np.float32
        if self.fault == "slow":
            time.sleep(0.02)
        if self.fault == "raise" and self.resets == 2:
            raise ValueError("the arm fell off")
        if self.fault == "bad_state" and self.values[0] == 3:
            raise ValueError("this state cannot be")
        if self.fault == "die" and self.resets == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        self.values[2] += 1
        self.values[3] += action[0]
        if self.strike("step"):
            action = np.array([0, np.nan])
        return Step(reward=float(action[1]), success=bool(action[0] > 0.99), terminated=bool(action[0] < -0.99))

    def observe(self, images, state):
        self.strike("observe")
        state[:] = self.values
        images[:] = int(self.values[2])

    def close(self):
        pass
