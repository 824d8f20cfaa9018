"""Rounding: the same decisions on CPU and GPU, in fp32 and bf16, by learner, replica and CUDA graph."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from batches import make_batch, make_policy

from dvla.config import Precision
from dvla.models.cuda_graph import GraphedAct
from dvla.models.policy import Decision, Observation
from dvla.rl.noise import decision_keys
from gpu.check import VLA_MODULES, Findings, check
from gpu.rank_of_one import WeightPlane, on_device, rank_of_one
from gpu.timing import median_seconds

if TYPE_CHECKING:
    from torch import Tensor

    from dvla.lanes.learner import MicroBatch

BATCH = 8


def _worst(one: Tensor, other: Tensor) -> float:
    return float((one.float().cpu() - other.float().cpu()).abs().max())


def _keys(count: int, device: torch.device) -> Tensor:
    return decision_keys(7, torch.arange(count), torch.zeros(count, dtype=torch.int64)).to(device)


def _first(observation: Observation, count: int) -> Observation:
    return Observation(*(getattr(observation, name)[:count] for name in ("images", "state", "task")))


def _compare_devices(found: Findings, name: str, batch: MicroBatch, bound: float) -> None:
    """fp32 on the device, and bf16 there, against fp32 on the CPU: log-probabilities of the same decisions."""
    policy = make_policy(name)
    here = on_device(batch, found.device)
    tf32 = torch.backends.cudnn.allow_tf32
    with torch.no_grad():
        want, _ = policy(batch.observation, batch.record)
        there = copy.deepcopy(policy).to(found.device)
        default, _ = there(here.observation, here.record)
        torch.backends.cudnn.allow_tf32 = False
        strict, _ = there(here.observation, here.record)
        torch.backends.cudnn.allow_tf32 = tf32
        narrow, _ = copy.deepcopy(policy).to(found.device, torch.bfloat16)(here.observation, here.record)
    found.figure("spread of logprobs", float(want.std()))
    found.figure("fp32 device to CPU gap", _worst(default, want))
    gap = found.figure("the same without TF32", _worst(strict, want))
    found.demand(gap < bound, f"fp32 log-probabilities of device and CPU differ by less than {bound}")
    found.figure("bf16 to fp32 gap", _worst(narrow, want))
    found.figure("bf16 to fp32 mean gap", float((narrow.cpu() - want).abs().mean()))


def _compare_learner(found: Findings, name: str, batch: MicroBatch, bounds: dict[Precision, float]) -> None:
    """What the learner recomputes against what the replica decided, with the same weights."""
    with rank_of_one(found.device) as world:
        for precision, bound in bounds.items():
            plane = WeightPlane(world, make_policy(name), precision)
            buffer = plane.write(0)
            plane.replica.apply(plane.host.buffers[buffer])
            observation = on_device(batch, found.device).observation
            gaps = []
            for rows in (BATCH, 1):  # decided all at once, and one by one: kernels may round differently
                keys = _keys(BATCH, found.device)
                with torch.inference_mode():
                    parts = [
                        plane.replica.policy.act(
                            Observation(*(getattr(observation, n)[i : i + rows] for n in ("images", "state", "task"))),
                            keys[i : i + rows],
                        )
                        for i in range(0, BATCH, rows)
                    ]
                decided = on_device(batch, found.device)
                decided.record = {n: torch.cat([p.record[n] for p in parts]).clone() for n in parts[0].record}
                decided.behavior_logprobs = torch.cat([p.logprobs for p in parts]).clone()
                logprobs, _, gap = plane.learner.accumulate(decided, is_last=True)
                gaps.append(_worst(logprobs, decided.behavior_logprobs))
                found.demand(bool(gap >= 0), "the learner counts these decisions as made with its own weights")
            found.figure(f"{precision.name} learner gap, one batch", gaps[0])
            found.figure(f"{precision.name} learner gap, decided singly", gaps[1])
            found.demand(max(gaps) < bound, f"{precision.name} learner and replica differ by less than {bound}")
            plane.learner.step(0)  # raises where the gradient is not finite
            plane.host.close()


def _compare_graph(found: Findings, name: str, dtype: torch.dtype, bound: float) -> None:
    """Replays against eager calls, at several batch sizes, before and after the weights are replaced in place."""
    policy: Any = make_policy(name).to(found.device, dtype).requires_grad_(False).eval()
    observation = on_device(make_batch(make_policy(name), BATCH, 0), found.device).observation
    keys = _keys(BATCH, found.device)
    act = GraphedAct(policy)
    short = str(dtype).removeprefix("torch.")
    worst = 0.0

    def compare(count: int) -> Decision:
        nonlocal worst
        part = _first(observation, count)
        got, want = act(part, keys[:count]), policy.act(part, keys[:count])
        worst = max(worst, _worst(got.logprobs, want.logprobs), _worst(got.actions, want.actions))
        return got

    with torch.inference_mode():
        before = [compare(count) for count in (1, 2, BATCH, 1, BATCH)][-1]
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(0.5)
        after = compare(BATCH)
        eager_s = median_seconds(lambda: policy.act(_first(observation, 1), keys[:1]), found.device, 30)
        graph_s = median_seconds(lambda: act(_first(observation, 1), keys[:1]), found.device, 30)
    found.figure(f"{short} graph to eager gap", worst)
    found.figure(f"{short} eager ms", eager_s * 1e3)
    found.figure(f"{short} graph ms", graph_s * 1e3)
    found.demand(worst < bound, f"{short}: replays give the decisions of eager calls")
    found.demand(not torch.equal(before.logprobs, after.logprobs), f"{short}: replays read the new weights")


def _numerics(found: Findings, name: str, *, fp32: float, learner: dict[Precision, float]) -> None:
    batch = make_batch(make_policy(name), BATCH, 0)
    _compare_devices(found, name, batch, fp32)
    _compare_learner(found, name, batch, learner)
    if found.on_gpu:  # a CPU has no graphs
        for dtype, bound in ((torch.float32, 1e-3), (torch.bfloat16, 0.1)):
            _compare_graph(found, name, dtype, bound)


@check()
def mlp_numerics(found: Findings) -> None:
    """The perceptron's log-probabilities agree: CPU and GPU, learner and replica, CUDA graph and eager call."""
    _numerics(found, "mlp", fp32=1e-4, learner={Precision.fp32: 1e-4, Precision.bf16: 0.1})


@check(limit_s=90, needs=VLA_MODULES)
def openvla_oft_numerics(found: Findings) -> None:
    """OpenVLA-OFT's log-probabilities agree: CPU and GPU, learner and replica, CUDA graph and eager call."""
    _numerics(found, "openvla_oft", fp32=1e-3, learner={Precision.fp32: 5e-3, Precision.bf16: 0.5})


@check(limit_s=90, needs=VLA_MODULES)
def pi05_numerics(found: Findings) -> None:
    """pi0.5's log-probabilities agree: CPU and GPU, learner and replica, CUDA graph and eager call."""
    _numerics(found, "pi05", fp32=1e-3, learner={Precision.fp32: 5e-3, Precision.bf16: 0.5})
