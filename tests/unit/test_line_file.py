"""Lines reach the disk whole and in order, also when it was full for a while."""

import errno
import resource
from contextlib import contextmanager

from dvla.telemetry import line_file
from dvla.telemetry.line_file import LineFile
from dvla.telemetry.metrics import FILE_NAME, MetricsWriter, read_metrics


@contextmanager
def files_of_at_most(num_bytes):
    """As a disk with so much room: a write that goes beyond is cut, the next one refused."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_what_a_full_disk_refuses_is_written_when_there_is_room(tmp_path):
    said = []
    file = LineFile(tmp_path / "a", said.append)
    with files_of_at_most(10):
        file.add("first")
        assert not file.is_behind
        file.add("second")
        assert file.is_behind
        assert (tmp_path / "a").read_bytes() == b"first\nseco"
        file.add("third")
        assert len(said) == 1 and "wait until there is room" in said[0]
    file.add("fourth")
    assert not file.is_behind
    assert (tmp_path / "a").read_text().split() == ["first", "second", "third", "fourth"]
    with files_of_at_most(10):
        file.add("fifth")
        assert len(said) == 2, "it is said again when it happens again"
    file.close()
    assert (tmp_path / "a").read_text().endswith("fourth\nfifth\n")


def test_what_is_lost_is_said(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(line_file, "_MAX_BYTES", 10)
    file = LineFile(tmp_path / "a", said.append)
    with files_of_at_most(0):
        for line in ("123456789", "0", "beyond"):
            file.add(line)
    file.add("good")
    assert (tmp_path / "a").read_text().split() == ["123456789", "good"]
    with files_of_at_most(0):
        file.add("last")
        file.close()
    assert "are lost" in said[-1]


def test_metrics_survive_a_full_disk_with_every_step(tmp_path):
    said = []
    with MetricsWriter(tmp_path, warn=said.append) as metrics:
        metrics.write(1, 10, {"a": 1.0})
        with files_of_at_most(20):
            for version in (2, 3):
                metrics.write(version, 10 * version, {"a": 1.0})
            metrics.write_evaluation(3, {"eval/success_rate": 0.5})
        metrics.write(4, 40, {"a": 1.0})
    assert [line["policy_version"] for line in read_metrics(tmp_path / FILE_NAME)] == [1, 2, 3, 4]
    assert sum("lines wait" in text for text in said) == 2, "of each file once"


def test_tensorboard_begins_a_new_file_where_the_old_one_could_not_be_written(tmp_path):
    said = []

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    metrics = MetricsWriter(tmp_path, warn=said.append)
    metrics._tensorboard.add_scalar = refuse
    metrics.write(1, 10, {"a": 1.0})
    assert said == ["TensorBoard lacks this step: [Errno 28] No space left on device"]
    metrics.write(2, 20, {"a": 1.0})
    metrics.close()
    assert len(said) == 1
    assert len(list((tmp_path / "tb").iterdir())) == 2
