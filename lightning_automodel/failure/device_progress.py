"""How far this rank's accelerator has come with what its host has queued, asked only while the host stands."""

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
        self._clock = clock
        self._unseen_s = min(LONGEST_UNSEEN_S, timeout_s / 20)
        self._marks: deque[tuple[int, torch.Event]] = deque(maxlen=MOST_MARKS)
        self._lock = threading.Lock()
        self._stream: torch.Stream | None = None
        self._host: tuple[int, dict[str, int]] = (0, {})  # steps and collectives that the host has given
        self._host_since_s = clock()
        self._device_since_s = clock()
        self._num_steps = 0
        self._device_step = 0

    def begin_step(self, step: int) -> None:
        """Note on the current stream that ``step`` begins."""
        self._num_steps += 1
        if not device_groups.exist():
            return
        stream = torch.accelerator.current_stream()
        event = stream.record_event()
        with self._lock:
            self._stream = stream
            self._marks.append((step, event))

    def describe(self) -> dict[str, Any]:
        """What this rank's record says of its device."""
        if not device_groups.exist():
            return {}
        now = self._clock()
        queued = device_groups.num_queued()
        host = (self._num_steps, queued)
        if host != self._host:
            self._host = host
            self._host_since_s = now
        device = Device.UNSEEN
        if now - self._host_since_s >= self._unseen_s:
            device = self._look()
        if device is not Device.BUSY:
            self._device_since_s = now
        return {
            "device": device,
            "device_step": self._device_step,
            "device_stood_s": now - max(self._host_since_s, self._device_since_s),
            "queued": queued,
        }

    def _look(self) -> Device:
        """Ask the device; this never waits for it."""
        try:
            with self._lock:
                stream = self._stream
                marks = self._marks
                if stream is None:
                    return Device.UNSEEN
                # A query in a thread that has chosen no device would open a context on the first one.
                torch.accelerator.set_device_index(stream.device_index)
                while marks and marks[0][1].query():
                    self._device_step = marks.popleft()[0]
                    self._device_since_s = self._clock()
                if stream.query():
                    return Device.IDLE
                return Device.BUSY
        except Exception:
            # Each later call raises the error of a kernel. The main thread will meet it too, and report it.
            return Device.FAILED
