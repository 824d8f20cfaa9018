"""Normalisation by quantiles, and the statistics that checkpoints bring for it.

A checkpoint acts in units in which 98 % of the training data lies in [-1, 1]. The bounds belong to the data set it was
fine-tuned on, and every publisher stores them in a file of their own kind.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dvla.config import ConfigError

_OPENVLA_EPS, _OPENPI_EPS, _LEROBOT_EPS = 1e-8, 1e-6, 1e-8
_LEROBOT_KEY = "lerobot"


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """What becomes -1 and 1, per element of a vector."""

    name: str
    """For messages, such as ``action statistics 'libero'``."""
    low: Tensor
    """float64 (n,), in the environment's units."""
    high: Tensor
    """float64 (n,), in the environment's units."""
    span: Tensor
    """float64 (n,), what is divided by: high - low, and the small number by which a publisher avoids zero."""
    mask: Tensor
    """bool (n,), elements that are normalised; the others pass unchanged."""

    def normalize(self, x: Tensor, *, clip: bool = False) -> Tensor:
        """From the environment's units to the model's.

        Args:
            x: (..., n), on the device of the bounds.
            clip: Limit all elements to [-1, 1].

        Returns:
            (..., n), float64 if `x` is, else float32.
        """
        x, low, span = self._matched(x)
        scaled = torch.where(self.mask, 2 * ((x - low) / span) - 1, x)
        return scaled.clamp(-1, 1) if clip else scaled

    def unnormalize(self, x: Tensor) -> Tensor:
        """From the model's units to the environment's; the inverse of `normalize` without clipping.

        Args:
            x: (..., n), on the device of the bounds.

        Returns:
            (..., n), float64 if `x` is, else float32.
        """
        x, low, span = self._matched(x)
        return torch.where(self.mask, 0.5 * (x + 1) * span + low, x)

    def to(self, device: torch.device | str) -> Bounds:
        """The same bounds on another device."""
        low, high, span, mask = (x.to(device) for x in (self.low, self.high, self.span, self.mask))
        return Bounds(self.name, low, high, span, mask)

    def first(self, n: int) -> Bounds:
        """Those of the first `n` elements."""
        return Bounds(self.name, self.low[:n], self.high[:n], self.span[:n], self.mask[:n])

    def require_length(self, n: int, what: str) -> None:
        """Check that these are bounds for vectors of `n` elements.

        Args:
            n: Elements there are.
            what: What has them, in the plural, such as ``the environment's actions``.

        Raises:
            ConfigError: The bounds have another length.
        """
        if len(self.low) != n:
            raise ConfigError(f"{self.name} have {len(self.low)} elements, {what} have {n}")

    def _matched(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if x.shape[-1] != len(self.low):
            raise ValueError(f"{self.name} have {len(self.low)} elements, the vectors have {x.shape[-1]}")
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        return x.to(dtype), self.low.to(dtype), self.span.to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """How a checkpoint's actions and states are normalised; the tensors are on the CPU."""

    action: Bounds
    state: Bounds | None
    """None if the checkpoint has none for the state."""
    key: str
    """The name the checkpoint has for them."""
    raw: Mapping[str, Any]
    """The entry as it was read; JSON can hold it."""


def read_openvla_statistics(folder: Path, unnorm_key: str | None) -> Statistics:
    """Statistics of a checkpoint of OpenVLA or OpenVLA-OFT.

    Args:
        folder: The checkpoint; ``norm_stats`` of ``config.json`` and, before it, ``dataset_statistics.json`` are read.
        unnorm_key: Name of the data set, with or without the ending ``_no_noops``; None for the only one, or for the
            only one of ``dataset_statistics.json``.

    Raises:
        ConfigError: There are none, the key does not tell which, or they are not usable.
    """
    own = _read_json(folder / "dataset_statistics.json")
    known = _read_json(folder / "config.json").get("norm_stats", {}) | own
    if not known:
        raise ConfigError(
            f"model.checkpoint={folder}: no statistics there (looked for dataset_statistics.json, and norm_stats in "
            "config.json)"
        )
    if unnorm_key is None:
        fitting = list(known if len(known) == 1 else own)
    else:
        fitting = [key for key in (unnorm_key, f"{unnorm_key}_no_noops") if key in known][:1]
    key = _only(fitting, known, folder, unnorm_key)
    raw, state = known[key], None
    if "proprio" in raw:
        state = _bounds(f"state statistics {key!r}", {**raw["proprio"], "mask": None}, folder, _OPENVLA_EPS)
    action = _bounds(f"action statistics {key!r}", raw.get("action", {}), folder, _OPENVLA_EPS)
    return Statistics(action, state, key, raw)


def read_pi05_statistics(folder: Path, unnorm_key: str | None) -> Statistics:
    """Statistics of a checkpoint of pi0.5, from openpi or from LeRobot.

    Args:
        folder: The checkpoint; ``norm_stats.json`` below ``assets`` or in an asset's own folder is read, and the file that
            ``policy_preprocessor.json`` names.
        unnorm_key: The asset id, such as ``physical-intelligence/libero``, or its last part; for LeRobot's ``lerobot``;
            None for the only one.

    Raises:
        ConfigError: There are none, the key does not tell which, or they are not usable.
    """
    paths = [x for pattern in ("*/norm_stats.json", "*/*/norm_stats.json") for x in folder.glob(pattern)]
    assets = folder / "assets"
    known = {x.parent.relative_to(folder).as_posix(): x for x in sorted(paths) if assets not in x.parents}
    known |= {x.parent.relative_to(assets).as_posix(): x for x in sorted(assets.glob("**/norm_stats.json"))}
    steps = _read_json(folder / "policy_preprocessor.json").get("steps", [])
    for step in steps:
        if str(step.get("state_file")).endswith("normalizer_processor.safetensors"):
            known[_LEROBOT_KEY] = folder / step["state_file"]
            lerobot = step.get("config", {})
    if not known:
        raise ConfigError(
            f"model.checkpoint={folder}: no statistics there (looked for assets/**/norm_stats.json, <asset id>/"
            "norm_stats.json, and the *_normalizer_processor.safetensors that policy_preprocessor.json names)"
        )
    last_parts = [x for x in known if unnorm_key in (None, x.rpartition("/")[2])]
    key = _only([unnorm_key] if unnorm_key in known else last_parts, known, folder, unnorm_key)
    if known[key].suffix == ".safetensors":
        return _read_lerobot(known[key], lerobot)
    raw, state = _read_json(known[key]), None
    raw = raw.get("norm_stats", raw)
    if "state" in raw:
        state = _bounds(f"state statistics {key!r}", raw["state"], known[key], _OPENPI_EPS)
    action = _bounds(f"action statistics {key!r}", raw.get("actions", {}), known[key], _OPENPI_EPS)
    return Statistics(action, state, key, raw)


def _read_lerobot(path: Path, config: Mapping[str, Any]) -> Statistics:
    try:
        raw = {name: tensor.tolist() for name, tensor in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model.checkpoint: {path} cannot be read ({error})") from error
    bounds = {}
    for kind, feature in (("action", "action"), ("state", "observation.state")):
        mode = config.get("norm_map", {}).get(kind.upper(), "QUANTILES")
        if mode != "QUANTILES":
            raise ConfigError(
                f"model.checkpoint: {path} is for {kind}s normalised by {mode}: only QUANTILES can be used"
            )
        entry = {name.removeprefix(f"{feature}."): x for name, x in raw.items() if name.startswith(f"{feature}.")}
        if entry or kind == "action":
            # LeRobot replaces a span of zero and leaves the others as they are.
            name, eps = f"{kind} statistics {_LEROBOT_KEY!r}", config.get("eps", _LEROBOT_EPS)
            bounds[kind] = _bounds(name, entry, path, eps, only_zero=True)
    return Statistics(bounds["action"], bounds.get("state"), _LEROBOT_KEY, raw)


def _bounds(name: str, entry: Mapping[str, Any], path: Path, eps: float, *, only_zero: bool = False) -> Bounds:
    """Bounds from the quantiles of one entry, and its mask if it has one."""
    if not {"q01", "q99"} <= set(entry):
        has = "/".join(x for x in entry if entry[x] is not None) or "nothing"
        raise ConfigError(f"model.checkpoint: {path}: {name} have {has} only: the model needs quantiles (q01, q99)")
    try:
        low, high = (torch.tensor(entry[x], dtype=torch.float64) for x in ("q01", "q99"))
        mask = entry.get("mask")
        mask = torch.ones(len(low), dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model.checkpoint: {path}: {name} cannot be read ({error})") from error
    if low.ndim != 1 or not low.shape == high.shape == mask.shape or not (high - low).isfinite().all():
        raise ConfigError(f"model.checkpoint: {path}: q01, q99 and mask of {name} are no finite vectors of one length")
    span = torch.where(high == low, eps, high - low) if only_zero else high - low + eps
    return Bounds(name, low, high, span, mask)


def _only(fitting: Sequence[str], known: Mapping[str, Any], folder: Path, unnorm_key: str | None) -> str:
    """The one key that fits, else an error that lists what there is."""
    if len(fitting) == 1:
        return fitting[0]
    if unnorm_key is None:
        raise ConfigError(f"model.unnorm_key: {folder} has several statistics, name one of: {', '.join(known)}")
    found = "several" if fitting else "no"
    raise ConfigError(
        f"model.unnorm_key={unnorm_key!r}: {folder} has {found} such statistics; it has: {', '.join(known)}"
    )


def _read_json(path: Path) -> dict[str, Any]:
    """An object; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.checkpoint: {path} cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"model.checkpoint: {path} holds no object")
    return content
