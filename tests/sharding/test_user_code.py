"""What users' hooks do to parameters and gradients between steps is right on shards, on every rank.

One fit runs all snippets, one a step, each from the same weights, gradients and states. What a snippet returns, the
gradients that it leaves and the weights after the optimizer's step are compared with one process.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lightning_automodel.distributed import collectives
from tests.rank_pool import RankPool
from tests.sharding import writers
from tests.sharding.snippets import READS, WRITES, Snippet, Trained, ramp
from tests.sharding.writers import WIDTH, train, train_plainly
from tests.trainer.exactness import relative_error
from tests.trainer.plain import fill
from tests.trainer.runs import STRATEGIES, TOLERANCE, first_by_default

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "hsdp": {"data_parallel_replicate_size": 2},
    "tensor parallel": {"tensor_parallel_size": 2},
    "kept": STRATEGIES["kept"],
    "resharded": STRATEGIES["resharded"],
    "four shards": {},
}
ON_FOUR = ("hsdp", "tensor parallel", "four shards")


def _of_this_rank(net: Trained) -> Any:
    part = net.weight.grad
    return part.to_local().norm() if isinstance(part, DTensor) else part.norm()


def _lost_on_other_ranks(net: Trained) -> None:
    part = net.weight.grad
    if isinstance(part, DTensor) and dist.get_rank() == 0:
        part.to_local().mul_(2)


PLANTED: dict[str, Snippet] = {"read planted": _of_this_rank, "write planted": _lost_on_other_ranks}
"""They are wrong on shards, which must be seen."""
FACTS: dict[str, Snippet] = {
    "made alike": READS["made alike"],
    "what it is": READS["what it is"],
    "members": READS["members"],
    "printed": READS["printed"],
    "names of weights": lambda net: list(net.module.state_dict()),
    "arithmetic": lambda net: (net.weight * 2 + net.other.detach().clamp(0)).to_local(),
    "arithmetic with a plain tensor": lambda net: torch.where(net.weight > 0, ramp(net.weight), net.weight),
    "averages": lambda net: torch._foreach_lerp([net.weight.detach()], [net.other.detach()], 0.5),
    "copied": lambda net: copy.deepcopy(net.weight).data.mul_(2),
    "module moved": lambda net: net.module.double(),
    "written": lambda net: net.weight.data.copy_(ramp(net.weight)),
    "frozen": lambda net: net.module.requires_grad_(True),
    "zeroed": lambda net: net.module.zero_grad(),
    "loaded": lambda net: net.module.load_state_dict({"head.bias": torch.ones(3)}, strict=False),
}
"""No collectives, so that one rank may do these alone."""
REDUCED: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda g: g.sum(),
    "norm": lambda g: (g.norm(), torch.norm(g), g.norm(p=2)),
    "norm of a list": lambda g: nn.utils.get_total_norm([g, g]),
}
"""Collectives, which gather nothing."""
WITHOUT_GRADIENTS = (
    *("norm as a number", "norms of columns", "where a short layer is largest", "counts", "outer product"),
    *("product of matrices", "equal", "masked", "reshaped", "state dict", "rows of weights", "normalised"),
    *("pruned", "whole view", "states", "initialised orthogonal", "initialised constant"),
)
SNIPPETS = {**PLANTED, **READS, **WRITES}  # what is planted is not left in the weights


class Net(writers.Net):
    """Layers with 5, 3 and 1 rows, a bias of one element, a kernel of three dimensions and a scalar."""

    def __init__(self) -> None:
        super().__init__(1)
        self.conv = nn.Conv1d(1, 3, 2)
        self.gate = nn.Linear(WIDTH, 1)
        self.head = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(()))
        fill(self)

    def forward(self, features: Tensor) -> Tensor:
        for block in self.blocks:
            features = block(features)  # [n, d]
        channels = self.conv(features.unsqueeze(1)).mean(dim=2)  # [n, 3]
        return self.scale * self.head(torch.sigmoid(self.gate(features)) * channels)


@dataclass
class Story:
    """What came of a snippet; tensors in full, by name."""

    value: Any = None  # what it returned, in plain numbers
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)  # after the optimizer's step
    loss: Tensor | None = None  # of the next forward
    error: str | None = None


class Told(LightningModule):
    """Runs a snippet in a hook of each step but the first, from which on the optimizer has states."""

    def __init__(self, names: list[str], hook: str) -> None:
        super().__init__()
        self.net = Net()
        self.names = names
        self.hook = hook
        self.start: list[Tensor] = []
        self.stories: dict[str, Story] = {}
        self.last: Story | None = None

    def configure_model(self) -> None:
        if dist.is_initialized() and self.device_mesh["tensor_parallel"].size() > 1:
            plan = {"blocks.*.linear": ColwiseParallel(output_layouts=Replicate())}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.last is not None:
            self.last.weights = {name: whole(p) for name, p in self.net.named_parameters()}

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = (self.net(batch) - batch[:, :3]).square().sum()
        if self.last is not None:
            self.last.loss = loss.detach()
            self.last = None
        return {"loss": loss / len(batch), "num_label_tokens": len(batch)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # A large epsilon: with a small one, rounding of tiny gradients would become large steps.
        return torch.optim.Adam(self.parameters(), lr=0.02, eps=1e-2)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self._tell("on_before_zero_grad", optimizer)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._tell("on_before_optimizer_step", optimizer)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.optimizer = getattr(optimizer, "optimizer", optimizer)
        self._tell("on_train_batch_end", self.optimizer)
        if "validation" in self.hook and not dist.is_initialized():
            self.zero_grad()  # as Lightning, which validates in inference mode
            with torch.inference_mode():
                self.on_validation_epoch_end()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.net(batch)

    def on_validation_epoch_end(self) -> None:
        self._tell("on_validation_epoch_end", self.optimizer)

    def _tell(self, hook: str, optimizer: Any) -> None:
        if hook != self.hook or not optimizer.state or len(self.stories) == len(self.names):
            return
        if hook != "on_before_zero_grad":  # where the backward needs the weights of the forward
            self._begin_alike(optimizer)
        name = self.names[len(self.stories)]
        self.stories[name] = self.last = Story()
        value = None
        try:
            value = SNIPPETS[name](self._trained(optimizer))
        except Exception as error:  # judged by the test
            self.last.error = f"{type(error).__name__}: {error}"
        if not raised_anywhere(self.last.error is not None):
            self.last.value = in_numbers(value)
        gradients = {name: p.grad for name, p in self.net.named_parameters()}
        self.last.gradients = {name: None if g is None else whole(g) for name, g in gradients.items()}

    def _trained(self, optimizer: Any) -> Trained:
        net = self.net
        first, second = (block.linear.weight for block in net.blocks)
        return Trained(first, second, net.gate.weight, net.gate.bias, net.conv.weight, net, optimizer)

    def _begin_alike(self, optimizer: Any) -> None:
        """Put back the weights, gradients and states of the first snippet, without the code under test."""
        parts = [part for p in self.net.parameters() for part in _parts(p, optimizer)]
        if not self.start:
            self.start = [part.clone() for part in parts]
        for part, value in zip(parts, self.start, strict=True):
            part.copy_(value)


def _parts(parameter: nn.Parameter, optimizer: Any) -> Iterator[Tensor]:
    """This rank's part of a parameter, its gradient and its states."""
    state = optimizer.state[parameter]
    for tensor in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"], state["step"]):
        with torch._C.DisableTorchFunctionSubclass():
            if tensor is not None:
                yield (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def raised_anywhere(has_raised: bool) -> bool:
    """Whether a rank's snippet has raised, so that none gathers what it returned: a collective."""
    flag = torch.tensor(int(has_raised))
    if dist.is_initialized():
        dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def whole(tensor: Tensor) -> Tensor:
    """A plain copy of a tensor in full, which all ranks gather, without the code under test."""
    with torch._C.DisableTorchFunctionSubclass():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return full.detach().clone()


def in_numbers(value: Any) -> Any:
    """What a snippet returned, with tensors, arrays and numbers as plain tensors."""
    if isinstance(value, Tensor):
        return whole(value)
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, (list, tuple)):
        return [in_numbers(part) for part in value]
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else value


