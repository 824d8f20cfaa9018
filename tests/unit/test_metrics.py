"""Metrics files hold every step once, whatever happens to the run."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from metric_tags import documented
from PIL import Image

from dvla.rl.losses import LossStats
from dvla.telemetry.metrics import FILE_NAME, Histogram, MetricsWriter, read_metrics
from dvla.telemetry.tensorboard_layout import RUN_LAYOUT


def write(folder: Path, versions: range, *, resume_at: int = 0) -> None:
    with MetricsWriter(folder, tensorboard=False, resume_at=resume_at) as metrics:
        for version in versions:
            metrics.write(version, version * 10, {"train/loss": version / 3})


def test_a_line_per_step(tmp_path: Path) -> None:
    write(tmp_path / "run", range(1, 4))
    text = (tmp_path / "run" / FILE_NAME).read_text()
    assert text.startswith('{"policy_version": 1, "env_steps": 10, ')
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines == [{"policy_version": v, "env_steps": 10 * v, "train/loss": v / 3} for v in (1, 2, 3)]


def test_what_is_no_number_is_null(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as metrics:
        metrics.write(1, 0, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": None, "e": 2, "f": torch.tensor(0.5)})
    (line,) = read_metrics(tmp_path / FILE_NAME)
    assert [line[key] for key in "abcdef"] == [None, None, None, None, 2, 0.5]
    assert "NaN" not in (tmp_path / FILE_NAME).read_text()


def test_a_line_is_there_as_soon_as_it_is_written(tmp_path: Path) -> None:
    metrics = MetricsWriter(tmp_path, tensorboard=False)
    metrics.write(1, 10, {})
    assert len(read_metrics(tmp_path / FILE_NAME)) == 1
    metrics.close()
    metrics.close()


def test_resuming_takes_back_what_lies_beyond_the_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, range(1, 8))
    write(tmp_path, range(5, 9), resume_at=4)
    assert [line["policy_version"] for line in read_metrics(tmp_path / FILE_NAME)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_resuming_at_the_end_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    before = (tmp_path / FILE_NAME).read_bytes()
    MetricsWriter(tmp_path, tensorboard=False, resume_at=3).close()
    assert (tmp_path / FILE_NAME).read_bytes() == before


def test_starting_over_leaves_nothing_old(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    write(tmp_path, range(1, 2))
    assert [line["policy_version"] for line in read_metrics(tmp_path / FILE_NAME)] == [1]


def test_a_torn_last_line_is_removed(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    path = tmp_path / FILE_NAME
    path.write_text(path.read_text()[:-9])  # killed within the third line
    assert len(read_metrics(path)) == 2
    write(tmp_path, range(3, 4), resume_at=2)
    assert [json.loads(line)["policy_version"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_tensorboard_shows_the_same(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with MetricsWriter(tmp_path) as metrics:
        metrics.add_text("config", "seed: 0\nrun:\n  name: x")
        for version in (1, 2):
            metrics.write(version, 10 * version, {"train/loss": version / 2, "train/kl": None, "a/nan": math.nan})
    events = accumulator.EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "rollout/env_steps"}
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.5), (2, 1.0)]
    assert events.Tags()["tensors"] == ["config/text_summary"]


def test_histograms_are_counts_in_the_file_and_histograms_in_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(1, 10, {"train/loss": 0.5}, {"staleness/hist": Histogram((0.5, 1.5), [3.0, 0.0, 2.0])})
    (line,) = read_metrics(tmp_path / FILE_NAME)
    assert list(line) == ["policy_version", "env_steps", "train/loss", "staleness/hist"]
    assert line["staleness/hist"] == [3, 0, 2]
    assert "[3, 0, 2]" in (tmp_path / FILE_NAME).read_text()
    events = accumulator.EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    (event,) = events.Histograms("staleness/hist")
    shown = event.histogram_value
    assert (event.step, shown.num, shown.min, shown.max, shown.sum) == (1, 5, -0.5, 2.5, 4)
    assert (shown.bucket_limit, shown.bucket) == ([0.5, 1.5, 2.5], [3, 0, 2])


def test_tensorboard_has_the_run_on_one_page(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

    with MetricsWriter(tmp_path) as metrics:
        metrics.add_layout(RUN_LAYOUT)
    events = accumulator.EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    (event,) = events.Tensors("custom_scalars__config__")
    (category,) = Layout.FromString(event.tensor_proto.string_val[0]).category
    tags = {chart.title: list(chart.multiline.tag) for chart in category.chart}
    assert len(tags) == 4
    assert "eval/success_rate" in tags["success"]
    patterns = documented()
    assert [t for part in tags.values() for t in part if not any(pattern.fullmatch(t) for pattern in patterns)] == []


def test_tensorboard_plays_what_the_policy_saw(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    frames = np.zeros((3, 2, 4, 6, 3), np.uint8)
    frames[1, 1] = 255
    with MetricsWriter(tmp_path) as metrics:
        metrics.add_film("rollout/film", frames, 7)
    events = accumulator.EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    (event,) = events.Images("rollout/film")
    assert (event.step, event.width, event.height) == (7, 12, 4)
    film = Image.open(io.BytesIO(event.encoded_image_string))
    film.seek(1)
    shown = np.asarray(film.convert("RGB"))
    assert (shown[:, :6].max(), shown[:, 6:].min()) == (0, 255)


def test_tags_of_the_loss_are_documented() -> None:
    patterns = documented()
    tags = [*LossStats.zeros().metrics(), "rollout/env_steps"]
    assert [tag for tag in tags if not any(pattern.fullmatch(tag) for pattern in patterns)] == []
    assert any(pattern.fullmatch("lane/grpo/busy_frac") for pattern in patterns)
    assert not any(pattern.fullmatch("lane/a/b/busy_frac") for pattern in patterns)
