"""Which EGL device a CUDA index means; the devices are made up, the real query must at least not crash."""

import pytest

from dvla.envs.egl_devices import EglDevice, egl_index, query_devices
from dvla.envs.errors import EnvironmentSetupError

DEVICES = [EglDevice(1, "ab" * 16), EglDevice(None, None), EglDevice(0, "cd" * 16), EglDevice(2, None)]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [2, 0, 3]),
        ("2,0", [3, 2]),
        ("GPU-" + "cdcdcdcd-cdcd-cdcd-cdcd-cdcdcdcdcdcd, GPU-abab", [2, 0]),
    ],
)
def test_counts_as_cuda_does(monkeypatch, visible, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [egl_index(cuda, lambda: DEVICES) for cuda in range(len(expected))] == expected
    with pytest.raises(EnvironmentSetupError, match=f"render_device={len(expected)}"):
        egl_index(len(expected), lambda: DEVICES)


@pytest.mark.parametrize("visible", ["7", "GPU-00", "MIG-abab"])
def test_a_gpu_that_egl_does_not_know(monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(EnvironmentSetupError, match=f"the GPU {visible}, is not among EGL's 4 devices"):
        egl_index(0, lambda: DEVICES)


def test_without_an_nvidia_gpu_only_asking_for_one_fails(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    devices = query_devices()
    if any(device.cuda is not None for device in devices):
        pytest.skip("there is an NVIDIA GPU")
    with pytest.raises(EnvironmentSetupError, match="EGL sees 0 NVIDIA GPUs"):
        egl_index(0)
