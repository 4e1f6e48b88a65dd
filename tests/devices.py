"""The device that ranks train on, so that the same test bodies run on a CPU, on CUDA and on the second device.

CUDA is taken where there is a device for each rank. `TEST_DEVICE=second` takes the device of
`tests/second_device`, whose collectives are gloo's; `TEST_DEVICE=nccl` lets them behave as NCCL's
(`tests/second_device/nccl_like.py`).
"""

from __future__ import annotations

import os
from typing import Any

import torch

VARIABLE = "TEST_DEVICE"


def is_second() -> bool:
    """Whether this process trains on the second device."""
    return os.environ.get(VARIABLE) in ("second", "nccl")


def is_nccl_like() -> bool:
    """Whether collectives of the second device behave as NCCL's in this process."""
    return os.environ.get(VARIABLE) == "nccl"


def backend(num_ranks: int) -> str:
    """Backend of a pool's process group."""
    if is_second():
        from tests.second_device import device  # registers it, in a rank's process alone

        return f"cpu:gloo,{device.TYPE}:{device.BACKEND}"
    return "cpu:gloo,cuda:nccl" if torch.cuda.device_count() >= num_ranks else "gloo"


def accelerator(num_ranks: int) -> Any:
    """For `Trainer(accelerator=...)`."""
    if is_second():
        from tests.second_device.device import HostDeviceAccelerator

        return HostDeviceAccelerator()
    return device_type(num_ranks)


def device_type(num_ranks: int) -> str:
    """Of a mesh over the ranks."""
    if is_second():
        from tests.second_device.device import TYPE

        return TYPE
    return "cuda" if torch.cuda.device_count() >= num_ranks else "cpu"
