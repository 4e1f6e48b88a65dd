"""Registers the device of `device.cpp` with torch as `hostdev`, its collectives as `hostccl`, and with Lightning.

Importing it builds the extension if this torch has none yet (`build.py`). It is a process-wide registration:
import it where nothing else is tested, such as in a rank of a pool.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import Accelerator
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tests import devices
from tests.second_device import build, nccl_like

TYPE = "hostdev"
BACKEND = "hostccl"
PAGEABLE = "copy from pageable memory"


def _index(device: Any = None) -> int:
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    return extension.current_device() if index is None else index


class _Device(contextlib.AbstractContextManager[None]):
    """Makes a device current."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = _exchange(self._index)

    def __exit__(self, *error: Any) -> None:
        extension.set_device(self._before)


def _exchange(index: int) -> int:
    before = extension.current_device()
    if index >= 0:
        extension.set_device(index)
    return before


def _stream(device: Any = None, priority: int = 0) -> torch.Stream:
    return torch.Stream(torch.device(TYPE, _index(device)), priority=priority)


def _empty_cache() -> None:
    """Free nothing; as CUDA's, wait for the device."""
    if devices.is_nccl_like():
        extension.synchronize(extension.current_device())


def _device_module() -> types.ModuleType:
    """What `torch.cuda` is for CUDA."""
    module = types.ModuleType(f"torch.{TYPE}")
    accelerator = torch.accelerator
    vars(module).update(
        Stream=_stream,
        Event=lambda *args, **kwargs: torch.Event(TYPE, *args, **kwargs),
        current_stream=lambda device=None: accelerator.current_stream(_index(device)),
        default_stream=lambda device=None: torch.Stream(0, _index(device), _DEVICE_TYPE_NUMBER),
        set_stream=accelerator.set_stream,
        stream=lambda stream: contextlib.nullcontext() if stream is None else stream,
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: extension.NUM_DEVICES,
        current_device=extension.current_device,
        set_device=lambda device: extension.set_device(_index(device)),
        synchronize=lambda device=None: extension.synchronize(_index(device)),
        manual_seed=lambda seed: extension.default_generator(-1).manual_seed(seed),
        manual_seed_all=lambda seed: [
            extension.default_generator(index).manual_seed(seed) for index in range(extension.NUM_DEVICES)
        ],
        get_rng_state=lambda device=TYPE: extension.default_generator(_index(device)).get_state(),
        set_rng_state=lambda state, device=TYPE: extension.default_generator(_index(device)).set_state(
            state
        ),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        empty_cache=_empty_cache,
        memory_allocated=lambda device=None: accelerator.memory_allocated(_index(device)),
        memory_reserved=lambda device=None: accelerator.memory_reserved(_index(device)),
        max_memory_allocated=lambda device=None: accelerator.max_memory_allocated(_index(device)),
        max_memory_reserved=lambda device=None: accelerator.max_memory_reserved(_index(device)),
        memory_stats=lambda device=None: accelerator.memory_stats(_index(device)),
        reset_peak_memory_stats=lambda device=None: accelerator.reset_peak_memory_stats(_index(device)),
        device=_Device,
        _exchange_device=_exchange,
        _maybe_exchange_device=_exchange,
    )
    return module


# --- Autocast, by the lists of ATen/autocast_mode.h -------------------------------------------------------------------

_LOWER = """_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input
convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul
linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell scaled_dot_product_attention"""
_FLOAT32 = """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp norm.Scalar
norm.ScalarOpt_dim"""
_FLOAT32_RESULT = """prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList"""
_WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"


def _is_cast(tensor: Tensor) -> bool:
    return tensor.device.type == TYPE and tensor.is_floating_point() and tensor.dtype != torch.float64


def _cast(arguments: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda each: each.to(dtype) if _is_cast(each) else each, arguments)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _to_lower(op: Any, args: Any, kwargs: Any) -> Arguments:
    return _cast((args, kwargs), torch.get_autocast_dtype(TYPE))


def _to_float32(op: Any, args: Any, kwargs: Any) -> Arguments:
    return _cast((args, kwargs), torch.float32)


def _to_float32_result(op: Any, args: Any, kwargs: Any) -> Arguments:
    place = [argument.name for argument in op._schema.arguments].index("dtype")
    given = args[place] if len(args) > place else kwargs.get("dtype")
    if given is None and _is_cast(args[0]):
        return args[:place], {**kwargs, "dtype": torch.float32}
    return args, kwargs


