"""Look whether everything is there: ``dvla doctor``, or ``python -m dvla.doctor``.

Each line is ok, a warning, or something that is missing, with what to do about it. The exit code is 1 if something is missing.
Simulators draw a picture in a process of their own, since a graphics driver that is broken may take the process with it.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from packaging.requirements import Requirement
from rich.console import Console
from rich.markup import escape
from rich.table import Table

OK, WARNING, MISSING = "ok", "warning", "missing"
_COLOURS = {OK: "green", WARNING: "yellow", MISSING: "red"}
_GIB = 2**30
_DRAWING_S = 120.0
_PACKAGES = "launch/system_packages.sh as root, or launch/system_packages.sh --user"
_MUJOCO = """
import mujoco
model = mujoco.MjModel.from_xml_string(
    "<mujoco><worldbody><light pos='0 0 3'/><geom type='sphere' size='.5'/></worldbody></mujoco>"
)
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
with mujoco.Renderer(model, 32, 32) as renderer:
    renderer.update_scene(data)
    assert renderer.render().any(), "the picture is black"
"""
_MANISKILL = """
import numpy as np
from dvla.envs.maniskill import ManiSkillEnv
env = ManiSkillEnv("PushCube-v1", ("base_camera",), (32, 32), 8, "sparse")
env.reset(0, 0)
picture = np.zeros((1, 32, 32, 3), np.uint8)
env.observe(picture, np.zeros(env.spec.state_dim, np.float32))
assert picture.any(), "the picture is black"
"""


class Finding(NamedTuple):
    """One line of the table."""

    what: str
    verdict: str
    found: str
    remedy: str = ""


def packages(requirements: Iterable[str], version_of: Callable[[str], str | None]) -> Iterator[Finding]:
    """What each requirement of the project (as in its metadata) finds.

    Args:
        requirements: Those of extras are left out.
        version_of: The installed version of a package, None if it is not there.
    """
    for text in requirements:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        version = version_of(wanted.name)
        fits = version is not None and wanted.specifier.contains(version, prereleases=True)
        found = version or "not installed"
        yield Finding(wanted.name, OK if fits else MISSING, found, "" if fits else f"pip install '{text}'")


def enough(what: str, amount: float, least: float, unit: str, remedy: str) -> Finding:
    """Whether there is enough of something; too little is a warning."""
    is_ok = amount >= least
    return Finding(what, OK if is_ok else WARNING, f"{amount:,.0f} {unit}", "" if is_ok else remedy)


def drawing(what: str, attempts: dict[str, str | None], remedy: str) -> Finding:
    """What came of attempts to draw: by how, what went wrong, None where nothing did."""
    works = [how for how, fault in attempts.items() if fault is None]
    if works:
        return Finding(what, OK, f"draws with {' and '.join(works)}")
    return Finding(what, MISSING, "; ".join(f"{how}: {fault}" for how, fault in attempts.items()), remedy)


def examine() -> Iterator[Finding]:
    """Look at this machine, one thing after another."""
    python = platform.python_version()
    is_known = sys.version_info[:2] in ((3, 11), (3, 12))
    yield Finding("Python", OK if is_known else MISSING, python, "" if is_known else "Python 3.11 or 3.12")
    yield from packages(importlib.metadata.requires("dvla") or (), _version)
    yield _accelerators()
    cores = len(os.sched_getaffinity(0))
    yield enough(
        "cores", cores, 2, "", "one core runs everything in turn: expect half of the documented speeds, or less"
    )
    from dvla.runtime.host_memory import HostMemory

    yield enough("free memory", HostMemory().free() / _GIB, 4, "GiB", "lower runtime.num_envs and algo.groups_per_step")
    yield enough("free disk here", shutil.disk_usage(".").free / _GIB, 5, "GiB", "runs go elsewhere with run.root")
    yield enough("open files", resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1024, "", "ulimit -n 4096")
    yield _shared_memory()
    yield _loopback()
    renderers = dict.fromkeys([*filter(None, [os.environ.get("MUJOCO_GL")]), "egl", "osmesa"])
    attempts = {f"MUJOCO_GL={name}": _draw(_MUJOCO, MUJOCO_GL=name) for name in renderers}
    yield drawing("LIBERO (MuJoCo)", attempts, _PACKAGES)
    yield drawing("ManiSkill (SAPIEN)", {"Vulkan": _draw(_MANISKILL)}, _PACKAGES)
    slurm = shutil.which("sbatch")
    yield Finding("SLURM", OK, slurm or "not here: only launch/slurm.sbatch needs it")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _accelerators() -> Finding:
    try:
        import torch
    except ImportError:
        return Finding("accelerators", MISSING, "torch cannot be imported", "make setup")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Finding("accelerators", OK, ", ".join(names) or "none, everything runs on the CPU")


def _shared_memory() -> Finding:
    from dvla.planes.anonymous_memory import create_anonymous_memory

    try:
        os.close(create_anonymous_memory("dvla-doctor", 1 << 26))
    except OSError as error:
        return Finding("shared memory", MISSING, str(error), "raise the memory limit of the container or job")
    return Finding("shared memory", OK, "64 MiB taken and given back")


def _loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return Finding("port on 127.0.0.1", OK, f"such as {server.getsockname()[1]}")
    except OSError as error:
        return Finding("port on 127.0.0.1", MISSING, str(error), "torchrun needs one for its ranks to meet")


def _draw(code: str, **variables: str) -> str | None:
    """Run `code`; what went wrong, or None."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_DRAWING_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no picture in {_DRAWING_S:.0f} s"
    if done.returncode == 0:
        return None
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return f"exit code {done.returncode}" + (f", {last}" if last else "")


def main() -> None:
    """Show a table as it comes to be; exit code 1 if something is missing."""
    console, table = Console(), Table("", "", "found", "what to do", box=None, pad_edge=False)
    missing = 0
    with console.status("looking") as status:
        for finding in examine():
            missing += finding.verdict == MISSING
            colour = _COLOURS[finding.verdict]
            table.add_row(finding.what, f"[{colour}]{finding.verdict}[/]", *map(escape, finding[2:]))
            status.update(f"looked at {finding.what}")
    console.print(table)
    console.print(f"{missing} missing" if missing else "everything that is needed is here")
    sys.exit(missing > 0)


if __name__ == "__main__":
    main()
