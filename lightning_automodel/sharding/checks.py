"""Checks that refuse what a model, an optimizer or a step must not contain, with the reason and a way out."""

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from pickle import PicklingError

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_automodel.distributed import collectives
from lightning_automodel.gradients.window_records import optimizer_parameters
from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.internals import torch as torch_internals
from lightning_automodel.internals.fsdp2 import fsdp_units
from lightning_automodel.sharding.quantized import has_parts

_FREED = (
    "A backward needed parameters that FSDP2 had freed. It gathers those of a unit again when a gradient"
    " reaches what the unit has returned: a loss on tensors that a unit has stored instead of returning them"
    " comes another way. Return them, or pass reshard_during_accumulation=False, which keeps parameters"
    " gathered until the backward has ended, or data_parallel='ddp'."
)
_CHANGES_INPUT = (
    "An FSDP unit changes its input in place (`x += ...`, or ReLU(inplace=True) as its first layer). FSDP2"
    " marks inputs to know when the unit's backward ends, and torch does not allow to change these. Write it"
    " out of place (`x = x + ...`, inplace=False), pass auto_wrap_policy=set(), which makes one unit of the"
    " model, or data_parallel='ddp'."
)
_RECOMPUTED_TWICE = (
    "Selective activation checkpointing recomputes a block for one backward alone, and a second one came:"
    " second derivatives (torch.autograd.grad(..., create_graph=True)), or retain_graph=True. Pass"
    " activation_checkpointing=True, which recomputes for each of them."
)
_ZEROED_WITHIN_WINDOW = (
    "Gradients were zeroed in the middle of an accumulation window, and DistributedDataParallel would reduce"
    " those of parameters that took no part in its last micro-batch: call zero_grad() where a window ends,"
    " and override on_validation_model_zero_grad if a validation falls into a window. Or pass"
    " data_parallel='fsdp2'."
)
_COPIES_SHARDS = (
    "copy.deepcopy() of a sharded module, which torch refuses. Make the copy before it is sharded, in __init__"
    " or configure_model: it is then sharded too, and copy.load_state_dict(module.state_dict()) gives it the"
    " weights of now. Or build a plain module, and load {name: value.full_tensor()} of the state dict into it,"
    " on all ranks."
)
_SPARSE = (
    "FSDP2 cannot reduce sparse gradients, such as those of nn.Embedding(sparse=True). Leave sparse=True"
    " out, or pass data_parallel='ddp'."
)
_ASSIGNED = (
    "load_state_dict(..., assign=True), or an initialiser that makes new parameters, would replace those of a"
    " sharded module by whole tensors. Leave assign=True out, and initialise in place (self.weight.normal_()):"
    " each rank then copies its part."
)
_PICKLED = (
    "A sharded module, of which this rank holds a part, cannot be pickled, as by torch.save(module). Save a"
    " checkpoint on every rank (trainer.save_checkpoint), and make a whole module of that"
    " (load_from_checkpoint)."
)
_SEVERAL_DTYPES = (
    "Trainable parameters of one FSDP unit have several dtypes, and FSDP2 reduces their gradients in one. Convert"
    " them to one dtype, freeze those of the other, let auto_wrap_policy make units of one dtype each, or pass"
    " data_parallel='ddp'."
)
_WITHOUT_AUTOCAST = (
    "Under a mixed precision FSDP2 casts parameters of its units and what enters a child of the LightningModule, in"
    " place of autocast. Cast what meets them, such as a buffer or a parameter of your own (table.to(x.dtype)), or pass"
    " data_parallel='ddp'."
)
_OUT_OF_MEMORY = (
    "The device has run out of memory. Where there seemed to be room, parameters stay gathered and gradients"
    " unsharded until a window ends, which saves communication: pass reshard_during_accumulation=True, then"
    " defer_fsdp_grad_sync=False."
)
_MIXED = (
    "A tensor-parallel parameter is a DTensor within a step, too. Where it meets other tensors, as in a penalty on"
    " weights, take p.full_tensor() of it."
)
_ARRAY = (
    "An array of .numpy() shares memory with parameters that FSDP2 has gathered, and that it must free: call .numpy()"
    " on a copy (p.detach().clone().numpy()), or in a hook, on a shard."
)
_COMPILED = (
    "A function that is compiled with fullgraph=True was given shards, as by torchao's optimizers of 8 and 4 bits, and"
    " torch.compile leaves shards to Python. Leave fullgraph=True out, or pass data_parallel='ddp'."
)
_DUAL_NUMBERS = (
    "Dual numbers (torch.autograd.forward_ad) entered an FSDP unit, whose hooks have no rule for them. Call"
    " torch.func.jvp, or pass data_parallel='ddp'."
)
_ONLY_SHARDED = (_FREED, _SPARSE, _OUT_OF_MEMORY, _WITHOUT_AUTOCAST, _MIXED, _ARRAY)
_EXPLANATIONS = {
    "RegisterPostBackwardFunction is a view and is being modified inplace": _CHANGES_INPUT,
    "out of bounds for storage of size 0": _FREED,
    "but its data is not allocated yet": _FREED,
    "only allowed to backward once on any region computed under selective": _RECOMPUTED_TWICE,
    "undefined, but still allreduced by DDP": _ZEROED_WITHIN_WINDOW,
    "FSDP does not support deepcopy": _COPIES_SHARDS,
    "'fsdp::chunk_cat' with arguments from the 'Sparse": _SPARSE,
    "reshape is not implemented for sparse tensors": _SPARSE,  # from torch 2.15 on
    "'Parameter' object has no attribute '_local_tensor'": _ASSIGNED,
    "FSDP expects uniform original parameter dtype": _SEVERAL_DTYPES,
    "Can't pickle <class 'torch.distributed.fsdp.": _PICKLED,
    "out of memory. Tried to allocate": _OUT_OF_MEMORY,
    "BFloat16": _WITHOUT_AUTOCAST,
    "c10::Half": _WITHOUT_AUTOCAST,
    "Float and Half": _WITHOUT_AUTOCAST,
    "Half and Float": _WITHOUT_AUTOCAST,
    "but found Half": _WITHOUT_AUTOCAST,
    "got mixed torch.Tensor and DTensor": _MIXED,
    "storage that is not resizable": _ARRAY,
    "of class `Shard`": _COMPILED,
    "but the jvp is not returning a view": _DUAL_NUMBERS,
}
"""What a part of torch's text means here."""


