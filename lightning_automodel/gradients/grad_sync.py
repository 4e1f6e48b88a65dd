"""What the algebra asks of an engine: the interface of gradient synchronisation, which communicates nothing."""

from collections.abc import Container, Iterable, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_automodel.gradients import rescale_clip
from lightning_automodel.internals import torch as torch_internals


class Uses(NamedTuple):
    """What a rank has used in the forwards and backwards of a window."""

    order: int  # of its FSDP units: a number below 2**20, the same on all ranks if their units and order are
    # Whether it has used them, of the parameters that get a zero gradient if no rank has; the same keys on
    # all ranks.
    by_parameter: dict[nn.Parameter, bool]


NO_USES = Uses(0, {})


class GradSync:
    """What each micro-batch communicates, and gradients outside of ``.grad``. As it is, it communicates nothing.

    FSDP2 and DDP give a zero gradient to some parameters that no rank has used, where one process has none.
    So what a window has really used is tracked. ``reuses_gradients``: whether a backward may overwrite a
    tensor in ``.grad``.
    """

    reuses_gradients = False

    def __init__(self) -> None:
        self._hooks: list[RemovableHandle] = []
        self._tracked: set[nn.Parameter] = set()
        self._used: set[nn.Parameter] = set()
        self._is_padding = False
        self._ends_window = False  # the backward that runs, or ran last

    def track(self, parameter: nn.Parameter, leaf: nn.Parameter) -> None:
        """Note whether backwards use ``parameter``, whose gradient autograd accumulates in ``leaf``."""
        if parameter.requires_grad and parameter not in self._tracked:
            self._tracked.add(parameter)
            hook = partial(self._gradient_accumulated, parameter)
            self._hooks.append(leaf.register_post_accumulate_grad_hook(hook))

    def _gradient_accumulated(self, parameter: nn.Parameter, _: Tensor) -> None:
        """Hook of autograd: note that a backward has used ``parameter``."""
        if not self._is_padding:
            self._used.add(parameter)

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        """Context for the forward and backward of one micro-batch; ``is_last``: its window ends with it."""
        return nullcontext()

    # --- The steps of one backward, in the order of `MicroBatches.backward` -------------------------------------------

    def begin(
        self, loss: Tensor, ends: bool, frozen: Set[nn.Parameter] = frozenset(), is_padding: bool = False
    ) -> None:
        """The backward of ``loss`` comes next, which ``ends`` its window, or not; the same on all ranks.

        ``frozen`` has the parameters that earlier backwards of the open windows have trained and this one
        does not, the same on all ranks. ``is_padding``: the batch is a padding batch, in which no parameter
        counts as used. May be a collective over the data-parallel group.
        """

    def reduce(self, final: list[nn.Parameter], trained: Container[nn.Parameter]) -> Uses:
        """Reduce what the backward has left. If it ends its window, the gradients of ``final`` are then complete.

        A collective over the data-parallel group. ``trained`` has what any backward of the window has
        trained. Returns what this rank has used of it; nothing if the window goes on.
        """
        return NO_USES

    def complete_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Once a window: average what the engine has left of parameters that the window has trained.

        Called by :meth:`reduce`, when the engine's own reductions have ended; gradients are then sums of
        token losses over all ranks, divided by D, as long as nothing is divided by label tokens. May be a
        collective.
        """

    def keep(self) -> None:
        """After the reduction: free what the backward has gathered, or keep it for the next micro-batch."""

    def average(self, parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
        """Average gradients of replicated parameters over ``group``, and note which this rank has. A collective."""
        self._tracked.update(parameters)
        self._used.update(parameter for parameter in parameters if parameter.grad is not None)
        rescale_clip.average_gradients_(parameters, group)

    # --- Apart from a backward ----------------------------------------------------------------------------------------

    def discard(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Forget the window, and gradients that are held outside of ``.grad``, for these (or all) parameters."""
        self._used.difference_update(self._tracked if parameters is None else parameters)

    def showing_shards(self) -> AbstractContextManager[Any]:
        """Context of the user's hooks, where a forward leaves no parameters gathered.

        The hook would find gathered parameters in the module, which have no gradients, or those of an open
        window.
        """
        return nullcontext()

    def start_step(self) -> None:
        """A training or evaluation step begins: its forwards may leave parameters gathered."""

    def end_step(self) -> None:
        """A step, with its backward, has ended: what follows are hooks, as in :meth:`showing_shards`."""

    def release(self) -> None:
        """Free gathered parameters, since weights may be written next or have been written."""

    def toggled(self) -> None:
        """Parameters were frozen or unfrozen."""

    def stepped(self) -> None:
        """An optimizer has written weights."""

    def recover(self) -> None:
        """Drop the state of an interrupted micro-batch."""

    def saving(self) -> AbstractContextManager[None]:
        """Context in which the model's state dict is what a checkpoint holds."""
        return nullcontext()

    def write_versions(self, tensors: Iterable[Tensor]) -> list[int]:
        """Numbers that differ from earlier ones if the tensors may have been written since."""
        return torch_internals.versions(tensors)

    def close(self) -> None:
        """Remove hooks from the model."""
        for hook in self._hooks:
            hook.remove()
