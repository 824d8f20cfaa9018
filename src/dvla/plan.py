"""What a policy costs before it is run: ``python -m dvla.plan model=openvla_oft_full [json=true]``.

And what a run will do: ``python -m dvla.plan from_run=[runs/short] ranks_per_node=8 search=true`` (docs/planning.md).

The policy is built, and computed, on the ``meta`` device: shapes without memory. So the published models of billions of
parameters are planned in seconds on any machine.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import hydra
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

from dvla.config import ConfigError, ModelConfig, Precision, load_as
from dvla.entry import CONFIG_FOLDER
from dvla.envs.protocol import EnvSpec
from dvla.models.policy import Observation
from dvla.models.policy_source import prepare_policy
from dvla.models.sharding import COMPUTE_DTYPE
from dvla.planes.manifest import make_manifest
from dvla.planning.footprint import BYTES_PER_TRAINED
from dvla.planning.run_plan import RunPlanConfig, plan_run, read_calibration, show_run

if TYPE_CHECKING:
    from collections.abc import Callable

    from omegaconf import DictConfig

TYPICAL_INSTRUCTION = "pick up the alphabet soup and place it in the basket"
"""Of LIBERO. A checkpoint's tokenizer cuts it finer than the one trained on it, for which every word is one token."""


@dataclass(kw_only=True, slots=True)
class PlanConfig(RunPlanConfig):
    """A policy, and what it is for; or a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The policy; not looked at for a run, which has its own."""
    num_cameras: int = 1
    image_size: tuple[int, int] = (224, 224)
    """Height and width of every picture, pixels."""
    state_dim: int = 8
    action_dim: int = 7
    prompt_tokens: int | None = None
    """Length of the prompt, BOS included; null takes a typical LIBERO instruction."""
    micro_batch_size: int = 1
    """Decisions of one forward-backward pass."""
    precision: Precision = Precision.bf16
    """Compute dtype: of weights that travel, and of frozen modules."""
    json: bool = False
    """Print one JSON object instead of a table."""

    def __post_init__(self) -> None:
        """Check the fields."""
        RunPlanConfig.__post_init__(self)
        for key, least in (("num_cameras", 0), ("state_dim", 0), ("action_dim", 1), ("micro_batch_size", 1)):
            if getattr(self, key) < least:
                raise ConfigError(f"{key} must be at least {least}")
        if len(self.image_size) != 2 or min(self.image_size) < 1:
            raise ConfigError(f"image_size={list(self.image_size)}: height and width must be at least 1 pixel")
        if self.prompt_tokens is not None and self.prompt_tokens < 2:
            raise ConfigError("prompt_tokens must be at least 2, or null")


@dataclass(kw_only=True, slots=True)
class PartSize:
    """Parameters of one part of a policy."""

    total: int = 0
    trainable: int = 0


@dataclass(kw_only=True, slots=True)
class Plan:
    """Sizes and costs of a policy; sizes of memory in bytes."""

    parameters: PartSize
    parts: dict[str, PartSize]
    """By top-level module, in the order of the model."""
    prompt_tokens: int | None
    """Length of the prompt the FLOPs are for; None where the model reads none."""
    decision_flops: int
    """One observation through `act`."""
    sample_flops: int
    """Forward and backward pass of one training sample."""
    micro_batch_flops: int
    weight_plane_bytes: int
    """One version of the weights on its way to the replicas."""
    trained_bytes: int
    """Master, gradient and optimiser state of what is trained; sharded over the ranks."""
    untrained_bytes: int
    """Single weights that are not trained, such as those beside adapters: compute dtype, sharded over the ranks."""
    frozen_bytes: int
    """Modules that are frozen as a whole: in the compute dtype, whole on every rank."""
    training_state_bytes: int
    """All three."""


def build_on_meta(config: PlanConfig) -> tuple[Any, list[str]]:
    """The policy without memory, as it would be trained, and the names of the modules that are frozen as a whole.

    Raises:
        ConfigError: A setting does not fit the model or the checkpoint.
    """
    model = config.model
    if ":" in model.name:
        raise ConfigError(f"model.name={model.name}: only models that come with D-VLA can be planned")
    spec = EnvSpec(
        name="the environment",
        cameras=tuple(f"camera{index}" for index in range(config.num_cameras)),
        image_size=config.image_size,
        state_dim=config.state_dim,
        action_dim=config.action_dim,
        max_episode_steps=model.num_action_chunks,
        instructions=(TYPICAL_INSTRUCTION,),
        gripper_open=1.0,
    )
    source = prepare_policy(model, spec=spec, seed=0, without_weights=True)
    policy, frozen = source.policy, source.frozen
    assert all(parameter.is_meta for parameter in policy.parameters())
    return policy, frozen


