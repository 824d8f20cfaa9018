"""A share of the damaged inputs of `perf/fuzz.py`: no reader raises anything but its own error, or hangs."""

import pytest
from fuzz_readers import NATIVE, TARGETS, fuzz, fuzz_apart


@pytest.mark.parametrize("name", TARGETS)
def test_damage_is_accepted_or_refused(name):
    inputs = max(TARGETS[name][0] // 100, 100)
    result = fuzz_apart(name, inputs, 0, timeout_s=250) if name in NATIVE else fuzz(name, inputs)
    assert result["inputs"] >= inputs
    assert result["accepted"] > 0
    assert len(result) > 3, "some are refused"
