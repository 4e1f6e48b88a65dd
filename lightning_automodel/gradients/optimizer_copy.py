"""Copies of an optimizer that step other parameters than its own."""

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_automodel.gradients.whole_tensors import nested_optimizers

NewState = Callable[[Optimizer], defaultdict[Any, Any]]


def copy_optimizer(optimizer: Optimizer, memo: dict[int, Any], state_of: NewState) -> Optimizer:
    """A copy of ``optimizer``, and of those that it wraps, without hooks, patches, or a call of a constructor.

    Args:
        optimizer: Stays as it is.
        memo: That of ``copy.deepcopy``: by the ``id`` of each parameter, what takes its place in the copy.
        state_of: Makes the state of the copy of an optimizer.
    """
    new: Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = new
    memo[id(optimizer.state)] = state_of(optimizer)
    for inner in nested_optimizers(optimizer)[1:]:
        if id(inner) not in memo:
            copy_optimizer(inner, memo, state_of)
    of_torch = vars(Optimizer([nn.Parameter(torch.zeros(1))], {}))
    vars(new).update(of_torch)
    for name, value in vars(optimizer).items():
        is_hook = name in of_torch and name not in ("defaults", "state", "param_groups")
        is_patch = callable(value) and hasattr(type(optimizer), name)
        # Which the optimizer has asked for names: neither to be copied nor written.
        if isinstance(value, nn.Module):
            memo[id(value)] = nn.Module()
        if not is_hook and not is_patch:
            vars(new)[name] = copy.deepcopy(value, memo)
    return new
