"""How a policy is sharded over the learner's ranks: FSDP2, unit by unit, fp32 masters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from dvla.config import Precision

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

COMPUTE_DTYPE = {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16}


def shard_policy(
    policy: Any,
    mesh: DeviceMesh,
    *,
    precision: Precision,
    reshard_after_forward: bool,
    frozen: Sequence[str] = (),
) -> Any:
    """Shard `policy` in place over `mesh`; its parameters become DTensors.

    Modules that are frozen as a whole are not sharded: every rank has them in the compute dtype, because gathering them
    for each batch would cost more than they weigh. What cannot be spared (the expert of pi0.5, which every denoising step
    needs) lies in the root unit, which stays gathered from forward to backward.

    Args:
        policy: A policy with fp32 parameters on the mesh's device, or on ``meta`` to be filled afterwards.
        mesh: One axis, or (replicate, shard).
        precision: Compute dtype of the units; gradients are reduced in fp32, log-probabilities stay fp32.
        reshard_after_forward: Free a unit's gathered parameters between forward and backward.
        frozen: Names of modules that are frozen as a whole.

    Returns:
        The same object, now both a policy and an ``FSDPModule`` (which no type says).
    """
    mixed = MixedPrecisionPolicy(
        param_dtype=COMPUTE_DTYPE[precision],
        reduce_dtype=torch.float32,
        # Casting inputs would also cast what log-probabilities are computed from (samples, states).
        cast_forward_inputs=False,
    )
    for parameter in policy.parameters():
        if not parameter.requires_grad:  # no optimiser adds to it: it needs no more digits than it is computed with
            parameter.data = parameter.data.to(COMPUTE_DTYPE[precision])
    ignored = {parameter for name in frozen for parameter in policy.get_submodule(name).parameters()}
    for unit in policy.fsdp_units():
        if not ignored.issuperset(unit.parameters()):
            fully_shard(unit, mesh=mesh, mp_policy=mixed, reshard_after_forward=reshard_after_forward)
    # The root is never resharded between forward and backward; what lies in it is needed again at once.
    return fully_shard(policy, mesh=mesh, mp_policy=mixed, ignored_params=ignored)
