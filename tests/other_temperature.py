"""A policy whose learner recomputes log-probabilities at another temperature than its actions were sampled at."""

from dvla.models.mlp import PRESETS, MLPPolicy


class OtherTemperature(MLPPolicy):
    """Samples as it should, and trains at a temperature that is `factor` times as high."""

    def __init__(self, *, preset, factor=1.2, **sizes):
        super().__init__(PRESETS[preset], **sizes)
        self._factor = factor

    def forward(self, obs, record):
        right = self.temperature
        self.temperature = self._factor * right
        try:
            return super().forward(obs, record)
        finally:
            self.temperature = right
