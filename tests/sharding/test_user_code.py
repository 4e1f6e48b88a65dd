"""What users' hooks do to parameters and gradients between steps is right on shards, on every rank.

One fit runs all snippets, one a step, each from the same weights, gradients and states. What a snippet returns, the
gradients that it leaves and the weights after the optimizer's step are compared with one process.
"""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from lightning_automodel import AutomodelStrategy
from lightning_automodel.distributed import collectives
from tests.rank_pool import RankPool
from tests.sharding.snippets import READS, WRITES, Snippet, Trained, ramp
from tests.trainer.runs import STRATEGIES, TOLERANCE, first_by_default, make_trainer

WIDTH = 5  # odd, so that shards are uneven
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
    "keys": READS["keys"],
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
}
"""No collectives, so that one rank may do these alone."""
WITHOUT_GRADIENTS = (
    *("norm as a number", "norms of columns", "where a short layer is largest", "singular values"),
    *("kth value", "all", "product of matrices", "equal", "masked", "reshaped", "softmax", "state dict"),
    *("rows of weights", "normalised", "spectrally normalised", "pruned", "whole view", "states"),
    *("initialised orthogonal", "initialised constant"),
)
SNIPPETS = {**PLANTED, **READS, **WRITES}  # what is planted is not left in the weights


class Net(nn.Module):
    """Layers with 5, 3 and 1 rows, a bias of one element, a kernel of three dimensions and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.conv = nn.Conv1d(1, 3, 2)
        self.gate = nn.Linear(WIDTH, 1)
        self.head = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(()))
        generator = torch.Generator().manual_seed(1)
        self.double()
        with torch.no_grad():
            for parameter in self.parameters():
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(0.5 * drawn)

    def forward(self, features: Tensor) -> Tensor:
        hidden = features
        for block in self.blocks:
            hidden = hidden + block(hidden)  # [n, d]
        channels = self.conv(hidden.unsqueeze(1)).mean(dim=2)  # [n, 3]
        return self.scale * self.head(torch.sigmoid(self.gate(hidden)) * channels)


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
            plan = {"blocks.*.0": ColwiseParallel(output_layouts=Replicate())}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.last is not None:
            self.last.weights = all_whole(dict(self.net.named_parameters()))

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
        present = all_whole({name: gradient for name, gradient in gradients.items() if gradient is not None})
        self.last.gradients = {name: present.get(name) for name in gradients}

    def _trained(self, optimizer: Any) -> Trained:
        net = self.net
        first, second = (block[0].weight for block in net.blocks)
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


def all_whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same of many, with one collective for all that are split by rows over the same ranks."""
    found = {}
    with torch._C.DisableTorchFunctionSubclass():
        by_group: dict[Any, dict[str, DTensor]] = defaultdict(dict)
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor) and tuple(tensor.placements) == (Shard(0),):
                by_group[tensor.device_mesh.get_group()][name] = tensor
        for group, split in by_group.items():
            padded = [_padded(tensor, group.size()) for tensor in split.values()]
            flat = torch.cat([part.flatten() for part in padded])
            by_rank = [torch.empty_like(flat) for _ in range(group.size())]
            dist.all_gather(by_rank, flat, group=group)
            columns = torch.stack(by_rank).split([part.numel() for part in padded], dim=1)
            for (name, tensor), column in zip(split.items(), columns, strict=True):
                rows_of_all = column.reshape(-1, *tensor.shape[1:])
                found[name] = rows_of_all[: tensor.shape[0]].clone()
    return {name: found[name] if name in found else whole(tensor) for name, tensor in tensors.items()}


