"""Sharded tensors that compute like the whole tensor, whatever user code does to them between steps.

A :class:`Shard` is a parameter of a sharded module, its gradient, or an optimizer's state for it. One
rule holds for all that torch can do with it:

- What treats each element by itself runs on this rank's part, without communication (``parts.py``).
- Everything else runs on the whole tensor, which is gathered for it: a collective that every rank must reach. Its
  results are plain tensors, equal on all ranks. What it has written goes back into the shards, each rank
  its part (``whole_copies.py``). Sums and norms, which are asked for often, are equal to that, and
  reduced (``parts.py``).

Random numbers are drawn for the whole tensor, as one process draws them. Ranks that are seeded alike,
and have drawn alike since, then hold parts of one tensor.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_automodel.distributed.mesh import num_expert_ranks
from lightning_automodel.internals import fsdp2
from lightning_automodel.internals.dtensor import (
    GRAD,
    REQUIRES_GRAD,
    break_graphs_at,
    plain_access,
    support_foreach,
    with_part,
)
from lightning_automodel.internals.torch import is_called_from, local_tensor, without_wrappers
from lightning_automodel.sharding import gathered_tensor, parts
from lightning_automodel.sharding.parts import NeedsWholes, elementwise, part_like
from lightning_automodel.sharding.whole_copies import (
    AUGMENTED,
    Call,
    count_writes,
    gather,
    name_of,
    note_write,
    on_wholes,
)

SAVE_WHOLE = (
    "gather it on all ranks, and let one of them write it: state = {name: w.full_tensor() if hasattr(w, 'full_tensor')"
    " else w for name, w in module.state_dict().items()}, then `if trainer.is_global_zero: torch.save(state, path)`."
    " Or call trainer.save_checkpoint(path), or export_hugging_face(module, path) in place of save_pretrained, on all"
    " ranks."
)
"""How to write sharded weights that other programs read."""


class Shard(DTensor):
    """A sharded tensor that user code may take for the whole one.

    Given by ``parameter.__class__ = Shard`` (:func:`make_shard`), so that the object, which FSDP2 and
    optimizers hold, stays the same.

    Attributes:
        parameter_name: For messages.
        fsdp_param: What FSDP2 knows of the parameter; None of a gradient or a state.
        engine_ref: Of a parameter of a fit, and of its gradient, a weak reference to the engine, which compares the
            writes of ranks; else None.
        accepts_hooks: Whether FSDP2 calls its post-accumulate-gradient hooks with a final gradient.
    """

    parameter_name: str = "a tensor"
    fsdp_param: Any = None
    engine_ref: Any = None
    accepts_hooks: bool = False

    @property
    def __tensor_flatten__(self) -> Any:
        """Not there, so that ``module.to(device)`` sets ``data``, in place of the parameter's whole content."""
        raise AttributeError("__tensor_flatten__")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(types) > 1 and any(hasattr(other, "refuses_use") for other in types):
            return NotImplemented  # what a shard has replaced raises itself
        call = Call(function, args, kwargs or {})
        with plain_access():
            try:
                return _RULES.get(call.name, on_wholes)(call)
            except NeedsWholes:
                pass
            return on_wholes(call)

    # Read so often, by optimizers, that it does not take the way of other attributes.
    @property
    def grad(self) -> Any:
        """The gradient, a shard too."""
        with plain_access():
            gradient = GRAD.__get__(self)
            if gradient.__class__ is DTensor:
                gradient = make_shard(gradient)
                gradient.parameter_name = self.parameter_name
                gradient.engine_ref = self.engine_ref
        return gradient

    @grad.setter
    def grad(self, value: Any) -> None:
        with plain_access():
            if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == self.shape:
                note_write([self], "grad", [value])
                value = with_part(Shard, part_like(value, self, False).clone(), self)
                value.parameter_name = self.parameter_name
                value.engine_ref = self.engine_ref
            GRAD.__set__(self, value)

    @property
    def requires_grad(self) -> Any:
        """Whether it is trainable, as what FSDP2 has gathered of it is."""
        with plain_access():
            return REQUIRES_GRAD.__get__(self)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        copied = getattr(self.fsdp_param, "unsharded_param", None)
        with plain_access():
            REQUIRES_GRAD.__set__(self, value)
            if copied is not None:
                REQUIRES_GRAD.__set__(copied, value)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Set :attr:`requires_grad`."""
        self.requires_grad = requires_grad
        return self

    @property
    def data(self) -> Any:
        """A shard that autograd does not follow. Its writes are counted as those of this one."""
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        """The shard gets its part of them, in memory of its own, as does whoever swaps weights."""
        if values is self:  # of a conversion that has changed nothing
            return
        if values.shape != self.shape or values.dtype != self.dtype:
            raise RuntimeError(
                f"{self.parameter_name} is sharded, of shape {tuple(self.shape)} and dtype {self.dtype}, and"
                f" cannot become one of shape {tuple(values.shape)} and dtype {values.dtype}. Change shapes"
                " and dtypes before the model is sharded, in __init__ or configure_model."
            )
        with plain_access(), torch.no_grad():
            part = part_like(values, self, False).clone()  # a collective if they are sharded in another way
            if self.fsdp_param is None or not fsdp2.move_shard(self, self.fsdp_param, part):
                local_tensor(self).copy_(part)
            count_writes([self])
            note_write([self], "data", [values])

    def __deepcopy__(self, memo: dict[int, Any]) -> "Shard":
        copied: Any = self.detach().clone()
        if isinstance(self, nn.Parameter):
            copied = nn.Parameter(copied, self.requires_grad)
        copied.parameter_name = self.parameter_name
        return copied


support_foreach(Shard)
break_graphs_at(Shard, parts.__name__, gathered_tensor.__name__)


def make_shard(tensor: Any) -> Any:
    """Let a sharded DTensor compute like the whole tensor. Anything else is returned as it is."""
    if tensor.__class__ is DTensor and not any(placement.is_partial() for placement in tensor.placements):
        tensor.__class__ = Shard
    return tensor


def shard_parameters(
    units: Iterable[FSDPModule], named: Mapping[str, nn.Parameter], accept_hooks: bool
) -> None:
    """Let all parameters of FSDP2 ``units`` compute like whole tensors, from now on, also after a run.

    ``named`` are those of the whole module. ``accept_hooks``: whether FSDP2 may call their post-accumulate-gradient
    hooks, because gradients are final then.
    """
    names = {id(parameter): without_wrappers(name) for name, parameter in named.items()}
    for group in fsdp2.groups_of(units):
        for param in group.fsdp_params:
            shard = make_shard(param.sharded_param)
            shard.parameter_name = names.get(id(shard), "a parameter")
            shard.fsdp_param = param
            shard.accepts_hooks = accept_hooks and num_expert_ranks(shard) == 1


# --- What a tensor says of itself -----------------------------------------------------------------------------------


def _attribute(call: Call) -> Any:
    """Whole tensors show ``p.T``; and a plain tensor's ``data`` or ``grad`` becomes a whole one."""
    descriptor: Any = call.function
    if descriptor.__self__.__name__ in _VIEWING_ATTRIBUTES or not isinstance(call.args[0], Shard):
        raise NeedsWholes
    return descriptor(*call.args)


