"""Every setting of a run, typed. Imports no torch, so that `--cfg job` and tools start at once.

Entry points compose YAML with Hydra (`conf/`), turn it into these dataclasses with `load`, and pass the dataclasses on;
nothing else sees OmegaConf. A value that cannot work is refused here, by key, before any simulator starts.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from enum import Enum
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from omegaconf import DictConfig

Schema = TypeVar("Schema")

MAX_ENVS_PER_WORKER = 256
"""Orders and answers of more would not fit into a socket's buffer at once."""


class ConfigError(ValueError):
    """A setting that cannot work; the message names its key. All ranks find it alike, one of them says it."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


class Device(Enum):
    """Where policies compute."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Schedule(Enum):
    """How the lanes of a rank share time."""

    overlapped = "overlapped"
    """Four threads, the product."""
    serial = "serial"
    """The same lanes in turn on one thread: the synchronous, bit-reproducible baseline."""


class Placement(Enum):
    """Which ranks sample, infer and train."""

    colocated = "colocated"
    """All three on every rank."""
    separated = "separated"
    """Sampling and inference on some ranks of each node, training on the others."""
    hybrid = "hybrid"
    """Sampling and inference on different ranks; training on its own ranks, or on all."""
    custom = "custom"
    """As `placement.sampling`, `placement.inference` and `placement.training` say."""


class WeightApplication(Enum):
    """When the inference lane takes over a version that has arrived."""

    between_batches = "between_batches"
    """At once: a group's decisions may be of several versions."""
    between_groups = "between_groups"
    """When no group is being sampled with the version in use: every group is sampled with one version."""


class Objective(Enum):
    """How the loss corrects for decisions made by older weights."""

    decoupled = "decoupled"
    """Importance weight pi_prox/pi_behavior times the clipped ratio pi/pi_prox (AReaL, arXiv 2505.24298)."""
    clip = "clip"
    """PPO's clipped ratio pi/pi_behavior."""


class Algorithm(Enum):
    """What judges an action."""

    grpo = "grpo"
    """The other episodes of its group."""
    ppo = "ppo"
    """A value head, by generalised advantage estimation."""


class ValueType(Enum):
    """What one value of PPO's value head is of."""

    chunk = "chunk"
    """A whole decision, whose rewards are added up."""
    action = "action"
    """One control step of it."""


class LogprobType(Enum):
    """What one probability ratio covers."""

    token = "token"
    """One element of one action."""
    action = "action"
    """One control step's action."""
    chunk = "chunk"
    """A whole decision."""


class Precision(Enum):
    """Compute dtype of learner and replica; masters and optimiser are always fp32."""

    fp32 = "fp32"
    bf16 = "bf16"


class RewardMode(Enum):
    """What the simulator pays."""

    sparse = "sparse"
    """1 on success, else 0."""
    dense = "dense"
    """The simulator's shaped reward, scaled to at most 1 a step."""


class Meshes(Enum):
    """What simulators draw; physics is the same."""

    full = "full"
    """The simulator's own meshes."""
    light = "light"
    """Decimated ones: several times faster to draw without a GPU, and nearly the same picture."""


class LrSchedule(Enum):
    """How the learning rate goes on after the warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class TaskSampling(Enum):
    """Which task the next group plays, where there are several."""

    uniform = "uniform"
    in_order = "in_order"
    """In the suite's order, again and again."""
    failure_rate = "failure_rate"
    """The less a task succeeds, the more often it is played."""


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """Where a run lives on disk."""

    name: str = "default"
    """Folder name below `root`."""
    root: str = "runs"
    """Folder that holds all runs."""
    clean: bool = False
    """Replace an old run of this name."""
    checkpoint_every: int = 10
    """Optimiser steps between checkpoints; the last step is always saved."""
    keep_checkpoints: int = 2
    """Complete checkpoints to keep, newest first."""
    eval_every: int | None = None
    """Optimiser steps between evaluations (as `evaluation` says), while training goes on; null never evaluates. The
    evaluations before the first and after the last step have the simulators to themselves."""

    def __post_init__(self) -> None:
        """Check the fields."""
        _require(
            self.name not in {"", ".", ".."} and Path(self.name).name == self.name,
            f"run.name={self.name!r}: give a plain folder name",
        )
        _require(self.checkpoint_every >= 1, "run.checkpoint_every must be at least 1")
        _require(self.keep_checkpoints >= 1, "run.keep_checkpoints must be at least 1")
        _require(self.eval_every is None or self.eval_every >= 1, "run.eval_every must be at least 1, or null")

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.root) / self.name


