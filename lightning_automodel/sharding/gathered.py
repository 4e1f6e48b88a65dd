"""The copies of a unit's parameters that FSDP2 has gathered, and the shards, which follow what is done to them.

What was written to copies goes into the shards where the strategy itself frees them: each rank holds its
own slice of every copy, so nothing is communicated. Where FSDP2 has freed them before, or where they have
another dtype, a write would be lost, and raises. Ranks must write alike, as under DDP.

In-place writes are counted by torch, on views of a copy too. What is written through ``.data`` is counted by
an alias of the copy, of which ``.data`` gives views. Functions take copies as plain tensors, without
``__torch_function__``: a forward is as fast as ever. Views are plain tensors, since compiled functions refuse
other classes.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_automodel.internals import fsdp2
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.dtensor import DATA, GRAD, plain_access
from lightning_automodel.internals.torch import local_tensor, use_and_writes, version
from lightning_automodel.sharding.phases import Phase, PhasedEngine
from lightning_automodel.sharding.whole_copies import own_part

_SUBSTITUTED = (
    "torch.func.functional_call puts other tensors in the place of parameters of an FSDP unit, which would"
    " put its own ones back. Call it on modules inside of a unit: pass auto_wrap_policy=set(), which makes one"
    " unit of the model, or data_parallel='ddp'."
)

IN_HOOKS = "in on_train_batch_start or on_train_batch_end, where module.parameters() are the sharded ones"
"""Where weights are written without being gathered."""

WRITTEN_BEFORE_BACKWARD = (
    "was written between a forward and its backward, for which FSDP2 has the values of one time alone. One process"
    " would go on with those of the forward, with the new ones, or raise, as they were written. Write it"
    f" {IN_HOOKS}, or pass data_parallel='ddp'."
)
"""Why a trained shard must not be written before a backward that reaches it."""

WRITTEN_TWICE = (
    "was written while it was gathered, as a list or an optimizer holds its shard. Within a step, take"
    f" parameters from the module (self.parameters()), or write them {IN_HOOKS}."
)
"""Why a shard must not be written while a step computes with its copy."""


# --- Writes through `.data` -------------------------------------------------------------------------------------------


def _get_data(gathered: Any) -> Tensor:
    view: Tensor = gathered.alias.detach()
    return view


def _set_data(gathered: Any, value: Tensor) -> None:
    shard = gathered.shard
    if value.dtype != gathered.dtype:
        raise RuntimeError(text_of_refusal(shard, gathered))
    if value.shape != gathered.shape or hasattr(local_tensor(shard), "fsdp_post_all_gather"):
        raise RuntimeError(
            f"{shard.parameter_name} is sharded, and its copy of shape {tuple(gathered.shape)}, which FSDP2 has"
            f" gathered, cannot become a tensor of shape {tuple(value.shape)}: write it {IN_HOOKS}. Change"
            " shapes before the model is sharded, in __init__ or configure_model."
        )
    _check_is_gathered(gathered)
    if isinstance(value, DTensor):
        value = value.full_tensor()
    # In other memory, since a backward may need what FSDP2 has gathered.
    memory = fsdp2.gather_elsewhere(shard.fsdp_param)
    memory.copy_(own_part(value, gathered).detach())
    for tensor in (gathered, gathered.alias):
        if isinstance(tensor, DTensor):
            torch_internals.set_local_tensor(tensor, memory)
        else:
            DATA.__set__(tensor, memory)
    torch.autograd.graph.increment_version([gathered.alias])


# --- Gradients --------------------------------------------------------------------------------------------------------


def _get_grad(gathered: Any) -> Tensor | None:
    if _is_asked_by_torch(gathered):
        return GRAD.__get__(gathered)
    return gathered.shard.grad


def _set_grad(gathered: Any, value: Tensor | None) -> None:
    if _is_asked_by_torch(gathered):
        GRAD.__set__(gathered, value)
    else:
        gathered.shard.grad = value


def _is_asked_by_torch(gathered: Any) -> bool:
    """Whether ``.grad`` is that of the gathered parameter, as torch needs it in a backward; else it is the shard's."""
    return gathered.unit.engine.backward is not None or torch_internals.is_read_by_torch()


# --- Classes ----------------------------------------------------------------------------------------------------------


