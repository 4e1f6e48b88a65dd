"""One micro-batch on the meta device: what it allocates, computes and sends, in the order in which it happens."""

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
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lightning_automodel import lightning_internals, torch_internals
from lightning_automodel.context_parallel import attention
from lightning_automodel.context_parallel.hugging_face import let_models_attend_across
from lightning_automodel.context_parallel.slices import SequenceSlices
from lightning_automodel.distributed.mesh import CONTEXT, REPLICATE, SHARD, TENSOR, MeshSizes, view_mesh
from lightning_automodel.patching import PatchStack
from lightning_automodel.sharding import precision, tensor_parallel, units
from lightning_automodel.sharding.activation_checkpointing import CheckpointedBlocks

PRECISIONS: dict[str, Callable[[], Precision]] = {
    "32-true": Precision,
    "bf16-true": partial(HalfPrecision, "bf16-true"),
    "bf16-mixed": partial(MixedPrecision, "bf16-mixed", "cuda"),
}
Build = Callable[[], tuple[pl.LightningModule, Any]]
_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")


class CannotPlanError(RuntimeError):
    """Why a module, or a layout of it, cannot be planned, and what to change."""


class Event(NamedTuple):
    """Something that a layout reacts to, and the bytes held since the event before, gradients left out."""

    kind: str  # "gather", "free": a unit's forward begins, ends; "loss"; "gradient": of a parameter is there; "end"
    index: int  # of the unit, the root after all others, or of the parameter
    peak: int  # the most above the event before
    net: int  # more than at the event before


