"""Runs that are killed or stopped amid a filmed episode: a film under its final name is whole, and can be played."""

import os
import signal
import time

import av
import pytest
from e2e.launch import QUICK, finish, start

pytestmark = pytest.mark.chaos

STEPS = 120  # of an episode; 2.4 s
FILMED = (
    *(*QUICK, "env.name=counting_env:CountingEnv", "+env.options.fault=slow", "env.cameras=[top]"),
    *(
        f"env.max_episode_steps={STEPS}",
        "algo.filter_zero_signal=false",
        "model.num_action_chunks=4",
        "run.eval_every=1",
    ),
    *("evaluation.episodes_per_task=8", "evaluation.videos_per_task=8", "run.clean=true"),
)


def frames(path):
    with av.open(str(path)) as container:
        return sum(1 for _ in container.decode(video=0))


def films(root):
    """Of the films of a run: those under their final names, and those under way."""
    paths = list((root / "test" / "videos").rglob("*.mp4"))
    final = [path for path in paths if path.stem.endswith(("_success", "_failure", "_stopped"))]
    return final, [path for path in paths if path not in final]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
def test_a_film_under_its_final_name_is_whole(how, tmp_path):
    process = start(tmp_path, *FILMED, ranks=1)
    deadline = time.monotonic() + 100
    first = set()  # of the films under way, those that began together with the ones that are done
    while True:
        final, under_way = films(tmp_path)
        if not final:
            first |= set(under_way)
        elif set(under_way) - first:  # an episode that began after others had ended is far from its own end
            break
        assert time.monotonic() < deadline and process.poll() is None, process.communicate(timeout=5)[0]
        time.sleep(0.02)
    os.killpg(process.pid, how)
    run = finish(process, tmp_path)
    final, under_way = films(tmp_path)
    for path in final:
        count = frames(path)
        # An episode that was broken off by a stop says so, and has as many frames as it had steps.
        assert 0 < count < STEPS + 1 if path.stem.endswith("_stopped") else count <= STEPS + 1, path
    if how is signal.SIGTERM:
        assert run.summary["exit"] == "stopped", run.output
        assert not under_way
        assert any(path.stem.endswith("_stopped") for path in final)
    else:
        assert under_way
        assert not any(path.stem.endswith("_stopped") for path in final)
