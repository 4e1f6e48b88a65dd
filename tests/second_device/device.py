"""Registers the device of `device.cpp` with torch as `hostdev`, its collectives as `hostccl`, and with Lightning.

Importing it builds the extension once for each torch (half a minute; a C++ compiler and ninja). It is a process-wide
registration: import it where nothing else is tested, such as in a rank of a pool.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import Accelerator
from torch.utils.cpp_extension import load

TYPE, BACKEND = "hostdev", "hostccl"
HERE = Path(__file__).parent


def build() -> types.ModuleType:
    """The extension, compiled if this torch has not compiled this source yet."""
    return load(
        f"{TYPE}_{torch.__version__.split('+')[0].replace('.', '_')}", [str(HERE / "device.cpp")], extra_cflags=["-O1"]
    )


class Event:
    """Recorded after the newest copy; synchronizing it delivers the copies before it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._copy = 0

    def record(self, stream: Any = None) -> None:
        self._copy = extension.newest_copy()

    def wait(self, stream: Any = None) -> None:
        """Order streams; there is one."""

    def query(self) -> bool:
        extension.deliver(self._copy)
        return True

    def synchronize(self) -> None:
        extension.tell("event.synchronize")
        extension.deliver(self._copy)

    def elapsed_time(self, end: Event) -> float:
        return 0.0


class Stream:
    """All streams of a device are one, in the order of issue."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stream_id = 0
        self.device = torch.device(TYPE, extension.current_device())

    def wait_stream(self, stream: Stream) -> None:
        """There is nothing to wait for."""

    def wait_event(self, event: Event) -> None:
        """There is nothing to wait for."""

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def synchronize(self) -> None:
        extension.wait_for_all("stream.synchronize")

    def query(self) -> bool:
        extension.deliver(extension.newest_copy())
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0


def _index(device: Any = None) -> int:
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    return extension.current_device() if index is None else index


class _Device(contextlib.AbstractContextManager[None]):
    """Makes a device current."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = extension.current_device()
        extension.set_device(self._index)

    def __exit__(self, *error: Any) -> None:
        extension.set_device(self._before)


def _exchange(index: int) -> int:
    before = extension.current_device()
    if index >= 0:
        extension.set_device(index)
    return before


def _device_module() -> types.ModuleType:
    """What `torch.cuda` is for CUDA."""
    module = types.ModuleType(f"torch.{TYPE}")
    stream = Stream()
    vars(module).update(
        Stream=Stream,
        Event=Event,
        current_stream=lambda device=None: stream,
        default_stream=lambda device=None: stream,
        set_stream=lambda stream: None,
        stream=lambda stream: contextlib.nullcontext(),
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: extension.NUM_DEVICES,
        current_device=extension.current_device,
        set_device=lambda device: extension.set_device(_index(device)),
        synchronize=lambda device=None: extension.wait_for_all("device.synchronize"),
        manual_seed=lambda seed: extension.default_generator(-1).manual_seed(seed),
        manual_seed_all=lambda seed: [
            extension.default_generator(index).manual_seed(seed) for index in range(extension.NUM_DEVICES)
        ],
        get_rng_state=lambda device=TYPE: extension.default_generator(_index(device)).get_state(),
        set_rng_state=lambda state, device=TYPE: extension.default_generator(_index(device)).set_state(state),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        empty_cache=lambda: None,
        device=_Device,
        _exchange_device=_exchange,
        _maybe_exchange_device=_exchange,
    )
    return module


class HostDeviceAccelerator(Accelerator):
    """For `Trainer(accelerator=...)`."""

    def setup_device(self, device: torch.device) -> None:
        extension.set_device(_index(device))

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    def teardown(self) -> None:
        """Nothing is held."""

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return list(range(devices)) if isinstance(devices, int) else devices

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device(TYPE, index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return extension.NUM_DEVICES

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return TYPE


def _make_backend(store: dist.Store, rank: int, size: int, timeout: Any) -> Any:
    return extension.backend(dist.ProcessGroupGloo(store, rank, size, timeout))


@contextlib.contextmanager
def recorded_waits() -> Iterator[Counter[str]]:
    """What made the host wait for the device in this block, and from which lines outside of torch, with how often."""
    waits: Counter[str] = Counter()

    def record(what: str) -> None:
        waits[f"{what} at {_caller()}"] += 1

    extension.set_on_wait(record)
    try:
        yield waits
    finally:
        extension.set_on_wait(None)


def _caller() -> str:
    """The innermost line that is neither torch's nor this file's; torch's own if there is no other."""
    frame = sys._getframe(2)
    innermost = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    torch_folder = str(Path(torch.__file__).parent)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((torch_folder, str(HERE), "<")):
            return f"{'/'.join(Path(name).parts[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return innermost


@functools.cache
def register() -> None:
    """Register device, module and collectives, once in a process."""
    torch.utils.rename_privateuse1_backend(TYPE)
    torch._register_device_module(TYPE, _device_module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend(BACKEND, _make_backend, devices=[TYPE])
    dist.Backend.default_device_backend_map[TYPE] = BACKEND


extension = build()
register()