class GatheredTensor:
    """A parameter that FSDP2 has gathered. It shows the gradient of the shard.

    Attributes:
        shard: The sharded parameter.
        unit: Whose parameter it is.
        alias: Shares the memory, and has a version counter of its own: that of writes through ``.data``.
    """

    __slots__ = ()  # or a parameter could not be given the classes below
    shard: Any
    unit: "GatheredUnit"
    alias: Tensor
    data = property(_get_data, _set_data)
    grad = property(_get_grad, _set_grad)

    def __deepcopy__(self: Any, memo: Any) -> nn.Parameter:
        return nn.Parameter(self.detach().clone(), self.requires_grad)


class _Gathered(GatheredTensor, nn.Parameter):
    """A whole parameter."""


class _GatheredPart(GatheredTensor, DTensor):
    """This rank's part of a parameter that tensor parallelism, or the exchange of experts, shards too."""


def make_gathered(gathered: Any, shard: nn.Parameter, unit: "GatheredUnit") -> None:
    """Give what FSDP2 gathers of ``shard``, which stays the same object, its class."""
    gathered.shard = shard
    gathered.unit = unit
    gathered.alias = DATA.__get__(gathered)
    gathered.__class__ = _GatheredPart if isinstance(gathered, DTensor) else _Gathered


def make_plain(gathered: Any) -> None:
    """Undo :func:`make_gathered`."""
    gathered.__class__ = DTensor if isinstance(gathered, DTensor) else nn.Parameter
    for name in ("shard", "unit", "alias"):
        delattr(gathered, name)


def text_of_refusal(shard: Any, gathered: Tensor) -> str:
    """Why what was written to a copy is not carried into the shard."""
    if gathered.dtype == shard.dtype:
        return f"{shard.parameter_name} {WRITTEN_TWICE}"
    return (
        f"{shard.parameter_name} was written within a step or a forward, where FSDP2 has gathered it in"
        f" {gathered.dtype}, which rounds what is written: its own dtype is {shard.dtype}. Write it"
        f" {IN_HOOKS}. Or pass data_parallel='ddp'."
    )


def shard_versions(shards: list[Any]) -> list[int]:
    """How often each of ``shards`` was written, as autograd counts it; 0 for those of inference mode."""
    with plain_access():
        try:
            return list(map(version, shards))
        except RuntimeError:
            # Asking each first whether it is one takes longer than all the rest.
            return [0 if shard.is_inference() else version(shard) for shard in shards]


# --- One unit -------------------------------------------------------------------------------------------------------


