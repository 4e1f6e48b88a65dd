"""The device that the ranks of a pool train on, so that the same test bodies run on a CPU, CUDA and the second device.

CUDA is taken where there is a device for each rank. `TEST_DEVICE=second` takes the device of `tests/second_device`.
"""

from __future__ import annotations

import os
from typing import Any

import torch


def _is_second() -> bool:
    return os.environ.get("TEST_DEVICE") == "second"


def backend(num_ranks: int) -> str:
    """Backend of a pool's process group."""
    if _is_second():
        from tests.second_device import device  # registers it, in a rank's process alone

        return f"cpu:gloo,{device.TYPE}:{device.BACKEND}"
    return "cpu:gloo,cuda:nccl" if torch.cuda.device_count() >= num_ranks else "gloo"


def accelerator(num_ranks: int) -> Any:
    """For `Trainer(accelerator=...)`."""
    if _is_second():
        from tests.second_device.device import HostDeviceAccelerator

        return HostDeviceAccelerator()
    return "cuda" if torch.cuda.device_count() >= num_ranks else "cpu"


def device_type(num_ranks: int) -> str:
    """Of a mesh over the ranks."""
    return "hostdev" if _is_second() else accelerator(num_ranks)
