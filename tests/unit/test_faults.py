"""Faults on purpose: what their words mean, and that they strike there and nowhere else."""

import threading
from pathlib import Path

import faults
import pytest
from faults import Fault, inject, parse
from standing import stand

from dvla.telemetry.trace import Tracer


@pytest.fixture(autouse=True)
def _no_fault_later(monkeypatch):
    monkeypatch.setattr(Tracer, "span", Tracer.span)  # put back after the test


def test_words_are_read():
    text = "lane=grpo rank=1 point='checkpoint write' step=3 call=2 do=slow seconds=0.5 stand=/a/b greedy=True"
    assert parse(text) == Fault(
        lane="grpo", rank=1, point="checkpoint write", do="slow", step=3, call=2, seconds=0.5, stand=Path("/a/b"),
        shown={"greedy": "True"},
    )  # fmt: skip
    assert parse("do=kill rank=0 lane=sampling point=reset") == Fault("sampling", 0, "reset", "kill")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "does not say lane, rank, point, do"),
        ("lane=grpo rank=1 do=hang", "does not say point"),
        ("lane=grpo rank=one point=publish do=hang", "invalid literal"),
        ("lane=grpo rank=1 point=publish do=explode", "do=explode is none of raise, kill, "),
        ("lane=grpo rank=1 point=gradient do=corrupt", "nothing can be corrupted at gradient"),
        ("lane=grpo lane=grpo rank=1 point=publish do=hang", "one too many"),
        ("grpo rank=1 point=publish do=hang", "'grpo' is no word"),
    ],
)
def test_words_that_mean_nothing_are_refused(text, words):
    with pytest.raises(ValueError, match=words):
        parse(text)


def strikes(text, spans, rank=1):
    """Numbers of the spans in which the fault raised."""
    inject(parse(text))
    tracer, struck = Tracer(rank, enabled=False), []
    for number, (lane, name, args) in enumerate(spans):
        try:
            with tracer.for_lane(lane).span(name, **args):
                pass
        except ValueError:
            struck.append(number)
    return struck


PASSES = [
    ("grpo", "publish", {"version": 0}),
    ("inference", "decide", {"greedy": True}),
    ("grpo", "gradient", {}),
    ("grpo", "publish", {"version": 1}),
    ("inference", "decide", {"greedy": False}),
    ("grpo", "gradient", {}),
    ("inference", "decide", {"greedy": True}),
    ("grpo", "gradient", {}),
    ("grpo", "publish", {"version": 2}),
]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("lane=grpo point=gradient rank=1", [2]),
        ("lane=grpo point=gradient rank=1 call=3", [7]),
        ("lane=grpo point=gradient rank=1 step=1", [5]),
        ("lane=grpo point=gradient rank=1 step=1 call=2", [7]),
        ("lane=grpo point=publish rank=1 step=2", [8]),
        ("lane=inference point=decide rank=1 step=1 greedy=True", [6]),
        ("lane=inference point=decide rank=1 greedy=False", [4]),
        ("lane=inference point=gradient rank=1", []),
        ("lane=grpo point=gradient rank=0", []),
        ("lane=grpo point=gradient rank=1 step=3", []),
    ],
)
def test_it_strikes_once_at_its_point(words, wanted):
    assert strikes(f"{words} do=raise", PASSES) == wanted


def test_a_slow_point_stays_slow(monkeypatch):
    slept = []
    monkeypatch.setattr(faults.time, "sleep", slept.append)
    assert strikes("lane=grpo point=gradient rank=1 step=1 do=slow seconds=2", PASSES) == []
    assert slept == [2.0, 2.0]


def test_who_stands_goes_on_when_he_was_seen(tmp_path):
    file = tmp_path / "standing"
    inject(parse(f"lane=grpo rank=1 point=publish stand={file} do=go"))
    inside, done = threading.Event(), threading.Event()

    def work():
        with Tracer(1, enabled=False).for_lane("grpo").span("publish", version=0):
            inside.set()
        done.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while not file.exists():
        assert thread.is_alive()
    assert not inside.is_set()
    file.unlink()
    assert done.wait(30)


def test_who_is_not_seen_does_not_stand_for_ever(tmp_path):
    with pytest.raises(TimeoutError, match="nobody removed"):
        stand(tmp_path / "standing", seconds=0.0)


def test_a_part_of_a_checkpoint_is_damaged_behind_the_block(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "1")
    inject(parse("lane=checkpoint rank=1 point='checkpoint write' do=corrupt"))
    temporary, others = tmp_path, tmp_path / "__0_0.distcp"
    others.write_bytes(b"abc")
    part = temporary / "__1_0.distcp"
    with Tracer(1, enabled=False).for_lane("checkpoint").span("checkpoint write", version=1):
        part.write_bytes(b"abc")
    assert (part.read_bytes(), others.read_bytes()) == (b"\x9ebc", b"abc")