def _alias(call: Call) -> Any:
    """What returns the same memory, and shares its version counter."""
    alias = make_shard(call.run())
    alias.parameter_name = call.args[0].parameter_name
    alias.engine_ref = call.args[0].engine_ref
    return alias


def _requires_grad(call: Call) -> Any:
    """``torch.Tensor.requires_grad_(p)``, as ``p.requires_grad_()``."""
    tensor = call.args[0]
    if not isinstance(tensor, Shard):
        raise NeedsWholes
    return tensor.requires_grad_(*call.args[1:], **call.kwargs)


def _new(call: Call) -> Any:
    """``p.new_zeros(size)``: a plain tensor, of the dtype and on the device of ``p``."""
    if any(isinstance(value, DTensor) for value in call.values[1:]):
        return on_wholes(call)  # ``x.new_tensor(p)``
    return call.run_with(local_tensor)


def _numpy(call: Call) -> Any:
    """An array of the whole tensor, which cannot be written: nothing would carry that into the shards."""
    array = on_wholes(call)
    array.flags.writeable = False
    return array


def _equal(call: Call) -> Any:
    """``torch.equal``, which Lightning's finetuning callbacks call for each pair of parameters."""
    one, other = call.values
    return one.shape == other.shape and on_wholes(call)


def _address(call: Call) -> Any:
    """``p.data_ptr()``, of which recurrent layers find out whether their weights lie in one buffer."""
    shard = call.args[0]
    if not isinstance(shard, nn.Parameter):
        return _refuse(call)  # what is saved are aliases of parameters
    if is_called_from(nn.modules.rnn):
        return 0
    raise RuntimeError(
        f"data_ptr() of {name_of(shard)}, which is sharded, and has no address as a whole. To tell parameters apart,"
        " take id(p), or their names."
    )


