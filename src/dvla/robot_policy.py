"""A trained policy by itself: plain arrays in, a chunk of actions out; no simulator, no lanes.

`RobotPolicy` has the methods of a policy of openpi's client, so it can stand where one is expected, and behind
`dvla.serving.policy_server` it does so on another machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from dvla.config import Device
from dvla.envs.protocol import EnvSpec
from dvla.models.policy import Observation
from dvla.rl.noise import decision_keys

_WRIST_CAMERAS = ("wrist", "hand_camera")  # LIBERO's and ManiSkill's


class RobotPolicy:
    """Decides for one robot at a time; not for several threads at once.

    Args:
        policy: A frozen policy on `device`.
        spec: The environment it was trained in.
        device: Where it computes.
        seed: Of its noise: the same questions in the same order get the same answers.
        greedy: Choose the likeliest actions.
    """

    def __init__(self, policy: Any, spec: EnvSpec, *, device: torch.device, seed: int = 0, greedy: bool = True) -> None:
        self.spec = spec
        self._policy, self._device, self._seed, self._greedy = policy, device, seed, greedy
        self._num_decisions = 0
        openpi_names = _openpi_names(spec.cameras)
        self._picture_keys = [tuple(filter(None, (name, openpi_names.get(name)))) for name in spec.cameras]

    @classmethod
    def load(cls, checkpoint: Path | str, device: str = "auto") -> Self:
        """The policy of a run's checkpoint, acting as its evaluations do.

        Args:
            checkpoint: A ``step_NNNNNN`` folder of a run, or the link ``latest``.
            device: ``auto``, ``cpu`` or ``cuda``.

        Raises:
            ConfigError: The checkpoint is torn or not of a run, or there is no such device.
        """
        from dvla.models.sharding import COMPUTE_DTYPE
        from dvla.models.trained import as_config, env_spec_of, run_config, trained_policy
        from dvla.runtime.device import choose_device

        folder, place = Path(checkpoint), choose_device(Device[device], 0, 1)
        config, spec = as_config(run_config(folder)), env_spec_of(folder)
        policy = trained_policy(config.model, spec=spec, seed=config.seed, checkpoint=folder)
        policy = policy.to(place, COMPUTE_DTYPE[config.runtime.precision]).requires_grad_(False)
        return cls(policy, spec, device=place, seed=config.seed, greedy=config.evaluation.greedy)

    @property
    def description(self) -> dict[str, Any]:
        """What a client must know, as plain values; of `observation_keys`, one of each list."""
        return {
            "env": self.spec.name,
            "observation_keys": [list(keys) for keys in self._picture_keys]
            + ([["state", "observation/state"]] if self.spec.state_dim else [])
            + [["prompt"]],
            "state_dim": self.spec.state_dim,
            "action_dim": self.spec.action_dim,
            "prompts": list(self.spec.instructions),
        }

    def infer(self, obs: Mapping[str, Any]) -> dict[str, Any]:
        """Choose a chunk of actions.

        Args:
            obs: For each camera, under its name, a picture (H, W, 3) uint8 RGB, of any size, as the model resizes it, but
                the same for all; ``state``: (state_dim,) as the environment gives it; ``prompt``: one of the run's
                instructions, which may be left out if there is only one. Names of openpi's LIBERO policies will do, too:
                ``observation/image`` (the one camera that is on no wrist), ``observation/wrist_image`` and
                ``observation/state``. What else there is is not looked at.

        Returns:
            ``actions``: (K, action_dim) float32 in [-1, 1], as the environment takes them, for K control steps.

        Raises:
            ValueError: Something is missing or of another shape; the message names its key.
        """
        pictures = [_picture(obs, keys) for keys in self._picture_keys]
        if len({picture.shape for picture in pictures}) > 1:
            raise ValueError(f"pictures differ in size: {', '.join(str(picture.shape) for picture in pictures)}")
        images = np.stack(pictures) if pictures else np.empty((0, 0, 0, 3), np.uint8)
        state = _state(obs, self.spec.state_dim)
        batch = [images, state, np.asarray(_task(obs, self.spec.instructions), np.int64)]
        observation = Observation(*(torch.from_numpy(part[None]).to(self._device) for part in batch))
        number, self._num_decisions = self._num_decisions, self._num_decisions + 1
        keys = decision_keys(self._seed, torch.tensor([0]), torch.tensor([number])).to(self._device)
        with torch.inference_mode():
            decision = self._policy.act(observation, keys, greedy=self._greedy)
        return {"actions": decision.actions[0].float().cpu().numpy()}

    def reset(self) -> None:
        """Nothing: it remembers nothing of an episode."""


def _openpi_names(cameras: tuple[str, ...]) -> dict[str, str]:
    """What openpi calls these cameras, as far as it is clear."""
    others = [name for name in cameras if name not in _WRIST_CAMERAS]
    wrists = [name for name in cameras if name in _WRIST_CAMERAS]
    names = {others[0]: "observation/image"} if len(others) == 1 else {}
    return names | ({wrists[0]: "observation/wrist_image"} if len(wrists) == 1 else {})


def _given(obs: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[str, Any]:
    """The one of `keys` that is there, and its value."""
    for key in keys:
        if key in obs:
            return key, obs[key]
    raise ValueError(f"the observation has no {' or '.join(map(repr, keys))}; it has: {', '.join(map(str, obs))}")


def _picture(obs: Mapping[str, Any], keys: tuple[str, ...]) -> np.ndarray:
    key, value = _given(obs, keys)
    picture = np.asarray(value)
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3 or not picture.size:
        raise ValueError(f"{key} must be a picture (H, W, 3) uint8, not {picture.shape} {picture.dtype}")
    return picture


def _state(obs: Mapping[str, Any], length: int) -> np.ndarray:
    if not length:
        return np.empty(0, np.float32)
    key, value = _given(obs, ("state", "observation/state"))
    state = np.array(value, np.float32)
    if state.shape != (length,) or not np.isfinite(state).all():
        raise ValueError(f"{key} must be {length} finite numbers, not {state.shape}: {state}")
    return state


def _task(obs: Mapping[str, Any], instructions: tuple[str, ...]) -> int:
    prompt = obs.get("prompt", instructions[0] if len(instructions) == 1 else None)
    if prompt not in instructions:
        raise ValueError(f"prompt must be one of: {', '.join(map(repr, instructions))}; not {prompt!r}")
    return instructions.index(prompt)
