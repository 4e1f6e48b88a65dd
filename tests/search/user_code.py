"""What users write into modules, steps and hooks beside training: the same code on ranks and in one process.

Each function does what the case says for this place, and nothing in other cases. Shapes: see `data.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.swa_utils import get_ema_multi_avg_fn

from tests.search.block import first_block, plain
from tests.search.cases import Case
from tests.search.data import VOCABULARY, WIDTH, count, cross_entropy
from tests.sharding.snippets import READS, WRITES, Snippet, Trained
from tests.trainer.exactness import full

MOMENTUM = 0.7
"""Of teachers."""


# --- Losses that hold a gradient --------------------------------------------------------------------------------------


def token_loss(case: Case, net: Any, ids: Tensor, labels: Tensor, reduction: str) -> tuple[Tensor, Tensor]:
    """[] the loss of a batch, and [b, s, d] the hidden states behind it."""
    shift = None
    if case.inner in ("fgsm", "virtual"):
        shift = _adversarial(case, net, ids, labels)
    elif case.inner == "penalty":
        shift = _no_shift(ids)
    logits, hidden = net(ids, shift)
    if case.forwards == 2:
        logits = logits - 0.5 * net(ids.flip(1))[0]
    loss = cross_entropy(case, logits, labels, reduction)
    if case.inner in ("penalty", "grad_norm", "cam"):
        summed = cross_entropy(case, logits, labels, "sum")
        added = _part_of_gradient(case, net, summed, hidden, shift)
        if reduction == "mean":
            added = added / count(case, labels).clamp(min=1e-9)
        # Where nothing is counted, one process adds nothing.
        loss = loss + added * (count(case, labels) > 0)
    return loss, hidden


def _no_shift(ids: Tensor) -> Tensor:
    return torch.zeros(*ids.shape, WIDTH, dtype=torch.float64, requires_grad=True)


def _adversarial(case: Case, net: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """[b, s, d] a shift of the embeddings that makes the loss larger."""
    shift = _no_shift(ids)
    trained = [name for name, parameter in net.named_parameters() if parameter.requires_grad]
    if case.inner == "fgsm":
        net.requires_grad_(False)
    loss = cross_entropy(case, net(ids, shift)[0], labels, "sum")
    if case.inner == "fgsm":
        gradient = torch.autograd.grad(loss, shift)[0]
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(name in trained)
    else:
        loss.backward(inputs=[shift])
        gradient = shift.grad
    return 0.1 * torch.tanh(5 * gradient)


def _part_of_gradient(case: Case, net: Any, summed: Tensor, hidden: Tensor, shift: Tensor | None) -> Tensor:
    """[] what the loss takes from a gradient of itself."""
    if case.inner == "penalty":
        return 0.1 * torch.autograd.grad(summed, shift, create_graph=True)[0].square().sum()
    of = net.head.weight if case.inner == "grad_norm" and net.head.weight.requires_grad else hidden
    gradient = torch.autograd.grad(summed, of, retain_graph=True)[0]
    return 0.1 * summed * full(gradient).norm()


# --- Gradients that are thrown away -----------------------------------------------------------------------------------


def foreign_gradients(case: Case, where: str, net: Any, ids: Tensor, labels: Tensor) -> Iterator[float]:
    """Yield norms of gradients (or losses) of one batch, computed beside training."""
    for each in case.foreign:
        what, _, place = each.partition("@")
        if place == where:
            with torch.enable_grad():
                yield _foreign_gradient(case, what, net, ids, labels)


def _foreign_gradient(case: Case, what: str, net: Any, ids: Tensor, labels: Tensor) -> float:
    shift = _no_shift(ids)
    of = {
        "parameters": [parameter for parameter in net.parameters() if parameter.requires_grad],
        "head": [net.head.weight if net.head.weight.requires_grad else shift],
    }.get(what, [shift])
    loss = cross_entropy(case, net(ids, shift)[0], labels, "sum")
    if what == "forward":
        return loss.item()
    if what == "backward":
        loss.backward(inputs=of)
        gradients = [shift.grad]
    else:
        unused = bool({"unused", "sometimes", "empty"} & set(case.parts))
        gradients = [each for each in torch.autograd.grad(loss, of, allow_unused=unused) if each is not None]
    return sum(float(full(each).square().sum()) for each in gradients) ** 0.5


# --- Writes to weights ------------------------------------------------------------------------------------------------


def write(case: Case, where: str, net: Any) -> None:
    """Write to weights, the same on all ranks."""
    for each in case.writes:
        what, _, place = each.partition("@")
        if place == where:
            if what.startswith("unit_"):
                student = first_block(net)
                teacher = net.teacher_block[0]
                _WRITES[what.replace("unit", "teacher")](net, student, teacher)
            else:
                _WRITES[what](net, net.head, getattr(net, "teacher", None))


def _normalize(net: Any, *_: Any) -> None:
    with torch.no_grad():
        weight = net.head.weight.data.clone()
        net.head.weight.copy_(F.normalize(weight, dim=1))


def _clamp(net: Any, *_: Any) -> None:
    for parameter in net.parameters():
        parameter.data.clamp_(-0.5, 0.5)


def _teacher_data(net: Any, student: nn.Module, teacher: nn.Module) -> None:
    for new, old in zip(student.parameters(), teacher.parameters(), strict=True):
        old.data = old.data * MOMENTUM + new.data * (1 - MOMENTUM)


def _teacher_mul(net: Any, student: nn.Module, teacher: nn.Module) -> None:
    for new, old in zip(student.parameters(), teacher.parameters(), strict=True):
        old.data.mul_(MOMENTUM).add_(new.data, alpha=1 - MOMENTUM)


@torch.no_grad()
def _teacher_lerp(net: Any, student: nn.Module, teacher: nn.Module) -> None:
    for new, old in zip(student.parameters(), teacher.parameters(), strict=True):
        old.lerp_(new, 1 - MOMENTUM)


def _teacher_foreach(net: Any, student: nn.Module, teacher: nn.Module) -> None:
    get_ema_multi_avg_fn(MOMENTUM)(list(teacher.parameters()), list(student.parameters()), 0)


def _teacher_load(net: Any, student: nn.Module, teacher: nn.Module) -> None:
    teacher.load_state_dict(student.state_dict())


_WRITES: dict[str, Callable[..., None]] = {
    "normalize": _normalize,
    "clamp": _clamp,
    "teacher_data": _teacher_data,
    "teacher_mul": _teacher_mul,
    "teacher_lerp": _teacher_lerp,
    "teacher_foreach": _teacher_foreach,
    "teacher_load": _teacher_load,
}


# --- The module -------------------------------------------------------------------------------------------------------


class _Clipped(torch.autograd.Function):
    """Clips what comes back through it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-2e-3, 2e-3)


