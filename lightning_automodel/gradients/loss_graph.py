"""What the autograd graph of a loss tells about how it was averaged. Read in the first micro-batches of a run alone."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from lightning_automodel.internals import torch as torch_internals

Kind = Literal["labels", "class weights", "cross-entropies", "numbers", "all ranks"]

_UNCHANGED = ("ToCopy", "Clone", "Alias", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze")
"""Functions whose output has the elements of their first input."""
_LINEAR = ("Add", "Sub", "Neg", "Sum", "Stack", "Cat", "DDPSink")
"""Functions whose output elements are sums of some of the inputs, up to signs."""
_COLLECTIVES = ("AllGather", "AllReduce", "c10d_functional")
"""In the names of the functions of ``torch.distributed.nn``, which ``all_gather(..., sync_grads=True)``
calls too, and of its functional collectives."""
_NLL_LOSSES = ("NllLoss", "NllLoss2D")
_MEAN = 1
_SUM = 2
"""How torch numbers ``reduction="mean"`` and ``"sum"``."""
_MAX_NODES = 1000


@dataclass(frozen=True)
class LossTerm:
    """A part of a loss: a sum, and the number that it is divided by.

    Attributes:
        kind: A mean cross-entropy of ``labels`` or by their ``class weights``; a sum of ``cross-entropies``
            (also of probabilities, whatever divides it) or of other ``numbers``; a loss that is taken from
            ``all ranks``.
        divisor: The product of all divisors between the loss and the sum.
        factor: The product of all numbers that it is multiplied by on the way.
    """

    kind: Kind
    divisor: float
    factor: float = 1.0


@dataclass(frozen=True)
class _Edge:
    """A node of the graph, and what the loss divides its output by and multiplies it by.

    ``is_summed``: the loss adds up several elements of the output.
    """

    node: Any
    divisor: float = 1.0
    factor: float = 1.0
    is_summed: bool = False

    def term(self, kind: Kind, divisor: float = 1.0) -> LossTerm:
        """The term that the node is, with a divisor of its own."""
        return LossTerm(kind, self.divisor * divisor, self.factor)


def loss_terms(loss: Tensor) -> list[LossTerm]:
    """The terms that ``loss`` [] is a weighted sum of, as far as they are known, the best known first.

    Reads the device.
    """
    found = [_term(edge) for edge in _linear_inputs(loss)]
    return sorted((term for term in found if term is not None), key=lambda term: term.kind == "numbers")


def averaged_parts(loss: Tensor) -> list[LossTerm]:
    """All parts that ``loss`` [] is a weighted sum of; empty if any of them is not known to be a sum itself.

    Parts that are multiplied by 0 are left out. Reads the device.
    """
    found = []
    for edge in _linear_inputs(loss):
        if edge.factor == 0 or _inputs(edge):
            continue  # its inputs are looked at
        term = _term(edge)
        reduction = torch_internals.saved(edge.node, "reduction")
        if term is None and reduction == _MEAN:  # a loss function of torch
            term = edge.term("numbers", torch_internals.saved(edge.node, "self").numel())
        elif term is None and (edge.is_summed or reduction == _SUM):
            term = edge.term("numbers")
        if term is None or term.kind == "all ranks":
            return []
        found.append(term)
    return found


def _linear_inputs(loss: Tensor) -> Iterator[_Edge]:
    """All nodes that the loss depends on linearly, from its own on. What is behind others is not looked at."""
    pending = [_Edge(loss.grad_fn)]
    seen = set()
    for _ in range(_MAX_NODES):
        if not pending:
            return
        edge = pending.pop()
        if edge.node is None or edge in seen:
            continue
        seen.add(edge)
        yield edge
        pending.extend(_inputs(edge))


def _inputs(edge: _Edge) -> list[_Edge]:
    """The inputs of a node that is linear in them, with the products of the divisors and the factors on the way."""
    node = edge.node
    name = _name(node)
    inputs = [parent for parent, _ in node.next_functions]
    divisor: float | None = 1.0
    factor: float | None = 1.0
    is_summed = edge.is_summed
    if node.name() == "MeanBackward0":  # of all elements
        divisor = torch_internals.saved(node, "self_sym_numel")
        is_summed = is_summed or divisor != 1
    elif name == "Div":
        divisor = _constant(node, "other", inputs[1:])
    elif name == "Mul":
        factor = _constant(node, "other", inputs[1:])
        if factor is None:
            factor = _constant(node, "self", inputs[:1])
    elif not (name in _LINEAR or name.startswith(_UNCHANGED)):
        return []
    elif name == "Sum":
        is_summed = is_summed or math.prod(torch_internals.saved(node, "self_sym_sizes")) != 1
    if divisor is None or factor is None:
        return []
    divisor *= edge.divisor
    factor *= edge.factor
    return [_Edge(parent, divisor, factor, is_summed) for parent in inputs]


def _name(node: Any) -> str:
    """The name of a node's function: ``Mean`` for ``MeanBackward0``. None has an empty one."""
    if node is None:
        return ""
    return str(node.name()).rsplit("Backward", 1)[0].lstrip("_")


def _constant(node: Any, name: str, inputs: list[Any]) -> float | None:
    """What one side of a product or quotient is, if it is a number that needs no gradient. Reads the device."""
    if any(parent is not None for parent in inputs):
        return None
    value = torch_internals.saved(node, name)
    if value is None or (isinstance(value, Tensor) and (value.numel() != 1 or value.is_complex())):
        return None
    try:
        return float(value)
    except RuntimeError:
        # Under a dispatch mode, torch cannot read the tensor that it has made of a Python number.
        return None


def _term(edge: _Edge) -> LossTerm | None:
    """What a node is known as, if it is."""
    node = edge.node
    name = _name(node)
    if any(collective in name for collective in _COLLECTIVES):
        return edge.term("all ranks")
    if name in _NLL_LOSSES:
        if torch_internals.saved(node, "reduction") != _MEAN:
            return edge.term("cross-entropies")
        weight: Kind = "labels" if torch_internals.saved(node, "weight") is None else "class weights"
        return edge.term(weight, float(torch_internals.saved(node, "total_weight")))
    if node.name() != "SumBackward0":  # of all elements
        return None
    summed = _name(_without_factors(node))
    if summed in _NLL_LOSSES:
        return None  # it is a term itself
    return edge.term("cross-entropies" if summed == "LogSoftmax" else "numbers")


def _without_factors(total: Any) -> Any:
    """The node whose outputs ``total`` adds up, perhaps multiplied by probabilities, weights or a mask."""
    node = total.next_functions[0][0]
    while _name(node) == "Mul":
        first, second = (parent for parent, _ in node.next_functions)
        node = second if first is None else first
    return node