@dataclass(kw_only=True, slots=True)
class EnvConfig:
    """The simulator and its episodes."""

    name: str = "reach"
    """`reach`, `maniskill`, or `package.module:Class` for an own environment."""
    task: str = "reach"
    """The simulator's name of the task."""
    cameras: tuple[str, ...] = ("top",)
    """Cameras to render, in this order; empty to train from state alone."""
    image_size: tuple[int, int] = (64, 64)
    """Height and width of every picture, pixels."""
    max_episode_steps: int = 32
    """Control steps after which an episode is cut."""
    reward_mode: RewardMode = RewardMode.sparse
    terminate_on_success: bool = True
    """End an episode at its first success. With a dense reward leave it off: ending early would cost return."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment's own; unknown ones are refused."""

    def __post_init__(self) -> None:
        """Check the fields."""
        _require(self.max_episode_steps >= 1, "env.max_episode_steps must be at least 1")
        _require(
            not self.cameras or (len(self.image_size) == 2 and min(self.image_size) >= 1),
            f"env.image_size={list(self.image_size)}: give height and width, each at least 1 pixel",
        )
        _require(len(set(self.cameras)) == len(self.cameras), "env.cameras names a camera twice")


@dataclass(kw_only=True, slots=True)
class RenderConfig:
    """How simulators draw."""

    meshes: Meshes = Meshes.full


