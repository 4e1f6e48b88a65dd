"""Computes the micro-batches of a step again, in the run itself: all ranks compute the same one together.

Every rank computes the same micro-batch, so that the mean over ranks, if an engine takes it, is its
gradient: FSDP2 takes it after every backward outside of a window, DDP after none but its own.
"""

import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_automodel.callbacks.exactness.counting import Told
from lightning_automodel.callbacks.exactness.manual import up_to_backward
from lightning_automodel.callbacks.exactness.moment import leaving_no_trace
from lightning_automodel.callbacks.running_strategy import run_of
from lightning_automodel.distributed import collectives
from lightning_automodel.distributed.failures import list_first
from lightning_automodel.distributed.process_group import group_rank, group_size
from lightning_automodel.gradients import rescale_clip
from lightning_automodel.gradients.token_loss import TokenWeighting
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.dtensor import plain_access
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.training_run import TrainingRun

Gradients = dict[str, Tensor]
"""This rank's parts of gradients by parameter, in host memory; those of parameters without one are missing."""
RecordedWeights = dict[int, list[Gradients]]
"""By training step, this rank's parts of weights before it and after each step of an optimizer in it."""

_SAMPLED = 1_000  # entries of this rank's part of each parameter, by which micro-batches are told apart
_TIME_FOR_ALL = timedelta(minutes=30)
_TIME_AFTER_ERROR = timedelta(seconds=20)


class ReplayError(RuntimeError):
    """Why the replay has ended, in words. Raised on all ranks."""


@dataclass
class MicroBatch:
    """One backward of this rank: the whole batch of its training step and the moment before it, and its weight."""

    pickled: bytes  # empty if that is not possible
    loss: float
    told: Told
    step: int  # how many training steps this rank had begun
    backward: int  # how many manual backwards its step had; 0 under automatic optimization
    count: float = 1.0  # set when those of all ranks are known


@dataclass(frozen=True)
class Turn:
    """A micro-batch that all ranks compute: the rank that has it, as which of its own, and what is known of it."""

    source: int
    index: int
    count: float  # of all slices
    recorded: MicroBatch  # of the rank that has computed the slice which this rank has

    @staticmethod
    def all_of(by_rank: Sequence[tuple[int, list[MicroBatch]]], num_slices: int) -> list["Turn"]:
        """The micro-batches of all ranks, by each one's number of its data and its own micro-batches."""
        peers: dict[int, list[int]] = {}
        for rank, (data, _) in enumerate(by_rank):
            peers.setdefault(data, []).append(rank)
        position = peers[by_rank[group_rank()][0]].index(group_rank())
        turns = []
        for _, ranks in sorted(peers.items()):
            for index, parts in enumerate(zip(*(by_rank[rank][1] for rank in ranks), strict=True)):
                count = sum(part.count for part in parts) * num_slices / len(parts)
                turns.append(Turn(ranks[0], index, count, parts[position]))
        return turns


