"""One micro-batch on the meta device: what it allocates, computes and sends, in the order in which it happens."""

import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from lightning_automodel import lightning_internals, torch_internals
from lightning_automodel.context_parallel import attention
from lightning_automodel.context_parallel.hugging_face import let_models_attend_across
from lightning_automodel.context_parallel.slices import SequenceSlices
from lightning_automodel.distributed.mesh import CONTEXT, REPLICATE, SHARD, TENSOR, MeshSizes, RunMesh, view_mesh
from lightning_automodel.patching import PatchStack
from lightning_automodel.sharding import precision, tensor_parallel, units
from lightning_automodel.sharding.activation_checkpointing import checkpoint_blocks

PRECISIONS: dict[str, Callable[[], Precision]] = {
    "32-true": Precision,
    "bf16-true": partial(HalfPrecision, "bf16-true"),
    "bf16-mixed": partial(MixedPrecision, "bf16-mixed", "cuda"),
}
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")
Build = Callable[[], tuple[pl.LightningModule, Any]]
_attention = nn.functional.scaled_dot_product_attention


class CannotPlanError(RuntimeError):
    """Why a module, or a layout of it, cannot be planned, and what to change."""


@dataclass(frozen=True)
class Event:
    """Something that a layout reacts to, and the memory of activations since the event before.

    Attributes:
        kind: "gather" and "free" (a unit's forward begins, ends), "loss" (the forward has ended), "gather_again" and
            "reduce" (a unit's backward begins, ends), "gradient" (of a parameter is there), "end".
        index: Of the unit, in the order of registration, or of the parameter.
        peak: Bytes, the most above the event before.
        net: Bytes more than at the event before, gradients of parameters left out.
    """

    kind: str
    index: int
    peak: int
    net: int


