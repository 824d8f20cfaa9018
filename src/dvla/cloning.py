"""Behaviour cloning: a policy learns to do what demonstrations show, on one rank or on many.

One call of `clone` is one rank of one run:

1. read the datasets' tables, compute the normalisation, open the run folder (nothing is written before what can be found
   wrong is found);
2. decode the pictures, once a node; build the policy and shard it; load a checkpoint if there is one;
3. take optimiser steps, measure the episodes that are held out, save, and write the policy for others to begin with.
"""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
import torch.distributed as dist
import yaml
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from dvla.config import ConfigError, ModelConfig, SftConfig, config_hash, to_plain
from dvla.datasets.frame_cache import cache_frames
from dvla.datasets.reading import read_dataset
from dvla.datasets.recorded import RecordedDataset
from dvla.datasets.samples import Samples, batch_rows, split_episodes
from dvla.datasets.statistics import compute_statistics, require_fitting
from dvla.envs.protocol import EnvSpec
from dvla.models.compute_options import checkpoint_activations, compile_layers
from dvla.models.export import write_policy
from dvla.models.policy_source import PolicySource, prepare_policy
from dvla.models.sharding import shard_policy
from dvla.rl.history import Course
from dvla.rl.learning_rate import lr_factor
from dvla.rl.noise import decision_keys
from dvla.runtime import checkpoint, run_folder
from dvla.runtime.checkpoint_writer import CheckpointWriter
from dvla.runtime.device import compute_threads
from dvla.runtime.failure import Failure, RunFailedError, settle
from dvla.runtime.resuming import open_run
from dvla.runtime.world import World, join_world, require_same
from dvla.telemetry.metrics import FILE_NAME, MetricsWriter, read_metrics
from dvla.telemetry.progress import Progress
from dvla.telemetry.redact import redact
from dvla.telemetry.report import draw_at_end
from dvla.telemetry.summary import SUMMARY_KEYS, write_summary
from dvla.telemetry.trace import Tracer

if TYPE_CHECKING:
    from torch import Tensor

    from dvla.datasets.samples import SampleBatch
    from dvla.models.normalization import Statistics
    from dvla.runtime.stop_request import StopRequest

logger = logging.getLogger(__name__)

_FIGURES = ("loss", "action_error", "accuracy")
POLICY = "policy"
"""Link in the run folder to the newest policy in its original's layout."""


def clone(config: SftConfig, stop_request: StopRequest) -> int:
    """Run this rank from beginning to end; the exit code of the process.

    Raises:
        Exception: What went wrong; ``summary.json`` tells it, too, if there is a run folder already.
    """
    begin, runtime = time.monotonic(), config.runtime
    world = join_world(config.device, runtime.collective_timeout_s, runtime.replicate_size)
    torch.set_num_threads(compute_threads(runtime.torch_threads, world.local_world_size))
    require_same(world, "configuration", config_hash(config))
    dataset = read_dataset(config.data)
    require_same(world, "dataset", dataset.fingerprint())
    task = _Task.of(config, dataset)
    with open_run(config, world, task.require_same) as (logs, resume_from):
        summary: dict[str, Any] = dict.fromkeys(SUMMARY_KEYS) | {
            "run": config.run.name,
            "exit": "failed",
            "device": world.device.type,
            "world_size": world.world_size,
            "nodes": world.num_nodes,
            "model": f"{config.model.name}/{config.model.checkpoint or config.model.preset}",
            "dataset": dataset.name,
            "steps": None,
            "loss": None,
            "held_out_loss": None,
            "held_out_accuracy": None,
            "samples_per_s": None,
        }
        try:
            _train(config, task, world, resume_from, stop_request, summary)
        except BaseException as error:
            logger.error("the run failed", exc_info=error, extra={"file_only": True})
            first = settle(logs, Failure.of(world.rank, error))[0]
            summary["error"] = first.told_by(world.rank)
            if isinstance(error, ConfigError):
                raise
            raise RunFailedError(first) from error
        finally:
            if world.is_main:
                summary["wall_s"] = time.monotonic() - begin
                with contextlib.suppress(OSError):  # a full disk must not hide what happened first
                    write_summary(config.run.folder / "summary.json", summary)
                    if config.telemetry.report:
                        draw_at_end(config.run.folder, logger.warning)
        if world.is_main and config.telemetry.console:
            figures = ", ".join(
                f"{key} {summary[key]:.3f}" for key in ("loss", "held_out_loss") if summary[key] is not None
            )
            print(
                f"{summary['exit']}: {summary['steps']} optimiser steps, {figures}\npolicy: {config.run.folder / POLICY}"
            )
    return 0


