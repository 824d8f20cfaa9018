"""`dvla.train` of which one lane of one rank hangs for ever, holds the interpreter's lock, or raises: see FAULT."""

import ctypes
import os

from dvla.lanes.grpo import GrpoLane
from dvla.lanes.inference import InferenceLane
from dvla.lanes.param_dist import ParamDistLane
from dvla.lanes.sampling import SamplingLane
from dvla.train import main

LANES = {
    "grpo": (GrpoLane, "_finish_step"),
    "inference": (InferenceLane, "serve"),
    "param_dist": (ParamDistLane, "step"),
    "sampling": (SamplingLane, "_dispatch"),
}
lane, rank, call, how = os.environ["FAULT"].split()  # e.g. "grpo 1 3 hang": at the third optimiser step of rank 1
kind, name = LANES[lane]
method, calls = getattr(kind, name), 0


def fail(*arguments):
    """Work, until it is time."""
    global calls
    calls += 1
    if calls == int(call) and os.environ["RANK"] == rank:
        if how == "raise":
            raise ValueError("the arm fell off")
        library = {"hang": ctypes.CDLL, "hold": ctypes.PyDLL}[how](None)  # PyDLL keeps the interpreter's lock
        mutex = ctypes.create_string_buffer(64)
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)
    return method(*arguments)


setattr(kind, name, fail)

if __name__ == "__main__":
    main()