def explain(error: BaseException, module: nn.Module) -> None:
    """Let an error of torch, from a run of ``module``, begin with what it means here."""
    if not isinstance(error, RuntimeError | AssertionError | AttributeError | PicklingError):
        return
    text = str(error)
    for symptom, explanation in _EXPLANATIONS.items():
        # Operators of a new device may return a tensor without memory of its own, too.
        if symptom in text and (explanation not in _ONLY_SHARDED or fsdp_units(module)):
            error.args = (f"{explanation} (torch: {text})",)


def check_ahead(module: pl.LightningModule) -> None:
    """Raise ValueError for a fit whose windows cannot be counted ahead."""
    if not module.automatic_optimization or lightning_internals.draws_its_batches(module.training_step):
        raise ValueError(
            "count_window_ahead=True needs automatic optimization, and a training_step that takes the batch"
            " instead of a dataloader_iter: otherwise the batches of a window are not known ahead. Leave it"
            " out."
        )


def check_validation_interval(trainer: pl.Trainer) -> None:
    """Raise ValueError where each of several ranks would validate by its own clock."""
    if trainer.world_size > 1 and trainer.val_check_batch is None:
        raise ValueError(
            "Trainer(val_check_interval=...) is a time, which ends on each rank after another batch: pass a"
            " number of batches."
        )


def check_equal_models(tensors: Mapping[str, Tensor], host_group: dist.ProcessGroup) -> None:
    """Refuse on every rank a model whose ``tensors`` differ on other ranks. A collective over the group."""
    held = {
        name: f"{tuple(tensor.shape)} and {'' if tensor.requires_grad else 'not '}trainable"
        for name, tensor in tensors.items()
        if not is_lazy(tensor)
    }
    if differing := collectives.disagreement(held, host_group):
        raise ValueError(
            f"Ranks hold different models: {differing}. Build and freeze the same model on every rank."
        )


def check_callbacks(callbacks: Iterable[pl.Callback], shards: bool = False) -> None:
    """Refuse callbacks of the package ``pytorch_lightning``, and pruning if the model will be sharded.

    Callbacks that save, average weights or prune are found by their classes: those of the other package
    would silently be overlooked, except classes derived only from ``Callback``.
    """
    for callback in callbacks:
        if shards and isinstance(callback, ModelPruning):
            raise ValueError(
                "ModelPruning puts products with its masks where a module has parameters, which FSDP2 would"
                " not gather: pass AutomodelStrategy(data_parallel='ddp'), or prune the trained"
                " model afterwards with torch.nn.utils.prune."
            )
        for base in type(callback).__mro__:
            if base.__module__.startswith("pytorch_lightning.") and base.__name__ != "Callback":
                raise TypeError(
                    f"The callback {type(callback).__name__} comes from pytorch_lightning"
                    f" ({base.__module__}), whose classes lightning's Trainer does not recognise: import it"
                    " from lightning.pytorch.callbacks, or first of all"
                    " lightning_automodel.alias_pytorch_lightning if a library imports it."
                )