@dataclass(frozen=True, slots=True)
class _Task:
    """What is learnt, and what a policy must know of it."""

    dataset: RecordedDataset
    spec: EnvSpec
    model: ModelConfig
    computed: Statistics | None
    """Normalisation of the dataset; None where the checkpoint's is kept."""
    train_rows: np.ndarray
    held_out_rows: np.ndarray
    num_steps: int
    identity: dict[str, Any]
    """What must be the same for a run to be resumed."""

    def require_same(self, folder: Path) -> None:
        """Refuse to resume from the checkpoint of another task; raises ConfigError."""
        saved = checkpoint.read_train_state(folder).get("identity", {})
        for key, value in self.identity.items():
            if saved.get(key) != value:
                raise ConfigError(f"{key}={value}, but the checkpoint to resume from ({folder}) has {saved.get(key)}")

    @classmethod
    def of(cls, config: SftConfig, dataset: RecordedDataset) -> Self:
        """Raises ConfigError if dataset, model and checkpoint do not go together."""
        spec = EnvSpec(
            name=f"dataset {dataset.name}",
            cameras=dataset.cameras,
            image_size=config.data.image_size if config.data.image_size and dataset.cameras else dataset.image_size,
            state_dim=dataset.state_dim,
            action_dim=dataset.action_dim,
            max_episode_steps=max(map(len, dataset.episodes)),
            instructions=dataset.instructions,
            gripper_open=config.data.gripper_open or dataset.gripper_open,
        )
        model = config.model
        keeps = model.checkpoint is not None and model.unnorm_key is not None
        if model.unnorm_key is not None and not keeps:
            raise ConfigError("model.unnorm_key names statistics of model.checkpoint: without one, leave it null")
        computed = None if keeps else compute_statistics(dataset, model.name)
        # Labels are for the distribution that the loss is of, whatever temperature samples from it later.
        policy = prepare_policy(model, spec=spec, seed=0, without_weights=True, statistics=computed).policy
        if keeps and policy.statistics is not None:
            require_fitting(policy.statistics, dataset)
        if model.temperature != 1:
            raise ConfigError("model.temperature must be 1 for SFT: set it in the runs that sample from the policy")
        train_rows, held_out_rows = split_episodes(dataset, config.sft.held_out_fraction, config.seed)
        batch = config.sft.global_batch_size
        num_steps = config.sft.num_steps or math.ceil(config.sft.epochs * len(train_rows) / batch)
        identity = {
            **{f"model.{key}": value for key, value in to_plain(config)["model"].items()},
            "seed": config.seed,
            "sft.global_batch_size": batch,
            "sft.held_out_fraction": config.sft.held_out_fraction,
            "data (SHA-256)": dataset.fingerprint(),
        }
        return cls(dataset, spec, model, computed, train_rows, held_out_rows, num_steps, identity)

    def source(self, seed: int) -> PolicySource:
        """The policy as it begins."""
        source = prepare_policy(self.model, spec=self.spec, seed=seed, statistics=self.computed)
        if getattr(source.policy, "noise_head", None) is not None:
            source.policy.noise_head.requires_grad_(False)  # demonstrations do not tell how much to explore
        return source


