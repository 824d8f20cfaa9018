import io

from dvla.telemetry.progress import Progress


def test_a_plain_stream_gets_a_line_now_and_then_and_at_the_end():
    now, out = [0.0], io.StringIO()
    with Progress(100, "episodes", file=out, clock=lambda: now[0]) as progress:
        for done in range(1, 101):
            now[0] = done * 0.5
            progress.update(done, f"success rate {done / 100:.2f}")
    lines = out.getvalue().splitlines()
    assert lines == [
        "40/100 episodes, success rate 0.40, 0:30 left",
        "80/100 episodes, success rate 0.80, 0:10 left",
        "100/100 episodes, success rate 1.00, 0:00 left",
    ]


def test_a_stream_that_goes_away_stops_nothing():
    out = io.StringIO()
    with Progress(1, "episodes", file=out) as progress:
        out.close()
        progress.update(1, "x")


def test_nothing_is_shown_when_not_enabled():
    out = io.StringIO()
    with Progress(1, "episodes", enabled=False, file=out) as progress:
        progress.update(1, "x")
    assert out.getvalue() == ""