@dataclass(frozen=True)
class Parameter:
    """One parameter, or a rank's tensor-parallel part of it.

    Attributes:
        unit: Index of its FSDP unit, after the last one for the root; None where FSDP2 leaves it whole.
        rows: Length of the dimension that FSDP2 shards.
        numel: Elements, all rows.
        itemsize: Bytes of an element, as stored.
        is_trained: Whether it gets a gradient.
        state: Bytes of optimizer state for each of its elements.
    """

    unit: int | None
    rows: int
    numel: int
    itemsize: int
    is_trained: bool
    state: float

    def shard(self, ranks: int) -> int:
        """Elements on the first of these ranks, padding included."""
        return -(-self.rows // ranks) * (self.numel // max(self.rows, 1))


@dataclass
class MicroBatch:
    """What one micro-batch does on one rank, and the optimizer's step.

    Attributes:
        events: In their order.
        parameters: Of the model, each once.
        num_units: FSDP units, without the root.
        compute_itemsize: Bytes of an element of gathered parameters and of their gradients; None: as stored.
        reduce_itemsize: The same of gradients as they are reduced; None: as computed.
        inputs: Bytes of the batch and of all buffers.
        buffers: Bytes of all buffers, and of those in the state dict.
        work: How many operators do (floating-point operations, bytes read and written).
        messages: How many collectives of (group, kind, bytes) there are.
        step_peak: Bytes that the optimizer's step takes for a while, for an element of all parameters.
    """

    events: list[Event] = field(default_factory=list)
    parameters: list[Parameter] = field(default_factory=list)
    num_units: int = 0
    compute_itemsize: int | None = None
    reduce_itemsize: int | None = None
    inputs: int = 0
    buffers: tuple[int, int] = (0, 0)
    work: Counter[tuple[int, int]] = field(default_factory=Counter)
    messages: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    step_peak: float = 0.0


class _Recorder(TorchDispatchMode):
    """Follows the memory of new tensors, and counts operations, bytes and collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.start = 0
        self.in_backward = False
        self.trace = MicroBatch()
        self._storages: dict[int, Any] = {}

    def mark(self, kind: str, index: int = -1, *_: Any) -> None:
        self.trace.events.append(Event(kind, index, self.peak - self.start, self.live - self.start))
        self.start = self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_plain = all(kind.__torch_dispatch__ is Tensor.__torch_dispatch__ for kind in types)
        if not is_plain and all(kind.__name__ != "FakeTensor" for kind in types):
            return NotImplemented  # a DTensor: what it does with its local parts comes here again
        output = func(*args, **(kwargs or {}))
        if not is_plain or func.is_view:  # a DTensor asks what shapes would come out
            return output
        for tensor in (outputs := list(_leaves(output))):
            self.follow(tensor)
        size = [tensor.nbytes for tensor in (*_leaves((args, kwargs or {})), *outputs)]
        name = func.overloadpacket.__name__.strip("_").replace("all_", "all")
        if "c10d" in func.namespace:
            group = "context" if func.namespace == "c10d" else "tensor"
            for kind in COLLECTIVES:  # torch has several operators of each kind
                if name.startswith(kind.replace("all_", "all")):
                    self.trace.messages[group, kind, max(size)] += 1
        else:
            formula = flop_registry.get(func.overloadpacket)
            flops = 0 if formula is None else int(formula(*args, **(kwargs or {}), out_val=output))
            self.trace.work[flops, sum(size)] += 1
        return output

    def follow(self, tensor: Tensor, counts: bool = True) -> None:
        storage = torch_internals.local_tensor(tensor).untyped_storage()
        if id(storage) not in self._storages:
            size = storage.nbytes() if counts else 0
            self._storages[id(storage)] = weakref.ref(storage, partial(self._freed, id(storage), size))
            self.live += size
            self.peak = max(self.peak, self.live)

    def _freed(self, key: int, size: int, _: Any) -> None:
        del self._storages[key]
        self.live -= size


class _AsOnADevice(TorchFunctionMode):
    """What the meta device lacks: fused attention, and positions of labels, of which all are taken to be labelled."""

    def __init__(self, recorder: _Recorder, patches: PatchStack, is_packed: bool) -> None:
        super().__init__()
        self._work = recorder.trace.work
        patches.set(nn.functional, _attention.__name__, self._attend)  # torch's own modules hide it from the mode
        if "transformers" in sys.modules:
            from transformers import masking_utils

            # They would read values: a mask in the batch is taken to have padding, position ids to be of documents.
            patches.set(masking_utils, "is_tracing", lambda *_: True)
            if not is_packed:
                patches.set(masking_utils, "find_packed_sequence_indices", lambda *_: None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _attention:
            return self._attend(*args, **(kwargs or {}))
        if func is Tensor.nonzero and args[0].is_meta and kwargs == {"as_tuple": True}:
            return tuple(torch.empty(args[0].numel(), dtype=torch.int64, device="meta") for _ in args[0].shape)
        return func(*args, **(kwargs or {}))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *_: Any, **__: Any) -> Tensor:
        return _FusedAttention.apply(self._work, query, key, value, attn_mask)


class _FusedAttention(torch.autograd.Function):
    """The memory and the operations of fused attention: it keeps its inputs, its output and a number for each row."""

    @staticmethod
    def forward(ctx: Any, work: Counter[tuple[int, int]], *inputs: Any) -> Tensor:
        query, key, value, _ = inputs
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        heads = query.shape[:-2]  # of grouped keys and values each serves several
        flops = sdpa_flop_count(query.shape, (*heads, *key.shape[-2:]), (*heads, *value.shape[-2:]))
        size = sum(tensor.nbytes for tensor in (query, key, value, output))
        work[int(flops), size] += 1
        ctx.work, ctx.backward_work = work, (int(flops * 2.5), 2 * size)  # its forward again, and four products
        mask = inputs[3] if isinstance(inputs[3], Tensor) else None
        ctx.save_for_backward(query, key, value, mask, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.work[ctx.backward_work] += 1
        return None, *map(torch.empty_like, ctx.saved_tensors[:3]), None


def run(
    build: Build, precision_name: str, tensor: int, context: int, recomputes: bool, label_shift: int, foreach: bool
) -> MicroBatch:
    """Record one micro-batch and one optimizer step of what ``build`` returns. Raises :class:`CannotPlanError`.

    Args:
        build: Returns a LightningModule, and what its ``training_step`` gets.
        precision_name: Of the Trainer; a key of ``PRECISIONS``.
        tensor: ``tensor_parallel_size``.
        context: ``context_parallel_size``.
        recomputes: ``activation_checkpointing``.
        label_shift: Of the strategy; for slices of sequences.
        foreach: Whether optimizers step with all parameters at once, their default on a GPU.
    """
    recorder, plugin, patches = _Recorder(), PRECISIONS[precision_name](), PatchStack()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # what the run itself will tell
        mesh = stack.enter_context(_pretended_mesh(tensor, context)) if tensor * context > 1 else None
        module, batch = _built(build, mesh)
        plugin.convert_module(module)
        state = _optimizer_state(module, recorder, foreach)
        if mesh is not None and tensor > 1:
            with _explained("tensor_parallel_size"):
                tensor_parallel.distribute(module, mesh)
        policy = precision.resolve_policy(plugin, None, module.parameters())
        plan = units.plan_sharding(module, None, root_is_model=True)
        _note_parameters(recorder.trace, module, plan, policy, state)
        if recomputes:
            with _explained("activation_checkpointing"):
                checkpoint_blocks(module, True, None, root_is_model=True, patches=patches)
        if policy.param_dtype is not None:
            module.to(policy.param_dtype)
            precision.cast_around(units.distinct(units.callable_children(module)), policy)
        batch = plugin.convert_input(apply_to_collection(batch, Tensor, lambda each: each.to("meta")))
        is_packed = isinstance(batch, Mapping) and "position_ids" in batch
        slices = None
        if mesh is not None and context > 1:
            with _explained("context_parallel_size"):
                batch, slices = _sliced(module, batch, mesh, label_shift, patches)
        _note_inputs(recorder, module, batch)
        _watch(module, plan, recorder)
        stack.callback(patches.restore)
        on_device = _AsOnADevice(recorder, patches, is_packed)
        steps_in = plugin.train_step_context() if policy.param_dtype is None else nullcontext()
        for entered in (recorder, on_device, attention.computing_on(slices), steps_in):
            stack.enter_context(entered)
        _run_step(module, batch, recorder)
        if slices is not None and slices.num_calls == 0:
            raise CannotPlanError(
                "attention stays within a slice: call lightning_automodel.context_parallel_attention."
            )
    return recorder.trace


def _built(build: Build, mesh: RunMesh | None) -> tuple[pl.LightningModule, Any]:
    """What the user's function returns, configured, without values."""
    with _explained("build"), torch.device("meta"):
        module, batch = build()
        if mesh is not None:
            lightning_internals.set_device_mesh(module, mesh.mesh)
        module.configure_model()
    if not module.automatic_optimization:
        raise CannotPlanError("manual optimization is not planned: let build() return a module without it.")
    return module.to("meta").train(), batch


def _note_parameters(
    trace: MicroBatch,
    module: pl.LightningModule,
    plan: units.ShardingPlan,
    policy: MixedPrecisionPolicy,
    state: dict[str, float],
) -> None:
    trace.compute_itemsize = None if policy.param_dtype is None else policy.param_dtype.itemsize
    trace.reduce_itemsize = None if policy.reduce_dtype is None else policy.reduce_dtype.itemsize
    trace.num_units = len(plan.units)
    unit_of = {parameter: index for index, unit in enumerate(plan.units) for parameter in unit.parameters()}
    for name, parameter in module.named_parameters():
        local = torch_internals.local_tensor(parameter)
        unit = None if name in plan.replicated else unit_of.get(parameter, len(plan.units))
        sizes = local.shape[0] if local.ndim else 1, local.numel(), local.element_size()
        trace.parameters.append(Parameter(unit, *sizes, parameter.requires_grad, state.get(name, 0.0)))


def _note_inputs(recorder: _Recorder, module: pl.LightningModule, batch: Any) -> None:
    """Bytes that are there all the time, which no layout's activations are."""
    kept = module.state_dict(keep_vars=True).keys()
    buffers = {name: buffer.nbytes for name, buffer in module.named_buffers()}
    recorder.trace.buffers = sum(buffers.values()), sum(size for name, size in buffers.items() if name in kept)
    recorder.trace.inputs = sum(buffers.values()) + sum(each.nbytes for each in _leaves(batch))
    for each in (*module.parameters(), *module.buffers(), *_leaves(batch)):
        recorder.follow(each, counts=False)


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


@contextmanager
def _pretended_mesh(tensor: int, context: int) -> Iterator[RunMesh]:
    """The mesh of one tensor- and context-parallel group, over a backend that sends nothing."""
    dist.init_process_group(dist.Backend.FAKE, rank=0, world_size=tensor * context)
    try:
        dimensions = {REPLICATE: 1, SHARD: 1, CONTEXT: context, TENSOR: tensor}
        mesh = init_device_mesh("cpu", tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
        yield view_mesh(mesh, MeshSizes(1, 1, tensor, context), (REPLICATE, SHARD), TENSOR)
    finally:
        dist.destroy_process_group()


def _sliced(
    module: pl.LightningModule, batch: Any, mesh: RunMesh, label_shift: int, patches: PatchStack
) -> tuple[Any, attention.Slices]:
    """The first rank's slice of the batch, and how it was sliced. Hugging Face models then attend across ranks."""
    num_layers, restore = let_models_attend_across(module)
    patches.callback(restore)
    slicer = SequenceSlices(0, mesh.sizes.context, "labels", -100, label_shift, adds_mask=num_layers > 0)
    length, group = slicer.length(batch), mesh.mesh[CONTEXT].get_group()
    sizes = slicer.chunks, slicer.chunk_length(length), length
    return slicer.slice(batch), attention.Slices(group, *sizes, slicer.has_mask(batch), slicer.documents(batch))


def _optimizer_state(module: pl.LightningModule, recorder: _Recorder, foreach: bool) -> dict[str, float]:
    """Bytes of state for each element of a parameter, by its name, after steps on gradients without values."""
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    state: dict[Any, Any] = {}
    for parameter in parameters.values():
        parameter.grad = torch.empty_like(parameter)
    with _explained("configure_optimizers"):
        optimizers = list(_leaves(module.configure_optimizers(), Optimizer))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if foreach and group.get("foreach", True) is None and not group.get("fused"):
                group["foreach"] = True
        for _ in range(2):  # the first step makes the state
            before = recorder.peak = recorder.live
            with recorder, _explained("the optimizer's step"):
                optimizer.step()
        numel = sum(parameter.numel() for parameter in parameters.values())
        recorder.trace.step_peak = max(recorder.trace.step_peak, (recorder.peak - before) / numel)
        state |= optimizer.state
    recorder.trace.work.clear()
    for parameter in parameters.values():
        parameter.grad = None
    sizes = {name: sum(each.nbytes for each in _leaves(state.get(p, {}))) for name, p in parameters.items()}
    return {name: size / max(parameters[name].numel(), 1) for name, size in sizes.items()}


def _watch(module: pl.LightningModule, plan: units.ShardingPlan, recorder: _Recorder) -> None:
    """Mark where units begin and end, forward and backward, and where a gradient is there."""

    def take_gradient(index: int, parameter: nn.Parameter) -> None:
        parameter.grad = None  # a layout decides how long gradients live
        recorder.mark("gradient", index)

    def before(index: int, _: nn.Module, args: Any, kwargs: Any) -> Any:
        def watch(tensor: Tensor) -> Tensor:
            if tensor.requires_grad:
                tensor = tensor.view_as(tensor)  # whose gradient is there before others add theirs
                tensor.register_hook(lambda _: recorder.mark("reduce", index))
            return tensor

        if recorder.in_backward:  # it is recomputed
            return None
        recorder.mark("gather", index)
        return apply_to_collection((args, kwargs), Tensor, watch)

    def after(index: int, _: nn.Module, args: Any, output: Any) -> None:
        if not recorder.in_backward:
            recorder.mark("free", index)
            for tensor in _leaves(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: recorder.mark("gather_again", index))

    for index, parameter in enumerate(module.parameters()):
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(take_gradient, index))
    for index, unit in enumerate(plan.units):
        unit.register_forward_pre_hook(partial(before, index), with_kwargs=True)
        unit.register_forward_hook(partial(after, index))


def _run_step(module: pl.LightningModule, batch: Any, recorder: _Recorder) -> None:
    recorder.start = recorder.peak = recorder.live
    with _explained("training_step"):
        output: Any = module.training_step(batch, 0)
        loss = output["loss"] if isinstance(output, Mapping) else output
        recorder.mark("loss")
        recorder.in_backward = True
        del output
        loss.backward()
    recorder.mark("end")


def _leaves(value: Any, kind: type = Tensor) -> Iterator[Any]:
    """What is of one type in nested containers."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (Mapping, tuple, list)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(each, kind)