def _train(
    config: SftConfig,
    task: _Task,
    world: World,
    resume_from: Path | None,
    stop_request: StopRequest,
    summary: dict[str, Any],
) -> None:
    """Build what is needed, take the optimiser steps and save what comes of them; `summary` is filled in on the way."""
    dataset, shows = task.dataset, world.is_main and config.telemetry.console
    if shows:
        print(
            f"dataset {dataset.name}: {len(dataset.episodes)} episodes, {dataset.num_steps} steps, "
            f"{len(dataset.instructions)} tasks, cameras {', '.join(dataset.cameras) or 'none'}, "
            f"{dataset.action_dim} action elements, {dataset.state_dim} state elements",
            flush=True,
        )
    with Progress(len(dataset.episodes), "episodes decoded", enabled=shows) as progress:
        frames = cache_frames(
            dataset,
            image_size=task.spec.image_size,
            folder=config.data.cache,
            max_gib=config.data.cache_gib,
            world=world,
            note=lambda done: progress.update(done, "pictures of demonstrations"),
        )
    cloner = Cloner(task.source(config.seed), world, config)
    samples = Samples(dataset, frames, horizon=cloner.horizon, device=world.device)
    step, is_saved = 0, False
    if resume_from is not None:
        checkpoint.load(resume_from, model=cloner.model, optimizer=cloner.optimizer, group=world.learners_pg)
        step = int(checkpoint.read_train_state(resume_from)["policy_version"])
        is_saved = resume_from.resolve().parent == config.checkpoints.resolve()
        if shows:
            print(f"resumed from {resume_from}", flush=True)
    training = _Training(config, task, world, cloner, samples, step, summary)
    training.run(stop_request)
    if training.step == step:  # there was nothing left to do
        if not is_saved:
            training.save(is_last=True)
        elif world.is_main and not (config.run.folder / "policies" / f"step_{step:06d}").exists():
            _write_policy(config, task, step)
    summary["exit"] = "stopped" if training.step < task.num_steps else "completed"
    if world.is_main:
        losses = Course()
        for line in read_metrics(config.run.folder / FILE_NAME):
            losses.add(line["sft/loss"])
        summary["loss"] = losses.first_last_mean()[1]


class _Training:
    """The optimiser steps of one run on this rank, their figures and their checkpoints."""

    def __init__(
        self,
        config: SftConfig,
        task: _Task,
        world: World,
        cloner: Cloner,
        samples: Samples,
        step: int,
        summary: dict[str, Any],
    ) -> None:
        self.step = step
        """Optimiser steps done."""
        self._config, self._task, self._world = config, task, world
        self._cloner, self._samples, self._summary = cloner, samples, summary
        self._begin, self._first = time.monotonic(), step
        # The policy is made of the checkpoint right afterwards, so nothing could overlap with writing it.
        self._checkpoints = CheckpointWriter(
            config.checkpoints,
            keep=config.run.keep_checkpoints,
            group=world.checkpoint_pg,
            overlaps=False,
            timeout_s=config.runtime.collective_timeout_s,
            saved_version=None,
            warn=logger.warning,
            tracer=Tracer(world.rank, enabled=False),
        )
        summary |= {"policy_version": step, "steps": step}

    def run(self, stop_request: StopRequest) -> None:
        """Go on to the last step, or to the one at which a rank is asked to stop; the last one is saved."""
        config, total = self._config, self._task.num_steps
        every, unit = config.run.eval_every, f"steps of {config.sft.global_batch_size} samples"
        note, is_last = "", self.step >= total
        with contextlib.ExitStack() as closing:
            metrics = None
            if self._world.is_main:
                checkpoint.take_back(config.checkpoints, self.step)
                metrics = MetricsWriter(
                    config.run.folder, tensorboard=config.telemetry.tensorboard, resume_at=self.step
                )
                closing.enter_context(metrics)
                metrics.add_text("config", redact(yaml.safe_dump(to_plain(config), sort_keys=False)))
            shows = self._world.is_main and config.telemetry.console
            progress = closing.enter_context(Progress(total, unit, enabled=shows))
            while not is_last:
                values, stops = self._take_step(stop_request)
                is_last = stops or self.step == total
                held_out: dict[str, float | None] = dict.fromkeys(_FIGURES)
                if len(self._task.held_out_rows) and (is_last or (every and self.step % every == 0)):
                    held_out |= self._measure()
                    note = f", held out {held_out['loss']:.3f}"
                values |= {f"sft/held_out_{key}": x for key, x in held_out.items()} | self._checkpoints.metrics()
                if metrics is not None:
                    metrics.write(self.step, None, values)
                progress.update(self.step, f"loss {values['sft/loss']:.3f}{note}")
                if is_last or self.step % config.run.checkpoint_every == 0:
                    self.save(is_last=is_last)

    def save(self, *, is_last: bool) -> None:
        """Write a checkpoint and the policy; collective. Of all saves of a run, the last one must succeed.

        Raises:
            CheckpointError: The last one did not; on all ranks.
            OSError: The last policy cannot be written; on the main rank.
        """
        train_state = {
            "policy_version": self.step,
            "identity": self._task.identity,
            "config": to_plain(self._config),
        }
        self._checkpoints.save(self.step, self._cloner.model, self._cloner.optimizer, train_state)
        if is_last:
            self._checkpoints.finish()
        if self._world.is_main and self._checkpoints.saved_version == self.step:
            try:
                _write_policy(self._config, self._task, self.step)
            except OSError as error:  # a full disk
                if is_last:
                    raise
                logger.warning("the policy of step %d cannot be written: %s", self.step, error)

    def _take_step(self, stop_request: StopRequest) -> tuple[dict[str, float | None], bool]:
        """One optimiser step; its figures by metric tag, and whether a rank is asked to stop."""
        sft, rows = self._config.sft, self._task.train_rows
        chosen = batch_rows(rows, seed=self._config.seed, step=self.step, batch_size=sft.global_batch_size)
        sums = self._cloner.accumulate(self._samples, chosen, self.step)
        rate = sft.lr * lr_factor(
            self.step, warmup_steps=sft.warmup_steps, num_steps=self._task.num_steps, schedule="cosine"
        )
        grad_norm = self._cloner.step(rate, self.step)
        self.step += 1
        *figures, stops = self._over_ranks(torch.cat((sums, torch.tensor([float(stop_request.is_set())]))))
        pace = (self.step - self._first) * sft.global_batch_size / (time.monotonic() - self._begin)
        self._summary |= {"policy_version": self.step, "steps": self.step, "samples_per_s": pace}
        values: dict[str, float | None] = {f"sft/{key}": value for key, value in _means(figures).items()}
        values |= {"sft/lr": rate, "sft/grad_norm": grad_norm, "sft/samples_per_s": pace}
        return values | {"sft/epoch": self.step * sft.global_batch_size / len(rows)}, stops > 0

    def _measure(self) -> dict[str, float]:
        """The figures of the episodes that are held out."""
        figures = _means(self._over_ranks(self._cloner.measure(self._samples, self._task.held_out_rows)))
        self._summary |= {f"held_out_{key}": figures[key] for key in ("loss", "accuracy")}
        return figures

    def _over_ranks(self, sums: Tensor) -> list[float]:
        dist.all_reduce(sums, group=self._world.learners_pg)
        return sums.tolist()


