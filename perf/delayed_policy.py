"""Policies that take as long as they are told, for `bench_placements.py`, `bench_stages.py` and `overlap.py`."""

from __future__ import annotations

import time

from dvla.models.mlp import MLPConfig, MLPPolicy


class DelayedPolicy(MLPPolicy):
    """A tiny perceptron that sleeps `seconds` for each decision of a batch."""

    def __init__(self, preset, spec, num_action_chunks, temperature, seconds) -> None:
        config = MLPConfig(hidden_sizes=(4,))
        super().__init__(config, spec=spec, num_action_chunks=num_action_chunks, temperature=temperature)
        self._seconds = seconds

    def act(self, obs, keys, *, greedy=False):
        """Decide, slowly."""
        time.sleep(self._seconds * len(keys))
        return super().act(obs, keys, greedy=greedy)


class StagedPolicy(MLPPolicy):
    """A tiny perceptron that sleeps `act_s` for each decision it makes and `gradient_s` for each it is trained on."""

    def __init__(self, preset, spec, num_action_chunks, temperature, act_s, gradient_s) -> None:
        config = MLPConfig(hidden_sizes=(4,))
        super().__init__(config, spec=spec, num_action_chunks=num_action_chunks, temperature=temperature)
        self._act_s, self._gradient_s = act_s, gradient_s

    def act(self, obs, keys, *, greedy=False):
        """Decide, slowly."""
        time.sleep(self._act_s * len(keys))
        return super().act(obs, keys, greedy=greedy)

    def forward(self, obs, record):
        """Compute log-probabilities for training, slowly."""
        time.sleep(self._gradient_s * len(obs.state))
        return super().forward(obs, record)


class WaitingPolicy(MLPPolicy):
    """The perceptron of `model=mlp`, whose every call waits `seconds` before it computes, as for an accelerator."""

    def __init__(self, preset, spec, num_action_chunks, temperature, seconds) -> None:
        super().__init__(MLPConfig(), spec=spec, num_action_chunks=num_action_chunks, temperature=temperature)
        self._seconds = seconds

    def act(self, obs, keys, *, greedy=False):
        """Decide, after a wait."""
        time.sleep(self._seconds)
        return super().act(obs, keys, greedy=greedy)

    def forward(self, *args, **kwargs):
        """Compute log-probabilities for training, after a wait."""
        time.sleep(self._seconds)
        return super().forward(*args, **kwargs)