@dataclass(kw_only=True, slots=True)
class EvaluationConfig:
    """Which episodes an evaluation plays, and how."""

    episodes_per_task: int | None = None
    """Initial states of each task; null takes all that the simulator lists (LIBERO: 50), else 50."""
    seed: int = 1_000_000
    """Seed of every task's first initial state; the others follow. Simulators with a list take it from its beginning."""
    greedy: bool = True
    """Take the policy's likeliest actions instead of exploring."""
    videos_per_task: int = 0
    """Episodes of each task to record as H.264 videos."""

    def __post_init__(self) -> None:
        """Check the fields."""
        _require(
            self.episodes_per_task is None or self.episodes_per_task >= 1,
            "evaluation.episodes_per_task must be at least 1, or null",
        )
        _require(0 <= self.seed < 2**31, "evaluation.seed must lie between 0 and 2^31 - 1")
        _require(self.videos_per_task >= 0, "evaluation.videos_per_task must be at least 0")


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The policy."""

    name: str = "mlp"
    """`openvla_oft`, `pi05`, `mlp`, or `package.module:Class` for an own policy."""
    preset: str = "default"
    """A named set of sizes, with random weights; not looked at with a checkpoint."""
    checkpoint: str | None = None
    """Folder of a pre-trained model: OpenVLA-OFT in Hugging Face layout, pi0.5 in openpi's or lerobot's."""
    tokenizer: str | None = None
    """Folder or SentencePiece file of the tokenizer, where the checkpoint's folder has none."""
    unnorm_key: str | None = None
    """Which of the checkpoint's statistics un-normalise actions; null takes the only ones there are."""
    freeze: tuple[str, ...] = ()
    """Parts that are not trained: `vision`, `projector`, `llm` or `vocabulary` of openvla_oft; `vision` or `vlm` of pi05."""
    lora_rank: int = 0
    """Train low-rank adapters of this rank instead of the weights; 0 for none."""
    lora_alpha: float | None = None
    """Scale of the adapters, divided by the rank; null takes the rank."""
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Layers that get adapters, by the last part of their name."""
    num_action_chunks: int = 8
    """Control steps one decision covers (K)."""
    temperature: float = 1.0
    """Softmax temperature of sampling; log-probabilities are recomputed at the same one."""
    options: dict[str, Any] = field(default_factory=dict)
    """Single sizes or switches of the model that differ from the preset; unknown ones are refused."""

    def __post_init__(self) -> None:
        """Check the fields."""
        _require(self.num_action_chunks >= 1, "model.num_action_chunks must be at least 1")
        _require(self.temperature > 0, "model.temperature must be above 0")
        _require(self.lora_rank >= 0, "model.lora_rank must be at least 0")
        _require(self.lora_alpha is None or self.lora_alpha > 0, "model.lora_alpha must be above 0, or null")


@dataclass(kw_only=True, slots=True)
class AlgoConfig:
    """GRPO or PPO, the staleness rule and the optimiser."""

    name: Algorithm = Algorithm.grpo
    group_size: int = 8
    """Episodes of one group (G): one task, one initial state. The only place where G is set."""
    groups_per_step: int = 8
    """Groups of one batch, over all ranks."""
    num_steps: int = 100
    """Optimiser steps of the whole run."""
    update_epochs: int = 1
    """Optimiser steps taken on each batch."""
    task_sampling: TaskSampling = TaskSampling.uniform
    max_staleness: int = 1
    """Batches by which the weights that sampled may be older than those that train; 0 is on-policy."""
    objective: Objective = Objective.decoupled
    logprob_type: LogprobType = LogprobType.token
    clip_ratio_low: float = 0.2
    """A ratio below 1 minus this gives no gradient where the advantage is negative."""
    clip_ratio_high: float = 0.28
    """A ratio above 1 plus this gives none where it is positive."""
    dual_clip: float | None = 3.0
    """Bound c of the loss for negative advantages; null switches it off."""
    behavior_ratio_cap: float | None = 5.0
    """Largest pi_prox/pi_behavior of the decoupled objective; null leaves it unbounded."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, in nats per action element; 0 for none."""
    reference_kl_coef: float = 0.0
    """Weight of the KL divergence from the weights the run began with, in nats per action element; 0 for none, and then
    these weights are not kept."""
    normalize_by_std: bool = True
    """Divide GRPO's advantages by the group's standard deviation; PPO's always are, by the batch's."""
    value_type: ValueType = ValueType.chunk
    gamma: float = 0.99
    """PPO's discount, per value: per decision or control step."""
    gae_lambda: float = 0.95
    """PPO's trade-off between values (0) and returns (1), likewise."""
    value_coef: float = 0.5
    """Weight of the value head's loss, whose gradient also reaches the policy's trunk."""
    value_lr: float = 1e-3
    """Learning rate of the value head; warms up as `lr` does."""
    value_clip: float | None = None
    """Largest change of a value in one batch that lowers the loss; null for no bound."""
    length_normalization: bool = True
    """Weigh each episode by one, whatever its number of decisions."""
    filter_zero_signal: bool = True
    """Drop groups whose returns are all equal and sample others instead."""
    max_dropped_per_step: int = 16
    """Dropped groups a batch, over all ranks, after which such groups are kept, so that sampling always ends."""
    micro_batch_size: int = 32
    """Decisions of one forward-backward pass on one rank."""
    lr: float = 1e-4
    """Learning rate of AdamW, after the warm-up."""
    warmup_steps: int = 0
    """Optimiser steps over which the learning rate rises linearly from lr/warmup_steps to lr."""
    lr_schedule: LrSchedule = LrSchedule.constant
    """What the learning rate does after the warm-up: `linear` and `cosine` let it fall to 0 at `num_steps`."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """How long AdamW remembers gradients, and their squares."""
    weight_decay: float = 0.0
    """AdamW's: share of each parameter that is taken away, by the learning rate."""
    max_grad_norm: float = 1.0
    """Norm to which a larger gradient is cut, over all trained parameters."""

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.name is Algorithm.ppo:
            self._check_ppo()
        else:
            _require(
                self.group_size >= 2, "algo.group_size must be at least 2: an advantage compares members of a group"
            )
        for key in ("group_size", "groups_per_step", "num_steps", "update_epochs", "micro_batch_size"):
            _require(getattr(self, key) >= 1, f"algo.{key} must be at least 1")
        for key in ("max_staleness", "max_dropped_per_step", "warmup_steps", "reference_kl_coef"):
            _require(getattr(self, key) >= 0, f"algo.{key} must be at least 0")
        _require(
            self.num_steps % self.update_epochs == 0,
            f"algo.num_steps={self.num_steps} must be a multiple of algo.update_epochs={self.update_epochs}",
        )
        _require(0 < self.clip_ratio_low < 1, "algo.clip_ratio_low must lie between 0 and 1")
        _require(self.clip_ratio_high > 0, "algo.clip_ratio_high must be above 0")
        _require(self.dual_clip is None or self.dual_clip > 1, "algo.dual_clip must be above 1, or null")
        _require(
            self.behavior_ratio_cap is None or self.behavior_ratio_cap >= 1,
            "algo.behavior_ratio_cap must be at least 1, or null",
        )
        _require(
            self.objective is Objective.decoupled or self.behavior_ratio_cap is None,
            "algo.behavior_ratio_cap acts on algo.objective=decoupled only: set it to null with clip",
        )
        _require(self.lr > 0, "algo.lr must be above 0")
        _require(self.max_grad_norm > 0, "algo.max_grad_norm must be above 0")

    def _check_ppo(self) -> None:
        _require(
            not self.filter_zero_signal,
            "algo.filter_zero_signal=true leaves out groups that GRPO cannot learn from: set it to false with algo.name=ppo",
        )
        _require(
            self.value_type is ValueType.chunk or self.logprob_type is not LogprobType.chunk,
            "algo.value_type=action gives each control step an advantage: algo.logprob_type must be token or action",
        )
        for key in ("gamma", "gae_lambda"):
            _require(0 <= getattr(self, key) <= 1, f"algo.{key} must lie between 0 and 1")
        _require(self.value_coef > 0, "algo.value_coef must be above 0")
        _require(self.value_lr > 0, "algo.value_lr must be above 0")
        _require(self.value_clip is None or self.value_clip > 0, "algo.value_clip must be above 0, or null")

    @property
    def keeps_batch(self) -> bool:
        """Whether a batch keeps its slots until its last update: for another epoch, or until all its advantages are known."""
        return self.update_epochs > 1 or self.name is Algorithm.ppo


