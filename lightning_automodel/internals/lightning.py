"""Every private name of Lightning that the package uses, each with its reason."""

# ruff: noqa: F401 (other modules import these names from here)

import inspect
import signal
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core import saving
from lightning.pytorch.loops import fetchers
from lightning.pytorch.strategies.launchers.multiprocessing import (
    _MultiProcessingLauncher as MultiProcessingLauncher,
)
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as SubprocessScriptLauncher,
)
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.exceptions import _TunerExitException as TunerExitException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torchmetrics import Metric

from lightning_automodel.internals.patching import PatchStack, is_patched, overwrite
from lightning_automodel.internals.torch import defined_in

_CONTAINERS = (dict, list, tuple, deque)
_MOST_METRICS = 1000

Gather = Callable[[Any], list[Any]]

NEUTRAL = {"mean": 0.0, "avg": 0.0, "sum": 0.0, "min": float("inf"), "max": float("-inf")}
"""Lightning's `reduce_fx`, each with the value that does not change its result."""

_BEFORE_BACKWARD = ("on_before_zero_grad", "optimizer_zero_grad", "on_before_backward", "pre_backward")


def has_hooks_before_backward(trainer: Trainer) -> bool:
    """Whether code of the user's runs between a step's forward and its backward, under automatic optimization."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    hooked = [trainer.lightning_module, trainer.strategy, trainer.precision_plugin, *callbacks]
    return any(
        not defined_in(getattr(owner, name), "lightning", "lightning_automodel")
        for owner in hooked
        for name in _BEFORE_BACKWARD
        if hasattr(owner, name)
    )


def draws_its_batches(step: Callable[..., Any]) -> bool:
    """Whether a step takes a ``dataloader_iter`` in place of a batch."""
    return is_param_in_hook_signature(step, "dataloader_iter", explicit=True)


def current_hook(module: LightningModule) -> str | None:
    """Name of the running hook of ``module``; None between hooks."""
    return module._current_fx_name


def patch_signals(trainer: Trainer, ask_to_requeue: Callable[[], None], patches: PatchStack) -> None:
    """Stop ``trainer`` from broadcasting SIGTERM in each micro-batch, and from communicating in a signal handler.

    On SLURM's signal to requeue Lightning saves at once, which is a collective under FSDP2. No two ranks
    receive a signal at the same point of a step: ``ask_to_requeue`` is called instead.
    """
    patches.set(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda *_: None)
    patches.set(trainer._signal_connector, "_sigterm_notifier_fn", lambda *_: None)
    patches.set(trainer._signal_connector, "_slurm_sigusr_handler_fn", lambda *_: ask_to_requeue())


def set_device_mesh(module: LightningModule, mesh: DeviceMesh) -> None:
    """Let ``module.device_mesh``, which has no setter, be ``mesh``."""
    overwrite(module, "_device_mesh", mesh)


def save_and_requeue(trainer: Trainer) -> None:
    """Do what Lightning does on SLURM's signal: save, and let rank 0 requeue the job. Every rank must call it."""
    connector = trainer._signal_connector
    type(connector)._slurm_sigusr_handler_fn(connector, signal.SIGUSR1, None)  # type: ignore[arg-type]


def keep_signal_handlers(trainer: Trainer) -> None:
    """Stop ``trainer`` from restoring signal handlers that it has not replaced, and that of SIGTERM.

    The supervisor removes its own handler of SIGTERM. Of those that ``faulthandler`` has set Python knows
    nothing, so that Lightning would restore the default action: the next crash of the process would leave no
    stack.
    """
    found = trainer._signal_connector._original_handlers
    for signum, handler in list(found.items()):
        if signum == signal.SIGTERM or signal.getsignal(signum) == handler:
            del found[signum]


def patch_model_checkpoints(
    patches: PatchStack,
    trainer: Trainer,
    link: Callable[[str, str], None],
    is_pending: Callable[[str], bool],
) -> None:
    """Make each ``ModelCheckpoint`` see checkpoints that are still being written, and replace links without a gap.

    Lightning 2.6.6 looks for existing files, so that no two callbacks choose the same name, and removes the
    old link or directory before it makes the new one.
    """
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            patches.set(callback, "_link_checkpoint", lambda _, path, name: link(path, name))
            exists = callback.file_exists
            patches.set(
                callback, "file_exists", lambda path, of, exists=exists: is_pending(path) or exists(path, of)
            )


def tell_sigterm(trainer: Trainer) -> None:
    """Make ``trainer`` leave its loop after the current batch with ``SIGTERMException``."""
    overwrite(trainer._signal_connector, "received_sigterm", True)


def begin_training_data(trainer: Trainer) -> None:
    """Iterate the training loaders anew: Lightning has done it in set-up, before they got their positions."""
    iter(trainer.fit_loop._data_fetcher)  # type: ignore[arg-type]


def is_trainer_drawing() -> bool:
    """Whether a loop of the Trainer iterates a loader now, rather than other code: whose call is the innermost.

    The running hook does not tell: those of a data module and loggers have no name, and LearningRateFinder
    runs a loop within one.
    """
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if module in (fetchers.__name__, call.__name__):
            return bool(module == fetchers.__name__)
        frame = frame.f_back
    return False


