"""The strategy's keywords: each with its type, default and valid values, checked before anything runs."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from datetime import timedelta
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import Module

from lightning_automodel.distributed.process_group import parse_timeout
from lightning_automodel.gradients.token_loss import TokenWeighting, count_samples

_FSDP2_ONLY = (
    "data_parallel_replicate_size",
    "defer_fsdp_grad_sync",
    "reshard_during_accumulation",
    "auto_wrap_policy",
    "reshard_after_forward",
    "mp_policy",
    "cpu_offload",
    "prefetch",
    "optimizer_step",
)
_DDP_ONLY = ("ddp_kwargs", "ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper")
# Their values are checked by functions of their own, not by their annotations.
_CHECKED_APART = ("auto_wrap_policy", "activation_checkpointing", "timeout", "heartbeat_timeout")
_SIZES = (
    "data_parallel_size",
    "data_parallel_replicate_size",
    "tensor_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
)
_COUNTERS = ("count_label_tokens", "count")
_LABELS = ("label_key", "ignore_index", "label_shift")
_SMALLEST = {**dict.fromkeys(_SIZES, 1), "label_shift": 0, "prefetch": 0, "reshard_after_forward": 2}


def _is_set_of_modules(value: Any) -> bool:
    return isinstance(value, (set, frozenset)) and all(
        isinstance(entry, type) and issubclass(entry, Module) for entry in value
    )


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """The keywords of ``AutomodelStrategy``, whose docstring has their meaning. Wrong ones raise there."""

    data_parallel: Literal["fsdp2", "ddp"] = "fsdp2"
    data_parallel_size: int | Literal["auto"] = "auto"
    data_parallel_replicate_size: int | Literal["auto"] = 1
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_parallel_size: int = 1
    device_mesh: DeviceMesh | None = None
    ddp_kwargs: dict[str, Any] | None = None
    ddp_comm_hook: Callable[..., Any] | None = None
    ddp_comm_state: Any = None
    ddp_comm_wrapper: Callable[..., Any] | None = None
    per_token_loss: bool = True
    loss_reduction: Literal["mean", "sum"] = "mean"
    label_key: str = "labels"
    ignore_index: int = -100
    label_shift: int = 0
    count_label_tokens: Callable[..., Any] | None = None
    count: Literal["tokens", "samples"] | None = None
    defer_fsdp_grad_sync: bool | Literal["all_reduce", "auto"] = "auto"
    reshard_during_accumulation: bool | Literal["auto"] = "auto"
    auto_wrap_policy: set[type[Module]] | Callable[..., Any] | None = None
    reshard_after_forward: bool | int = True
    mp_policy: MixedPrecisionPolicy | None = None
    cpu_offload: bool = False
    activation_checkpointing: (
        bool | set[type[Module]] | Literal["selective", "offload"] | Callable[..., Any]
    ) = False
    compile: bool | dict[str, Any] = False
    prefetch: int | Literal["auto"] = "auto"
    optimizer_step: Literal["auto", "shards", "whole"] = "auto"
    track_grad_norm: bool = False
    error_if_nonfinite: bool = False
    process_group_backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | float = 30
    heartbeat_timeout: timedelta | float = 2
    start_method: Literal["popen", "fork"] = "popen"
    first_rank_setup: bool = False
    save_distributed_checkpoint: bool | None = None
    uneven_inputs: Literal["error", "pad"] = "error"
    count_window_ahead: bool = False
    async_checkpoint: bool = False

    def __post_init__(self) -> None:
        self._check_each()
        self._check_together()
        self._check_beside_parallelism()

    def _check_each(self) -> None:
        """Raise TypeError or ValueError for the first option whose own value is wrong."""
        policy = self.auto_wrap_policy
        choice = self.activation_checkpointing
        if not (policy is None or _is_set_of_modules(policy) or _is_function(policy)):
            raise TypeError(
                "auto_wrap_policy must be a set of nn.Module classes or a function of a module, got"
                f" {policy!r}."
            )
        is_known = isinstance(choice, bool) or choice in ("selective", "offload")
        if not (is_known or _is_set_of_modules(choice) or _is_function(choice)):
            raise TypeError(
                "activation_checkpointing must be True, False, 'selective', 'offload', a set of nn.Module"
                f" classes or a policy of torch.utils.checkpoint, got {choice!r}."
            )
        method: str = self.start_method
        if method in ("spawn", "forkserver"):
            raise ValueError(
                f"start_method={method!r} would pickle the Trainer, the module and its data into each rank:"
                " pass 'popen' in a script, which the ranks run again, or 'fork' in a notebook."
            )
        _ = self.parsed_timeout, self.parsed_heartbeat_timeout  # each raises if it is not valid
        for field in fields(self):
            if field.name not in _CHECKED_APART:
                _check(field.name, getattr(self, field.name), field.type)

    def _check_together(self) -> None:
        """Raise ValueError for options that exclude or need each other."""
        if self.count == "samples" and self.count_label_tokens is not None:
            raise ValueError(
                "count='samples' and count_label_tokens are two ways to tell the count: pass one of them."
            )
        if self.activation_checkpointing == "offload" and self.compile is not False:
            raise ValueError(
                "activation_checkpointing='offload' does not work with compile: torch.compile leaves out"
                " blocks that move tensors to the host. Leave out one of them, or pass"
                " activation_checkpointing=True."
            )
        if self.ddp_comm_hook is not None and not self.count_window_ahead:
            raise ValueError(
                "ddp_comm_hook needs count_window_ahead=True: without it, the gradients that the hook"
                " compresses are sums over all tokens of a window, not means."
            )

    def _check_beside_parallelism(self) -> None:
        """Raise ValueError for options that are wrong, or untested, with slices of sequences or with spread experts."""
        has_mesh = self.device_mesh is not None
        of_slices = {
            "device_mesh": has_mesh,
            "per_token_loss=False (means of slices are not the mean of a batch)": not self.per_token_loss,
            "count='samples' (a slice is not a sample)": self.count == "samples",
            "count_window_ahead=True": self.count_window_ahead,
            "uneven_inputs='pad'": self.uneven_inputs == "pad",
        }
        of_experts = {
            "data_parallel='ddp' (which copies whole parameters to every rank: pass 'fsdp2')": not self.is_sharded,
            "device_mesh (whose ranks the strategy would have to split: pass the sizes)": has_mesh,
        }
        for keyword, problems in (
            ("context_parallel_size", of_slices),
            ("expert_parallel_size", of_experts),
        ):
            size = getattr(self, keyword)
            found = [problem for problem, applies in problems.items() if applies]
            if size > 1 and found:
                raise ValueError(
                    f"{keyword}={size} does not work with {', '.join(found)}: leave one of them out."
                )

    @property
    def parsed_timeout(self) -> timedelta:
        """``timeout``, which may be minutes."""
        return parse_timeout(self.timeout)

    @property
    def parsed_heartbeat_timeout(self) -> timedelta:
        """``heartbeat_timeout``, which may be minutes."""
        return parse_timeout(self.heartbeat_timeout, "heartbeat_timeout")

    @property
    def is_sharded(self) -> bool:
        """Whether the engine is FSDP2."""
        return self.data_parallel == "fsdp2"

    def weighting(self) -> TokenWeighting:
        """How losses are counted and weighed."""
        count = count_samples if self.count == "samples" else self.count_label_tokens
        return TokenWeighting(
            self.per_token_loss,
            self.loss_reduction,
            self.label_key,
            self.ignore_index,
            self.label_shift,
            count,
        )

    def sizes(self, given: bool = False) -> dict[str, Any]:
        """Sizes of the mesh, by keyword; only those that differ from their defaults if ``given``."""
        return {name: getattr(self, name) for name in (self._changed(_SIZES) if given else _SIZES)}

    def without_effect(self) -> list[str]:
        """One sentence for each option that has no effect because of another one."""
        unused = self._changed(_DDP_ONLY if self.is_sharded else _FSDP2_ONLY)
        if self.activation_checkpointing and not _is_set_of_modules(self.activation_checkpointing):
            # It chooses the recomputed blocks too.
            unused = [name for name in unused if name != "auto_wrap_policy"]
        notes = [f"{name} has no effect with data_parallel={self.data_parallel!r}." for name in unused]
        has_replicas = self.data_parallel_replicate_size != 1 or self.device_mesh is not None
        if self.is_sharded and self.defer_fsdp_grad_sync == "all_reduce" and not has_replicas:
            notes.append(
                "defer_fsdp_grad_sync='all_reduce' reduces after every micro-batch, as False does, without"
                " replicas (data_parallel_replicate_size=1)."
            )
        if not self.per_token_loss:
            unused = self._changed(("loss_reduction", *_LABELS, *_COUNTERS))
            notes += [f"{name} has no effect with per_token_loss=False." for name in unused]
        elif self.count_label_tokens is not None or self.count == "samples":
            if self.count_label_tokens is None:
                counter = "count='samples'"
            else:
                counter = "count_label_tokens"
            notes += [f"{name} has no effect beside {counter}." for name in self._changed(_LABELS)]
        return notes

    def _changed(self, names: Collection[str]) -> list[str]:
        return [f.name for f in fields(self) if f.name in names and getattr(self, f.name) != f.default]


def _check(name: str, value: Any, annotation: Any) -> None:
    """Raise unless ``value`` is of its type, and one of its choices or an integer that is large enough."""
    parts = [annotation] if annotation is bool or get_origin(annotation) is Literal else get_args(annotation)
    values = {bool: (True, False), NoneType: (None,)}
    by_part = [get_args(part) if get_origin(part) is Literal else values.get(part, ()) for part in parts]
    choices = [choice for part in by_part for choice in part]
    if any(isinstance(value, type(choice)) and value == choice for choice in choices):
        return
    if (smallest := _SMALLEST.get(name)) is not None:
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            others = "".join(f" or {choice!r}" for choice in choices)
            raise ValueError(f"{name} must be an integer of at least {smallest}{others}, got {value!r}.")
    elif choices and all(by_part):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")
    types = tuple(get_origin(part) or part for part in parts or [annotation])
    if Any not in types and (not isinstance(value, types) or (value is True and bool not in types)):
        expected = " or ".join("None" if type_ is NoneType else type_.__name__ for type_ in types)
        raise TypeError(f"{name} must be {expected}, got {value!r}.")