@dataclass(kw_only=True, slots=True)
class PlacementConfig:
    """Which ranks do what; the same on every node."""

    name: Placement = Placement.colocated
    ratio: str = "1:1"
    """Ranks of a node. For `separated`, sampling:training. For `hybrid`, sampling:inference:training, or only
    sampling:inference to train on all ranks."""
    stages: int | None = None
    """Parts that each sampling rank's environments move in: all of a part act on one inference batch while the others
    simulate. Null lets every environment go on as soon as it can."""
    sampling: tuple[int, ...] = ()
    """Local ranks that sample, with `custom`."""
    inference: tuple[int, ...] = ()
    """Local ranks that infer, with `custom`."""
    training: tuple[int, ...] = ()
    """Local ranks that train, with `custom`."""

    def __post_init__(self) -> None:
        """Check the fields."""
        parts = self.ratio.split(":")
        num_parts = (2, 3) if self.name is Placement.hybrid else (2,)
        _require(
            len(parts) in num_parts and all(part.isdecimal() and int(part) > 0 for part in parts),
            f"placement.ratio={self.ratio}: give {' or '.join(map(str, num_parts))} numbers above 0, as in "
            f"{':'.join('1' * num_parts[-1])}",
        )
        _require(self.stages is None or self.stages >= 1, "placement.stages must be at least 1, or null")
        is_custom = self.name is Placement.custom
        for role in ("sampling", "inference", "training"):
            _require(
                bool(getattr(self, role)) is is_custom,
                f"placement.{role} is empty: give it at least one local rank"
                if is_custom
                else f"placement.{role} is for placement=custom",
            )


