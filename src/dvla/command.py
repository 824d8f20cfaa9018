"""The command ``dvla``, or ``python -m dvla``: one word for each program of the project."""

from __future__ import annotations

import difflib
import sys
from importlib import import_module
from pathlib import Path

COMMANDS = {
    "train": ("reinforcement learning", "experiment=reach algo.num_steps=20"),
    "sft": ("behaviour cloning from demonstrations", "cloning=pushcube_oft 'data.paths=[datasets/pushcube]'"),
    "evaluate": ("success of a policy, with videos", "checkpoint=runs/pushcube_oft/checkpoints/latest"),
    "collect": ("demonstrations of scripted experts", "demonstrations=pushcube out=datasets/pushcube"),
    "export": ("a policy in its original layout", "checkpoint=runs/pushcube_oft/checkpoints/latest out=exported"),
    "serve": ("a policy behind a websocket", "checkpoint=runs/pushcube_oft/checkpoints/latest port=8000"),
    "plan": ("what a policy or a run will cost", "model=openvla_oft_full model.lora_rank=32"),
    "report": ("report.html of a run", "runs/pushcube_oft"),
    "doctor": ("whether this machine has what is needed", ""),
}
"""Module below ``dvla``: what it does, and an example."""


def usage() -> str:
    """What there is, a line each."""
    lines = ["usage: dvla COMMAND [key=value …]; dvla COMMAND --help says more", ""]
    lines += [
        f"  {name:<10}{what}\n{'':12}dvla {name} {example}".rstrip() for name, (what, example) in COMMANDS.items()
    ]
    return "\n".join([*lines, "", "On several processes: torchrun --standalone --nproc-per-node 2 -m dvla.train …\n"])


def main() -> None:
    """Run the command that the first word names."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        sys.stdout.write(usage())
        return
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        sys.stderr.write(f"dvla: error: there is no command {name}: {hint}\n")
        sys.exit(2)
    # As `python -m dvla.NAME` has it: runs keep their command, and Hydra asks the program for its name.
    sys.argv = [str(Path(__file__).with_name(f"{name}.py")), *sys.argv[2:]]
    import_module(f"dvla.{name}").main()