def _refuse(call: Call) -> Any:
    """What torch.save and safetensors write, and what transformers take to be shared if addresses are equal."""
    raise RuntimeError(
        f"{call.args[0].parameter_name} is sharded: torch.save, or another process, would get this rank's part alone"
        f" ({call.name}). Save it whole: {SAVE_WHOLE}"
    )


# --- Hooks, and gradients with respect to shards, for which a forward uses gathered copies ---------------------------


def _hook(call: Call) -> Any:
    """Hooks on parameters: FSDP2 writes gradients itself, and calls at most hooks for accumulated ones."""
    shard = call.args[0]
    is_called = shard.accepts_hooks and call.name == "register_post_accumulate_grad_hook"
    if shard.is_leaf and shard.requires_grad and not is_called:
        raise RuntimeError(
            f"{call.name} on {shard.parameter_name}, which is sharded: FSDP2 would not call the"
            " hook, or would call it before the gradient is divided by the label tokens of its window."
            " Change or read gradients in on_before_optimizer_step, where they are final. For hooks that"
            " step inside of the backward use register_post_accumulate_grad_hook with"
            " count_window_ahead=True, on parameters that are no spread experts."
        )
    return call.run()


def _gathered(inputs: Sequence[Any]) -> list[Any]:
    """What FSDP2's forwards use in place of shards; any other tensor is returned as it is."""
    found = []
    for tensor in inputs:
        gathered = getattr(getattr(tensor, "fsdp_param", None), "unsharded_param", None)
        is_used = gathered is not None and gathered.requires_grad
        found.append(gathered if is_used else tensor)
    return found


def _grad(call: Call) -> Any:
    """``torch.autograd.grad`` with respect to shards, and to the gathered parameters that the graph has in their place.

    What a rank's loss computes of both is added up: a collective, as penalties on shards are.
    """
    outputs, inputs = call.args
    copies = _gathered(inputs)
    for tensor, copied in zip(inputs, copies, strict=True):
        has_run = copied is tensor or isinstance(copied, gathered_tensor.GatheredTensor)
        if call.kwargs["create_graph"] and not has_run:
            raise RuntimeError(gathered_tensor.SECOND_DERIVATIVE)
    found = call.function(outputs, [*inputs, *copies], **{**call.kwargs, "allow_unused": True})
    may_be_unused = call.kwargs["allow_unused"] or call.kwargs["materialize_grads"]
    gradients: list[Any] = []
    for tensor, copied, gradient, of_copy in zip(inputs, copies, found, found[len(inputs) :], strict=False):
        if gradient is None:
            gradient = of_copy
        elif of_copy is not None and copied is not tensor:
            gradient = gather(gradient, call.name) + of_copy
        if gradient is None and not may_be_unused:
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set"
                " allow_unused=True if this is the desired behavior."
            )
        gradients.append(make_shard(gradient))
    return tuple(gradients)