@dataclass(kw_only=True, slots=True)
class RuntimeConfig:
    """Lanes, workers and process groups."""

    schedule: Schedule = Schedule.overlapped
    num_envs: int = 8
    """Environments of one rank."""
    num_workers: int = 1
    """Worker processes of one rank; each runs num_envs / num_workers environments in turn."""
    num_slots: int | None = None
    """Episode slots of one sampling rank; null takes what the staleness window can fill."""
    max_batch: int = 64
    """Decisions of one inference batch at most."""
    max_wait_s: float = 0.002
    """Seconds an inference batch waits for more requests once it has one."""
    apply_weights: WeightApplication = WeightApplication.between_batches
    balance: bool = True
    """Let what is measured decide, in the overlapped schedule: which rank of a node samples a group, how many environments
    are in flight, how long an inference batch waits and how large it gets (the keys above are limits then)."""
    precision: Precision = Precision.fp32
    activation_checkpointing: bool = False
    """Compute the transformer layers a second time in the backward pass instead of keeping their activations."""
    compile_inference: bool = False
    """Compile the replica's transformer layers with torch.compile (minutes at the start)."""
    compile_learner: bool = False
    """Compile the learner's transformer layers."""
    cuda_graphs: bool = False
    """Replay inference as CUDA graphs, one per batch size; needs a GPU."""
    replicate_size: int | None = None
    """Copies of the sharded learner (HSDP); gradients are averaged over them. Null makes one per node, so that parameters
    are gathered within a node; 1 shards over all ranks."""
    sync_every_micro_batch: bool = False
    """Reduce gradients after every micro-batch (least memory) instead of once a step (least traffic)."""
    weight_deltas: bool = False
    """Send between nodes only the weights that differ from the version before, exactly; for slow links. It pays with
    precision=bf16, where most weights stay as they are in a step of a small learning rate."""
    verify_weights: bool = False
    """Hash every weight transfer on both ends and stop on a difference."""
    torch_threads: int | None = None
    """Compute threads of each rank; null shares the cores among the ranks of the node."""
    wait_timeout_s: float = 600.0
    """Seconds a lane waits for another before the run stops and says who waited for what."""
    setup_timeout_s: float = 600.0
    """Seconds for the simulators to start."""
    step_timeout_s: float = 120.0
    """Seconds one control step, picture or reset of a simulator may take before its worker is replaced."""
    max_worker_failures: int = 3
    """Failures in a row of the simulators of one task that are made good; one more ends the run."""
    watchdog_s: float = 900.0
    """Seconds without any sign that the run gets on, or after a wish to stop, before it ends with the stacks of all threads
    and exit code 3; half as long for a rank without any sign of life."""
    collective_timeout_s: float = 3600.0
    """Seconds a collective may take before its group gives up."""

    def __post_init__(self) -> None:
        """Check the fields."""
        for key in ("num_envs", "num_workers", "max_batch"):
            _require(getattr(self, key) >= 1, f"runtime.{key} must be at least 1")
        _require(
            self.replicate_size is None or self.replicate_size >= 1,
            "runtime.replicate_size must be at least 1, or null",
        )
        _require(
            self.num_envs % self.num_workers == 0,
            f"runtime.num_envs={self.num_envs} must be a multiple of runtime.num_workers={self.num_workers}",
        )
        _require(
            self.num_envs // self.num_workers <= MAX_ENVS_PER_WORKER,
            f"runtime.num_envs={self.num_envs} are more than {MAX_ENVS_PER_WORKER} for each of the "
            f"runtime.num_workers={self.num_workers} processes: raise runtime.num_workers",
        )
        _require(
            self.wait_timeout_s <= self.watchdog_s < self.collective_timeout_s,
            f"runtime.watchdog_s={self.watchdog_s:g} must be at least runtime.wait_timeout_s={self.wait_timeout_s:g} and "
            f"below runtime.collective_timeout_s={self.collective_timeout_s:g}: a lane that waits for its own rank must give "
            "up, and say for what, before the run is given up, and that before the other ranks lose patience",
        )
        _require(self.max_wait_s >= 0, "runtime.max_wait_s must be at least 0")
        _require(
            self.torch_threads is None or self.torch_threads >= 1, "runtime.torch_threads must be at least 1, or null"
        )
        _require(self.max_worker_failures >= 0, "runtime.max_worker_failures must be at least 0")
        for key in ("wait_timeout_s", "setup_timeout_s", "step_timeout_s", "collective_timeout_s"):
            _require(getattr(self, key) > 0, f"runtime.{key} must be above 0")


@dataclass(kw_only=True, slots=True)
class MemoryConfig:
    """What the two memory pools of a rank may take of its GPU, or of its part of the host (`dvla.runtime.memory`)."""

    model_fraction: float | None = None
    """Share for weights, optimiser and activations. Null takes what `environment_gib` leaves; 5 % of a GPU are left to CUDA
    and NCCL."""
    environment_gib: float | None = None
    """GiB for simulators and episode slots: with a batch simulator on the GPU for all of it, physics engine and renderer
    included, else for the slots, on the host. Null takes what `model_fraction` leaves, or a quarter of the GPU with a batch
    simulator, or what the host has."""

    def __post_init__(self) -> None:
        """Check the fields."""
        _require(
            self.model_fraction is None or 0 < self.model_fraction <= 1,
            "memory.model_fraction must lie above 0 and not above 1, or be null",
        )
        _require(
            self.environment_gib is None or self.environment_gib > 0, "memory.environment_gib must be above 0, or null"
        )


@dataclass(kw_only=True, slots=True)
class TelemetryConfig:
    """What a run shows and records."""

    console: bool = True
    """Live view on rank 0 (plain lines when the output is no terminal)."""
    trace: bool = False
    """Record the lanes' spans to traces/ (Chrome Trace Event JSON)."""
    report: bool = True
    """Draw the run as report.html when it ends."""
    tensorboard: bool = True
    """Write the metrics for TensorBoard, too."""


