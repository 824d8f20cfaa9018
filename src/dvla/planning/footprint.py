"""What a setting takes of memory and links. Pure; sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dvla.config import ConfigError

if TYPE_CHECKING:
    from dvla.config import Config
    from dvla.planning.profile import Profile
    from dvla.runtime.placement import Roles

BYTES_PER_TRAINED = 16
"""fp32 master, gradient and the two moments of Adam."""
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes; what a forward and backward pass keeps of activations comes on top."""

    learner_bytes: int
    """Model pool of a rank that trains: sharded state, and what every rank has whole."""
    replica_bytes: int
    """Model pool of a rank that infers: weights in the compute dtype. On a CPU, what is trained is read in the host buffer."""
    model_bytes: int
    """Model pool of the rank with most to hold."""
    environment_bytes: int
    """Environment pool of a sampling rank: its episode slots."""
    host_buffer_bytes: int
    """Of a node, for weights on their way."""
    weight_bytes_per_node: int
    """Weights that a node receives from others, per batch."""
    gradient_bytes_per_node: int
    """Gradients that a node sends, and receives, per optimiser step."""


def footprint(config: Config, profile: Profile, roles: Roles, *, num_nodes: int) -> Footprint:
    """Sizes of a setting.

    Raises:
        ConfigError: A rank or node has too little memory for them.
    """
    num_learners = num_nodes * len(roles.training)
    replicas = config.runtime.replicate_size or num_nodes
    if num_learners % replicas:
        raise ConfigError(f"runtime.replicate_size={replicas} must divide the {num_learners} training ranks")
    shards = num_learners // replicas
    sharded = BYTES_PER_TRAINED * profile.trained_parameters + profile.untrained_bytes
    learner = -(-sharded // shards) + profile.frozen_bytes
    own_copy = profile.weight_bytes if profile.has_accelerators else 0
    replica = own_copy + profile.untrained_bytes + profile.frozen_bytes
    model = max(
        learner * (rank in roles.training) + replica * (rank in roles.inference)
        for rank in (*roles.training, *roles.inference)
    )
    slots = config.slots_per_sampler(num_learners, num_nodes * len(roles.sampling))
    environment = slots * profile.slot_bytes
    buffers = (2 if profile.has_accelerators else 3) * profile.weight_bytes
    others = num_nodes - 1
    needs = Footprint(
        learner_bytes=learner,
        replica_bytes=replica,
        model_bytes=model,
        environment_bytes=environment,
        host_buffer_bytes=buffers,
        weight_bytes_per_node=profile.weight_bytes * others // num_nodes,
        gradient_bytes_per_node=8 * profile.trained_parameters * others // num_nodes,
    )
    ranks = len({*roles.sampling, *roles.inference, *roles.training})
    on_host = buffers + len(roles.sampling) * environment
    if profile.has_accelerators and profile.is_batch_simulator:
        on_host = buffers
        model += environment
    if profile.has_accelerators and profile.accelerator_gib is not None and model > profile.accelerator_gib * _GIB:
        raise ConfigError(
            f"profile.accelerator_gib={profile.accelerator_gib:g}: a rank would hold {model / _GIB:.1f} GiB without "
            "activations; train on more ranks, train less (model.freeze, model.lora_rank), or lower runtime.num_slots"
        )
    on_host += 0 if profile.has_accelerators else ranks * model
    if profile.host_gib is not None and on_host > profile.host_gib * _GIB:
        raise ConfigError(
            f"profile.host_gib={profile.host_gib:g}: a node would hold {on_host / _GIB:.1f} GiB; lower runtime.num_slots, "
            "algo.groups_per_step or algo.max_staleness, or train less"
        )
    return needs
