"""Runs one micro-batch on the meta device, and records in order what it allocates and sends."""

import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import apply_to_collection, move_data_to_device
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from lightning_automodel.context_parallel import attention, hugging_face, slices
from lightning_automodel.data.tensors import tensors_in
from lightning_automodel.distributed.mesh import CONTEXT, REPLICATE, SHARD, TENSOR, MeshSizes, view_mesh
from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.options import StrategyOptions
from lightning_automodel.sharding import precision, tensor_parallel, units
from lightning_automodel.sharding.activation_checkpointing import checkpoint_blocks

PRECISIONS: dict[str, Precision] = {
    "32-true": Precision(),
    "bf16-true": HalfPrecision("bf16-true"),
    "bf16-mixed": MixedPrecision("bf16-mixed", "cuda"),
}
_DATA = (REPLICATE, SHARD)
Build = Callable[[], tuple[pl.LightningModule, Any]]


class CannotPlanError(RuntimeError):
    """A module, or a layout of it, cannot be planned. The message says why, and what to change."""


class Parameter(NamedTuple):
    """One parameter, or a rank's tensor-parallel part of it."""

    unit: int | None  # in the order of registration, the root last; None if FSDP2 does not shard it
    rows: int  # length of the dimension that FSDP2 shards
    numel: int
    stored: int  # bytes of an element in the shard
    computed: int  # bytes of an element as gathered and computed with
    reduced: int  # bytes of an element of the gradient as reduced
    is_trained: bool

    def shard(self, ranks: int) -> int:
        """Number of elements on the first of these ranks, including padding."""
        return -(-self.rows // ranks) * (self.numel // max(self.rows, 1))


class PlannedBatch(torch_internals.TorchDispatchMode):
    """A record of one micro-batch on one rank; as a mode, it follows tensors and collectives."""

    def __init__(self) -> None:
        super().__init__()
        # Events: the kind, which is "gather" or "free" (a unit's forward begins or ends), "loss", or
        # "gradient" (a parameter has its gradient); the unit or parameter; and the memory without gradients,
        # its peak since the event before and its size now, in bytes above the size at the event before.
        self.events: list[tuple[str, int, int, int]] = []
        self.parameters: list[Parameter] = []
        self.num_units = 0  # without the root
        self.state = 0.0  # bytes of optimizer state per trained element
        self.buffers = 0  # bytes of those in the state dict
        self.messages = Counter[tuple[str, str, int]]()  # number of collectives by (group, kind, bytes)
        self._sizes: dict[int, int] = {}
        self._live = 0
        self._peak = 0
        self._start = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        names = {kind.__name__ for kind in types}
        if names & {"DTensor", "AsyncCollectiveTensor"}:
            return NotImplemented  # its operations on local parts come here again
        # Assume that every position has a label.
        if func is torch.ops.aten.nonzero.default and args[0].is_meta:
            return torch.empty(args[0].numel(), args[0].ndim, dtype=torch.int64, device="meta")
        output = func(*args, **kwargs)
        # With FakeTensors, DTensor only asks for the output's shape.
        if func.is_view or "FakeTensor" in names:
            return output
        self.follow(output)
        if "c10d" in func.namespace:
            size = max(tensor.nbytes for tensor in tensors_in((args, kwargs, output)))
            if func.namespace == "c10d":
                group = "context"
            else:
                group = "tensor"
            operator = func.overloadpacket.__name__.replace("_", "")  # each collective has several
            for kind in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"):
                if kind.replace("_", "") in operator:
                    self.messages[group, kind, size] += 1
        return output

    def follow(self, tensors: Any) -> None:
        """Count the memory of ``tensors`` until it is freed."""
        for tensor in tensors_in(tensors):
            storage = torch_internals.local_tensor(tensor).untyped_storage()
            if id(storage) not in self._sizes:
                self._sizes[id(storage)] = storage.nbytes()
                weakref.finalize(storage, self._forget, id(storage))
                self._live += storage.nbytes()
                self._peak = max(self._peak, self._live)

    def _forget(self, key: int) -> None:
        self._live -= self._sizes.pop(key)

    def mark(self, kind: str, index: int = 0, *_: Any) -> None:
        """Record an event, unless a backward has recomputed it."""
        if kind == "gradient" or not self.events or self.events[-1][0] not in ("loss", "gradient"):
            self.events.append((kind, index, self._peak - self._start, self._live - self._start))
            self._start = self._peak = self._live

    def take_gradient(self, index: int, parameter: nn.Parameter) -> None:
        """Record a gradient and drop it: its lifetime depends on the layout. Autograd still holds it a while."""
        self.mark("gradient", index)
        parameter.grad = None


class _FusedAttention(torch.autograd.Function):
    """Memory of fused attention, which keeps inputs, outputs and a number for each row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        row_values = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, output, row_values)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *map(torch.empty_like, ctx.saved_tensors[:3]), None


def run(build: Build, precision_name: str, options: StrategyOptions) -> PlannedBatch:
    """Record one micro-batch of ``build``, which returns a LightningModule and a batch for ``training_step``.

    ``precision_name`` is a key of ``PRECISIONS``. Raises :class:`CannotPlanError`.
    """
    micro = PlannedBatch()
    plugin = PRECISIONS[precision_name]
    tensor = options.tensor_parallel_size
    context = options.context_parallel_size
    with PatchStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))  # the run itself will warn
        dist.init_process_group(dist.Backend.FAKE, rank=0, world_size=tensor * context)
        stack.callback(dist.destroy_process_group)
        mesh = init_device_mesh("cpu", (1, 1, context, tensor), mesh_dim_names=(*_DATA, CONTEXT, TENSOR))
        with _explained("build"), torch.device("meta"):
            module, batch = build()
            lightning_internals.set_device_mesh(module, mesh)
            module.configure_model()
        if not module.automatic_optimization:
            raise CannotPlanError(
                "manual optimization is not planned: let build() return a module without it."
            )
        module = plugin.convert_module(module.to("meta").train())  # type: ignore[assignment]
        batch = plugin.convert_input(move_data_to_device(batch, torch.device("meta")))
        with _explained("configure_optimizers"):
            micro.state = _optimizer_state(module)
        sliced: Any = None
        with _explained("this layout"):
            viewed = view_mesh(mesh, MeshSizes(1, 1, tensor, context), _DATA, TENSOR)
            tensor_parallel.distribute(module, viewed)
            _note_units(micro, module, plugin, options, stack)
            if context > 1:
                # Hugging Face models then attend across ranks.
                adds_mask = hugging_face.let_models_attend_across(module, stack)
                slicer = slices.SequenceSlices(0, options, adds_mask)
                sliced = slicer.describe(batch, mesh[CONTEXT].get_group())
                batch = slicer.slice(batch)
        _stand_in(stack)
        micro.follow((dict(module.named_buffers()), batch))
        micro.mark("gather", micro.num_units)
        with _explained("training_step"), micro, attention.computing_on(sliced), plugin.train_step_context():
            output: Any = module.training_step(batch, 0)
            loss = output["loss"] if isinstance(output, Mapping) else output
            micro.mark("loss")
            del output
            loss.backward()
    if sliced is not None and sliced.num_calls == 0:
        raise CannotPlanError(
            "attention stays within a slice: call lightning_automodel.context_parallel_attention."
        )
    return micro


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn an exception into a CannotPlanError: what failed on the meta device, and what to change."""
    try:
        yield
    except Exception as error:  # the user's code can raise anything
        text = " ".join(str(error).split())
        raise CannotPlanError(
            f"{name} does not run on the meta device, which has no values for .item(), `if tensor:` and"
            f" boolean masks, and no kernels for fused=True: {type(error).__name__}: {text}"
        ) from error


def _optimizer_state(module: pl.LightningModule) -> float:
    """Bytes of optimizer state per trained element."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    optimizers: list[Optimizer] = []
    apply_to_collection(module.configure_optimizers(), Optimizer, optimizers.append)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    size = sum(tensor.nbytes for optimizer in optimizers for tensor in tensors_in(dict(optimizer.state)))
    return size / max(sum(parameter.numel() for parameter in trained), 1)


def _note_units(
    micro: PlannedBatch, module: nn.Module, plugin: Precision, options: StrategyOptions, stack: PatchStack
) -> None:
    """Record parameters and buffers, watch units and gradients, and let blocks compute as in the strategy."""
    buffers = dict(module.named_buffers())
    saved = module.state_dict(keep_vars=True).keys() & buffers
    micro.buffers = sum(buffers[name].nbytes for name in saved)
    plan = units.plan_sharding(module, options.auto_wrap_policy, root_is_model=True)
    policy = precision.resolve_policy(plugin, options.mp_policy, module.parameters())
    micro.num_units = len(plan.units)
    unit_of = {parameter: index for index, unit in enumerate(plan.units) for parameter in unit.parameters()}
    for name, parameter in module.named_parameters():
        local = torch_internals.local_tensor(parameter)
        unit = None if name in plan.replicated else unit_of.get(parameter, len(plan.units))
        computed = policy.param_dtype or local.dtype
        reduced = policy.reduce_dtype or computed
        micro.parameters.append(
            Parameter(
                unit,
                rows=local.shape[0] if local.ndim else 1,
                numel=local.numel(),
                stored=local.element_size(),
                computed=computed.itemsize,
                reduced=reduced.itemsize,
                is_trained=parameter.requires_grad,
            )
        )
    for index, own in enumerate(plan.units):
        own.register_forward_pre_hook(partial(micro.mark, "gather", index))
        own.register_forward_hook(partial(micro.mark, "free", index))
    checkpoint_blocks(module, options.activation_checkpointing, options.auto_wrap_policy, True, stack)
    if policy.param_dtype is not None:
        module.to(policy.param_dtype)
        precision.cast_around(units.callable_children(module), policy)
    for index, parameter in enumerate(module.parameters()):
        if parameter.requires_grad:  # hooks come last, since the cast can remove earlier ones
            parameter.register_post_accumulate_grad_hook(partial(micro.take_gradient, index))


def _stand_in(stack: PatchStack) -> None:
    """Replace operations that do not run on the meta device."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *_: Any, **__: Any
    ) -> Tensor:
        return _FusedAttention.apply(query, key, value, attn_mask)

    stack.set(nn.functional, "scaled_dot_product_attention", attend)
    # Under a dispatch mode torch cannot make this subclass of Tensor, a mask without elements.
    stack.set(attention, "causal_lower_right", lambda *_: None)
    if "transformers" in sys.modules:
        from transformers import masking_utils

        # Both read values. Assume that a mask has padding, and that position ids belong to one document.
        stack.set(masking_utils, "is_tracing", lambda *_: True)
        stack.set(masking_utils, "find_packed_sequence_indices", lambda *_: None)
