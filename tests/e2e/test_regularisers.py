"""The entropy bonus and the penalty for leaving the first weights act in a real run."""

import pytest

from e2e.launch import QUICK, train

pytestmark = pytest.mark.e2e

SERIAL = (
    *QUICK,
    "algo.num_steps=6",
    "algo.lr=1e-2",
    "algo.max_staleness=0",
    "algo.filter_zero_signal=false",
    "runtime.schedule=serial",
)


def test_entropy_rises_with_a_bonus_and_the_policy_stays_near_its_start_with_a_penalty(tmp_path):
    last = {}
    for name, coefficients in {
        "neither": ("algo.reference_kl_coef=1e-12",),  # measures, and does not act
        "bonus": ("algo.entropy_coef=1", "algo.reference_kl_coef=1e-12"),
        "penalty": ("algo.reference_kl_coef=10",),
    }.items():
        run = train(tmp_path, *SERIAL, *coefficients, f"run.name={name}", ranks=0)
        assert run.code == 0, run.output
        assert run.metrics[0]["train/reference_kl"] == pytest.approx(0, abs=1e-9), "the first weights are the reference"
        last[name] = run.metrics[-1]
    assert last["bonus"]["train/entropy"] > last["neither"]["train/entropy"] + 0.03
    assert last["penalty"]["train/reference_kl"] < 0.5 * last["neither"]["train/reference_kl"]
