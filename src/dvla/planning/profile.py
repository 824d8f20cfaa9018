"""What the parts of a run cost on some hardware: measured (`dvla.planning.calibration`), or written down by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from dvla.config import ConfigError


@dataclass(kw_only=True, slots=True)
class Cost:
    """Seconds of a call."""

    fixed_s: float = 0.0
    each_s: float = 0.0
    """For each item in it."""
    factors: tuple[float, ...] = (1.0,)
    """What calls take, by this; each as likely. Lanes that wait for the slowest of several feel the difference."""

    def draw(self, items: int, dice: Random) -> float:
        """Seconds of one call with so many items."""
        return (self.fixed_s + self.each_s * items) * dice.choice(self.factors)


@dataclass(kw_only=True, slots=True)
class Profile:
    """Costs of the lanes' work, and what there is to do it with; as if each part had its hardware to itself."""

    chunk: Cost = field(default_factory=Cost)
    """A decision's control steps and the picture after them: of one environment in a worker process (`fixed_s` counts), or of
    a whole batch simulator (items are its environments)."""
    reset_s: float = 0.0
    """Begin an episode and observe it."""
    handle_s: float = 0.0
    """What the sampling lane does with one answer of a simulator."""
    decide: Cost = field(default_factory=Cost)
    """An inference batch; items are decisions."""
    gradient: Cost = field(default_factory=Cost)
    """A micro-batch, forward and backward; items are decisions."""
    optimise_s: float = 0.0
    """An optimiser step, with the reduction of gradients within a node."""
    agree_s: float = 0.0
    """What the training ranks take to agree, once a group."""
    report_s: float = 0.0
    """Between two batches: add up over the ranks, write metrics."""
    publish_s: float = 0.0
    """Write the shards to the host buffer."""
    transfer_s: float = 0.0
    """Make them a whole version, within a node."""
    apply_s: float = 0.0
    """Take a version over into a replica."""

    episode_decisions: tuple[int, ...] = (1,)
    """Lengths of episodes, of which each is as likely."""
    steps_per_decision: float = 1.0
    """Control steps that a decision executes, on average."""
    dropped_share: float = 0.0
    """Share of the groups that have no signal and are replaced."""

    is_batch_simulator: bool = False
    """A rank's environments are one simulator, on the rank's accelerator if it has one."""
    has_accelerators: bool = False
    """Each rank has one, on which policy and learner compute; what is at work on it at the same time shares its speed."""
    cores: int | None = None
    """Cores of a node, shared in the same way by what computes on no accelerator; null: there are always enough."""
    accelerator_gib: float | None = None
    """Memory of an accelerator; null: not checked."""
    host_gib: float | None = None
    """Memory of a node's host; null: not checked."""
    network_gb_per_s: float | None = None
    """Bandwidth of a node to the others, 10^9 bytes/s each way; null: traffic between nodes takes no time."""

    trained_parameters: int = 0
    frozen_bytes: int = 0
    """Of modules that every rank has whole, once for learner and once for replica."""
    untrained_bytes: int = 0
    """Of other weights that are not trained, in the compute dtype."""
    weight_bytes: int = 0
    """One version on its way to the replicas."""
    slot_bytes: int = 0
    """An episode slot."""

    def __post_init__(self) -> None:
        """Check the fields."""
        for name in ("chunk", "decide", "gradient"):
            cost = getattr(self, name)
            for key in ("fixed_s", "each_s"):
                _require_not_negative(f"profile.{name}.{key}", getattr(cost, key))
            if not cost.factors or not 0 <= min(cost.factors) <= max(cost.factors) < float("inf"):
                raise ConfigError(f"profile.{name}.factors: give at least one, none below 0")
        for key in ("reset_s", "handle_s", "optimise_s", "agree_s", "report_s", "publish_s", "transfer_s", "apply_s"):
            _require_not_negative(f"profile.{key}", getattr(self, key))
        if not self.episode_decisions or min(self.episode_decisions) < 1:
            raise ConfigError("profile.episode_decisions: give the length of at least one episode, each at least 1")
        if not 0 <= self.dropped_share < 1:
            raise ConfigError("profile.dropped_share must be at least 0 and below 1")
        for key in ("cores", "accelerator_gib", "host_gib", "network_gb_per_s"):
            if (value := getattr(self, key)) is not None and value <= 0:
                raise ConfigError(f"profile.{key} must be above 0, or null")


def _require_not_negative(key: str, value: float) -> None:
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{key} must be at least 0 seconds")
