"""The README of an exported policy: where it comes from, how well it does, how to use it. What is not known is left out."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from dvla.config import Config, ConfigError
from dvla.envs.protocol import EnvSpec
from dvla.runtime.json_file import read_object
from dvla.telemetry.figures import fixed
from dvla.telemetry.redact import redact
from dvla.telemetry.run_files import NoRunError, RunFiles, number

_HEAD = """\
---
# The licence is yours to choose; the base model's may bind you. Hugging Face wants it here: license: …
library_name: dvla
pipeline_tag: robotics
tags: [robotics, reinforcement-learning, vision-language-action]
---
"""


def model_card(config: Config, spec: EnvSpec, checkpoint: Path, version: int) -> str:
    """The text, with results and command from the folder of the run, if the checkpoint lies in one.

    Args:
        config: The run.
        spec: Its environment.
        checkpoint: The ``step_NNNNNN`` folder.
        version: Optimiser steps it has behind it.
    """
    model, env = config.model, config.env
    try:
        run = RunFiles.read(checkpoint.parents[1])
    except NoRunError:
        run = RunFiles(checkpoint.parents[1])
    facts = {
        "base model": model.checkpoint or f"none: random weights, preset {model.preset}",
        "architecture": model.name,
        "trained by": f"{config.algo.name.name.upper()}, {version} optimiser steps",
        "adapters": f"LoRA of rank {model.lora_rank}, merged" if model.lora_rank else "none",
        "environment": spec.name,
        "cameras": f"{', '.join(spec.cameras)} ({spec.image_size[0]} × {spec.image_size[1]})"
        if spec.cameras
        else "none",
        "actions": f"{model.num_action_chunks} control steps of {spec.action_dim} elements in [-1, 1] a decision",
        "instructions": "; ".join(spec.instructions),
        "D-VLA": (run.environment.get("versions") or {}).get("dvla"),
    }
    settings = _overrides(
        {"model": f"{model.name}_{model.preset}", "model.checkpoint": "FOLDER"}
        | {"model.num_action_chunks": model.num_action_chunks}
        | {f"env.{key}": getattr(env, key) for key in ("name", "task", "cameras", "image_size", "max_episode_steps")}
        | {f"++env.options.{key}": value for key, value in env.options.items()}
    )
    parts = [
        f"{_HEAD}\n# {config.run.name}, step {version}",
        _table(("", ""), [(name, str(value)) for name, value in facts.items() if value is not None]),
        *_results(run, version),
        *(["## Training", f"```bash\n{run.command}\n```"] if run.command else []),
        "## Use\n\nIn D-VLA, with FOLDER for this one:",
        f"```bash\npython -m dvla.evaluate {settings}\npython -m dvla.train {settings}\n```",
        "The layout is that of the model's original tools, which read it, too.",
    ]
    return redact("\n\n".join(parts) + "\n")


def _overrides(settings: dict[str, Any]) -> str:
    """Settings for a command line."""
    words = {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
    return " ".join(shlex.quote(f"{key}={word}") for key, word in words.items())


def _results(run: RunFiles, version: int) -> list[str]:
    """Success of evaluations before training and of this very policy."""
    rows = [
        (
            f"during training, {'before' if line['policy_version'] == 0 else 'this step'}",
            "",
            _success(line, "eval/"),
            "",
        )
        for line in run.evaluations
        if line["policy_version"] in (0, version)
    ]
    for path in sorted(run.folder.glob("evaluations/*/evaluation.json")):
        result = read_object(path, ConfigError)
        if result.get("policy_version") == version:
            interval = " to ".join(fixed(number(bound), 3) for bound in result.get("interval", ()))
            rows.append((str(result.get("env")), str(result.get("episodes")), _success(result), interval))
    if not rows:
        return ["## Results\n\nThis policy was not evaluated."]
    return ["## Results", _table(("evaluation", "episodes", "success", "95 % interval"), rows)]


def _success(values: dict[str, Any], prefix: str = "") -> str:
    return fixed(number(values.get(f"{prefix}success_rate")), 3)


def _table(head: tuple[str, ...], rows: list[Any]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
