"""Experts' parameters as DTensors over the ranks that each hold other experts."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_automodel.distributed.mesh import EXPERT, check_divides, num_expert_ranks
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
    if mesh.mesh_dim_names != (EXPERT,):
        raise ValueError(
            f"spread_experts needs the mesh self.device_mesh[{EXPERT!r}], which a strategy with"
            f" expert_parallel_size > 1 makes, got a mesh with the dimensions {mesh.mesh_dim_names} of sizes"
            f" {tuple(mesh.shape)}."
        )
    if names is None:
        names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    chosen = {name: module.get_parameter(name) for name in names}
    wholes = {name: parameter for name, parameter in chosen.items() if num_expert_ranks(parameter) == 1}
    _check(wholes, module, mesh.size())
    spread = {whole: _spread(whole, mesh) for whole in wholes.values()}
    for name, whole in wholes.items():
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, spread[whole])


def _check(parameters: dict[str, nn.Parameter], module: nn.Module, num_ranks: int) -> None:
    """Raise ValueError unless these parameters of ``module`` can be spread over ``num_ranks``."""
    for name, parameter in parameters.items():
        if not parameter.is_floating_point() or has_parts(parameter):
            raise ValueError(
                f"spread_experts: {name} of {class_name(module)} is a {type(parameter).__name__} of"
                f" {parameter.dtype}, which cannot be split by experts: spread them before anything else"
                " distributes them, and load them in full precision, or leave expert_parallel_size at 1."
            )
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    numbers = {shape[:1] for shape in shapes.values()}
    if len(numbers) > 1 or any(len(shape) < 2 for shape in shapes.values()):
        raise ValueError(
            f"spread_experts: the first of several dimensions of each parameter must count the experts, and"
            f" {class_name(module)} has {shapes}: pass names=[...] with the parameters whose first one does."
        )
    for (number,) in numbers:
        check_divides("expert_parallel_size", num_ranks, number, f"experts of {class_name(module)}")


def _spread(whole: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    source = None if whole.is_meta else 0  # there are no values to send
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
