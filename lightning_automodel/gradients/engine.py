"""What the strategy and the algebra ask of an engine, here without any communication."""

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn

from lightning_automodel.gradients.window_records import BackwardPass
from lightning_automodel.internals.torch import Reached, queue_callback

PLAIN_BACKWARD = (
    "A plain loss.backward() in the middle of an accumulation window, whose gradients it would join. For the"
    " gradient of inputs or activations, call torch.autograd.grad(loss, inputs), which leaves nothing"
    " behind. For a loss that trains, call self.manual_backward(loss), or end the window first, by a"
    " manual_backward outside of `optimizer.toggle_model(sync_grad=False)`; under automatic optimization,"
    " return the sum of the losses."
)
"""Why a backward that is not the strategy's is refused while a window is open."""

SECOND_BACKWARD = (
    "LightningModule.backward runs a second backward, after that of its loss, with which gradients were"
    " final. Add up what is backpropagated, for one loss.backward(). For gradients that shall train"
    " nothing, call torch.autograd.grad(loss, inputs)."
)
"""Why a module's own ``backward`` runs one."""


def when_backward_ends(output: Tensor, function: Callable[[], None]) -> None:
    """Let autograd call ``function`` when a backward of ``output`` has ended, before it returns.

    If backwards are nested, the one of ``output`` counts. FSDP2 and DDP reduce the last gradients in callbacks
    too, which they queue later: so a callback queues ``function``.
    """
    output.register_hook(lambda _: queue_callback(partial(queue_callback, function)))


