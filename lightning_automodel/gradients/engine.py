"""What the strategy and the algebra ask of an engine, here without any communication."""

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch.distributed as dist
from torch import Tensor, nn

from lightning_automodel.gradients.rank_agreement import WriteDigest
from lightning_automodel.gradients.window_records import BackwardPass
from lightning_automodel.internals.torch import Reached


class Engine:
    """Distributes a model over ranks, and communicates what each micro-batch of a fit needs. As it is, nothing.

    Attributes:
        group: The ranks that gradients are averaged over; None for one rank.
        shares_buffers: Whether ranks take buffers from the first one.
        reuses_gradients: Whether a backward may overwrite a tensor in ``.grad``.
        reached: The tracked parameters that got gradients since this list was last cleared: in the strategy's own
            backward from that one, in between from a foreign one.
        tracked: The parameters for which :attr:`reached` is noted.
        backward: The backward of the strategy that runs, from before :meth:`begin` on; else None. The windows set it
            when they set older gradients aside; from then on an exception must put these back.
        model: What to call the module's steps on.
        unit_order: A hash of the sequence of units that this rank has gathered and reduced since ranks last compared
            evaluations. Ranks that used the same units have the same hash.
        written: What this rank has written to sharded parameters and gradients.
        first_peer: The first of the ranks that gather together with this one.
        ends_window: Whether a backward ends its window now: not in a micro-batch that others follow.
    """

    shares_buffers = True
    reuses_gradients = False
    unit_order = 0
    first_peer = 0
    model: nn.Module

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.backward: BackwardPass | None = None
        self.reached = Reached()
        self.written = WriteDigest()
        self.ends_window = True
        self.tracked: set[nn.Parameter] = set()

    def track(self, trained: set[nn.Parameter]) -> None:
        """Note from now on which backwards reach these parameters."""
        for parameter in trained - self.tracked:
            self.tracked.add(parameter)
            self._watch(parameter)

    def _watch(self, parameter: nn.Parameter) -> None:
        self.reached.watch(parameter)

    @contextmanager
    def micro_batch(self, ends_window: bool) -> Generator[None, None, None]:
        """Context for the forward and backward of one micro-batch. ``ends_window``: its backward ends the window."""
        before = self.ends_window
        self.ends_window = ends_window
        try:
            yield
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
        """A step without a backward has ended. Shards must show before hooks run.

        Gathered parameters would show no gradients, or those of an open window.
        """

    def release(self) -> None:
        """Free gathered parameters, since weights may be written next or have been written."""

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
        """Drop the state of an interrupted micro-batch, which ranks may have left in different places."""
        self.written.take()

    def close(self) -> None:
        """Remove hooks from the model."""
        self.reached.close()
