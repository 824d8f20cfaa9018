"""What this machine has of what the checks need, in words. Imports torch only when asked about it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import resource
import shlex
import sys
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
BASE_MODULES = ("torch", "numpy", "psutil")
"""Without these nothing can be checked."""
_DISTRIBUTIONS = {"hydra": "hydra-core", "yaml": "PyYAML", "PIL": "Pillow"}


def missing(modules: tuple[str, ...]) -> list[str]:
    """Those of `modules` that cannot be imported here."""
    return [module for module in modules if importlib.util.find_spec(module) is None]


def how_to_get(modules: list[str]) -> str:
    """The command that installs `modules` in the versions the project asks for."""
    wanted = [_requirements().get(_DISTRIBUTIONS.get(module, module), module) for module in modules]
    return f"{shlex.quote(sys.executable)} -m pip install {shlex.join(wanted)}"


def _requirements() -> dict[str, str]:
    """The project's requirements by name of the distribution."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return {re.split(r"[<>=!~ \[]", line)[0]: line for line in project["dependencies"]}


def other_versions() -> list[str]:
    """Requirements that are installed in a version the project does not ask for."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return []
    found = []
    for name, line in _requirements().items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if not Requirement(line).specifier.contains(version, prereleases=True):
            found.append(f"{name} {version} (the project asks for {line})")
    return found


def describe() -> dict[str, str]:
    """Versions and machine."""
    import torch

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    said = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "memory that may be locked": "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / 2**20:.0f} MiB",
    }
    for module in ("transformers", "omegaconf"):
        if not missing((module,)):
            said[module] = importlib.metadata.version(module)
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        said |= {
            "GPU": f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB",
            "CUDA": str(torch.version.cuda),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return said
