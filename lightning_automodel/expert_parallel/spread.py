"""Experts' parameters as DTensors over the ranks that each hold other experts."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_automodel.distributed.mesh import EXPERT, num_expert_ranks
from lightning_automodel.sharding.quantized import has_parts
from lightning_automodel.sharding.units import class_name


def spread_experts(module: nn.Module, mesh: DeviceMesh, names: Iterable[str] | None = None) -> None:
    """Spread parameters that stack all experts of a mixture over ranks: each rank keeps those it computes.

    Call it from ``configure_model``, with ``self.device_mesh["expert_parallel"]``, which exists if the
    strategy has ``expert_parallel_size`` > 1. The first dimension of each parameter counts the experts: of E
    experts, rank r of n keeps those from ``r * E / n`` to ``(r + 1) * E / n``. The parameters become
    DTensors. In the forward their ``to_local()`` has this rank's experts, and the module sends each token to
    the rank that holds its experts, as ``dispatch_tokens`` does.

    A collective over ``mesh``: every rank must call it with the same modules in the same order. If a rank
    does not, the others raise when the group's timeout ends. All ranks get the values of the mesh's first
    rank. Parameters that are spread already stay as they are, since Lightning calls ``configure_model`` for
    each run.

    Args:
        module: Holds the parameters, itself or below it.
        mesh: The 1-D mesh of the ranks that each hold other experts.
        names: Names within ``module`` of the parameters to spread; None for all of them. A router's weights
            count the experts too, but every rank needs them whole: leave them out.

    Raises:
        ValueError: If the mesh is another one, if parameters do not count the same number of experts, if the
            ranks do not divide that number, or if a parameter cannot be split by experts.
    """
    _check_mesh(mesh)
    parameters = _chosen(module, names)
    wholes = {name: parameter for name, parameter in parameters.items() if num_expert_ranks(parameter) == 1}
    _check(wholes, module, mesh.size())
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for name, whole in wholes.items():
        if whole not in replaced:
            replaced[whole] = _spread(whole, mesh)
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, replaced[whole])


def _check_mesh(mesh: DeviceMesh) -> None:
    if mesh.ndim != 1 or mesh.mesh_dim_names != (EXPERT,):
        raise ValueError(
            f"spread_experts needs the mesh self.device_mesh[{EXPERT!r}], which a strategy with"
            f" expert_parallel_size > 1 makes, got a mesh with the dimensions {mesh.mesh_dim_names} of sizes"
            f" {tuple(mesh.shape)}."
        )


def _chosen(module: nn.Module, names: Iterable[str] | None) -> dict[str, nn.Parameter]:
    """The parameters of ``module`` with these names, or all."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if names is None:
        return parameters
    chosen = list(names)
    unknown = [name for name in chosen if name not in parameters]
    if unknown:
        raise ValueError(
            f"{class_name(module)} has no parameter {unknown[0]!r} to spread: its parameters are"
            f" {', '.join(parameters)}."
        )
    return {name: parameters[name] for name in chosen}


def _check(parameters: dict[str, nn.Parameter], module: nn.Module, num_ranks: int) -> None:
    """Raise ValueError unless these parameters of ``module`` can be spread over ``num_ranks``."""
    for name, parameter in parameters.items():
        reason = _reason_against(parameter)
        if reason is not None:
            raise ValueError(f"spread_experts: {name} of {class_name(module)} {reason}.")
    numbers = {name: len(parameter) for name, parameter in parameters.items()}
    if len(set(numbers.values())) > 1:
        shown = ", ".join(f"{name} ({number})" for name, number in numbers.items())
        raise ValueError(
            f"spread_experts: the first dimensions of {class_name(module)}'s parameters differ: {shown}."
            " Each must count the experts. Pass names=[...] with the parameters that do."
        )
    for name, number in numbers.items():
        if number % num_ranks:
            valid = ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
            raise ValueError(
                f"expert_parallel_size={num_ranks} does not divide the {number} experts of {name} in"
                f" {class_name(module)}: valid sizes are {valid}."
            )


def _reason_against(parameter: nn.Parameter) -> str | None:
    """Why ``parameter`` cannot be split by experts; None if it can."""
    if isinstance(parameter, DTensor):
        return "is a DTensor of another mesh: spread experts before anything else distributes them"
    if not parameter.is_floating_point() or has_parts(parameter):
        return (
            f"holds quantised weights ({parameter.dtype}), whose codes cannot be split by experts: load the"
            " experts in full precision, or leave expert_parallel_size at 1"
        )
    if parameter.ndim < 2:
        return f"has the shape {tuple(parameter.shape)}: its first dimension must count the experts"
    return None


def _spread(whole: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    source: int | None = 0
    if whole.device.type == "meta":
        source = None  # there are no values to send
    with torch.no_grad():
        part = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=source)
    parameter = nn.Parameter(part, requires_grad=whole.requires_grad)
    vars(parameter).update(vars(whole))  # what users note on parameters, such as a tag for weight decay
    return parameter


def check_spread(module: nn.Module, num_ranks: int) -> None:
    """Raise ValueError if no parameter of ``module`` is spread over the ``num_ranks`` of the option."""
    if num_ranks > 1 and not any(num_expert_ranks(parameter) > 1 for parameter in module.parameters()):
        raise ValueError(
            f"expert_parallel_size={num_ranks}, but no parameter of {class_name(module)} is spread over the"
            " expert-parallel ranks, and it holds no Hugging Face model with an ep_plan: in configure_model"
            f" call spread_experts(experts, self.device_mesh[{EXPERT!r}]) for each module that stacks the"
            " weights of its experts, or leave expert_parallel_size at 1."
        )