def make_plan(config: PlanConfig) -> Plan:
    """Measure the policy that `config` describes.

    Raises:
        ConfigError: A setting does not fit the model or the checkpoint.
    """
    policy, frozen = build_on_meta(config)
    dtype = COMPUTE_DTYPE[config.precision]
    parts: dict[str, PartSize] = {}
    whole = PartSize()
    for name, parameter in policy.named_parameters():
        for size in (whole, parts.setdefault(name.partition(".")[0], PartSize())):
            size.total += parameter.numel()
            size.trainable += parameter.numel() * parameter.requires_grad
    ignored = {parameter for name in frozen for parameter in policy.get_submodule(name).parameters()}
    num_frozen = sum(parameter.numel() for parameter in ignored)
    trained_bytes = BYTES_PER_TRAINED * whole.trainable
    untrained_bytes = dtype.itemsize * (whole.total - whole.trainable - num_frozen)
    frozen_bytes = dtype.itemsize * num_frozen
    weight_plane_bytes = make_manifest(policy, dtype).num_bytes

    policy.to(dtype)
    prompt_tokens = _set_prompt(policy, config)
    decision_flops, micro_batch_flops = _flops(policy, config)
    return Plan(
        parameters=whole,
        parts=parts,
        prompt_tokens=prompt_tokens,
        decision_flops=decision_flops,
        sample_flops=micro_batch_flops // config.micro_batch_size,
        micro_batch_flops=micro_batch_flops,
        weight_plane_bytes=weight_plane_bytes,
        trained_bytes=trained_bytes,
        untrained_bytes=untrained_bytes,
        frozen_bytes=frozen_bytes,
        training_state_bytes=trained_bytes + untrained_bytes + frozen_bytes,
    )


def _set_prompt(policy: Any, config: PlanConfig) -> int | None:
    """Give the policy a prompt of the planned length; returns the length."""
    if not hasattr(policy, "set_prompts"):
        if config.prompt_tokens is not None:
            raise ConfigError(f"prompt_tokens: {config.model.name} reads no prompt")
        return None
    prompt, length = policy.prompts[0], config.prompt_tokens
    if config.model.name == "pi05":
        length = _fix_length(policy, config)
    if length is not None:
        # Which tokens they are costs nothing, but the first is BOS and the last may have a meaning of its own.
        prompt = [*prompt[:1] * (length - 1), prompt[-1]]
    if config.model.name == "openvla_oft":
        policy.set_prompts([prompt], stop_id=policy.stop_id)
    else:
        policy.set_prompts([prompt])
    return len(prompt)


def _fix_length(policy: Any, config: PlanConfig) -> int | None:
    """Length of pi0.5's prompt, or None for that of the instruction; from now on it does not depend on the state.

    A prompt with the state in it is made from the state's values, and is cut to the longest of the batch. ``meta`` tensors
    have no values, so `act` and `forward` could not run. A fixed prompt of the same length costs the same.
    """
    from dvla.models.pi05_prompt import tokenize  # imports transformers

    length, longest = config.prompt_tokens, policy.config.max_token_len
    if length is not None and length > longest:
        raise ConfigError(f"prompt_tokens={length}: pi05 cuts prompts to {longest} (model.options.max_token_len)")
    if policy.config.discrete_state_input:
        if length is None:
            length = len(tokenize(policy.tokenizer, TYPICAL_INSTRUCTION, np.zeros(config.state_dim), longest))
        policy.config = replace(policy.config, discrete_state_input=False)
    return length


def _flops(policy: Any, config: PlanConfig) -> tuple[int, int]:
    """Of one decision, and of one micro-batch."""
    batch = config.micro_batch_size
    record = {
        name: torch.empty(batch, *entry.shape, dtype=entry.dtype, device="meta")
        for name, entry in policy.record_spec.items()
    }

    def train() -> None:
        logprobs, entropy = policy(_observation(batch, config), record)
        (logprobs.sum() + entropy.sum()).backward()

    keys = torch.empty(1, dtype=torch.int64, device="meta")
    return _count(lambda: policy.act(_observation(1, config), keys)), _count(train)


