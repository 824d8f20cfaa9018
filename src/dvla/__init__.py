"""D-VLA: reinforcement learning of vision-language-action policies on plain torchrun."""

__version__ = "0.1.0"
