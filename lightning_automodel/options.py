"""Checking the strategy's keywords before anything runs."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Literal, get_args, get_origin

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import Module

from lightning_automodel.distributed.process_group import parse_timeout
from lightning_automodel.sharding.grad_sync import Deferral, check_deferral
from lightning_automodel.sharding.precision import check_policy

_FSDP2_ONLY = (
    *("data_parallel_replicate_size", "defer_fsdp_grad_sync", "reshard_during_accumulation", "auto_wrap_policy"),
    *("reshard_after_forward", "mp_policy", "cpu_offload", "prefetch"),
)
_DDP_ONLY = ("ddp_kwargs", "ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper")
_SIZES = ("data_parallel_size", "data_parallel_replicate_size", "tensor_parallel_size", "context_parallel_size")
_COUNTERS = ("count_label_tokens", "count")
_LABELS = ("label_key", "ignore_index", "label_shift")


def _is_set_of_modules(value: Any) -> bool:
    return isinstance(value, (set, frozenset)) and all(
        isinstance(entry, type) and issubclass(entry, Module) for entry in value
    )


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """The keywords of ``AutomodelStrategy``, checked. Their meaning is documented there.

    Raises:
        ValueError: If a value is out of range.
        TypeError: If a value has the wrong type.
    """

    data_parallel: Literal["fsdp2", "ddp"] = "fsdp2"
    data_parallel_size: int | Literal["auto"] = "auto"
    data_parallel_replicate_size: int | Literal["auto"] = 1
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1
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
    defer_fsdp_grad_sync: Deferral = True
    reshard_during_accumulation: bool | Literal["auto"] = "auto"
    auto_wrap_policy: set[type[Module]] | Callable[..., Any] | None = None
    reshard_after_forward: bool | int = True
    mp_policy: MixedPrecisionPolicy | None = None
    cpu_offload: bool = False
    activation_checkpointing: bool | set[type[Module]] | Literal["selective", "offload"] | Callable[..., Any] = False
    compile: bool | dict[str, Any] = False
    prefetch: int | Literal["auto"] = "auto"
    track_grad_norm: bool = False
    error_if_nonfinite: bool = False
    process_group_backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | float = 30
    start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen"
    first_rank_setup: bool = False
    save_distributed_checkpoint: bool | None = None
    uneven_inputs: Literal["error", "pad"] = "error"
    count_window_ahead: bool = False
    async_checkpoint: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type is bool or get_origin(field.type) is Literal:
                self._check_choice(field.name, *(get_args(field.type) or (True, False)))
        self._check_choice("count", None, "tokens", "samples")
        self._check_choice("reshard_during_accumulation", True, False, "auto")
        check_deferral(self.defer_fsdp_grad_sync)
        for name in ("data_parallel_size", "data_parallel_replicate_size"):
            self._check_integer(name, smallest=1, alternative="auto")
        self._check_integer("prefetch", smallest=0, alternative="auto")
        self._check_integer("tensor_parallel_size", smallest=1)
        self._check_integer("context_parallel_size", smallest=1)
        self._check_type("device_mesh", DeviceMesh | None, "a DeviceMesh (init_device_mesh makes one)")
        self._check_type("ddp_kwargs", dict | None, "a dictionary of keywords for DistributedDataParallel")
        self._check_type("count_label_tokens", Callable | None, "a function of the batch")
        self._check_type("label_key", str, "the name of an entry of the batch")
        self._check_type("ignore_index", int, "a label value, such as -100")
        self._check_type("process_group_backend", str | None, "the name of a backend, such as 'gloo'")
        self._check_type("compile", bool | dict, "True, False or a dictionary of keywords for torch.compile")
        self._check_integer("label_shift", smallest=0)
        self._check_choice("save_distributed_checkpoint", True, False, None)
        if not isinstance(self.reshard_after_forward, bool):
            self._check_integer("reshard_after_forward", smallest=2)
        if self.count == "samples" and self.count_label_tokens is not None:
            raise ValueError("count='samples' and count_label_tokens are two ways to tell the count: pass one of them.")
        policy, choice = self.auto_wrap_policy, self.activation_checkpointing
        if not (policy is None or _is_set_of_modules(policy) or (callable(policy) and not isinstance(policy, type))):
            raise TypeError(
                f"auto_wrap_policy must be a set of nn.Module classes or a function of a module, got {policy!r}."
            )
        check_policy(self.mp_policy)
        is_policy = choice in ("selective", "offload") or (callable(choice) and not isinstance(choice, type))
        if not (isinstance(choice, bool) or is_policy or _is_set_of_modules(choice)):
            raise TypeError(
                "activation_checkpointing must be True, False, 'selective', 'offload', a set of nn.Module classes or a"
                f" policy of torch.utils.checkpoint, got {choice!r}."
            )
        if choice == "offload" and self.compile is not False:
            raise ValueError(
                "activation_checkpointing='offload' does not work with compile: torch.compile leaves out blocks that"
                " move tensors to the host. Leave out one of them, or pass activation_checkpointing=True."
            )
        for name in ("ddp_comm_hook", "ddp_comm_wrapper"):
            self._check_type(name, Callable | None, "a function, as in DDPStrategy")
        if self.ddp_comm_hook is not None and not self.count_window_ahead:
            raise ValueError(
                "ddp_comm_hook needs count_window_ahead=True: without it, the gradients that the hook compresses are"
                " sums over all tokens of a window, not means."
            )
        _ = self.parsed_timeout  # raises if it is not valid
        if self.context_parallel_size > 1:
            self._check_beside_context_parallelism()

    @property
    def parsed_timeout(self) -> timedelta:
        """``timeout``, which may be minutes."""
        return parse_timeout(self.timeout)

    def _check_beside_context_parallelism(self) -> None:
        """Raise ValueError for options that are wrong, or untested, with slices of sequences."""
        problems = {
            "device_mesh": self.device_mesh is not None,
            "per_token_loss=False (means of slices are not the mean of a batch)": not self.per_token_loss,
            "count='samples' (a slice is not a sample)": self.count == "samples",
            "count_window_ahead=True": self.count_window_ahead,
            "uneven_inputs='pad'": self.uneven_inputs == "pad",
        }
        found = [problem for problem, applies in problems.items() if applies]
        if found:
            raise ValueError(
                f"context_parallel_size={self.context_parallel_size} does not work with {', '.join(found)}: leave one"
                " of them out."
            )

    def _check_type(self, name: str, valid: Any, description: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, valid) or (valid is int and isinstance(value, bool)):
            raise TypeError(f"{name} must be {description}, got {value!r}.")

    def _check_choice(self, name: str, *valid: Any) -> None:
        value = getattr(self, name)
        if not any(value is choice or (isinstance(choice, str) and value == choice) for choice in valid):
            raise ValueError(f"{name} must be one of {', '.join(map(repr, valid))}, got {value!r}.")

    def _check_integer(self, name: str, smallest: int, alternative: str | None = None) -> None:
        value = getattr(self, name)
        if alternative is not None and value == alternative:
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            other = f" or {alternative!r}" if alternative else ""
            raise ValueError(f"{name} must be an integer of at least {smallest}{other}, got {value!r}.")

    @property
    def writes_directories(self) -> bool:
        """Whether checkpoints are directories of shards."""
        if self.save_distributed_checkpoint is None:
            return self.data_parallel == "fsdp2"
        return self.save_distributed_checkpoint

    def given_sizes(self) -> dict[str, Any]:
        """Sizes of the mesh that differ from their defaults, by keyword."""
        return {name: getattr(self, name) for name in self._changed(_SIZES)}

    def without_effect(self) -> list[str]:
        """One sentence for each option that has no effect because of another one."""
        notes = []
        if self.data_parallel == "ddp":
            unused = self._changed(_FSDP2_ONLY)
            uses_policy = self.activation_checkpointing and not _is_set_of_modules(self.activation_checkpointing)
            if uses_policy and "auto_wrap_policy" in unused:
                unused.remove("auto_wrap_policy")
            notes += [f"{name} has no effect with data_parallel='ddp'." for name in unused]
        else:
            notes += [f"{name} has no effect with data_parallel='fsdp2'." for name in self._changed(_DDP_ONLY)]
        if (
            self.data_parallel == "fsdp2"
            and self.defer_fsdp_grad_sync == "all_reduce"
            and self.data_parallel_replicate_size == 1
            and self.device_mesh is None
        ):
            notes.append(
                "defer_fsdp_grad_sync='all_reduce' reduces after every micro-batch, as False does, without replicas"
                " (data_parallel_replicate_size=1)."
            )
        if not self.per_token_loss:
            unused = self._changed(("loss_reduction", *_LABELS, *_COUNTERS))
            notes += [f"{name} has no effect with per_token_loss=False." for name in unused]
        elif self.count_label_tokens is not None or self.count == "samples":
            counter = "count='samples'" if self.count_label_tokens is None else "count_label_tokens"
            notes += [f"{name} has no effect beside {counter}." for name in self._changed(_LABELS)]
        return notes

    def _changed(self, names: Collection[str]) -> list[str]:
        return [f.name for f in fields(self) if f.name in names and getattr(self, f.name) != f.default]