def tell(names: list[str], hook: str, options: dict[str, Any]) -> dict[str, Story]:
    """Runs on every rank: what came of each snippet."""
    module = Told(names, hook)
    validates = {"val_check_interval": 1, "limit_val_batches": 1} if "validation" in hook else {}
    train(module, options, len(names) + 2, accumulate=1, **validates)
    return module.stories


def difference(actual: Any, expected: Any) -> str | None:
    """What is not equal, up to rounding; NaN equals NaN."""
    if isinstance(expected, list) and isinstance(actual, list) and len(actual) == len(expected):
        found = (difference(a, b) for a, b in zip(actual, expected, strict=True))
        return next((what for what in found if what is not None), None)
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        same = type(actual) is type(expected) and actual == expected
        return None if same else f"{actual} instead of {expected}"
    is_alike = actual.shape == expected.shape and actual.dtype == expected.dtype
    if not is_alike or not torch.equal(actual.isnan(), expected.isnan()):
        return f"{actual} instead of {expected}"
    error = relative_error(actual.nan_to_num(), expected.nan_to_num()) if expected.numel() else 0.0
    return None if error <= TOLERANCE else f"{error:.1e} off"


def wrong_in(story: Story, expected: Story) -> str | None:
    """What is wrong with what a rank tells, in words."""
    if story.error != expected.error:
        return f"{story.error} instead of {expected.error}"
    pairs = [("value", story.value, expected.value)]
    for what in ("gradients", "weights"):
        named = getattr(expected, what)
        pairs += [(f"{what} of {name}", getattr(story, what)[name], right) for name, right in named.items()]
    for what, actual, right in pairs:
        if (found := difference(actual, right)) is not None:
            return f"{what}: {found}"
    return None


@functools.cache
def expected_stories(names: tuple[str, ...], hook: str, num_ranks: int) -> dict[str, Story]:
    """Of one process, where nothing raises."""
    module = Told(list(names), hook)
    train_plainly(module, num_ranks, len(names) + 2, accumulate=1)
    assert {name: story.error for name, story in module.stories.items() if story.error is not None} == {}
    return module.stories