def results_of(trainer: Trainer) -> list[Any]:
    """What is logged: in training, in validations within it, and in the other stages."""
    epoch_loop = trainer.fit_loop.epoch_loop
    loops = (epoch_loop, epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
    return [loop._results for loop in loops]


def epoch_metrics(trainer: Trainer) -> dict[str, Any]:
    """This epoch's training metrics for callbacks, from the batches so far. A collective if any is synchronised."""
    return trainer.fit_loop.epoch_loop._results.metrics(on_step=False)["callback"]


def peek_at_epoch_metrics(trainer: Trainer, gather: Gather) -> dict[str, Any]:
    """The same of an epoch that goes on, by :func:`reduce_by_name`.

    Metrics keep nothing of it. They would compute anew after an update alone: at the epoch's end, ranks whose last
    batch was padding would not, and the others would wait for them.
    """
    results = trainer.fit_loop.epoch_loop._results
    metrics: list[nn.Module] = list(results.values())
    for result in results.values():
        if not result.is_tensor:
            metrics += result.value.modules()
    before = [dict(vars(metric)) for metric in metrics]
    reduce_by_name(results, trainer, gather)
    computed = epoch_metrics(trainer)
    for metric, attributes in zip(metrics, before, strict=True):
        vars(metric).update(attributes)
    return computed


def _log_what_others_reduce(results: Any, trainer: Trainer, gather: Gather) -> None:
    """Log what other ranks have logged over an epoch, and this one has not, so that it does not count.

    A collective if this rank has evaluated, or has something to reduce. Raises RuntimeError, on every rank, for what
    all ranks must log.
    """
    own = {}
    for key, result in results.valid_items():
        meta = result.meta
        is_reduced = not result.is_tensor or (meta.sync.should and not meta.sync.rank_zero_only)
        if is_reduced and meta.on_epoch and result._computed is None:
            dtype = None if meta.on_step or not result.is_tensor else result.value.dtype
            own[key] = (
                dtype,
                {
                    "fx": meta.fx.removesuffix(f".{results.dataloader_idx}"),
                    "name": meta.name,
                    "prog_bar": meta.prog_bar,
                    "logger": meta.logger,
                    "add_dataloader_idx": meta.add_dataloader_idx,
                    "reduce_fx": meta.reduce_fx,
                    "enable_graph": meta.enable_graph,
                },
            )
    by_rank = []
    if own or not results.training:  # in training, ranks may have come to different ends of epochs
        by_rank = gather(own)
    for key, (dtype, options) in sorted({key: told[key] for told in by_rank for key in told}.items()):
        if dtype is None and not all(key in told for told in by_rank):
            raise RuntimeError(
                f"{options['name']!r} was logged on some ranks alone. TorchMetrics, and values with on_step=True and"
                " sync_dist=True, are reduced by all ranks together: log them in each batch, or in hooks of an epoch's"
                " end."
            )
        if key not in own:
            neutral = NEUTRAL[options["reduce_fx"].__name__]
            value = torch.tensor(neutral, dtype=dtype, device=trainer.strategy.root_device)
            reduce = trainer.strategy.reduce
            results.log(value=value, batch_size=0, sync_dist=True, sync_dist_fn=reduce, **options)
            # Python's own min and max return one of two infinities, in whatever dtype.
            results[key].value = results[key].value.to(dtype)


def reduce_by_name(results: Any, trainer: Trainer, gather: Gather) -> None:
    """Reduce what steps have logged over an epoch by its names: ranks may have logged in another order, or not all.

    A collective, for which all ranks must come before hooks of the epoch's end log; theirs is reduced in the order of
    logging, since a progress bar may read some of it on rank 0 earlier. ``gather`` returns an object of each rank.
    """
    _log_what_others_reduce(results, trainer, gather)
    logged = dict(results)
    results.clear()
    results.update(sorted(logged.items()))
    type(results).metrics(results, False)
    # Each result keeps what it was reduced to, so that the order is this rank's again.
    results.clear()
    results.update(logged)


def reduce_evaluated_by_name(
    trainer: Trainer, take_evaluated: Callable[[], bool], gather: Gather, patches: PatchStack
) -> None:
    """Let :func:`reduce_by_name` come first where a loader has been evaluated, as ``take_evaluated`` says once."""

    def metrics_of(results: Any, metrics: Callable[[bool], Any], on_step: bool) -> Any:
        if not on_step and take_evaluated():
            reduce_by_name(results, trainer, gather)
        return metrics(on_step)

    for results in results_of(trainer)[1:]:
        patches.set(results, "metrics", partial(metrics_of, results, results.metrics))


def compute_metrics_again(trainer: Trainer) -> None:
    """Compute anew what TorchMetrics objects are logged, which hooks may have updated since. A collective if so."""
    for result in trainer.fit_loop.epoch_loop._results.values():
        if not result.is_tensor:
            result.update(result.value, batch_size=1)  # forgets what it has computed
    epoch_metrics(trainer)


STEPS = "_batches_that_stepped"  # in the state of the loop of batches: what `logging_step` returns


def logging_step(trainer: Trainer) -> int:
    """The step number under which Lightning logs the values of this training batch."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def logged_metrics(loop: Any) -> set[int]:
    """Ids of the TorchMetrics objects that were logged in ``loop``, which resets them at its end."""
    return {id(result.value) for result in loop._results.values() if not result.is_tensor}


def modes_before_validation(trainer: Trainer) -> dict[str, bool]:
    """By name, which modules were in training mode when the validation began that runs within the fit."""
    return trainer.fit_loop.epoch_loop.val_loop._module_mode.mode


def told_weights_only(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool | None:
    """What the user gave ``fit`` as ``weights_only``: Lightning drops it if a strategy loads after its set-up."""
    return inspect.signature(function).bind(*args, **kwargs).arguments.get("weights_only")


def metric_state(metric: Metric) -> dict[str, Any]:
    """A copy of a TorchMetrics object's state, for :func:`set_metric_state`."""
    # Metrics append to list states, and do not change their tensors in place.
    states = {k: list(v) if isinstance(v, list) else v.clone() for k, v in metric.metric_state.items()}
    return {"states": states, "count": metric.update_count}


def set_metric_state(metric: Metric, saved: dict[str, Any]) -> None:
    """Restore what :func:`metric_state` returned."""
    metric.reset()
    for name, state in saved["states"].items():
        if name in metric.metric_state:
            setattr(metric, name, move_data_to_device(state, metric.device))
    overwrite(metric, "_update_count", saved["count"])


def sync_lists_by(gather: Callable[..., list[Any]], metric: Metric, patches: PatchStack) -> None:
    """Let ``gather(lists, group)`` bring the states of a metric that are lists, with an entry for each batch or image.

    TorchMetrics gathers entries one by one, or concatenates several, but not one alone: ranks with unequal numbers of
    them would call different collectives.
    """

    def sync(sync_others: Callable[..., None], dist_sync_fn: Any, process_group: Any = None) -> None:
        if metric._cache is None:
            raise RuntimeError(
                f"A shallow copy of a {type(metric).__name__} is computed, whose lists are those of the metric that was"
                " copied: call metric.clone() in place of copy.copy(metric)."
            )
        own = {name: getattr(metric, name) for name in metric._reductions}
        own = {name: state for name, state in own.items() if isinstance(state, list)}
        by_rank = []
        if own:
            # Copies: a view, such as a row of a batch, would be sent with all that it is a view of.
            sent = apply_to_collection(own, Tensor, lambda tensor: tensor.detach().to("cpu", copy=True))
            by_rank = gather(sent, process_group or metric.process_group)
        for name in own:
            setattr(metric, name, [])
        sync_others(dist_sync_fn, process_group)
        for name in own:
            # Rank by rank: entries of lists with one for each batch, and with one for each sample, belong together.
            state: Any = [entry for states in by_rank for entry in states[name]]
            state = move_data_to_device(state, metric.device)
            reduce: Any = metric._reductions[name]
            if state and reduce is not None:
                state = reduce(state)
            setattr(metric, name, state)

    if not is_patched(metric, "_sync_dist"):
        patches.set(metric, "_sync_dist", partial(sync, metric._sync_dist))


def metrics_in(module: LightningModule) -> dict[str, Metric]:
    """All TorchMetrics of ``module``, of the callbacks and of the data module by name.

    Also those that are no submodules: in attributes of theirs, and in nested dicts and lists there.
    """
    trainer: Any = module.trainer
    holders: dict[str, Any] = dict(module.named_modules())
    named = dict(holders)
    # With its number too, for two of a class: another order brings nothing back, rather than the other's.
    holders |= {f"{callback.state_key} {n}": callback for n, callback in enumerate(trainer.callbacks)}
    if trainer.datamodule is not None:
        holders["data module"] = trainer.datamodule
    known = set(map(id, named.values()))
    for path, holder in holders.items():
        for number, part in enumerate(_modules_within(vars(holder))):
            if id(part) not in known:
                named |= part.named_modules(prefix=f"{path}[{number}]")
    by_id: dict[int, tuple[str, Metric]] = {}
    for name, part in named.items():
        if isinstance(part, Metric):
            by_id.setdefault(id(part), (name, part))
    return dict(by_id.values())


def _modules_within(attributes: dict[str, Any]) -> Iterator[nn.Module]:
    """The modules in nested containers. Not in more, or larger, ones than anybody has metrics, such as of samples."""
    containers: list[Any] = [attributes]
    seen = {id(attributes)}
    for container in containers:  # grows
        for value in container.values() if isinstance(container, dict) else container:
            if isinstance(value, nn.Module):
                yield value
            elif not isinstance(value, _CONTAINERS) or id(value) in seen:
                continue
            elif len(value) <= _MOST_METRICS and len(containers) < _MOST_METRICS:
                seen.add(id(value))
                containers.append(value)