def _padded(tensor: DTensor, num_ranks: int) -> Tensor:
    """This rank's rows, and zeros where it has fewer than the first rank."""
    own = tensor._local_tensor.detach()
    padded = own.new_zeros(-(-tensor.shape[0] // num_ranks), *tensor.shape[1:])
    padded[: len(own)] = own
    return padded


def in_numbers(value: Any) -> Any:
    """What a snippet returned, with tensors, arrays and numbers as plain tensors."""
    if isinstance(value, Tensor):
        return whole(value)
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, (list, tuple)):
        return [in_numbers(part) for part in value]
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else value


def features(rank: int, step: int) -> Tensor:
    """[n, d] rows of a rank; n differs."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(1 + (rank + 2 * step) % 4, WIDTH, generator=generator, dtype=torch.float64)


def tell(names: list[str], hook: str, options: dict[str, Any]) -> dict[str, Story]:
    """Runs on every rank: what came of each snippet."""
    module = Told(names, hook)
    rank = dist.get_rank() // options.get("tensor_parallel_size", 1)
    batches = [features(rank, step) for step in range(len(names) + 2)]
    validates = {"val_check_interval": 1, "limit_val_batches": 1} if "validation" in hook else {}
    trainer = make_trainer(AutomodelStrategy(**options), precision="64-true", **validates)
    loader = DataLoader(batches, batch_size=None)
    trainer.fit(module, loader, loader if validates else None)
    return module.stories


def tell_plainly(names: list[str], hook: str, num_ranks: int) -> dict[str, Story]:
    """The same in one process."""
    module = Told(names, hook)
    optimizer = module.configure_optimizers()
    module.__dict__["optimizers"] = lambda: optimizer
    for step in range(len(names) + 2):
        batch = torch.cat([features(rank, step) for rank in range(num_ranks)])
        module.on_train_batch_start(batch, step)
        loss = module.training_step(batch, step)["loss"]
        module.on_before_zero_grad(optimizer)
        optimizer.zero_grad()
        loss.backward()
        module.on_before_optimizer_step(optimizer)
        optimizer.step()
        module.on_train_batch_end(SimpleNamespace(), batch, step)
        if "validation" in hook:
            module.zero_grad()  # as Lightning, which validates in inference mode
            with torch.inference_mode():
                module.on_validation_epoch_end()
    return module.stories


def difference(actual: Any, expected: Any) -> str | None:
    """What is not equal, up to rounding; NaN equals NaN."""
    if isinstance(expected, list) and isinstance(actual, list) and len(actual) == len(expected):
        found = (difference(a, b) for a, b in zip(actual, expected, strict=True))
        return next((what for what in found if what is not None), None)
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        same = type(actual) is type(expected) and actual == expected
        return None if same else f"{actual} instead of {expected}"
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{actual.dtype} {list(actual.shape)} instead of {expected.dtype} {list(expected.shape)}"
    if not torch.equal(actual.isnan(), expected.isnan()):
        return f"NaN in {int(actual.isnan().sum())} elements instead of {int(expected.isnan().sum())}"
    right = expected.double().nan_to_num()
    deviation = (actual.double().nan_to_num() - right).abs()
    if not right.numel() or deviation.max() <= TOLERANCE * right.abs().max():
        return None
    return f"{float(deviation.max() / right.abs().max()):.1e} off"


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
    stories = tell_plainly(list(names), hook, num_ranks)
    assert {name: story.error for name, story in stories.items() if story.error is not None} == {}
    return stories


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


def listed(found: dict[str, str]) -> str:
    """All findings, for the message of an assertion."""
    return "\n".join(f"{name}: {what}" for name, what in found.items())


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
    assert found == {}, listed(found)
    assert planted == PLANTED.keys() & set(names)


def _fitted() -> Told:
    """A module after a fit that tells nothing."""
    module = Told([], "")
    batches = [features(dist.get_rank(), step) for step in range(2)]
    make_trainer(AutomodelStrategy(), precision="64-true").fit(module, DataLoader(batches, batch_size=None))
    return module


def _gathers_of_facts() -> dict[str, int]:
    """How often each of `FACTS` has gathered."""
    module = _fitted()
    found = {}
    net = module._trained(module.optimizer)
    for name, fact in FACTS.items():
        before = collectives.gathers_so_far()
        fact(net)
        found[name] = collectives.gathers_so_far() - before
    before = collectives.gathers_so_far()
    net.weight.sort()
    found["a gather"] = collectives.gathers_so_far() - before
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
    weight, other = (block[0].weight for block in net.blocks)
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