def _observation(batch: int, config: PlanConfig) -> Observation:
    return Observation(
        images=torch.empty(batch, config.num_cameras, *config.image_size, 3, dtype=torch.uint8, device="meta"),
        state=torch.empty(batch, config.state_dim, device="meta"),
        task=torch.empty(batch, dtype=torch.int64, device="meta"),
    )


def _count(compute: Callable[[], object]) -> int:
    """FLOPs of matrix products and convolutions; attention on ``meta`` is two products a head, which are counted too."""
    with FlopCounterMode(display=False) as counter:
        compute()
    return int(counter.get_total_flops())


def _short(value: int, unit: str) -> str:
    """A number with up to four digits: 4.983 TFLOP, 430.1 MB."""
    thousands = min((len(str(value)) - 1) // 3, 5)
    return f"{value / 1000**thousands:.4g} {' kMGTP'[thousands].strip()}{unit}"


def show(plan: Plan, title: str, console: Console) -> None:
    """Print `plan` as tables."""
    sizes = Table("part", title=title, title_justify="left")
    for column in ("parameters", "trainable"):
        sizes.add_column(column, justify="right")
    for name, part in plan.parts.items():
        sizes.add_row(name, f"{part.total:,}", f"{part.trainable:,}")
    sizes.add_section()
    sizes.add_row("all", f"{plan.parameters.total:,}", f"{plan.parameters.trainable:,}")
    console.print(sizes)

    costs = Table("cost")
    costs.add_column("amount", justify="right")
    costs.add_column("of")
    prompt = "" if plan.prompt_tokens is None else f", prompt of {plan.prompt_tokens} tokens"
    costs.add_row("decision", _short(plan.decision_flops, "FLOP"), f"one observation{prompt}")
    costs.add_row("training sample", _short(plan.sample_flops, "FLOP"), "forward and backward")
    costs.add_row("micro-batch", _short(plan.micro_batch_flops, "FLOP"), "forward and backward")
    costs.add_section()
    costs.add_row("weights that travel", _short(plan.weight_plane_bytes, "B"), "one version")
    costs.add_row("training state", _short(plan.training_state_bytes, "B"), "all of the following")
    costs.add_row("  trained", _short(plan.trained_bytes, "B"), "master, gradient, Adam; sharded")
    costs.add_row("  not trained", _short(plan.untrained_bytes, "B"), "single weights, compute dtype; sharded")
    costs.add_row("  frozen modules", _short(plan.frozen_bytes, "B"), "compute dtype; whole on every rank")
    console.print(costs)


def _foretell(config: PlanConfig) -> None:
    known = read_calibration(config)
    run, profile = known.config, known.profile
    if ":" not in run.model.name and config.profile is None:  # else nobody knows its weights that are not trained
        sizes = make_plan(
            PlanConfig(
                model=run.model,
                num_cameras=len(run.env.cameras),
                image_size=run.env.image_size,
                precision=run.runtime.precision,
            )
        )
        profile = replace(profile, frozen_bytes=sizes.frozen_bytes, untrained_bytes=sizes.untrained_bytes)
    plan = plan_run(replace(known, profile=profile), with_search=config.search)
    if config.json:
        sys.stdout.write(json.dumps(plan.to_plain()) + "\n")
    else:
        show_run(plan, Console())


def main() -> None:
    """Entry."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="plan_config", node=PlanConfig)

    @hydra.main(version_base="1.3", config_path=str(CONFIG_FOLDER), config_name="plan")
    def start(composed: DictConfig) -> None:
        try:
            config = load_as(PlanConfig, composed)
            if config.from_run or config.profile is not None:
                _foretell(config)
                return
            plan = make_plan(config)
        except ConfigError as error:
            sys.stderr.write(f"dvla: error: {error}\n")
            sys.exit(2)
        model = config.model
        if config.json:
            names = {"model": model.name, "preset": model.preset, "checkpoint": model.checkpoint}
            settings = {"precision": config.precision.name, "micro_batch_size": config.micro_batch_size}
            sys.stdout.write(json.dumps(names | settings | asdict(plan)) + "\n")
        else:
            show(plan, f"{model.name}, {model.checkpoint or model.preset}, {config.precision.name}", Console())

    start()


if __name__ == "__main__":
    main()
