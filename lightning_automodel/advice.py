"""Warnings and notes for the user, each given once."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from lightning_automodel.context_parallel.hugging_face import outermost_hugging_face_models
from lightning_automodel.context_parallel.slices import SHIFTED_LABELS
from lightning_automodel.distributed.mesh import DATA, REPLICATE, SHARD
from lightning_automodel.gradients.token_loss import TokenWeighting, count_samples, has_count
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.dtensor import plain_access
from lightning_automodel.sharding.precision import HALF


class _TensorHooks(TorchFunctionMode):
    """Context that notes the functions which user code registers as backward hooks of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.register_hook and not isinstance(args[0], nn.Parameter):
            hook = args[1]
            if not torch_internals.defined_in(hook, "torch", "lightning_automodel"):
                self.names.append(f"a tensor {getattr(hook, '__qualname__', hook)}")
        return func(*args, **(kwargs or {}))


class BackwardHooks:
    """Names hooks of the user, in a run, whose gradients are not those of the window's mean; ``say`` says it once."""

    def __init__(
        self, module: nn.Module, divisor: int, counts_ahead: bool, say: Callable[[str], None]
    ) -> None:
        self._module = module
        self._divisor = divisor
        self._counts_ahead = counts_ahead
        self._say = say
        self._tensor_hooks = _TensorHooks()
        self._registers_hooks: bool | None = None  # whether steps do; None until one has run

    def noting(self) -> AbstractContextManager[None]:
        """Context of a training step; those of modules and parameters are named at the end of the first one.

        It also tells whether steps register hooks, as FSDP2 does. If so, the second one tells whose those of tensors
        are: that slows down all functions of torch, and compiled code would be compiled for it.
        """
        if self._registers_hooks is False:
            return nullcontext()
        return self._note()

    @contextmanager
    def _note(self) -> Iterator[None]:
        is_first = self._registers_hooks is None
        noting: AbstractContextManager[Any] = nullcontext()
        if self._registers_hooks and not any(map(torch_internals.is_compiled, self._module.modules())):
            noting = self._tensor_hooks
        before = RemovableHandle.next_id
        with noting:
            yield
        self._registers_hooks = is_first and RemovableHandle.next_id > before
        if is_first:
            with plain_access():
                hooked = _hooked(self._module)
            self._tell(hooked)
        else:
            self._tell(self._tensor_hooks.names)

    def _tell(self, hooked: list[str]) -> None:
        divisor = self._divisor
        if not hooked or (self._counts_ahead and divisor == 1):
            return
        found = (
            f"{len(hooked)} modules, parameters or tensors have backward hooks ({', '.join(hooked[:3])})."
        )
        linear = "A hook that only looks, or that multiplies by a constant, is right."
        if self._counts_ahead:
            self._say(
                f"{found} They see {divisor} times the gradient of the window's mean loss, which is then"
                f" averaged over {divisor} ranks. {linear} Let any other, as one that clips or normalises,"
                f" compute {divisor} * f(g / {divisor}) for its f(g)."
            )
        else:
            self._say(
                f"{found} They see the gradient of a micro-batch's sum of losses, which is divided by the"
                f" counts of the window after the last backward. {linear} For any other, as one that clips"
                f" or normalises, pass count_window_ahead=True, and let it compute {divisor} * f(g /"
                f" {divisor}) for its f(g): trainer.strategy.describe()['gradient_divisor'] has this number."
            )