def _to_widest(op: Any, args: Any, kwargs: Any) -> Arguments:
    dtypes = [
        each.dtype for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and _is_cast(each)
    ]
    return _cast((args, kwargs), functools.reduce(torch.promote_types, dtypes)) if dtypes else (args, kwargs)


def _casting(op: Any, cast: Callable[[Any, Any, Any], Arguments]) -> Callable[..., Any]:
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast(op, args, kwargs)
        with torch._C._ExcludeDispatchKeyGuard(autocast):
            return op(*args, **kwargs)

    return call


def _register_autocast() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    for names, cast in (
        (_LOWER, _to_lower),
        (_FLOAT32, _to_float32),
        (_FLOAT32_RESULT, _to_float32_result),
        (_WIDEST, _to_widest),
    ):
        for name in names.split():
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, _casting(op, cast), "AutocastPrivateUse1")
    return library


# --- Lightning and torch.distributed ----------------------------------------------------------------------------------


class HostDeviceAccelerator(Accelerator):
    """For `Trainer(accelerator=...)`."""

    def setup_device(self, device: torch.device) -> None:
        extension.set_device(_index(device))

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    def teardown(self) -> None:
        """Nothing is held; CUDA's empties the cache."""
        _empty_cache()

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
    if devices.is_nccl_like():
        return nccl_like.make_backend(extension, store, rank, size, timeout)
    return extension.at_once(dist.ProcessGroupGloo(store, rank, size, timeout))


# --- Waits ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def recorded_waits() -> Iterator[Counter[tuple[str, str]]]:
    """What made the host wait for the device in this block, and the innermost line outside of torch, with how often.

    Copies from memory that is not pinned (`PAGEABLE`) are recorded too, though some make nobody wait.
    """
    waits: Counter[tuple[str, str]] = Counter()

    def record(what: str) -> None:
        waits[what, _caller()] += 1

    extension.set_on_wait(record)
    try:
        yield waits
    finally:
        extension.set_on_wait(None)


def _caller() -> str:
    """The innermost line that is neither torch's nor this file's; torch's own if there is no other."""
    frame: types.FrameType | None = sys._getframe(1)
    torch_folder = str(Path(torch.__file__).parent)
    innermost = "a thread of torch's"
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((__file__, "<")):
            place = f"{'/'.join(Path(name).parts[-2:])}:{frame.f_lineno}"
            if not name.startswith(torch_folder):
                return place
            innermost = place if innermost == "a thread of torch's" else innermost
        frame = frame.f_back
    return innermost


# --- Kernels in the steady state of a fit: on a GPU each costs the host some microseconds ----------------------------

PACKAGE = "lightning_automodel"
LAUNCHERS = {f"/{PACKAGE}/": PACKAGE, "/torch/distributed/fsdp/": "FSDP2", "/torch/optim/": "optimizer"}
"""Who launches a kernel, by a part of the path of the innermost file that has such a part."""
FORWARDS = ("sharding/shards.py", "sharding/parts.py", "sharding/whole_copies.py")
"""They pass operators of others on."""

Launched = tuple[str, str, str]  # launcher, line in the package (else ""), operator


@contextlib.contextmanager
def recorded_kernels() -> Iterator[Counter[Launched]]:
    """Counts what operators launch on the second device in this block."""
    found: Counter[Launched] = Counter()

    def record(operator: str, number: int) -> None:
        found[(*_launcher(), operator)] += number

    extension.set_on_kernel(record)
    try:
        yield found
    finally:
        extension.set_on_kernel(None)


def _launcher() -> tuple[str, str]:
    frame = sys._getframe(1).f_back  # None in a thread of torch, which calls back itself
    while frame is not None:
        path = frame.f_code.co_filename
        if path.endswith(FORWARDS):
            frame = frame.f_back
            continue
        for part, launcher in LAUNCHERS.items():
            if part in path:
                line = f"{'/'.join(Path(path).parts[-2:])}:{frame.f_lineno}"
                return launcher, line if launcher == PACKAGE else ""
        if "/torch/" not in path:
            return "model", ""
        frame = frame.f_back
    return "model", ""


@functools.cache
def register() -> Any:
    """Register device, module, casts and collectives, once in a process."""
    torch.utils.rename_privateuse1_backend(TYPE)
    torch._register_device_module(TYPE, _device_module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend(BACKEND, _make_backend, devices=[TYPE])
    dist.Backend.default_device_backend_map[TYPE] = BACKEND
    if devices.is_nccl_like():
        nccl_like.configure(extension, TYPE)
    return _register_autocast()


extension = build.load()
_casts = register()
_DEVICE_TYPE_NUMBER = torch.Stream(torch.device(TYPE, 0)).device_type
