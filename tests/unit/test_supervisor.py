"""What the supervisor of a rank takes for a run that stands still, look by look."""

import os
from types import SimpleNamespace

import numpy as np
import pytest

from dvla.config import RuntimeConfig
from dvla.planes.node_board import Life, NodeBoard, board_bytes
from dvla.planes.semaphore import StopFlag
from dvla.runtime.supervisor import Supervisor
from dvla.telemetry.lane_clock import LaneClock

# One look a second: silent after 30 looks, still after 60, patient lanes after 200.
RUNTIME = RuntimeConfig(wait_timeout_s=60.0, watchdog_s=60.0, collective_timeout_s=200.0)


class Node:
    """A node of two ranks, of which the first one's supervisor looks when it is told."""

    def __init__(self, logs, number=0, num_nodes=1):
        self.board = NodeBoard(np.zeros(board_bytes(2), np.uint8), 2)
        self.tick, self.beats, self.stop, self.stop_request = 0, 0, StopFlag(), StopFlag()
        self.clock = LaneClock()
        world = SimpleNamespace(
            rank=2 * number,
            node=number,
            num_nodes=num_nodes,
            local_rank=0,
            local_world_size=2,
            world_size=2 * num_nodes,
        )
        self.supervisor = Supervisor(
            world=world, runtime=RUNTIME, logs=logs, board=self.board, clocks={"grpo": self.clock}, state=str,
            stop=self.stop, stop_request=self.stop_request, finish=lambda *_: None,
        )  # fmt: skip

    def look(self, *, beats=False, other_ticks=True, is_patient=False):
        """What is found after a second in which the other rank did this."""
        self.tick += other_ticks
        self.beats += beats
        self.board.note_life(1, Life(os.getpid(), self.tick, self.beats, is_patient))
        self.supervisor._tick += 1
        self.board.note_life(0, self.supervisor._life())
        return self.supervisor._judge()

    def looks(self, count, **how):
        """The number of looks after which something is found; None if nothing is."""
        return next((number for number in range(count) if self.look(**how)), None)


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


def test_a_lane_that_beats_anywhere_keeps_the_run_going(node):
    assert node.looks(500, beats=True) is None
    assert node.looks(60) is None
    assert node.look() == ("no lane has got on for 60 s (runtime.watchdog_s)", [])


def test_own_lanes_count_as_well(node):
    for _ in range(500):
        node.clock.beat()
        assert node.look() is None


def test_patience_ends_too(node):
    assert node.looks(201, is_patient=True) is None
    assert node.look(is_patient=True) == ("no lane has got on for 200 s (runtime.collective_timeout_s)", [])


def test_patient_work_is_a_beat_when_it_is_done(node):
    before = node.supervisor._life()
    with node.clock.doing("checkpoint", is_patient=True):
        assert node.supervisor._life() == before._replace(is_patient=True)
    assert node.supervisor._life() == before._replace(beats=before.beats + 1)


def test_lanes_that_are_being_stopped_are_given_time(node):
    node.stop.set()
    assert node.looks(100) is None


def test_a_rank_that_gives_no_sign_of_life_is_silent_while_others_get_on(node):
    assert node.looks(5, beats=True) is None
    assert node.looks(30, beats=True, other_ticks=False) is None
    assert node.look(beats=True, other_ticks=False) == ("no sign of life for 30 s", [1])


def test_ranks_that_have_not_begun_or_have_ended_are_not_missed(node):
    assert node.looks(100, other_ticks=False) is None  # its tick is 0
    for _ in range(60):
        node.clock.beat()
        node.tick = -1
        assert node.look(other_ticks=False) is None


def test_a_wish_to_stop_is_granted_in_time(node):
    node.stop_request.set()
    assert node.looks(60, beats=True) is None
    assert node.look(beats=True) == ("asked to stop, and not done after 60 s (runtime.watchdog_s)", [])


def test_a_node_that_waits_for_a_slow_one_is_no_stall(tmp_path):
    waiting, working = Node(tmp_path, 0, 2), Node(tmp_path, 1, 2)
    for _ in range(300):
        assert working.look(beats=True) is None
        assert waiting.look() is None
    for _ in range(150):
        assert working.look(is_patient=True) is None
        assert waiting.look() is None
    assert working.look(beats=True) is None  # the checkpoint is done
    found = [number for number in range(150) for node in (working, waiting) if node.look()]
    assert 60 <= found[0] <= 60 + 60 / 10 + 2


def test_a_node_that_has_not_begun_is_waited_for(tmp_path):
    assert Node(tmp_path, 0, 2).looks(300) is None
