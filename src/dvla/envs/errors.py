"""What an environment raises; the messages are meant for the user and name the remedy."""

from __future__ import annotations


class EnvironmentSetupError(RuntimeError):
    """An environment cannot be created as configured: a wrong name, a missing asset, driver or permission."""


class SimulationError(RuntimeError):
    """A simulator left the domain of sense, e.g. a state or a reward that is not finite."""
