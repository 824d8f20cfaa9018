"""When a worker says what it has simulated: at once, or several answers together where simulating takes next to nothing."""

import itertools
import socket
import types

import pytest

from dvla.envs import worker
from dvla.envs.messages import MAX_PACKET, Kind, Record, unpack

ENVS = 60


class TimedEpisode:
    """Each order moves the clock on by `seconds`."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def reset(self, order):
        self.clock.now += self.seconds

    def act(self, slot, decision):
        self.clock.now += self.seconds
        return decision == 9


def serve(monkeypatch, packets, seconds):
    """The packets with which a worker answers `packets`, each a list of records, and when it sent each."""
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(worker, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        sent = []
        link = types.SimpleNamespace(
            recv=theirs.recv, send=lambda packet: sent.append((clock.now, unpack(packet)[0])) or len(packet)
        )
        for records in packets:
            ours.send(b"".join(record.pack() for record in records))
        ours.shutdown(socket.SHUT_WR)
        worker.serve(link, [TimedEpisode(clock, seconds(env)) for env in range(ENVS)])
    assert all(len(records) * len(records[0].pack()) <= MAX_PACKET for _, records in sent)
    return sent


def orders(kind=Kind.act):
    return [Record(kind, env, slot=env, decision=env % 10) for env in range(ENVS)]


def test_quick_answers_go_together_and_none_is_lost(monkeypatch):
    sent = serve(monkeypatch, [orders(), orders(), orders()], lambda env: 100e-6)
    for turn in range(3):
        answers = [answer for _, records in sent for answer in records][turn * ENVS : (turn + 1) * ENVS]
        assert [answer.env for answer in answers] == list(range(ENVS))
        for answer in answers:
            over = answer.env % 10 == 9
            assert (answer.kind, answer.decision) == (
                (Kind.finished, 9) if over else (Kind.observed, answer.env % 10 + 1)
            )
    last = [len(records) for when, records in sent if when > 2 * ENVS * 100e-6]
    assert sum(last) == ENVS
    assert len(last) == pytest.approx(ENVS * 100e-6 / worker._GATHER_S, abs=1)
    # The first answer of a packet has waited for no longer than that, and the last of a round for nothing.
    times = [when for when, _ in sent]
    assert max(after - before for before, after in itertools.pairwise(times)) < worker._GATHER_S + 200e-6


def test_slow_answers_go_at_once(monkeypatch):
    sent = serve(monkeypatch, [orders(Kind.reset), orders()], lambda env: 0.002)
    assert [len(records) for _, records in sent] == [1] * 2 * ENVS


def test_a_quick_one_does_not_wait_for_a_slow_one(monkeypatch):
    """One in three takes long: its neighbours' answers go before it begins."""
    sent = serve(monkeypatch, [orders(), orders()], lambda env: 0.5 if env % 3 == 2 else 10e-6)
    assert [len(records) for _, records in sent] == [1] * 2 * ENVS