class _Reversed(_Clipped):
    """Reverses what comes back through it, which is linear."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


def _scaled(gradient: Tensor) -> Tensor:
    return 0.5 * gradient


def _squashed(gradient: Tensor) -> Tensor:
    """An elementwise normalisation."""
    return 0.1 * gradient / (1e-2 + gradient.abs())


_KEPT: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dict": (lambda parameter: {"weight": parameter}, lambda kept: kept["weight"]),
    "list": (lambda parameter: [parameter], lambda kept: kept[0]),
    "closure": (lambda parameter: lambda: parameter, lambda kept: kept()),
    "object": (lambda parameter: SimpleNamespace(weight=parameter), lambda kept: kept.weight),
}
"""In what a parameter is kept past the module tree, and how it is read there."""


def attach(case: Case, net: Any) -> None:
    """Give a module that is made what this case's user code needs, before its weights are drawn."""
    block = first_block(net)
    if case.alias is not None:
        how, _, whose = case.alias.partition("@")
        if whose == "root":
            net.reachable = nn.Parameter(torch.ones(WIDTH))
        parameter = net.reachable if whose == "root" else block.linear.weight
        net.kept = _KEPT[how][0](parameter)
    if any(each.startswith("unit_") for each in case.writes):
        net.teacher_block = nn.ModuleList([copy.deepcopy(block)]).requires_grad_(False)
    change = _scaled if case.backward is not None and "scale" in case.backward else _squashed
    if case.backward in ("full_hook_scale", "full_hook_squash"):
        block.register_full_backward_hook(
            lambda _, given, __: tuple(g if g is None else change(g) for g in given)
        )
    elif case.backward in ("pre_hook_scale", "pre_hook_squash"):
        block.register_full_backward_pre_hook(lambda _, given: tuple(change(g) for g in given))
    elif case.backward in ("parameter_hook_scale", "parameter_hook_squash"):
        block.linear.weight.register_hook(change)


