"""DDP: the whole model on every rank."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import lightning.pytorch as pl
import torch
from lightning.pytorch.overrides.distributed import prepare_for_backward
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_automodel.distributed.mesh import Placement
from lightning_automodel.gradients import rescale_clip
from lightning_automodel.gradients.engine import Engine
from lightning_automodel.gradients.window_records import BackwardPass
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.options import StrategyOptions
from lightning_automodel.sharding import apply, quantized, units

_SEVERAL_BACKWARDS = (
    "A parameter gets gradients of several backwards within one backward of the strategy, as a hook computes"
    " them that runs a backward for each chunk of a batch (GradCache), or reentrant checkpoints of one module."
    " DistributedDataParallel averages the first of them alone over ranks. Pass data_parallel='fsdp2', which"
    " averages all of them."
)
_SWITCHED = (
    "automatic_optimization was switched within a fit, which DistributedDataParallel is not prepared for: begin a"
    " new fit, or pass data_parallel='fsdp2'."
)
_INCOMPLETE = (
    "DistributedDataParallel did not reduce all gradients of this window: some parameters took no part in its"
    " last micro-batch (unused, frozen since set-up, or not toggled), so ranks would step with different"
    " gradients. Pass AutomodelStrategy(data_parallel='ddp', ddp_kwargs={'find_unused_parameters': True})."
)


class DDPEngine(Engine):
    """The whole model on every rank. ``DistributedDataParallel`` averages gradients, and this what DDP leaves out.

    Creating one is a collective over the world. ``fitting``: whether gradients will be needed.
    ``give_values`` initialises tensors without values.
    """

    shares_buffers = False  # unless it trains, and its user wants that

    def __init__(
        self,
        module: pl.LightningModule,
        placement: Placement,
        options: StrategyOptions,
        fitting: bool,
        give_values: Callable[[], None],
    ) -> None:
        mesh = placement.mesh
        super().__init__(mesh.group if mesh.sizes.divisor > 1 else None)
        self._padding_hooks = ExitStack()
        kwargs = options.ddp_kwargs or {}
        give_values()
        parameters = dict(module.named_parameters())
        if any(isinstance(parameter, DTensor) for parameter in parameters.values()):
            raise ValueError(
                f"{units.class_name(module)} is already sharded by FSDP2, which data_parallel='ddp' cannot"
                " replicate: pass data_parallel='fsdp2', or a module that was not sharded before."
            )
        self.model = module
        if not fitting:
            apply.broadcast_states(torch_internals.named_tensors(module), mesh)
            return
        if quantized.check_replicable(parameters):
            # To make parameters equal, DDP would flatten all of them into one plain tensor.
            apply.broadcast_states(torch_internals.named_tensors(module), mesh)
            kwargs = {**kwargs, "init_sync": False}
        ddp = self._ddp = DistributedDataParallel(module, process_group=mesh.group, **kwargs)
        # DDP's forward is a whole step with its backwards here, and its end would prepare one more reduction.
        self._is_manual = not module.automatic_optimization
        ddp.require_backward_grad_sync = not self._is_manual
        self.model = ddp
        hook = options.ddp_comm_hook
        wrapper = options.ddp_comm_wrapper
        if hook is not None:
            ddp.register_comm_hook(options.ddp_comm_state, hook if wrapper is None else wrapper(hook))
        self.reuses_gradients = ddp.gradient_as_bucket_view
        # DDP never reduces others, which were frozen at its set-up.
        self._trainable_at_setup = {p for p in parameters.values() if p.requires_grad}
        self.track(self._trainable_at_setup)
        # DDP does not know where windows begin: not every forward is its own.
        self.shares_buffers = ddp.forward_sync_buffers
        ddp.forward_sync_buffers = False

    @override
    @contextmanager
    def micro_batch(self, ends_window: bool) -> Iterator[None]:
        with super().micro_batch(ends_window), nullcontext() if ends_window else self._ddp.no_sync():
            yield

    @override
    def begin(self, backward: BackwardPass, loss: Tensor) -> None:
        if self._ddp.module.automatic_optimization is self._is_manual:
            raise RuntimeError(_SWITCHED)
        if self._ddp.static_graph and (self._is_manual or not self.ends_window):
            raise ValueError(
                "ddp_kwargs: static_graph=True works under automatic optimization without accumulation alone,"
                " since DDP learns the graph from one backward for each training_step, which synchronises:"
                " leave it out."
            )
        self._padding_hooks.close()  # if an exception has left some
        if backward.is_padding:
            for parameter in self.tracked:
                if parameter.requires_grad:
                    self._padding_hooks.callback(parameter.register_hook(_without_entries).remove)
        if self._is_manual and self.ends_window:
            self._ddp.require_backward_grad_sync = True
            prepare_for_backward(self._ddp, loss)
            self._ddp.require_backward_grad_sync = False

    @override
    def reduce(self, backward: BackwardPass) -> set[nn.Parameter]:
        """See the base class. Raises if a parameter took no part in a synchronised backward, or in several.

        Gradients of its bucket, or those that came later, are then this rank's own.
        """
        ddp = self._ddp
        self._padding_hooks.close()
        reached = set(self.reached)
        if self.ends_window and not ddp.static_graph:
            if len(reached) < len(self.reached) and self.group is not None:
                raise RuntimeError(_SEVERAL_BACKWARDS)
            try:
                torch_internals.check_ddp_backward_is_complete(ddp)
            except RuntimeError as error:
                raise RuntimeError(_INCOMPLETE) from error
        if not backward.ends:
            return reached
        unfrozen = [p for p in backward.final if p not in self._trainable_at_setup]
        if self.group is not None:
            rescale_clip.average_gradients_(unfrozen, self.group)
        # DDP itself gives no gradient to what no rank has used, but a padding batch uses what it uses.
        backward.zero_filled = unfrozen
        if ddp.find_unused_parameters:
            backward.zero_filled = backward.final
        return reached


def _without_entries(gradient: Tensor) -> Tensor:
    """The gradient of a padding batch, 0: entries of a sparse one would be rows that lazy optimizers step."""
    if gradient.is_sparse:
        return torch.zeros_like(gradient)
    return gradient