class LockStep:
    """Replays windows on all ranks together.

    Collectives over the world are ``together``, ``compute``, ``one_batch``, ``norms`` and ``products`` alone.

    Where parameters are sharded, a step of the replay communicates. A rank whose step raises alone waits for
    the others as long as ``_TIME_AFTER_ERROR``, and then raises: they may wait for it within the step, as they
    would in the run.
    """

    def __init__(self, trainer: pl.Trainer, weighting: TokenWeighting) -> None:
        self._trainer = trainer
        self._module: pl.LightningModule = trainer.lightning_module
        self._weighting = weighting
        self._device = trainer.strategy.root_device
        self._run = run_of(trainer)
        self.context = None if self._run is None else self._run.micro_batches.context
        self.num_slices = 1 if self.context is None else dist.get_world_size(self.context.group)
        self.parameters = dict(self._module.named_parameters())
        self.trained = self.parameters
        self._own: Sequence[MicroBatch] = ()
        self._of_steps: RecordedWeights = {}

    @property
    def is_sharded(self) -> bool:
        """Whether an engine takes part in the replay's backwards."""
        return any(isinstance(parameter, DTensor) for parameter in self.trained.values())

    def requiring_gradients(self) -> set[str]:
        """The parameters of optimizers that require gradients."""
        groups = (group for optimizer in self._trainer.optimizers for group in optimizer.param_groups)
        optimized = {id(parameter) for group in groups for parameter in group["params"]}
        return {name for name, p in self.parameters.items() if p.requires_grad and id(p) in optimized}

    def gradients(self) -> Gradients:
        """What ``.grad`` holds."""
        with plain_access():
            graded = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
            return {name: local_part(gradient).to("cpu", copy=True) for name, gradient in graded.items()}

    def weights(self) -> Gradients:
        """This rank's parts of all parameters, in host memory."""
        return {name: local_part(p).to("cpu", copy=True) for name, p in self.parameters.items()}

    @contextmanager
    def apart(
        self, own: Sequence[MicroBatch], trained: Iterable[str], of_steps: RecordedWeights
    ) -> Iterator[None]:
        """Context of replays of a window, of which this rank has its ``own``; all that a step may change is put back.

        ``trained`` are the parameters that are compared, and ``of_steps`` the weights of training steps that
        were written later.
        """
        self._own = own
        self._of_steps = of_steps
        self.trained = {name: self.parameters[name] for name in self.parameters if name in trained}
        self._weights = self.weights()
        with (
            leaving_no_trace(self._module, self._device) as self._missing,
            PatchStack() as patches,
            torch.enable_grad(),
        ):
            for name in ("log", "log_dict"):
                patches.set(self._module, name, lambda *_, **__: None)
            for parameter in self.parameters.values():
                patches.callback(setattr, parameter, "grad", parameter.grad)
            patches.callback(self.restore_weights)
            yield

    def restore_weights(self) -> bool:
        """Write back the weights, and free what was gathered of them. Returns whether any had changed."""
        return self._write(self._weights)

    @torch.no_grad()
    def _write(self, weights: Gradients) -> bool:
        has_changed = False
        for name, parameter in self.parameters.items():
            part = local_part(parameter)
            wanted = weights[name].to(part.device)
            if not torch.equal(part, wanted):
                part.copy_(wanted)
                has_changed = True
        if self._run is not None:
            self._run.engine.stepped()
            return has_changed
        for submodule in self._module.modules():
            if isinstance(submodule, FSDPModule):
                submodule.reshard()
        return has_changed

    def together(self, function: Callable[[], None]) -> None:
        """Call ``function``. ReplayError on all ranks if it raises on any."""
        problem = None
        try:
            function()
        except ReplayError:
            raise  # of a call within this one
        except Exception as error:
            problem = f"the replay has raised {type(error).__name__}: {error}"
            if self._missing:
                problem += f". It lacks {list_first(self._missing, 4)}: what is drawn from iterators cannot be put back"
        if self.is_sharded:
            patience = _TIME_FOR_ALL if problem is None else _TIME_AFTER_ERROR
            try:
                collectives.named_barrier("ExactnessCheck", patience)
            except RuntimeError as error:
                if problem is None:
                    raise
                raise RuntimeError(
                    f"ExactnessCheck: {problem}, on this rank alone and within a forward that the others are"
                    " still in. Remove the check, or the cause."
                ) from error
        first = next(filter(None, collectives.gather_objects(problem)), None)
        if first is not None:
            raise ReplayError(first)

    # --- One micro-batch --------------------------------------------------------------------------------------

    def compute(self, turn: Turn, turns: Sequence[Turn], scale: float | None = None) -> tuple[float, float]:
        """Compute a micro-batch's forward, and the backward of its objective times ``scale`` if there is one.

        Its gradients are then in ``.grad``. Returns this rank's part of its share in the loss of one batch,
        and its own loss.
        """
        sent = b""
        if turn.source == group_rank():
            sent = self._own[turn.index].pickled
        received = collectives.broadcast_object(sent, turn.source)
        if not received:
            raise ReplayError("a batch cannot be pickled, for other ranks")
        written = iter(self._of_steps.get(turn.recorded.step, ()))
        found = []

        def backward(loss: Tensor, output: Any) -> None:
            objective = self._objective(loss, output, turn, turns)
            found.append((float(objective.detach()), float(loss.detach())))
            if scale is None:
                return
            self.together(lambda: None)  # no rank has raised before its backward
            self._clear_gradients()
            self._differentiate(objective * scale)

        def stepped() -> None:
            self._write(next(written))

        def run_step() -> None:
            self._clear_gradients()
            if self._run is None or self._module.automatic_optimization:
                output = self._training_step(received)
                backward(loss_of(output), output)
                return
            stepped()
            with (
                self._requiring_gradients(self._run),
                up_to_backward(self._module, turn.recorded.backward, backward, stepped),
            ):
                self._training_step(received)
            if not found:
                raise RuntimeError(
                    f"training_step has called manual_backward less than {turn.recorded.backward} times"
                )

        with nullcontext() if self._run is None else self._run.engine.replaying():
            self.together(run_step)
        return found[0]

    def _clear_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    @contextmanager
    def _requiring_gradients(self, run: TrainingRun) -> Iterator[None]:
        """Context at whose end no optimizer is toggled, as a step that ends early leaves it."""
        required = {parameter: parameter.requires_grad for parameter in self.parameters.values()}
        try:
            yield
        finally:
            run.engine.release()  # what it has gathered would toggle them again
            for parameter, requires_grad in required.items():
                parameter.requires_grad = requires_grad
            run.windows.toggled = None
            run.engine.requires_grad_changed()

    def _training_step(self, received: bytes) -> Any:
        arguments, before = pickle.loads(received)
        before.restore(self._module, self._device)
        batch, *rest = move_data_to_device(arguments, self._device)
        if self.context is not None:
            batch = self.context.slice(batch)
        attention = nullcontext() if self.context is None else self.context.step("training_step")
        with self._trainer.precision_plugin.train_step_context(), attention:
            return self._module.training_step(batch, *rest)

    def _differentiate(self, objective: Tensor) -> None:
        """Put the gradients of ``objective`` [] into ``.grad``. No window is open."""
        if not getattr(self._trainer.strategy.model, "find_unused_parameters", False):
            objective.backward()
            return
        # DDP would take what it sees in a backward for used in the run's next one.
        trained = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        gradients = torch.autograd.grad(objective, trained, allow_unused=True)
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient

    def _objective(self, loss: Tensor, output: Any, turn: Turn, turns: Sequence[Turn]) -> Tensor:
        """[] the share of a ``loss`` [] in that of one batch."""
        aux = None
        if self._run is not None:
            aux = self._weighting.aux_loss(output, is_counted_ahead=True)
        total = max(sum(other.count for other in turns), 1e-30)
        objective = self._weighting.objective(loss, turn.recorded.count, aux_loss=aux) / total
        if aux is not None:
            objective = objective + aux / len(turns)
        return objective * self.num_slices

    # --- One batch --------------------------------------------------------------------------------------------

    def one_batch(
        self, turns: Sequence[Turn], scale: float = 1.0, reverse: bool = False
    ) -> tuple[Gradients, Tensor, list[float]]:
        """Compute the gradients of all micro-batches as one batch, from losses times ``scale``.

        Returns these, what each of m micro-batches adds to k sampled entries of them [k, m], and its loss on
        this rank.
        """
        scale *= loss_scale(self._trainer)
        losses = [0.0] * len(turns)
        parts = [torch.zeros(0)] * len(turns)
        total: Gradients = {}
        for number in sorted(range(len(turns)), reverse=reverse):
            _, losses[number] = self.compute(turns[number], turns, scale)
            self._complete()
            own = self.gradients()
            parts[number] = self.sample(own) / scale
            for name, gradient in own.items():
                if name in total:
                    total[name].add_(gradient)
                else:
                    total[name] = gradient
        for gradient in total.values():
            gradient.div_(scale)
        return total, torch.stack(parts, dim=1), losses

    @torch.no_grad()
    def _complete(self) -> None:
        """Average what an engine does not, in ``.grad``."""
        trained = list(self.trained.values())
        plain = [p for p in trained if p.grad is not None and not isinstance(p, DTensor)]
        if self.context is not None and plain:
            rescale_clip.average_gradients_(plain, self.context.group)
        rescale_clip.share_experts_gradients_(trained)

    # --- Comparing --------------------------------------------------------------------------------------------

    def sample(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """[k] entries of this rank's parts of gradients, in float64 on the host; 0 for missing ones."""
        parts = [torch.zeros(0, dtype=torch.float64)]
        for name, parameter in self.trained.items():
            local = local_part(gradients.get(name, parameter)).reshape(-1)
            taken = local[:: max(1, local.numel() // _SAMPLED)].double().cpu()
            parts.append(taken * (name in gradients))
        return torch.cat(parts)

    def norms(self, first: Gradients, second: Gradients | None = None) -> dict[str, float]:
        """2-norms by parameter, of one gradient or of the differences between two."""
        zero = torch.zeros((), dtype=torch.float64)
        squares = []
        for name, parameter in self.trained.items():
            difference = first.get(name, zero).double() - (second or {}).get(name, zero).double()
            squares.append(float(difference.square().sum()) / _num_copies(parameter))
        roots = self._sum(torch.tensor(squares, dtype=torch.float64)).sqrt().tolist()
        return dict(zip(self.trained, roots, strict=True))

    def products(self, columns: Tensor) -> Tensor:
        """[c, c] inner products of [k, c] columns, each of which all ranks hold parts of."""
        return self._sum(columns.mT @ columns)

    @staticmethod
    def _sum(values: Tensor) -> Tensor:
        return torch.stack(collectives.gather_objects(values)).sum(dim=0)


def loss_of(output: Any) -> Tensor:
    """[] the loss in what ``training_step`` has returned."""
    if isinstance(output, Mapping):
        loss: Tensor = output["loss"]
        return loss
    found: Tensor = output
    return found


def loss_scale(trainer: pl.Trainer) -> float:
    """What a gradient scaler multiplies losses by at the moment."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None:
        return 1.0
    return float(scaler.get_scale())


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, dense, sharing memory if it is."""
    with plain_access():
        local = torch_internals.local_tensor(tensor.detach())
    if local.is_sparse:
        return local.to_dense()
    return local


def _num_copies(parameter: Tensor) -> int:
    """How many ranks hold the same part of a parameter."""
    if not isinstance(parameter, DTensor):
        return group_size()
    placed = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return group_size() // math.prod(size for placement, size in placed if not placement.is_replicate())