class Engine:
    """Distributes a model over ranks, and communicates what each micro-batch of a fit needs. As it is, nothing.

    It knows which backward runs, and what becomes of one that is not the strategy's, a plain one:

    ===========================  ==============================================  ================  =====================
    state                        entered by                                      :attr:`backward`  a plain backward
    ===========================  ==============================================  ================  =====================
    no window is open            :meth:`user_backward_returned`, :meth:`forget`  None              is noted as foreign
    our backward runs            `GradientWindows.set_aside`                     it                is a part of it
    our backward has ended; the  :meth:`leave_backward`                          None              is refused: it is the
    user's has not returned yet                                                                    second
    a window is open             :meth:`user_backward_returned`                  None              is refused
    ===========================  ==============================================  ================  =====================

    Attributes:
        group: The ranks that gradients are averaged over; None for one rank.
        shares_buffers: Whether ranks take buffers from the first one.
        reuses_gradients: Whether a backward may overwrite a tensor in ``.grad``.
        reached: The parameters that have got gradients since the state was entered, of those that are tracked.
        tracked: The parameters for which :attr:`reached` is noted.
        unsynchronised: Parameters that may have gradients of a plain backward, which the engine does not average.
        backward: The backward of the strategy that runs, from before :meth:`begin` on; else None. Once it is set, an
            exception puts back the older gradients that were set aside.
        model: What to call the module's steps on.
        collectives: A number of the units that this rank has gathered and reduced, in their order, since ranks have
            compared what they evaluated: equal where they have used the same.
        first_peer: The first of the ranks that gather together with this one.
        ends_window: Whether a backward ends its window now: not in a micro-batch that others follow.
    """

    shares_buffers = True
    reuses_gradients = False
    collectives = 0
    first_peer = 0
    model: nn.Module

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.backward: BackwardPass | None = None
        self._refusal: str | None = None  # why a plain backward is refused
        self.reached = Reached()
        self.unsynchronised: set[nn.Parameter] = set()
        self.ends_window = True
        self.tracked: set[nn.Parameter] = set()

    # --- Which backward runs ------------------------------------------------------------------------------------------

    def leave_backward(self) -> None:
        """The gradients are where the window keeps them. A second backward would be lost, so it is refused."""
        self.backward = None
        self._refusal = SECOND_BACKWARD
        self.reached.clear()

    def user_backward_returned(self, no_window_is_open: bool) -> None:
        """The user's ``backward`` has returned. Toggled optimizers have windows of their own, and one may stay open."""
        self._refusal = None if no_window_is_open else PLAIN_BACKWARD

    def forget(self) -> None:
        """No backward runs, and no window is open any more."""
        self.backward = None
        self._refusal = None
        self.reached.clear()
        self.discard()

    def zeroed(self, parameters: set[nn.Parameter]) -> None:
        """The user has zeroed the gradients of these parameters."""
        self.check_foreign()
        self.unsynchronised -= parameters

    def track(self, trained: set[nn.Parameter]) -> None:
        """Note from now on which backwards reach these parameters."""
        for parameter in trained - self.tracked:
            self.tracked.add(parameter)
            self._watch(parameter)

    def _watch(self, parameter: nn.Parameter) -> None:
        self.reached.watch(parameter)

    def check_foreign(self) -> None:
        """Raise RuntimeError if a backward that is not the strategy's has reached parameters, and joins a window."""
        if self.backward is not None or not self.reached:
            return
        if self._refusal is not None or not self.ends_window:
            raise RuntimeError(self._refusal or PLAIN_BACKWARD)
        if self.group is not None:  # FSDP2 averages the gradients of its shards in any backward
            self.unsynchronised.update(leaf for leaf in self.reached if not hasattr(leaf, "shard"))
        self.reached.clear()

    @contextmanager
    def micro_batch(self, ends_window: bool) -> Generator[None, None, None]:
        """Context for the forward and backward of one micro-batch. ``ends_window``: its backward ends the window."""
        self.check_foreign()
        before = self.ends_window
        self.ends_window = ends_window
        try:
            yield
            self.check_foreign()
        finally:
            self.ends_window = before

    # --- The steps of one backward, in the order of `MicroBatches.backward` -------------------------------------------

    def begin(self, backward: BackwardPass, loss: Tensor) -> None:
        """``backward``, of ``loss``, comes next. May be a collective over the data-parallel group."""

    def reduce(self, backward: BackwardPass) -> set[nn.Parameter]:
        """Reduce what the backward has left, and return the parameters that it has reached on this rank.

        If the backward ends the window, the gradients of ``backward.final`` are then complete: sums of token
        losses over all ranks, divided by D, and not yet by label tokens, unless the window was counted ahead.
        Also sets ``backward.zero_filled``. Runs within autograd's backward, when everything else in it has
        ended. A collective over the data-parallel group if the window ends.
        """
        return set(self.reached)

    def keep(self, backward: BackwardPass) -> None:
        """After the reduction: free what the backward has gathered, or keep it for the next micro-batch."""

    @contextmanager
    def replaying(self) -> Generator[None, None, None]:
        """Context of a forward and a plain backward of one batch, the same on all ranks, while no window is open.

        Its gradients may be averaged over ranks or not, since they are equal. Nothing else is left behind.
        """
        yield
        self.reached.clear()

    # --- Apart from a backward ----------------------------------------------------------------------------------------

    def discard(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Forget gradients that are held outside of ``.grad``, of these (or all) parameters."""

    def start_forward(self) -> None:
        """Called before each training step: its forwards may leave parameters gathered."""

    def resume_step(self) -> None:
        """A training step goes on after one of its backwards."""

    def end_forward(self) -> None:
        """A step's forward has ended, and hooks follow that must find shards, before its backward."""

    def end_step(self) -> None:
        """A step has ended, and no backward follows but hooks, whose forwards leave nothing gathered.

        Of gathered parameters in the module a hook would find no gradients, or those of an open window.
        """

    def release(self) -> None:
        """Free gathered parameters, since weights may be written next or have been written."""

    def requires_grad_changed(self) -> None:
        """Parameters were frozen or unfrozen."""

    def evaluation(self, find_leader: Callable[[], int | None]) -> AbstractContextManager[None]:
        """Context of a step of evaluation or prediction; after it, a callback may swap weights.

        ``find_leader`` returns the first rank with data, where another one joins this step without; else None.
        """
        return nullcontext()

    def join_evaluation(self, leader: int) -> None:
        """Take part in the collectives of other ranks' evaluation step, without data, as the ``leader`` does.

        A collective.
        """

    def recover(self) -> None:
        """Drop the state of an interrupted micro-batch."""

    def close(self) -> None:
        """Remove hooks from the model."""
        self.reached.close()
