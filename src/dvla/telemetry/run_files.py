"""What a run has left in its folder, as far as it got: a killed run lacks some files, and the last line of others."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml

from dvla.runtime.json_file import read_object
from dvla.telemetry.metrics import EVALUATIONS, FILE_NAME, read_metrics


class NoRunError(Exception):
    """A folder holds no run."""


@dataclass(slots=True)
class RunFiles:
    """The files of a run, read."""

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    """``env.json``."""
    summary: dict[str, Any] | None = None
    """None: the run goes on, or was killed."""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    traces: list[Path] = field(default_factory=list)
    films: list[Path] = field(default_factory=list)
    videos: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What is there and cannot be read."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read all but traces, films and videos, which are only listed.

        Raises:
            NoRunError: There is no run.
        """
        if not folder.is_dir():
            raise NoRunError(f"there is no folder {folder}: give the folder of a run, runs/<run.name>")
        if not any((folder / name).is_file() for name in ("config.yaml", FILE_NAME)):
            raise NoRunError(
                f"{folder} holds no run: it has neither config.yaml, which a run writes when it starts, nor {FILE_NAME}, to "
                "which it adds a line per optimiser step; give the folder of a run, runs/<run.name>"
            )
        run = cls(folder)
        run.config = run._try("config.yaml", _read_yaml) or {}
        run.environment = run._try("env.json", _read_json) or {}
        run.summary = run._try("summary.json", _read_json)
        run.metrics = run._lines(FILE_NAME)
        run.evaluations = run._lines(EVALUATIONS)
        run.traces = sorted(folder.glob("traces/rank*.json"))
        run.films = sorted(folder.glob("frames/*.png"))
        run.videos = sorted(folder.glob("videos/**/*.mp4"))
        return run

    @property
    def command(self) -> str:
        """What the run was started with, for a shell; nothing if that is not known."""
        words = self.environment.get("command")
        if not isinstance(words, list) or not words:
            return ""
        program, *rest = map(str, words)
        path = Path(program)
        start = f"python -m dvla.{path.stem}" if path.parent.name == "dvla" else shlex.quote(program)
        return " ".join([start, *map(shlex.quote, rest)])

    def _try(self, name: str, read: Callable[[Path], Any]) -> Any:
        if not (self.folder / name).exists():
            return None
        try:
            return read(self.folder / name)
        except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
            self.problems.append(f"{name} cannot be read: {error}")
            return None

    def _lines(self, name: str) -> list[dict[str, Any]]:
        lines = self._try(name, read_metrics) or []
        return [line for line in lines if isinstance(line, dict) and number(line.get("policy_version")) is not None]


def number(value: Any) -> float | None:
    """A value of a file as a number, if it is a finite one."""
    return float(value) if type(value) in (int, float) and abs(value) < 1e300 else None  # True is no number


def _read_json(path: Path) -> dict[str, Any]:
    return read_object(path, ValueError)


def _read_yaml(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError("it holds no settings")
    return content