class Advice:
    """Says each thing once: on rank 0, unless it is told how else."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._count_is_checked = False

    def say_once(self, message: str, say: Callable[[str], None] = rank_zero_warn) -> None:
        """Say ``message`` unless it has been said, or is empty."""
        if message and message not in self._said:
            self._said.add(message)
            say(message)

    def about_half_precision(self, loss: Tensor) -> None:
        """Warn about a loss [] in half precision, which is rounded before the loss is weighed."""
        if loss.dtype in HALF:
            self.say_once(
                f"training_step returned a {loss.dtype} loss, which is rounded before it is weighed: compute"
                " the loss in float32 (logits.float()) for exact gradients."
            )

    def about_late_loading(self, module: pl.LightningModule) -> None:
        """Name hooks of the user that have run before a checkpoint is loaded, which Lightning's ``ddp`` loads first."""
        owners: list[Any] = [module, *module.trainer.callbacks]  # type: ignore[attr-defined]
        hooks = [owner.on_fit_start for owner in owners] + [module.on_load_checkpoint]
        early = [
            str(getattr(hook, "__qualname__", hook))
            for hook in hooks
            if not torch_internals.defined_in(hook, "lightning", "lightning_automodel")
        ]
        if early:
            self.say_once(
                f"{', '.join(early)}: the checkpoint is loaded once the model is distributed, after"
                " configure_optimizers and on_fit_start, which have seen initial values: take loaded weights and"
                " states in on_train_start, and change the module's layers in setup."
            )

    def about_count(self, module: nn.Module, weighting: TokenWeighting, output: Any) -> None:
        """Warn, in the first step whose labels are counted, of a Hugging Face model whose own loss drops other ones."""
        counts_labels = weighting.per_token_loss and weighting.count_label_tokens is None
        if self._count_is_checked or has_count(output) or not counts_labels:
            return
        self._count_is_checked = True
        is_shifted = weighting.label_shift > 0 or weighting.label_key == SHIFTED_LABELS
        if not is_shifted and contains_hugging_face_causal_lm(module):
            self.say_once(
                "Label tokens are counted with label_shift=0, but Hugging Face causal language models drop"
                " the first label of each row: pass label_shift=1 if training_step returns the model's own"
                " loss."
            )

    def about_class_weights(self, module: nn.Module, weighting: TokenWeighting, output: Any) -> None:
        """Warn, in an evaluation that returns no count, of losses with class weights."""
        if has_count(output) or not weighting.per_token_loss:
            return
        if weighting.count_label_tokens not in (None, count_samples):
            return
        for name, loss in module.named_modules():
            is_mean = isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and loss.reduction == "mean"
            if is_mean and loss.weight is not None:
                self.say_once(
                    f"{type(module).__name__}.{name} divides by the class weights of its labels, but each"
                    " label counts as one. Return {'loss': loss, 'num_label_tokens': weight[labels].sum()}"
                    " from the step."
                )


def _hooked(module: nn.Module) -> list[str]:
    """What of ``module`` has backward hooks, in words."""
    hooked: dict[nn.Module | Tensor, str] = {}
    for path, owner in module.named_modules():
        if torch_internals.has_backward_hooks(owner):
            hooked[owner] = f"module {path}"
        for name, parameter in torch_internals.parameters_of(owner).items():
            if parameter is not None and torch_internals.has_hooks(parameter):
                own_path = f"{path}.{name}".lstrip(".")
                hooked.setdefault(parameter, f"parameter {own_path}")
    return list(hooked.values())


def stop_iteration_error(where: str) -> RuntimeError:
    """What to raise for a StopIteration in ``where`` on one of several ranks: the others would wait for this one."""
    return RuntimeError(
        f"{where} raised StopIteration. Lightning takes it for the end of the data, and ends the epoch on this rank"
        " alone, while the others wait. Begin the iterator anew where it ends, or return -1 from"
        " on_train_batch_start on all ranks to end an epoch early."
    )


def contains_hugging_face_causal_lm(module: nn.Module) -> bool:
    """Whether a model whose own loss shifts the labels by one is at or below ``module``. Does not import transformers.

    The outermost of nested models decides, since it computes the loss. A ``...ForConditionalGeneration``
    that is not an encoder-decoder is a vision or audio model, and shifts like the language model inside it.
    """
    shifting = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    models = outermost_hugging_face_models(module)
    # An encoder-decoder's own loss uses every label.
    return any(
        type(model).__name__.endswith(shifting) and not getattr(model.config, "is_encoder_decoder", False)
        for model in models
    )


def summary(described: dict[str, Any]) -> str:
    """What a run starts with, by ``describe()``, in one line."""
    sizes = {name: size for name, size in described["mesh"].items() if size > 1}
    if sizes.keys() & {REPLICATE, SHARD}:
        sizes.pop(DATA, None)  # their product
    ranks = ", ".join(f"{name}={size}" for name, size in sizes.items()) or "one rank"
    return (
        f"AutomodelStrategy: {described['data_parallel']} over {ranks}, precision"
        f" {described['precision']['trainer']}, gradients per {described['gradient_denominator']};"
        " trainer.strategy.describe() has the details."
    )