def check_optimizers(optimizers: list[Optimizer]) -> None:
    """Raise ValueError for optimizers that spread their states over ranks."""
    for optimizer in optimizers:
        if hasattr(optimizer, "consolidate_state_dict"):
            name = type(optimizer).__name__
            raise ValueError(
                f"{name} spreads its states over ranks by itself, so that no checkpoint could have them: return"
                " the optimizer that it wraps from configure_optimizers, and pass data_parallel='fsdp2', which"
                " spreads states of any optimizer."
            )


def check_order(
    parameters: Mapping[str, nn.Parameter], optimizers: list[Optimizer], group: dist.ProcessGroup
) -> None:
    """Raise ValueError, on every rank, unless the optimizers have their parameters in the same order on all ranks.

    A collective over ``group``. What ranks exchange by the order of parameters would be another parameter's
    elsewhere: gradients of those that are stepped whole, and states in checkpoints.
    """
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    places = {
        f"number {index} of {type(optimizer).__name__} {number}": f"{name_of.get(id(parameter))}"
        for number, optimizer in enumerate(optimizers)
        for index, parameter in enumerate(optimizer_parameters(optimizer))
    }
    if differing := collectives.disagreement(places, group):
        raise ValueError(
            "configure_optimizers gives the optimizers their parameters in another order on each rank:"
            f" {differing}. A set of tensors has no order; to leave"
            " out what comes twice, pass list(dict.fromkeys(parameters)) instead of list(set(parameters))."
        )


def check_embeddings(module: nn.Module) -> None:
    """Raise ValueError for embeddings with ``max_norm``, which write to their weights what differs by rank."""
    classes = (nn.Embedding, nn.EmbeddingBag)
    found = [name for name, m in module.named_modules() if isinstance(m, classes) and m.max_norm is not None]
    if found:
        raise ValueError(
            f"{', '.join(found[:3])}: {len(found)} embeddings with max_norm, whose forward shortens the rows"
            " that its batch uses, so that weights would differ by rank. Leave max_norm out, and shorten all"
            " rows in on_train_batch_start, under torch.no_grad(): w = embedding.weight, then"
            " w.mul_((max_norm / w.norm(dim=1, keepdim=True)).clamp(max=1))."
        )


def check_hooks(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ValueError for hooks that get a gradient before it is final, as to step inside of the backward."""
    check_shardable({name: p for name, p in parameters.items() if isinstance(p, DTensor)})
    early = [
        name
        for name, parameter in parameters.items()
        if torch_internals.has_post_accumulate_hook(parameter)
        and not getattr(parameter, "accepts_hooks", False)
    ]
    if early:
        raise ValueError(
            f"{len(early)} parameters have post-accumulate-gradient hooks ({', '.join(early[:3])}, ...), as an"
            " optimizer that steps inside backward has, which would see their gradients before they are final."
            " Step after backward, or pass count_window_ahead=True and register hooks in configure_optimizers"
            " on parameters that FSDP2 shards and that are no spread experts: the number of label tokens is"
            " then known ahead, and nothing is left to be averaged over ranks."
        )


def check_memory(tensors: Mapping[str, Tensor], replicated: Container[str]) -> None:
    """Raise ValueError if a parameter to be sharded, not ``replicated``, lies in the memory of another tensor."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        has_memory = not (tensor.is_meta or isinstance(tensor, DTensor) or has_parts(tensor))
        if has_memory and tensor.numel() > 0:
            names[tensor.data_ptr()].append(name)
    for shared in names.values():
        if len(shared) > 1 and any(
            isinstance(tensors[n], nn.Parameter) and n not in replicated for n in shared
        ):
            raise ValueError(
                f"{' and '.join(shared)} lie in one memory, which sharding would take apart: a write to one would not"
                " change the other any more. Let them be one parameter (self.decoder.weight = self.encoder.weight),"
                " compute one of the other in forward, or pass data_parallel='ddp'."
            )


def check_shardable(sharded: Mapping[str, nn.Parameter]) -> None:
    """Refuse gradient hooks of ``sharded`` parameters, which FSDP2 never calls."""
    if hooked := [name for name, parameter in sharded.items() if torch_internals.has_hooks(parameter)]:
        raise ValueError(
            f"{len(hooked)} parameters that FSDP2 shards have gradient hooks ({', '.join(hooked[:3])}),"
            " which it never calls: change gradients in on_before_optimizer_step, or pass"
            " data_parallel='ddp'."
        )
