"""Normalisation statistics of a dataset, in the form in which each model's checkpoints hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dvla.datasets.recorded import DatasetError, RecordedDataset
from dvla.models.normalization import Bounds, Statistics, openpi_statistics, openvla_statistics

_MOST_OUTSIDE = 0.5
"""Share of values beyond the 1 % and 99 % quantiles by which these are of other data; by design it is 0.02."""


def element_statistics(values: np.ndarray) -> dict[str, list[float]]:
    """Mean, population standard deviation, extremes and 1 % and 99 % quantiles of each element of (N, n) values."""
    values = values.astype(np.float64)
    functions: dict[str, Any] = {"mean": np.mean, "std": np.std, "min": np.min, "max": np.max}
    statistics = {name: function(values, axis=0).tolist() for name, function in functions.items()}
    return statistics | {name: np.quantile(values, q, axis=0).tolist() for name, q in (("q01", 0.01), ("q99", 0.99))}


def compute_statistics(dataset: RecordedDataset, model: str) -> Statistics:
    """Statistics of all steps, by which `model` (``openvla_oft`` or ``pi05``) normalises; their key is the dataset's name."""
    actions = element_statistics(np.concatenate([episode.actions for episode in dataset.episodes]))
    states = None
    if dataset.state_dim:
        states = element_statistics(np.concatenate([episode.states for episode in dataset.episodes]))
    raw: dict[str, Any]
    if model == "pi05":
        raw = {"state": states} if states else {}
        return openpi_statistics(dataset.name, raw | {"actions": actions}, Path(dataset.name))
    raw = {"action": actions | {"mask": [True] * dataset.action_dim}}
    if states:
        raw["proprio"] = states
    raw |= {"num_transitions": dataset.num_steps, "num_trajectories": len(dataset.episodes)}
    return openvla_statistics(dataset.name, raw, Path(dataset.name))


def require_fitting(statistics: Statistics, dataset: RecordedDataset) -> None:
    """Refuse statistics that a checkpoint brings, if they are not of data like these.

    Raises:
        DatasetError: Most of an element's values lie outside of what becomes -1 and 1.
    """
    actions = np.concatenate([episode.actions for episode in dataset.episodes])
    states = np.concatenate([episode.states for episode in dataset.episodes])
    _require_inside(statistics.action, actions, dataset)
    if statistics.state is not None and dataset.state_dim:
        _require_inside(statistics.state, states, dataset)


def _require_inside(bounds: Bounds, values: np.ndarray, dataset: RecordedDataset) -> None:
    n = min(len(bounds.low), values.shape[1])  # lengths are the policy's to compare
    low, high = bounds.low.numpy()[:n], bounds.high.numpy()[:n]
    slack = 0.01 * np.maximum(high - low, 1e-3)
    outside = ((values[:, :n] < low - slack) | (values[:, :n] > high + slack)).mean(0) * bounds.mask.numpy()[:n]
    if n and outside.max() > _MOST_OUTSIDE:
        element = int(outside.argmax())
        raise DatasetError(
            f"model.unnorm_key: the {bounds.name} are of other data than {dataset.name}: {outside[element]:.0%} of its values "
            f"of element {element} lie outside of their [{low[element]:.3g}, {high[element]:.3g}]; with "
            "model.unnorm_key=null they are computed"
        )
