"""How a run begins and goes on: its folder, the checkpoint it resumes from, and what it saves to go on later."""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dvla.config import Config, ConfigError, to_plain
from dvla.planes.tickets import cursor_after_reshard
from dvla.runtime import checkpoint, run_folder
from dvla.runtime.world import World, restart_count
from dvla.telemetry.logs import set_up_logging
from dvla.telemetry.redact import redact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dvla.config import SftConfig
    from dvla.envs.protocol import EnvSpec
    from dvla.lanes.learner import Learner
    from dvla.planes.tickets import TicketBook
    from dvla.runtime.checkpoint_writer import CheckpointWriter
    from dvla.telemetry.reporter import Reporter

logger = logging.getLogger(__name__)


@contextmanager
def open_run(
    config: Config | SftConfig, world: World, require_fitting: Callable[[Path], None]
) -> Iterator[tuple[Path, Path | None]]:
    """The main rank opens the run folder for all, and keeps it until the block ends.

    Gives the folder of this attempt's logs, and the checkpoint to resume from.

    Args:
        config: The run.
        world: This rank.
        require_fitting: Raises ConfigError if the checkpoint in a folder is not one that this run can go on from; called
            before anything of an old run is touched.

    Raises:
        ConfigError: It cannot be used; raised on every rank.
    """
    said: list[Any] = [None, None, None, None]
    if restart_count():  # ranks that torchrun starts again after a failure were told how to begin, not how to go on
        goes_on = config.resume == "none" or checkpoint.complete_checkpoints(config.checkpoints)
        config = replace(config, resume="auto" if goes_on else config.resume, run=replace(config.run, clean=False))
    with ExitStack() as claims:
        if world.is_main:
            try:
                found, torn = checkpoint.find(config.resume, config.checkpoints)
                is_own = found is not None and found.resolve().is_relative_to(config.run.folder.resolve())
                if is_own and config.run.clean:
                    raise ConfigError(
                        f"run.clean=true would remove the checkpoint to resume from ({found}): leave one out"
                    )
                if found is not None:
                    require_fitting(found)
                claims.enter_context(run_folder.claim(config.run.folder))
                logs = run_folder.prepare(config, resuming=is_own or config.resume == "auto")
                said = [None, str(logs), str(found) if found else None, torn]
            except (ConfigError, checkpoint.CheckpointError) as error:
                said = [str(error), None, None, None]
        dist.broadcast_object_list(said, src=world.main_rank, group=world.control_pg)
        if said[0] is not None:
            raise ConfigError(said[0])
        logs = Path(said[1])
        set_up_logging(world.rank, logs)
        for folder, fault in said[3].items():
            logger.warning("checkpoint %s is torn and passed over: %s", folder, fault)
        yield logs, Path(said[2]) if said[2] else None


def _policy_identity(config: Config) -> dict[str, Any]:
    """What decides which weights a checkpoint holds, and where those come from that it does not: frozen, or a reference."""
    model = to_plain(config)["model"]
    keys = ("name", "preset", "checkpoint", "freeze", "lora_rank", "lora_targets", "num_action_chunks", "options")
    identity = {f"model.{key}": model[key] for key in keys}
    if config.algo.reference_kl_coef or (model["checkpoint"] is None and (model["freeze"] or model["lora_rank"])):
        identity["seed"] = config.seed
    algo = to_plain(config)["algo"]
    return identity | {f"algo.{key}": algo[key] for key in ("name", "value_type")}


def require_same_policy(config: Config, folder: Path) -> None:
    """Refuse to resume from the checkpoint of another policy."""
    saved = checkpoint.read_train_state(folder).get("policy")
    if not isinstance(saved, dict):
        raise ConfigError(f"the checkpoint to resume from ({folder}) is of an older version of this program")
    for key, value in _policy_identity(config).items():
        if saved.get(key, value) != value:
            raise ConfigError(f"{key}={value}, but the checkpoint to resume from ({folder}) was made with {saved[key]}")


def resume(
    config: Config, world: World, folder: Path, learner: Learner, book: TicketBook, reporter: Reporter
) -> tuple[int, int | None]:
    """Put learner, tickets and counts back to where the checkpoint in `folder` was taken.

    Returns:
        Its policy version, and the same again if this run has it as a checkpoint of its own, else None.
    """
    reporter.phase(f"resuming from {folder}")
    checkpoint.load(folder, model=learner.model, optimizer=learner.optimizer, group=world.learners_pg)
    state = checkpoint.read_train_state(folder)
    version: int = state["policy_version"]
    try:
        cursor = cursor_after_reshard(state["cursors"], world.learner, world.num_learners)
        book.restore(**cursor, batches_done=version // config.algo.update_epochs)
        reporter.restore(state["report"])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        fault = f"{type(error).__name__}: {error}"
        raise checkpoint.CheckpointError(
            f"{folder} was written by another version of this program ({fault})"
        ) from error
    if world.is_main:
        checkpoint.take_back(config.checkpoints, version)
    return version, version if folder.resolve().parent == config.checkpoints.resolve() else None


def saver(
    config: Config,
    world: World,
    spec: EnvSpec,
    learner: Learner,
    reporter: Reporter,
    writer: CheckpointWriter,
) -> Callable[[int, dict[str, Any]], None]:
    """What the grpo lane calls to save version `policy_version`, from which the rank's groups go on at `cursor`."""

    def save(policy_version: int, cursor: dict[str, Any]) -> None:
        cursors: list[dict[str, Any]] = [{}] * world.num_learners
        dist.all_gather_object(cursors, cursor, group=world.learners_pg)
        train_state = {
            "policy_version": policy_version,
            "cursors": cursors,
            "report": reporter.state(),
            "env_spec": asdict(spec),
            "policy": _policy_identity(config),
            "config": json.loads(redact(json.dumps(to_plain(config)))),
        }
        writer.save(policy_version, learner.model, learner.optimizer, train_state)

    return save