def altered(case: Case, net: Any, hidden: Tensor) -> Tensor:
    """[b, s, d] hidden states, after what the case's user code adds to the forward."""
    if case.alias is not None:
        how, _, whose = case.alias.partition("@")
        parameter = _KEPT[how][1](net.kept)
        hidden = hidden * (1 + parameter) if whose == "root" else hidden + torch.tanh(hidden @ parameter.T)
    if case.backward in ("function_clip", "function_reverse"):
        hidden = (_Clipped if case.backward == "function_clip" else _Reversed).apply(hidden)
    if case.functional is not None:
        hidden = _called_functionally(case, net, hidden)
    if hasattr(net, "late"):
        hidden = hidden + torch.tanh(net.late(hidden))
    if hasattr(net, "teacher_block"):
        with torch.no_grad():
            target = plain(net.teacher_block[0](hidden))
        hidden = hidden + 0.1 * target
    return hidden


def _called_functionally(case: Case, net: Any, hidden: Tensor) -> Tensor:
    """[b, s, d] what the first block makes of hidden states, twice, with weights that the call is given."""
    block = first_block(net)
    for _ in range(2):
        weights = {"linear.weight": net.embedding.weight[:WIDTH]}
        if case.functional == "own":
            weights = dict(block.named_parameters())
        hidden = plain(functional_call(block, weights, (hidden,)))
    return hidden


def changed(case: Case, where: str, net: Any) -> list[nn.Parameter]:
    """The parameters that the module gets in this hook."""
    what, _, place = (case.changed or "").partition("@")
    if place != where:
        return []
    generator = torch.Generator().manual_seed(case.seed + 2)
    if what == "append" and not hasattr(net, "late"):
        net.late = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            for parameter in net.late.parameters():
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        return list(net.late.parameters())
    if what == "replace":
        net.head.bias = nn.Parameter(torch.randn(VOCABULARY, generator=generator, dtype=torch.float64))
        return [net.head.bias]
    if what == "fill":
        nn.init.constant_(net.head.bias, 0.3)
    return []


_UNSTABLE = {"weight decay", "pruned"}
"""They compare values that may be rounding with a threshold."""
_FOR_CONVOLUTIONS = {"sum of columns", "reshaped", "kernel", "rows of weights", "data from plain"}
SNIPPETS: dict[str, Snippet] = {
    name: snippet
    for name, snippet in (READS | WRITES).items()
    if name not in _UNSTABLE and name not in _FOR_CONVOLUTIONS
}
"""What is drawn of the table in `tests/sharding/snippets.py`."""


def run_snippet(case: Case, net: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    """What a snippet returned, as one number; nothing before the optimizer has states of all that it touches."""
    if case.snippet is None:
        return []
    touched = [net.embedding.weight, net.head.weight, net.gate.weight, net.gate.bias]
    if any(p.grad is None or p not in optimizer.state for p in touched):
        return []
    with torch.random.fork_rng(devices=[]):
        returned = SNIPPETS[case.snippet](Trained(*touched, None, net, optimizer))
    return [as_number(returned)]


def as_number(returned: Any) -> float:
    """A number that tells whether something was returned that is not equal."""
    if isinstance(returned, (list, tuple)):
        return sum(as_number(part) / (index + 1) for index, part in enumerate(returned))
    if returned is None or isinstance(returned, str):
        return float(len(returned or ""))
    if isinstance(returned, float):
        values = torch.tensor(returned, dtype=torch.float64)  # by itself torch would make it a float32
    else:
        values = full(torch.as_tensor(returned))
    values = values.detach().double().nan_to_num(nan=3.0).abs().flatten()
    return float((values / torch.arange(1, len(values) + 1)).sum())


def edit_rows(case: Case, net: Any) -> None:
    """Change some rows of final gradients."""
    gradient = net.embedding.weight.grad
    if gradient is None:
        return
    rows = torch.tensor([0, 2, 5])
    if case.rows == "slice":
        gradient[2:5].zero_()
    elif case.rows == "one":
        gradient[4].mul_(3)
    elif case.rows == "narrow":
        torch.narrow(gradient, 0, 2, 3).zero_()
    elif case.rows == "view":
        gradient.unsqueeze(0)[0, 4].mul_(3)
    elif case.rows in ("noise", "drawn"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(case.seed)
            if case.rows == "noise":
                gradient.add_(torch.randn_like(gradient), alpha=0.01)
            else:
                nn.init.uniform_(gradient, -0.01, 0.01)
    elif case.rows == "assign":
        gradient[4] = 0.0
    elif case.rows == "index":
        gradient[rows] = 0.0
    elif case.rows == "fill":
        gradient.index_fill_(0, rows, 0.0)
    elif case.rows == "mask":
        gradient.masked_fill_((torch.arange(VOCABULARY) % 3 == 1).unsqueeze(1), 0.0)
    elif case.rows == "data":
        net.embedding.weight.grad.data[:2] = 0.0