def _backward(call: Call) -> Any:
    """``backward(inputs=shards)``, also by the gathered copies that the graph has in their place."""
    inputs = call.kwargs["inputs"]
    if isinstance(inputs, Tensor):
        inputs = [inputs]
    if inputs is not None:
        inputs = list({*inputs, *_gathered(inputs)})
    return call.function(*call.args, **{**call.kwargs, "inputs": inputs})


# --- Which rule a function follows ----------------------------------------------------------------------------------

_VIEWING_ATTRIBUTES = frozenset({"T", "H", "mT", "mH", "real", "imag"})

_AS_DTENSORS = """
    dim dim_order element_size get_device is_coalesced is_complex is_conj is_contiguous
    is_distributed is_floating_point is_inference is_leaf is_neg is_pinned is_same_size is_shared
    is_signed ndimension nelement numel retain_grad size stride storage_offset
    __len__ __hash__ __format__ __delete__ _has_compatible_shallow_copy_type _is_view
    result_type can_cast is_tensor
""".split()  # noqa: SIM905 (a table of names)

_ELEMENTWISE = """
    abs absolute acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh bfloat16
    bitwise_and bitwise_not bitwise_or bitwise_xor ceil celu clamp clamp_max clamp_min clip clone
    conj contiguous copy copysign cos cosh cpu cuda deg2rad digamma div divide double elu eq erf
    erfc erfinv
    exp exp2 expm1 float float_power floor floor_divide fmax fmin fmod frac ge gelu greater
    greater_equal gt half hardshrink hardsigmoid hardswish hardtanh heaviside hypot isclose isfinite
    isinf isnan isneginf isposinf isreal le leaky_relu lerp less less_equal lgamma log log10 log1p
    log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit logsigmoid lt
    masked_fill maximum minimum mish mul multiply nan_to_num ne neg negative nextafter not_equal
    ones_like positive pow rad2deg reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid
    sign signbit silu sin sinc sinh softplus softsign sqrt square sub subtract tan tanh tanhshrink
    threshold true_divide trunc type where xlogy zero zeros_like empty_like full_like fill
    __abs__ __add__ __and__ __div__ __eq__ __floordiv__ __ge__ __gt__ __invert__ __le__ __lt__
    __mod__ __mul__ __ne__ __neg__ __or__ __pos__ __pow__ __radd__ __rand__ __rdiv__ __rfloordiv__
    __rmod__ __rmul__ __ror__ __rpow__ __rsub__ __rtruediv__ __rxor__ __sub__ __truediv__ __xor__
""".split()  # noqa: SIM905 (a table of names)

_FOREACH = [f"_foreach_{name}" for name in _ELEMENTWISE]


def _in_place(names: Sequence[str]) -> list[str]:
    return [f"{name}_" for name in names]


# A name may stand here only if its rule gives what the whole tensors give, whatever the arguments are.
_NAMES: dict[Callable[[Call], Any], Sequence[str]] = {
    elementwise: (*_ELEMENTWISE, *_in_place(_ELEMENTWISE), *AUGMENTED),
    parts.foreach: (
        *(*_FOREACH, *_in_place(_FOREACH)),
        *("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"),
    ),
    parts.cast: ("to", "type_as"),
    Call.run: _AS_DTENSORS,
    _alias: ("detach", "detach_"),
    _attribute: ("__get__", "__set__"),
    _requires_grad: ("requires_grad_",),
    _new: ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"),
    _numpy: ("numpy", "__array__"),
    _address: ("data_ptr",),
    _refuse: ("__dlpack__", "share_memory_", "storage", "untyped_storage", "__reduce_ex__"),
    _hook: ("register_hook", "register_post_accumulate_grad_hook"),
    _grad: ("grad",),
    _backward: ("backward",),
    parts.reduced: ("sum", "norm", "linalg_vector_norm", "_foreach_norm"),
    _equal: ("equal",),
}
_RULES = {name: rule for rule, names in _NAMES.items() for name in names}
"""How shards take part in a function of torch of this name. Any other is computed on whole tensors."""
