"""What this rank's accelerator has done of what its host has queued. It is only asked, and only if the host stands."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from lightning_automodel.distributed import device_groups
from lightning_automodel.distributed.failures import Device

LONGEST_UNSEEN_S = 5.0
MOST_MARKS = 64
"""Steps that a host can be ahead of its device: a device's queue is shorter."""


class DeviceProgress:
    """Notes each step on the device's stream, and asks how far it is.

    The main thread calls :meth:`begin_step`, which records an event and waits for nothing; the board's
    thread calls :meth:`describe` with each heartbeat. As long as the host begins steps or queues
    collectives, nothing is asked of the device: a query would disturb the capture of a CUDA graph, and would
    tell nothing.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._unseen_s = clock, min(LONGEST_UNSEEN_S, timeout_s / 20)
        self._marks: deque[tuple[int, torch.Event]] = deque(maxlen=MOST_MARKS)
        self._lock = threading.Lock()
        self._stream: torch.Stream | None = None
        self._device_index: int | None = None
        self._host: tuple[int, dict[str, int]] = (0, {})  # steps and collectives that the host has given
        self._host_since_s = self._device_since_s = clock()
        self._num_steps = self._device_step = 0

    def begin_step(self, step: int) -> None:
        """Note on the current stream that ``step`` begins."""
        self._num_steps += 1
        if not device_groups.exist():
            return
        stream = torch.accelerator.current_stream()
        event = stream.record_event()
        with self._lock:
            self._stream, self._device_index = stream, stream.device_index
            self._marks.append((step, event))

    def describe(self) -> dict[str, Any]:
        """What this rank's record says of its device."""
        if not device_groups.exist():
            return {}
        now, host = self._clock(), (self._num_steps, device_groups.num_queued())
        if host != self._host:
            self._host, self._host_since_s = host, now
        host_goes_on = now - self._host_since_s < self._unseen_s
        device = Device.UNSEEN if host_goes_on else self._look()
        if device is not Device.BUSY:
            self._device_since_s = now
        stood_s = now - max(self._host_since_s, self._device_since_s) if device is Device.BUSY else 0.0
        return {
            "device": device,
            "device_step": self._device_step,
            "device_stood_s": stood_s,
            "queued": host[1],
        }

    def _look(self) -> Device:
        """Ask the device; this never waits for it."""
        try:
            with self._lock:
                stream, marks = self._stream, self._marks
                if stream is None:
                    return Device.UNSEEN
                # A query in a thread that has chosen no device would open a context on the first one.
                torch.accelerator.set_device_index(self._device_index)
                while marks and marks[0][1].query():
                    self._device_step = marks.popleft()[0]
                    self._device_since_s = self._clock()
                return Device.IDLE if stream.query() else Device.BUSY
        except Exception:
            # An error in a kernel is raised by each later call; the main thread will meet it too, and tell
            # it.
            return Device.FAILED
