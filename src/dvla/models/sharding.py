"""How a policy is sharded over the learner's ranks: FSDP2, unit by unit, fp32 masters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from dvla.config import Precision

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

COMPUTE_DTYPE = {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16}


def shard_policy(policy: Any, mesh: DeviceMesh, *, precision: Precision, reshard_after_forward: bool) -> Any:
    """Shard `policy` in place over `mesh`; its parameters become DTensors.

    Args:
        policy: A policy with fp32 parameters on the mesh's device.
        mesh: One axis, or (replicate, shard).
        precision: Compute dtype of the units; gradients are reduced in fp32, log-probabilities stay fp32.
        reshard_after_forward: Free a unit's gathered parameters between forward and backward.

    Returns:
        The same object, now both a policy and an ``FSDPModule`` (which no type says).
    """
    mixed = MixedPrecisionPolicy(
        param_dtype=COMPUTE_DTYPE[precision],
        reduce_dtype=torch.float32,
        # Casting inputs would also cast what log-probabilities are computed from (samples, states).
        cast_forward_inputs=False,
    )
    for unit in policy.fsdp_units():
        fully_shard(unit, mesh=mesh, mp_policy=mixed, reshard_after_forward=reshard_after_forward)
    return fully_shard(policy, mesh=mesh, mp_policy=mixed, reshard_after_forward=reshard_after_forward)
