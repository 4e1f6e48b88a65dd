"""The second device behaves as an accelerator does, and the matrix of support trains on it as on the CPU.

It is registered for a whole process, so each test has one of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sys.executable).parent  # where pip puts ninja, which need not be on the path
ENVIRONMENT = {**os.environ, "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        shutil.which("c++") is None or shutil.which("ninja", path=ENVIRONMENT["PATH"]) is None,
        reason="needs a C++ compiler and ninja",
    ),
]

BEHAVIOUR = """
import pytest
import torch
from tests.second_device import device

tensor = torch.arange(4.0, device=device.TYPE)
pinned = torch.zeros(4, pin_memory=True)
with device.recorded_waits() as waits:
    pinned.copy_(tensor, non_blocking=True)
    assert pinned.isnan().all(), "a copy that does not block has arrived too early"
    assert not waits
    event = torch.get_device_module(tensor.device).Event()
    event.record()
    event.synchronize()
    assert torch.equal(pinned, torch.arange(4.0))
    tensor.sum().item()
    tensor.nonzero()
    tensor.cpu()
assert [wait.split(" at ")[0] for wait in waits] == ["event.synchronize", "item", "aten::nonzero", "copy to the host"]
with pytest.raises(RuntimeError, match="same device|two devices"):
    tensor + torch.ones(4)
with pytest.raises(RuntimeError, match="same device|two devices|tensors on"):
    tensor + torch.ones(4, device=f"{device.TYPE}:1")
convolution = torch.nn.Conv2d(1, 2, 3).to(device.TYPE)
convolution(torch.ones(1, 1, 4, 4, device=device.TYPE)).sum().backward()
assert convolution.bias.grad.tolist() == [4.0, 4.0]
device.extension.refuse_float64(True)
with pytest.raises(TypeError, match="no float64"):
    torch.ones(2, dtype=torch.float64, device=device.TYPE)
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process in which the device may be registered."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**ENVIRONMENT, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=800,
    )


def test_what_makes_code_fail_on_an_accelerator_fails_here() -> None:
    """Late copies, waits told by their place, devices told apart, convolutions, float64 that is switched off."""
    done = run("-c", BEHAVIOUR)
    assert done.returncode == 0, done.stderr


def test_matrix_of_support() -> None:
    """The default choice of the matrix, by the bodies that run on the CPU."""
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/trainer/test_support.py", TEST_DEVICE="second")
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