class Parameter(NamedTuple):
    """One parameter, or a rank's tensor-parallel part of it."""

    unit: int | None  # None where FSDP2 leaves it whole
    rows: int  # length of the dimension that FSDP2 shards
    numel: int
    stored: int  # bytes of an element; also as gathered and computed with, and of a gradient as reduced:
    computed: int
    reduced: int
    is_trained: bool

    def shard(self, ranks: int) -> int:
        """Elements on the first of these ranks, padding included."""
        return -(-self.rows // ranks) * (self.numel // max(self.rows, 1))


class MicroBatch(TorchDispatchMode):
    """What one micro-batch does on one rank: as a mode, follows the memory of new tensors, operations, collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.parameters: list[Parameter] = []
        self.num_units = 0  # without the root
        self.state = 0.0  # bytes of optimizer state for each trained element
        self.buffers = 0, 0  # bytes of all buffers, and of those in the state dict
        self.flops = self.num_bytes = 0  # of matrix products; read and written by other operations
        self.messages = Counter[tuple[str, str, int]]()  # how many of (group, kind, bytes)
        self._sizes: dict[int, int] = {}
        self._live = self._peak = self._start = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_plain = all(kind.__torch_dispatch__ is Tensor.__torch_dispatch__ for kind in types)
        if not is_plain and all(kind.__name__ != "FakeTensor" for kind in types):
            return NotImplemented  # a DTensor: what it does with its local parts comes here again
        if func is torch.ops.aten.nonzero.default and args[0].is_meta:  # every position is taken to carry a label
            return torch.empty(args[0].numel(), args[0].ndim, dtype=torch.int64, device="meta")
        output = func(*args, **(kwargs or {}))
        if not is_plain or func.is_view:  # a DTensor asks what shapes would come out
            return output
        self.follow(output)
        size = [tensor.nbytes for tensor in leaves((args, kwargs, output))]
        if "c10d" in func.namespace:
            group = "context" if func.namespace == "c10d" else "tensor"
            name = func.overloadpacket.__name__.replace("_", "")  # torch has several operators of each kind
            for kind in _KINDS:
                if kind.replace("_", "") in name:
                    self.messages[group, kind, max(size)] += 1
        elif func.overloadpacket in flop_registry:
            self.flops += int(flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=output))
        else:
            self.num_bytes += sum(size)
        return output

    def follow(self, tensors: Any) -> None:
        """Count the memory of tensors until it is freed."""
        for tensor in leaves(tensors):
            storage = torch_internals.local_tensor(tensor).untyped_storage()
            if id(storage) not in self._sizes:
                self._sizes[id(storage)] = storage.nbytes()
                weakref.finalize(storage, self._forget, id(storage))
                self._live += storage.nbytes()
                self._peak = max(self._peak, self._live)

    def _forget(self, key: int) -> None:
        self._live -= self._sizes.pop(key)

    def mark(self, kind: str, index: int = 0, *_: Any) -> None:
        """Note an event."""
        self.events.append(Event(kind, index, self._peak - self._start, self._live - self._start))
        self._start = self._peak = self._live

    def note_parameters(self, module: nn.Module, plan: units.ShardingPlan, policy: MixedPrecisionPolicy) -> None:
        self.num_units = len(plan.units)
        unit_of = {parameter: index for index, unit in enumerate(plan.units) for parameter in unit.parameters()}
        for name, parameter in module.named_parameters():
            local = torch_internals.local_tensor(parameter)
            unit = None if name in plan.replicated else unit_of.get(parameter, len(plan.units))
            sizes = local.shape[0] if local.ndim else 1, local.numel(), local.element_size()
            computed = (policy.param_dtype or local.dtype).itemsize
            reduced = (policy.reduce_dtype or policy.param_dtype or local.dtype).itemsize
            self.parameters.append(Parameter(unit, *sizes, computed, reduced, parameter.requires_grad))
        buffers = dict(module.named_buffers())
        kept = module.state_dict(keep_vars=True).keys() & buffers
        self.buffers = sum(each.nbytes for each in buffers.values()), sum(buffers[name].nbytes for name in kept)

    def watch(self, module: nn.Module, plan: units.ShardingPlan) -> list[Any]:
        """Mark what units and parameters do. Returns handles of hooks for the forward; recomputation is no event."""

        def take_gradient(index: int, parameter: nn.Parameter) -> None:
            self.mark("gradient", index)  # autograd still holds it for a while
            parameter.grad = None  # a layout decides how long gradients live

        handles: list[Any] = []
        for index, parameter in enumerate(module.parameters()):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(take_gradient, index))
        for index, unit in enumerate(plan.units):
            parts = units.parts_of(unit)
            handles.append(parts[0].register_forward_pre_hook(partial(self.mark, "gather", index)))
            handles.append(parts[-1].register_forward_hook(partial(self.mark, "free", index)))
        return handles


class _FusedAttention(torch.autograd.Function):
    """The memory and the operations of fused attention: it keeps its inputs, its output and a number for each row."""

    @staticmethod
    def forward(ctx: Any, micro: MicroBatch, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        ctx.save_for_backward(query, key, value, mask, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        ctx.micro, ctx.flops = micro, 4 * query.numel() * key.shape[-2]
        micro.flops += ctx.flops
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.micro.flops += ctx.flops * 5 // 2  # its forward again, and four products
        return None, *map(torch.empty_like, ctx.saved_tensors[:3]), None


def run(
    build: Build, precision_name: str, tensor: int = 1, context: int = 1, recomputes: bool = False, label_shift: int = 0
) -> MicroBatch:
    """Record one micro-batch of what ``build`` returns: a LightningModule, and what its ``training_step`` gets.

    ``precision_name`` is a key of ``PRECISIONS``; the others are options of the strategy: ``tensor_parallel_size``,
    ``context_parallel_size``, ``activation_checkpointing``, ``label_shift``. Raises :class:`CannotPlanError`.
    """
    micro, plugin = MicroBatch(), PRECISIONS[precision_name]()
    with PatchStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))  # what the run itself will tell
        dist.init_process_group(dist.Backend.FAKE, rank=0, world_size=tensor * context)
        stack.callback(dist.destroy_process_group)
        whole = init_device_mesh("cpu", (1, 1, context, tensor), mesh_dim_names=(REPLICATE, SHARD, CONTEXT, TENSOR))
        mesh = view_mesh(whole, MeshSizes(1, 1, tensor, context), (REPLICATE, SHARD), TENSOR)
        with _explained("build"), torch.device("meta"):
            module, batch = build()
            lightning_internals.set_device_mesh(module, whole)
            module.configure_model()
        if not module.automatic_optimization:
            raise CannotPlanError("manual optimization is not planned: let build() return a module without it.")
        module = plugin.convert_module(module.to("meta").train())  # type: ignore[assignment]
        batch = plugin.convert_input(apply_to_collection(batch, Tensor, lambda each: each.to("meta")))
        with _explained("configure_optimizers"):
            micro.state = _optimizer_state(module)
        slices = None
        with _explained("this layout"):
            tensor_parallel.distribute(module, mesh)
            plan = units.plan_sharding(module, None, root_is_model=True)
            policy = precision.resolve_policy(plugin, None, module.parameters())
            micro.note_parameters(module, plan, policy)
            CheckpointedBlocks(module, recomputes, None, root_is_model=True)
            if policy.param_dtype is not None:
                module.to(policy.param_dtype)
                precision.cast_around(units.distinct(units.callable_children(module)), policy)
            if context > 1:
                num_layers, restore = let_models_attend_across(module)
                stack.callback(restore)
                slicer = SequenceSlices(0, context, "labels", -100, label_shift, adds_mask=num_layers > 0)
                sizes = slicer.chunks, slicer.chunk_length(slicer.length(batch)), slicer.length(batch)
                has_mask, documents = slicer.has_mask(batch), slicer.documents(batch)
                slices = attention.Slices(whole[CONTEXT].get_group(), *sizes, has_mask, documents)
                batch = slicer.slice(batch)
        _stand_in(micro, stack)
        micro.follow((dict(module.named_buffers()), batch))
        micro.mark("gather", micro.num_units)
        hooks = micro.watch(module, plan)
        with _explained("training_step"), micro, attention.computing_on(slices), plugin.train_step_context():
            output: Any = module.training_step(batch, 0)
            loss = output["loss"] if isinstance(output, Mapping) else output
            micro.mark("loss")
            for hook in hooks:
                hook.remove()
            del output
            loss.backward()
    if slices is not None and slices.num_calls == 0:
        raise CannotPlanError("attention stays within a slice: call lightning_automodel.context_parallel_attention.")
    return micro


def _stand_in(micro: MicroBatch, stack: PatchStack) -> None:
    """For what the meta device lacks."""

    def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *_: Any, **__: Any) -> Tensor:
        return _FusedAttention.apply(micro, query, key, value, attn_mask)

    stack.set(nn.functional, "scaled_dot_product_attention", attend)
    if "transformers" in sys.modules:
        from transformers import masking_utils

        # They would read values: a mask in the batch is taken to have padding, position ids to be of one document.
        stack.set(masking_utils, "is_tracing", lambda *_: True)
        stack.set(masking_utils, "find_packed_sequence_indices", lambda *_: None)


def _optimizer_state(module: pl.LightningModule) -> float:
    """Bytes of state for each trained element, after a step on gradients without values."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    optimizers = list(leaves(module.configure_optimizers(), Optimizer))
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    size = sum(each.nbytes for optimizer in optimizers for each in leaves(dict(optimizer.state)))
    return size / max(sum(parameter.numel() for parameter in trained), 1)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Say what failed on the meta device."""
    try:
        yield
    except Exception as error:  # the user's code can raise anything
        text = " ".join(str(error).split())
        if "item()" in text or "data-dependent" in text or "aten::nonzero" in text:
            text += " (it reads values: keep .item(), if tensor: and boolean masks out of it)"
        elif "fused" in text:
            text += " (pass fused=self.device.type == 'cuda')"
        raise CannotPlanError(f"{name} does not run on the meta device: {type(error).__name__}: {text}") from error


def leaves(value: Any, kind: type = Tensor) -> Iterator[Any]:
    """What is of one type in nested containers."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (Mapping, tuple, list)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from leaves(each, kind)
