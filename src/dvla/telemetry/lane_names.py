"""The names of the lanes, and how a thread says which lane it is."""

from __future__ import annotations

LANES = ("sampling", "inference", "grpo", "param_dist")
"""In the order data flow through them."""

_PREFIX = "dvla-"


def lane_of_thread(thread_name: str) -> str:
    """Name a thread by its lane: ``dvla-grpo`` is ``grpo``, the main thread ``main``, any other itself."""
    return "main" if thread_name == "MainThread" else thread_name.removeprefix(_PREFIX)