@dataclass(kw_only=True, slots=True)
class Config:
    """A whole run."""

    seed: int = 0
    """Decides weights, tasks, initial states and every random draw of sampling."""
    device: Device = Device.auto
    resume: str = "none"
    """`none`, `auto` (go on from the run's last complete checkpoint, if there is one), or the path of a checkpoint. Ranks that
    torchrun starts again after a failure take `none` for `auto`."""
    run: RunConfig = field(default_factory=RunConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    render: RenderConfig = field(default_factory=RenderConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    def __post_init__(self) -> None:
        """Check what several fields must agree on."""
        _require(0 <= self.seed < 2**31, "seed must lie between 0 and 2^31 - 1")
        _require(
            self.model.num_action_chunks <= self.env.max_episode_steps,
            f"model.num_action_chunks={self.model.num_action_chunks} is longer than an episode "
            f"(env.max_episode_steps={self.env.max_episode_steps})",
        )
        _require(
            self.algo.max_staleness == 0 or self.runtime.schedule is Schedule.overlapped,
            "runtime.schedule=serial is on-policy: set algo.max_staleness=0",
        )
        _require(
            self.placement.name is Placement.colocated or self.runtime.schedule is Schedule.overlapped,
            f"runtime.schedule=serial runs all lanes on one thread: it needs placement=colocated, not "
            f"{self.placement.name.name}",
        )
        _require(
            self.placement.stages is None or self.placement.stages <= self.runtime.num_envs,
            f"placement.stages={self.placement.stages} are more than runtime.num_envs={self.runtime.num_envs}",
        )
        _require(
            not self.evaluation.videos_per_task or bool(self.env.cameras),
            f"evaluation.videos_per_task={self.evaluation.videos_per_task}: nothing to film without env.cameras",
        )
        _require(
            self.runtime.num_slots is None or self.runtime.num_slots >= self.algo.group_size,
            f"runtime.num_slots={self.runtime.num_slots} cannot hold one group "
            f"(algo.group_size={self.algo.group_size})",
        )

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.run.folder / "checkpoints"

    @property
    def max_decisions(self) -> int:
        """Decisions of the longest episode (T)."""
        return -(-self.env.max_episode_steps // self.model.num_action_chunks)

    @property
    def num_batches(self) -> int:
        """Batches of the whole run; each gives `algo.update_epochs` optimiser steps."""
        return self.algo.num_steps // self.algo.update_epochs

    @property
    def balances(self) -> bool:
        """Whether measurements move work; the serial schedule is to be reproducible."""
        return self.runtime.balance and self.runtime.schedule is Schedule.overlapped

    @property
    def moves_groups(self) -> bool:
        """Whether balance may let another rank sample a group; not where a batch keeps its slots, as they must suffice."""
        return self.balances and not self.algo.keeps_batch

    def groups_per_learner(self, num_learners: int) -> int:
        """Groups each of `num_learners` training ranks gives to a batch.

        Raises:
            ConfigError: The batch does not divide among them.
        """
        _require(
            self.algo.groups_per_step % num_learners == 0,
            f"algo.groups_per_step={self.algo.groups_per_step} must be a multiple of the number of training ranks "
            f"({num_learners})",
        )
        return self.algo.groups_per_step // num_learners

    def slots_per_sampler(self, num_learners: int, num_samplers: int) -> int:
        """Episode slots of each sampling rank: by default all that the staleness window can fill at once.

        Args:
            num_learners: Training ranks of all nodes.
            num_samplers: Sampling ranks of all nodes.
        """
        shared = gcd(num_learners, num_samplers)
        num_sharing, num_each = num_learners // shared, num_samplers // shared  # see `Roles.samplers_in_turn`
        batch = self.groups_per_learner(num_learners)
        window = -(-(self.algo.max_staleness + 1) * batch // num_each)  # groups that one learner has on one sampler
        groups = num_sharing * window
        if self.moves_groups and num_samplers > 1:
            groups += groups // 2  # a fast rank takes groups of a slow one
        slots = groups * self.algo.group_size
        if self.runtime.num_slots is not None:
            slots = min(slots, self.runtime.num_slots)
        _require(
            self.runtime.num_workers <= slots,
            f"runtime.num_workers={self.runtime.num_workers} processes for {slots} episode slots a rank: some would "
            "never have an episode; lower it, or raise runtime.num_slots, algo.groups_per_step or algo.max_staleness",
        )
        # Training ranks wait for each other: none may lack the slots that groups of the others fill meanwhile.
        least = num_sharing * self.algo.group_size
        _require(
            num_sharing == 1 or slots >= least,
            f"runtime.num_slots={self.runtime.num_slots} must be at least {least}: {num_sharing} training ranks share each "
            "sampling rank",
        )
        least = ((num_sharing - 1) * window + min(batch, window)) * self.algo.group_size
        _require(
            not self.algo.keeps_batch or slots >= least,
            f"algo.name={self.algo.name.name} with algo.update_epochs={self.algo.update_epochs} keeps a whole batch in its "
            f"slots: runtime.num_slots must be at least {least}",
        )
        return slots


@dataclass(kw_only=True, slots=True)
class EvaluateConfig(Config):
    """What `dvla.evaluate` takes."""

    checkpoint: str | None = None
    """A ``step_NNNNNN`` folder of a run, or its link ``latest``; null evaluates the weights the model begins with."""
    out: str | None = None
    """A new folder for the results; null for one in ``evaluations/`` of the run."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Demonstrations to clone."""

    paths: tuple[str, ...] = ()
    """LeRobot datasets (folders), LIBERO's HDF5 files or folders of these; they must go together."""
    name: str | None = None
    """The dataset's name, by which the checkpoint keeps its statistics (`model.unnorm_key` of later runs); null takes that of
    the folder or file, if there is only one."""
    action_key: str = "action"
    """Column of the actions in LeRobot's tables: in the environment's units, each element in [-1, 1]."""
    state_key: str | None = "observation.state"
    """Column of the states, as the environment gives them; null for none."""
    cameras: tuple[str, ...] | None = None
    """Cameras in the order of `env.cameras` of later runs, each by its column or the last part of that; null takes all."""
    image_size: tuple[int, int] | None = None
    """Height and width to which pictures are resized; null leaves them as they are. The model resizes to its own size."""
    gripper_open: float | None = None
    """1 or -1: what opens the gripper, the last element of an action. Needed only where the checkpoint to begin with commands
    a gripper by itself; null takes what the files' kind tells (LIBERO: -1)."""
    cache: str | None = None
    """Folder for the decoded pictures, uncompressed, while the run lasts; null for that of temporary files."""
    cache_gib: float = 64.0
    """GiB they may take there, once per node."""

    def __post_init__(self) -> None:
        """Check the fields."""
        _require(self.name != "" and "/" not in (self.name or ""), f"data.name={self.name!r}: give a plain name")
        _require(
            self.name is not None or len(self.paths) <= 1,
            "data.name: several datasets need a name for their statistics",
        )
        _require(
            self.image_size is None or (len(self.image_size) == 2 and min(self.image_size) >= 1),
            "data.image_size must be height and width, each at least 1 pixel, or null",
        )
        _require(self.gripper_open in (None, 1.0, -1.0), "data.gripper_open must be 1, -1 or null")
        _require(self.cache_gib > 0, "data.cache_gib must be above 0")

    @property
    def dataset_name(self) -> str:
        """What the dataset is called."""
        return self.name or Path(self.paths[0]).expanduser().resolve().name.removesuffix(".hdf5")


@dataclass(kw_only=True, slots=True)
class CloningConfig:
    """Behaviour cloning and its optimiser."""

    epochs: float = 10.0
    """Times each sample is trained on; a sample is a step of an episode with the actions that follow it."""
    num_steps: int | None = None
    """Optimiser steps instead of epochs."""
    global_batch_size: int = 64
    """Samples of one optimiser step, over all ranks."""
    micro_batch_size: int = 64
    """Samples of one forward-backward pass on one rank."""
    lr: float = 5e-4
    """Highest learning rate; it falls to 0 along a half cosine."""
    warmup_steps: int = 20
    """Optimiser steps over which it rises linearly before."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """How long AdamW remembers gradients, and their squares."""
    weight_decay: float = 0.0
    """AdamW's: share of each parameter that is taken away, by the learning rate."""
    max_grad_norm: float = 1.0
    """Norm to which a larger gradient is cut, over all trained parameters."""
    label_smoothing: float = 0.0
    """Share of the target that is spread evenly over all bins; openvla_oft only."""
    held_out_fraction: float = 0.05
    """Share of the episodes that is not trained on but measured; 0 holds out none."""

    def __post_init__(self) -> None:
        """Check the fields."""
        _require(self.epochs > 0, "sft.epochs must be above 0")
        _require(self.num_steps is None or self.num_steps >= 1, "sft.num_steps must be at least 1, or null")
        for key in ("global_batch_size", "micro_batch_size"):
            _require(getattr(self, key) >= 1, f"sft.{key} must be at least 1")
        _require(self.lr > 0, "sft.lr must be above 0")
        for key in ("warmup_steps", "weight_decay"):
            _require(getattr(self, key) >= 0, f"sft.{key} must be at least 0")
        _require(self.max_grad_norm > 0, "sft.max_grad_norm must be above 0")
        for key in ("label_smoothing", "held_out_fraction"):
            _require(0 <= getattr(self, key) < 1, f"sft.{key} must be at least 0 and below 1")


@dataclass(kw_only=True, slots=True)
class SftConfig:
    """What `dvla.sft` takes."""

    seed: int = 0
    """Decides random weights, which episodes are held out, the order of the samples and the noise of the flow."""
    device: Device = Device.auto
    resume: str = "none"
    """As in `Config`."""
    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    sft: CloningConfig = field(default_factory=CloningConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    """Precision, threads and how the policy is sharded and computed; the rest concerns lanes, which there are none of."""
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    def __post_init__(self) -> None:
        """Check what several fields must agree on."""
        _require(0 <= self.seed < 2**31, "seed must lie between 0 and 2^31 - 1")
        _require(bool(self.data.paths), "data.paths is empty: give at least one dataset")
        _require(
            self.model.name in ("openvla_oft", "pi05"),
            f"model.name={self.model.name}: openvla_oft and pi05 can be trained by cloning",
        )
        _require(
            not self.sft.label_smoothing or self.model.name == "openvla_oft",
            "sft.label_smoothing spreads over bins, which only openvla_oft has: set it to 0",
        )

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.run.folder / "checkpoints"


@dataclass(kw_only=True, slots=True)
class ServeConfig:
    """What `dvla.serve` takes."""

    checkpoint: str = "???"
    """A ``step_NNNNNN`` folder of a run, or its link ``latest``."""
    host: str = "127.0.0.1"
    """Interface to listen on; 0.0.0.0 for all, and then for everybody who can reach this machine."""
    port: int = 8000
    """TCP port; 0 takes a free one."""
    device: Device = Device.auto

    def __post_init__(self) -> None:
        """Check the fields."""
        _require(0 <= self.port < 2**16, "port must lie between 0 and 65535")


def to_plain(config: Config | SftConfig) -> dict[str, Any]:
    """The config as nested dicts, lists and scalars, enums by name."""

    def plain(value: Any) -> Any:
        if isinstance(value, Enum):
            return value.name
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return value

    return plain(asdict(config))


def config_hash(config: Config | SftConfig) -> str:
    """SHA-256 of the resolved config; equal on all ranks of a sound run."""
    return hashlib.sha256(json.dumps(to_plain(config), sort_keys=True).encode()).hexdigest()


def load(composed: DictConfig) -> Config:
    """Turn a composed Hydra config into a checked `Config`; raises as `load_as`."""
    return load_as(Config, composed)


def load_as(schema: type[Schema], composed: DictConfig) -> Schema:
    """Turn a composed Hydra config into a checked object of the dataclass `schema`.

    Raises:
        ConfigError: A key is unknown, has the wrong type, or a value that cannot work.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        # As plain values first: a key that was forced in with + would pass for one of the schema's.
        plain = OmegaConf.create(OmegaConf.to_container(composed))
        result: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), plain))
    except (OmegaConfBaseException, OverflowError) as error:  # the latter: an int beyond all floats
        key = getattr(error, "full_key", None)
        first = str(error).splitlines()[0]
        raise ConfigError(f"{key}: {first}" if key else first) from error
    return result


def register() -> None:
    """Give Hydra the schemas of all programs; entry points call it once."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="base_config", node=Config)
    ConfigStore.instance().store(name="evaluate_config", node=EvaluateConfig)
    ConfigStore.instance().store(name="sft_config", node=SftConfig)
    ConfigStore.instance().store(name="serve_config", node=ServeConfig)