class GatheredUnit(fsdp2.Unit):
    """Lets the shards of a unit follow what is done to its gathered parameters.

    Attributes:
        number: Of the unit, from 1.
        engine: Knows which phase it is in, and whether a backward of the strategy runs.
        hook: Of its forwards.
    """

    def __init__(self, module: FSDPModule, number: int, engine: PhasedEngine) -> None:
        super().__init__(module)
        self.number = number
        self.engine = engine
        self._forward_versions: list[int] = []  # of the shards, before the newest forward
        # From now on the copies stay the same objects. FSDP2 accumulates into those of units that a window
        # uses for the first time in its last micro-batch, too.
        for group in self.groups:
            fsdp2.make_unsharded(group)
        self._shards = [param.sharded_param for param in self.params]
        self._copies: list[Any] = []
        for param in self.params:
            make_gathered(param.unsharded_param, param.sharded_param, self)
            self._copies.append(param.unsharded_param)
        self.forget_writes()
        self.free()  # other code may have gathered them before
        self.note_shards()
        self.hook = cast(nn.Module, module).register_forward_pre_hook(self._before_forward, prepend=True)

    # --- A forward ----------------------------------------------------------------------------------------------------

    def note_shards(self) -> None:
        """Note the versions of the shards, before a gather that FSDP2 may start ahead."""
        self._gathered_versions = shard_versions(self._shards)

    @torch_internals.not_compiled
    def _before_forward(self, *_: Any) -> None:
        """Before FSDP2's own hook, which gathers the parameters unless they are."""
        if self.is_substituted():
            raise RuntimeError(_SUBSTITUTED)
        if self.is_gathered:
            self.check_current()
        else:
            self.settle()
            if self.is_pending and not self.is_current:
                self.free()  # a shard was written after the gather had started
            self.note_shards()
        if self.engine.phase is not Phase.BEFORE_BACKWARD:
            self._forward_versions = shard_versions(self._shards)

    @property
    def is_current(self) -> bool:
        """Whether no shard was written since it was gathered; the same on all ranks."""
        return self._gathered_versions == shard_versions(self._shards)

    def _written_since(self, before: list[int]) -> list[Any]:
        """The shards whose versions are no longer those of ``before``; none if that is empty."""
        now_and_before = zip(self._shards, shard_versions(self._shards), before, strict=False)
        return [shard for shard, now, then in now_and_before if now != then]

    def check_current(self) -> None:
        """Raise RuntimeError if a step has written shards while it computes with what is gathered of them."""
        for shard in self._written_since(self._gathered_versions):
            raise RuntimeError(f"{shard.parameter_name} {WRITTEN_TWICE}")

    def written_since_forward(self) -> list[Any]:
        """The shards that were written after the newest forward, whose backward comes next.

        What a step writes to its copies, while these stay gathered, the backward sees as in one process.
        """
        return self._written_since(self._gathered_versions if self.is_gathered else self._forward_versions)

    # --- Before copies are freed --------------------------------------------------------------------------------------

    def forget_writes(self) -> None:
        """After an exception, give up what was written to copies, some of which may have been freed."""
        self._noted = list(map(use_and_writes, self._copies))

    @torch.no_grad()
    def settle(self) -> None:
        """Let shards follow what was done to their copies. Not a collective.

        Raises RuntimeError if FSDP2 has freed a copy that was written.
        """
        noted = list(map(use_and_writes, self._copies))
        if noted == self._noted:
            return
        written = self._written_since(self._gathered_versions)
        for number, param in enumerate(self.params):
            trained, *writes_before = self._noted[number]
            trains, *writes_now = noted[number]
            shard = param.sharded_param
            if trains != trained and shard.requires_grad == trained:
                shard.requires_grad_(trains)
            if writes_now != writes_before:
                _write_back(param, not any(shard is one for one in written))
                self._gathered_versions[number] += 1
                if self._forward_versions:
                    self._forward_versions[number] += 1
        self.forget_writes()

    def check_uncounted_writes(self) -> None:
        """Raise RuntimeError if a copy was written in a way that torch does not count. Reads the device.

        Not a collective.
        """
        if not (self.is_gathered and self.is_current):
            return
        for param in self.params:
            shard = local_tensor(param.sharded_param)
            own = fsdp2.own_slice(param)
            is_same = own.dtype != shard.dtype or torch.allclose(
                own.to(shard.device), shard, rtol=0.0, atol=0.0, equal_nan=True
            )
            if not is_same:
                raise RuntimeError(
                    f"{param.sharded_param.parameter_name} was written within a step or a forward in a way that"
                    " nothing counts: by .data of a slice (p[:2].data), by an array of .numpy(), or its shard"
                    " was by its local tensor, while it was gathered. The write would be lost. Write"
                    f" p[:2].clamp_() under torch.no_grad(), or p.data[:2].clamp_(), or write {IN_HOOKS}."
                )

    def close(self) -> None:
        """Stop following: FSDP2 alone has them again."""
        self.hook.remove()
        for gathered in self._copies:
            make_plain(gathered)
        self._copies.clear()


def _write_back(param: fsdp2.FSDPParam, shard_is_current: bool) -> None:
    """Copy this rank's slice of a written copy into the shard. Not a collective.

    Raises RuntimeError if the copy was freed, if it has another dtype, in which small changes are rounded away, or
    if the shard was written too.
    """
    gathered = param.unsharded_param
    _check_is_gathered(gathered)
    shard = local_tensor(param.sharded_param)
    own = fsdp2.own_slice(param)
    if own.dtype != shard.dtype or not shard_is_current:
        raise RuntimeError(text_of_refusal(param.sharded_param, gathered))
    shard.copy_(own)
    torch.autograd.graph.increment_version([param.sharded_param])


def _check_is_gathered(gathered: Any) -> None:
    """Raise RuntimeError if a copy is written that FSDP2 has freed."""
    memory = local_tensor(gathered.alias).untyped_storage()
    if gathered.numel() > 0 and memory.size() == 0:
        raise RuntimeError(
            f"{gathered.shard.parameter_name} was written within a step or a forward, and FSDP2 has freed"
            f" what it had gathered there, so that the write is lost. Write it {IN_HOOKS}. In training, keep"
            " parameters gathered for the window: reshard_during_accumulation=False. Or pass"
            " data_parallel='ddp'."
        )
