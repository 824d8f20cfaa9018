"""What a check on the accelerator is: a function that measures and demands, with what it needs and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

VLA_MODULES = ("transformers", "tokenizers", "sentencepiece", "safetensors")
"""What the vision-language-action models import beyond torch, numpy and psutil."""


@dataclass
class Findings:
    """What a check measured, and which of its demands were not met."""

    device: torch.device
    figures: dict[str, float] = field(default_factory=dict)
    """Value by name; the name ends with the unit, if there is one."""
    faults: list[str] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        """Whether this is the real check; else it is a dry run, whose speeds mean nothing."""
        return self.device.type == "cuda"

    def figure(self, name: str, value: float) -> float:
        """Note a measured value; returns it."""
        self.figures[name] = float(f"{float(value):.4g}")
        return value

    def demand(self, condition: bool, what: str) -> None:
        """Note a fault unless `condition`; the check goes on, because time on a GPU is scarce."""
        if not condition:
            self.faults.append(what)


@dataclass(frozen=True)
class Check:
    """One check."""

    name: str
    function: Callable[[Findings], None]
    limit_s: float
    """Seconds after which it counts as hung: all stacks are written, and it has failed."""
    needs: tuple[str, ...]
    """Modules that it imports beyond torch, numpy and psutil."""
    gpu_only: str | None
    """Why it makes no sense on a CPU."""

    @property
    def title(self) -> str:
        """What it shows, in one line."""
        return (self.function.__doc__ or "").splitlines()[0]


CHECKS: dict[str, Check] = {}
"""All checks of the modules imported so far, by name."""


def check(
    *, limit_s: float = 60.0, needs: tuple[str, ...] = (), gpu_only: str | None = None
) -> Callable[[Callable[[Findings], None]], Callable[[Findings], None]]:
    """Declare the decorated function a check; the arguments are explained at `Check`."""

    def declare(function: Callable[[Findings], None]) -> Callable[[Findings], None]:
        CHECKS[function.__name__] = Check(function.__name__, function, limit_s, needs, gpu_only)
        return function

    return declare
