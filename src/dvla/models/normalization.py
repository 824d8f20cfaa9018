"""Normalisation by quantiles, and the statistics that checkpoints bring for it.

A checkpoint acts in units in which 98 % of the training data lies in [-1, 1]. The bounds belong to the data set it was
fine-tuned on, and every publisher stores them in a file of their own kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dvla.config import ConfigError
from dvla.runtime.confined_path import inside
from dvla.runtime.json_file import read_object

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
        """From the environment's units to the model's; `clip` limits all elements to [-1, 1].

        `x` is (..., n), on the device of the bounds; so is the result, float64 if `x` is, else float32.
        """
        x, low, span = self._matched(x)
        scaled = torch.where(self.mask, 2 * ((x - low) / span) - 1, x)
        return scaled.clamp(-1, 1) if clip else scaled

    def unnormalize(self, x: Tensor) -> Tensor:
        """From the model's units to the environment's; the inverse of `normalize` without clipping."""
        x, low, span = self._matched(x)
        return torch.where(self.mask, 0.5 * (x + 1) * span + low, x)

    def to(self, device: torch.device | str) -> Bounds:
        """The same bounds on another device."""
        return Bounds(self.name, *(x.to(device) for x in (self.low, self.high, self.span, self.mask)))

    def first(self, n: int) -> Bounds:
        """Those of the first `n` elements."""
        return Bounds(self.name, *(x[:n] for x in (self.low, self.high, self.span, self.mask)))

    def require_length(self, n: int, what: str) -> None:
        """Raise ConfigError unless these are for `n` elements, which `what` (e.g. ``the environment's actions``) have."""
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
    return openvla_statistics(key, known[key], folder)


def openvla_statistics(key: str, raw: Mapping[str, Any], path: Path) -> Statistics:
    """Statistics from an entry of OpenVLA's ``dataset_statistics.json``; `path` is where it is from, for messages.

    Raises:
        ConfigError: They are not usable.
    """
    state = {**raw["proprio"], "mask": None} if "proprio" in raw else None
    return _statistics(key, raw, path, raw.get("action", {}), state, _OPENVLA_EPS)


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
            known[_LEROBOT_KEY] = inside(folder, step["state_file"])
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
    raw = _read_json(known[key])
    return openpi_statistics(key, raw.get("norm_stats", raw), known[key])


def openpi_statistics(key: str, raw: Mapping[str, Any], path: Path) -> Statistics:
    """Statistics from the content of openpi's ``norm_stats.json``; `path` is where it is from, for messages.

    Raises:
        ConfigError: They are not usable.
    """
    return _statistics(key, raw, path, raw.get("actions", {}), raw.get("state"), _OPENPI_EPS)


def _read_lerobot(path: Path, config: Mapping[str, Any]) -> Statistics:
    try:
        raw = {name: tensor.tolist() for name, tensor in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model.checkpoint: {path} cannot be read ({error})") from error
    entries = {}
    for kind, feature in (("action", "action"), ("state", "observation.state")):
        mode = config.get("norm_map", {}).get(kind.upper(), "QUANTILES")
        if mode != "QUANTILES":
            raise ConfigError(
                f"model.checkpoint: {path} is for {kind}s normalised by {mode}: only QUANTILES can be used"
            )
        prefix = f"{feature}."
        entries[kind] = {name.removeprefix(prefix): x for name, x in raw.items() if name.startswith(prefix)}
    # LeRobot replaces a span of zero and leaves the others as they are.
    eps = config.get("eps", _LEROBOT_EPS)
    return _statistics(_LEROBOT_KEY, raw, path, entries["action"], entries["state"] or None, eps, only_zero=True)


def _statistics(
    key: str, raw: Mapping[str, Any], path: Path, action: Any, state: Any, eps: float, *, only_zero: bool = False
) -> Statistics:
    """Statistics from the quantiles of the entries `action` and `state`; the latter may be None."""

    def bounds(kind: str, entry: Any) -> Bounds:
        return _bounds(f"{kind} statistics {key!r}", entry, path, eps, only_zero=only_zero)

    return Statistics(bounds("action", action), None if state is None else bounds("state", state), key, raw)


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
    return read_object(path, lambda text: ConfigError(f"model.checkpoint: {text}")) if path.is_file() else {}
