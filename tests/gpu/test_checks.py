"""The checks of check.sh as tests: on a GPU, or dry on a CPU with DVLA_GPU_CHECK_DEVICE=cpu."""

import pytest
import torch

from gpu.run import DEVICE_VARIABLE, load_checks, run_check, wanted_device, why_not

CHECKS = load_checks()


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("name", CHECKS)
def test_check(name):
    check, device = CHECKS[name], wanted_device()
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip(f"torch finds no GPU ({DEVICE_VARIABLE}=cpu makes a dry run)")
    if reason := why_not(check, device):
        pytest.skip(reason)
    outcome = run_check(check, device, check.limit_s)
    assert outcome.result == "pass", str(outcome)