def _means(sums: list[float]) -> dict[str, float]:
    """The `_FIGURES` from sums as `_sums` gives them."""
    loss, num_steps, error, correct, num_elements = sums
    return dict(zip(_FIGURES, (loss / num_steps, error / num_elements, correct / num_elements), strict=True))


def _write_policy(config: SftConfig, task: _Task, step: int) -> None:
    """Write the policy of the checkpoint of `step` for others to begin with, and let the link show it; main rank only."""
    source = task.source(config.seed)
    if source.load is not None:
        source.policy.to_empty(device="cpu")
        source.load(source.policy)
    checkpoint.load_plain(checkpoint.step_folder(config.checkpoints, step), source.policy)
    root = config.run.folder / "policies"
    out = root / f"step_{step:06d}"
    shutil.rmtree(out, ignore_errors=True)
    write_policy(source.policy, task.model, out, task.computed if task.model.checkpoint else None)
    run_folder.point_link(config.run.folder / POLICY, f"{root.name}/{out.name}")
    for old in root.iterdir():
        if old != out:
            shutil.rmtree(old)


class Cloner:
    """The sharded policy of one rank, its optimiser, and what a batch of samples does to them.

    Args:
        source: The policy as it begins.
        world: Ranks and mesh.
        config: Optimiser, micro-batches, precision.
    """

    def __init__(self, source: PolicySource, world: World, config: SftConfig) -> None:
        self._sft, self._seed, self._world = config.sft, config.seed, world
        self._sync_always = config.runtime.sync_every_micro_batch
        policy = source.policy if source.load else source.policy.to(world.device)
        if config.runtime.activation_checkpointing:
            checkpoint_activations(policy)
        if config.runtime.compile_learner:
            compile_layers(policy)
        self.model = shard_policy(
            policy,
            world.learner_mesh,
            precision=config.runtime.precision,
            reshard_after_forward=self._sync_always,
            frozen=source.frozen,
        )
        if source.load is not None:
            self.model.to_empty(device=world.device)
            source.load(self.model)
        register_fsdp_forward_method(self.model, "imitation_loss")
        self.model.train()
        self.horizon: int = self.model.num_imitated_steps
        self._options = {"label_smoothing": config.sft.label_smoothing} if config.sft.label_smoothing else {}
        self._trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self._trainable, lr=config.sft.lr, betas=config.sft.adam_betas, weight_decay=config.sft.weight_decay
        )

    def accumulate(self, samples: Samples, rows: np.ndarray, step: int) -> Tensor:
        """Add the gradient of the mean loss of the samples `rows`, those of all ranks; collective.

        Args:
            samples: The dataset.
            rows: All samples of this optimiser step, the same on every rank; this rank computes its share.
            step: Optimiser steps done; decides the noise.

        Returns:
            As `_sums`, of this rank's share.
        """
        total = torch.zeros(5, dtype=torch.float64)
        # The denominator is known beforehand, so the gradient does not depend on how the batch is cut. FSDP averages.
        scale = self._world.num_learners / samples.num_actions(rows)
        parts = self._parts(rows)
        for index, part in enumerate(parts):
            is_last = index == len(parts) - 1
            if not self._sync_always:
                self.model.set_requires_gradient_sync(is_last)
                self.model.set_reshard_after_backward(is_last)
            batch, is_padding = self._load(samples, part, rows)
            loss, error, correct = self.model.imitation_loss(
                batch.observation, batch.actions, self._keys(part if len(part) else rows[:1], step + 1), **self._options
            )
            mask = batch.mask & (not is_padding)
            (torch.where(mask[..., None], loss, 0.0).mean(-1).sum() * scale).backward()
            total += _sums(loss.detach(), error, correct, mask)
        return total

    def measure(self, samples: Samples, rows: np.ndarray) -> Tensor:
        """As `accumulate`, without gradients and label smoothing, and with the same noise each time."""
        total = torch.zeros(5, dtype=torch.float64)
        with torch.no_grad():
            for part in self._parts(rows):
                batch, is_padding = self._load(samples, part, rows)
                keys = self._keys(part if len(part) else rows[:1], 0)
                loss, error, correct = self.model.imitation_loss(batch.observation, batch.actions, keys)
                total += _sums(loss, error, correct, batch.mask & (not is_padding))
        return total

    def step(self, rate: float, step: int) -> float:
        """Clip the gradient and take the optimiser step that follows `step` others, at the learning rate `rate`.

        Returns:
            The gradient's norm before clipping.

        Raises:
            FloatingPointError: It is not finite.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norm = torch.nn.utils.clip_grad_norm_(self._trainable, self._sft.max_grad_norm)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"the gradient of optimiser step {step + 1} is not finite ({grad_norm}): lower sft.lr"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return grad_norm

    def _parts(self, rows: np.ndarray) -> list[np.ndarray]:
        """This rank's share of `rows` in micro-batches; on all ranks equally many, which may be empty."""
        ranks, size = self._world.num_learners, self._sft.micro_batch_size
        share = rows[self._world.learner :: ranks]
        return [share[begin : begin + size] for begin in range(0, -(-len(rows) // ranks), size)]

    def _load(self, samples: Samples, part: np.ndarray, rows: np.ndarray) -> tuple[SampleBatch, bool]:
        """A micro-batch; some sample, and True, where there is none for this rank."""
        return samples.batch(part if len(part) else rows[:1]), not len(part)

    def _keys(self, rows: np.ndarray, draw: int) -> Tensor:
        """Noise keys (B,): of each sample another one each time it is drawn."""
        tickets = torch.from_numpy(rows)
        return decision_keys(self._seed, tickets, torch.full_like(tickets, draw)).to(self._world.device)


def _sums(loss: Tensor, error: Tensor, correct: Tensor | None, mask: Tensor) -> Tensor:
    """Sum of the loss over steps and their number; of error and hits over elements, and their number: (5,) float64, host.

    Without a notion of hits their sum is NaN.
    """
    steps = mask.sum()
    hits = torch.where(mask[..., None], correct, False).sum() if correct is not None else torch.tensor(float("nan"))
    figures = (
        torch.where(mask[..., None], loss, 0.0).mean(-1).sum(),
        steps,
        torch.where(mask[..., None], error, 0.0).sum(),
        hits.to(loss.device),
        steps * error.shape[-1],
    )
    return torch.stack([figure.double() for figure in figures]).cpu()