def wrong_snippets(pool: RankPool, names: list[str], hook: str, options: dict[str, Any]) -> dict[str, str]:
    """What is wrong, by snippet."""
    by_rank = pool.run(tell, names, hook, options, timeout_s=120)
    num_peers = options.get("tensor_parallel_size", 1)
    expected = expected_stories(tuple(names), hook, len(by_rank) // num_peers)
    found: dict[str, str] = {}
    for name, right in expected.items():
        for rank, stories in enumerate(by_rank):
            what = wrong_in(stories[name], right)
            if what is not None:
                found.setdefault(name, f"rank {rank}: {what}")
        loss = torch.stack([stories[name].loss for stories in by_rank]).sum() / num_peers
        if name not in found and (what := difference(loss, right.loss)) is not None:
            found[name] = f"loss of the next forward: {what}"
    return found


WHERE: dict[str, list[str]] = {
    "on_before_optimizer_step": list(SNIPPETS),
    # Between forward and backward, where the module has been gathered: it shows shards, and the gradients before.
    "on_before_zero_grad": ["read planted", *READS],
    "on_train_batch_end": ["write planted", *WRITES],
    # In inference mode, without gradients.
    "on_validation_epoch_end": list(WITHOUT_GRADIENTS),
}
"""By hook: snippets that run there."""
BY_DEFAULT = {
    ("on_before_optimizer_step", "fsdp2"): 1,
    ("on_before_zero_grad", "kept"): 4,
    ("on_before_zero_grad", "tensor parallel"): 4,
    ("on_train_batch_end", "kept"): 4,
    ("on_validation_epoch_end", "fsdp2"): 1,
}
"""What every run has: each snippet, or each fourth one, where the same kind of shards has all of them elsewhere."""
SWEPT = [(hook, layout, 1) for hook in WHERE for layout in LAYOUTS if BY_DEFAULT.get((hook, layout)) != 1]


@pytest.mark.parametrize(
    ("hook", "layout", "every"),
    first_by_default([*((*key, every) for key, every in BY_DEFAULT.items()), *SWEPT], len(BY_DEFAULT)),
)
@pytest.mark.every_case
def test_like_one_process(request: pytest.FixtureRequest, hook: str, layout: str, every: int) -> None:
    """All that is right in one process is right on shards, and what is planted is found wrong."""
    planted_first, *others = WHERE[hook]
    names = [
        planted_first,
        *others[list(LAYOUTS).index(layout) % every :: every],
    ]  # other ones in each layout
    pool = request.getfixturevalue("pool4" if layout in ON_FOUR else "pool2")
    found = wrong_snippets(pool, names, hook, LAYOUTS[layout])
    planted = {name for name in PLANTED if found.pop(name, None)}
    assert found == {}, "\n".join(f"{name}: {what}" for name, what in found.items())
    assert planted == PLANTED.keys() & set(names)


def _fitted() -> Told:
    """A module after a fit that tells nothing."""
    module = Told([], "")
    train(module, {}, 2, accumulate=1)
    return module


def _gathers_of_facts() -> dict[str, int]:
    """How often each of `FACTS` and `REDUCED` has gathered."""
    module = _fitted()
    found = {}
    net = module._trained(module.optimizer)
    for name, fact in FACTS.items():
        before = collectives.gathers.count
        fact(net)
        found[name] = collectives.gathers.count - before
    for name, reduce in REDUCED.items():
        with CommDebugMode() as communicated:
            reduce(net.weight.detach())
        counts = communicated.get_comm_counts().items()
        found[name] = sum(count for operator, count in counts if "all_gather" in str(operator))
    before = collectives.gathers.count
    net.weight.sort()
    found["a gather"] = collectives.gathers.count - before
    return found


def test_facts_are_told_to_a_rank_alone(pool2: RankPool) -> None:
    """What a tensor is, and arithmetic by element, are no collectives: `if trainer.is_global_zero` hangs nobody."""
    for found in pool2.run(_gathers_of_facts):
        assert found.pop("a gather") > 0
        assert {name: count for name, count in found.items() if count} == {}


def _compiled() -> list[Tensor]:
    """Weights and a norm, by functions that are compiled over shards."""
    net = _fitted().net
    return [whole(tensor) for tensor in use_compiled(net, partial(torch.compile, backend="aot_eager"))]


def use_compiled(net: Net, compiled: Callable[[Any], Any] = lambda function: function) -> list[Tensor]:
    """What a compiled average and norm make of weights that are set before."""
    weight, other = (block.linear.weight for block in net.blocks)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(ramp(p))
        compiled(lambda a, b: a.mul_(0.9).add_(b, alpha=0.1))(weight, other)
        return [compiled(lambda a: (a * 2).norm(dim=0))(weight), weight.detach()]


def test_compiled_user_code(pool2: RankPool) -> None:
    """As without compilation."""
    expected = use_compiled(Net())
    for found in pool2.run(_compiled, timeout_s=180):
        assert difference(found, expected) is None
