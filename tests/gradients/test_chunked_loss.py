"""`token_loss` gives the loss and the gradients of all logits, without them, however the ranks hold the head.

Shapes: b rows, s positions, d width, v vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_automodel import AutomodelStrategy, token_loss
from tests.rank_pool import RankPool
from tests.trainer.cases import Case
from tests.trainer.exactness import (
    VOCABULARY,
    WIDTH,
    Batch,
    Block,
    TinyDecoder,
    assert_exact,
    full,
    full_weights,
    relative_error,
)
from tests.trainer.plain import ModelModule, differ_by_rank, plain_weights
from tests.trainer.runs import STRATEGIES, TOLERANCE, by_default, loader, make_trainer
from tests.trainer.test_communication import OpCounts

CHUNK = 3 * VOCABULARY  # three positions
CLASS_WEIGHTS = torch.linspace(0.5, 2.0, VOCABULARY, dtype=torch.float64)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shifted": {"label_shift": 1},
    "ignore_index": {"ignore_index": 3},
    "smoothed": {"label_smoothing": 0.1},
    "weighted": {"weight": CLASS_WEIGHTS},
    "all": {"label_shift": 1, "label_smoothing": 0.1, "weight": CLASS_WEIGHTS},
}


def of_all_logits(
    hidden: Tensor,
    head: nn.Module,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_shift: int = 0,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The same by `F.cross_entropy`."""
    logits = head(hidden)[..., : labels.shape[-1] - label_shift, :].flatten(0, -2)
    labels = labels[..., label_shift:].flatten()
    options = {"weight": weight, "label_smoothing": label_smoothing, "ignore_index": ignore_index}
    loss = F.cross_entropy(logits, labels, reduction="sum", **options)
    used = labels != ignore_index
    counts = torch.ones(int(used.sum())) if weight is None else weight[labels[used]]
    return loss, counts.sum()


def inputs(dtype: torch.dtype = torch.float64, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """[b, s, d] hidden states and [b, s] labels, some of which do not count."""
    hidden = torch.randn(3, 6, WIDTH, dtype=dtype, requires_grad=True)
    labels = torch.randint(VOCABULARY, (3, 6))
    labels[0, :4] = labels[2, 2] = ignore_index
    return hidden, labels


def with_gradients(
    function: Callable[..., tuple[Tensor, Tensor]],
    hidden: Tensor,
    head: nn.Module,
    labels: Tensor,
    **options: Any,
) -> list[Tensor]:
    """Loss, count, and the gradients of three times the loss."""
    loss, count = function(hidden, head, labels, **options)
    wanted = [tensor for tensor in (hidden, *head.parameters()) if tensor.requires_grad]
    return [loss.detach(), count, *torch.autograd.grad(3 * loss, wanted)]


def deviation(actual: list[Tensor], expected: list[Tensor]) -> float:
    return max(relative_error(one, other) for one, other in zip(actual, expected, strict=True))


@pytest.mark.parametrize("chunk_elements", [1, CHUNK, 2**22])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("frozen", ["nothing", "head", "hidden"])
def test_equals_all_logits(name: str, chunk_elements: int, frozen: str) -> None:
    options = OPTIONS[name]
    choices = {"chunk_elements": chunk_elements}
    (hidden, labels) = inputs(ignore_index=options.get("ignore_index", -100))
    head = nn.Linear(WIDTH, VOCABULARY).double()
    for tensor in {"nothing": [], "head": [*head.parameters()], "hidden": [hidden]}[frozen]:
        tensor.requires_grad_(False)
    actual = with_gradients(token_loss, hidden, head, labels, **choices, **options)
    assert deviation(actual, with_gradients(of_all_logits, hidden, head, labels, **options)) <= TOLERANCE
    with torch.no_grad():
        loss, _ = token_loss(hidden, head, labels, **choices, **options)
    assert relative_error(loss, actual[0]) <= TOLERANCE


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e300])
def test_ignored_positions_have_no_effect_whatever_stands_there(value: float, name: str) -> None:
    """Padding may attend to nothing, and be NaN. Its gradients are zero, also if no position has a label."""
    options = OPTIONS[name]
    ignore_index = options.get("ignore_index", -100)
    hidden, labels = inputs(ignore_index=ignore_index)
    head = nn.Linear(WIDTH, VOCABULARY).double()
    shift = options.get("label_shift", 0)
    ignored = F.pad(labels[:, shift:] == ignore_index, (0, shift), value=True)
    for filled_labels in (labels, torch.full_like(labels, ignore_index)):
        expected = with_gradients(token_loss, hidden, head, filled_labels, **options)
        if filled_labels is not labels:
            ignored = torch.ones_like(ignored)
            assert all(tensor.count_nonzero() == 0 for tensor in expected)
        replaced = hidden.detach().masked_fill(ignored[..., None], value).requires_grad_()
        assert (
            deviation(with_gradients(token_loss, replaced, head, filled_labels, **options), expected)
            <= TOLERANCE
        )


def test_without_positions() -> None:
    """The head takes part, with gradients of zero, as other ranks need it."""
    hidden = torch.randn(2, 1, WIDTH, requires_grad=True)
    head = nn.Linear(WIDTH, VOCABULARY)
    options = {"label_shift": 1, "label_smoothing": 0.1}
    loss, count, *gradients = with_gradients(token_loss, hidden, head, torch.full((2, 1), -100), **options)
    assert loss == count == 0
    assert all(gradient.count_nonzero() == 0 for gradient in gradients)


class _Sizes(TorchDispatchMode):
    """Elements of whatever is computed, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor):
                    name = func.overloadpacket.__name__
                    self.largest[name] = max(self.largest[name], tensor.numel())
        return result


def test_weights_of_classes_in_half_precision_are_counted_in_float32() -> None:
    hidden, labels = inputs(torch.float32)
    weight = torch.linspace(0.1, 2.0, VOCABULARY, dtype=torch.bfloat16)
    head = nn.Linear(WIDTH, VOCABULARY)
    _, count = token_loss(hidden, head, labels, weight=weight)
    _, expected = token_loss(hidden, head, labels, weight=weight.double())
    assert count.dtype == torch.float32
    assert relative_error(count, expected.float()) <= 1e-6


def test_nothing_is_larger_than_a_chunk() -> None:
    """But for the head's gradient, which is added up and scaled in place, and that of one chunk."""
    vocabulary = 1000
    chunk_elements = 4000
    hidden = torch.randn(60, WIDTH, requires_grad=True)
    head = nn.Linear(WIDTH, vocabulary)
    with _Sizes() as sizes:
        loss, _ = token_loss(hidden, head, torch.arange(60), chunk_elements=chunk_elements)
        loss.backward()
    as_large_as_the_head = {name for name, size in sizes.largest.items() if size > chunk_elements}
    assert as_large_as_the_head == {"zeros_like", "mm", "add_", "mul_"}
    assert max(sizes.largest.values()) == head.weight.numel()


def test_autocast() -> None:
    """Logits in bfloat16, the loss in float32, and the head's gradient added up in its own dtype."""
    (hidden, labels) = inputs(torch.float32)
    head = nn.Linear(WIDTH, VOCABULARY)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = with_gradients(token_loss, hidden, head, labels, chunk_elements=CHUNK)
        expected = with_gradients(
            lambda h, m, y: of_all_logits(h, lambda x: m(x).float(), y), hidden, head, labels
        )
    assert {each.dtype for each in (actual[0], *actual[2:])} == {torch.float32}
    assert relative_error(actual[0], expected[0]) <= 1e-6
    assert deviation(actual[2:], expected[2:]) <= 0.01


def test_autocast_caches_nothing_without_a_gradient() -> None:
    """A head that is used again in the same context gets the gradient of that use too."""
    (hidden, labels) = inputs(torch.float32)
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first, _ = token_loss(hidden, head, labels, chunk_elements=CHUNK)
        again = head(hidden).float().square().sum()
        (actual,) = torch.autograd.grad(first + again, head.weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(head(hidden).flatten(0, 1).float(), labels.flatten(), reduction="sum")
        (expected,) = torch.autograd.grad(loss + head(hidden).float().square().sum(), head.weight)
    assert relative_error(actual, expected) <= 0.01


def test_half_precision_gradients_do_not_drown() -> None:
    """Thousands of chunks add up as precisely as one does, and a large count upstream is not rounded."""
    hidden = torch.randn(1000, WIDTH, dtype=torch.bfloat16)
    labels = torch.randint(VOCABULARY, (1000,))
    head = nn.Linear(WIDTH, VOCABULARY, bias=False).bfloat16()
    wide = nn.Linear(WIDTH, VOCABULARY, bias=False)
    wide.weight.data = head.weight.data.float()
    (expected,) = torch.autograd.grad(of_all_logits(hidden.float(), wide, labels)[0] * 1001, wide.weight)
    loss, _ = token_loss(hidden, head, labels, chunk_elements=1)
    assert loss.dtype == torch.float32
    (actual,) = torch.autograd.grad(loss * 1001, head.weight)
    assert relative_error(actual, expected) <= 2**-7


@pytest.mark.parametrize("compiled", ["head", "method"])
def test_compiled(compiled: str) -> None:
    (hidden, labels) = inputs()
    head = nn.Linear(WIDTH, VOCABULARY).double()
    called: Any = head

    def step(hidden: Tensor, labels: Tensor) -> Tensor:
        return token_loss(hidden.tanh(), called, labels, chunk_elements=CHUNK)[0] * 2

    expected = torch.autograd.grad(step(hidden, labels), [hidden, *head.parameters()])
    if compiled == "head":
        called = torch.compile(head, backend="aot_eager")
    else:
        head.compile(backend="aot_eager")
    actual = torch.autograd.grad(step(hidden, labels), [hidden, *head.parameters()])
    assert deviation(list(actual), list(expected)) <= TOLERANCE


def test_what_is_refused() -> None:
    """Shapes, a second backward, a gradient penalty (which would be a constant), and hooks that chunks would run."""
    (hidden, labels) = inputs()
    head = nn.Linear(WIDTH, VOCABULARY).double()
    with pytest.raises(ValueError, match=r"hidden \[3, 6, 7\] must be \[\.\.\., s, d\] for labels \[3, 5\]"):
        token_loss(hidden, head, labels[:, 1:])
    with pytest.raises(ValueError, match="chunk_elements must be at least 1, got 0"):
        token_loss(hidden, head, labels, chunk_elements=0)
    with pytest.raises(ValueError, match="label_shift must be at least 0, got -1"):
        token_loss(hidden, head, labels, label_shift=-1)
    loss, _ = token_loss(hidden, head, labels)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, head.weight, create_graph=True)
    loss.backward(retain_graph=True)  # what was refused has used nothing up
    with pytest.raises(RuntimeError, match="backpropagated once"):
        loss.backward()
    head.bias.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(ValueError, match=r"A parameter \[11\] of the head has a gradient hook"):
        token_loss(hidden, head, labels)
    assert "forward" not in vars(head)


# --- Trained by the strategy


class TiedDecoder(TinyDecoder):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.head.weight = self.embedding.weight


class InChunks(ModelModule):
    """Trains a decoder on the sum of its token losses."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        hidden = self.model.embedding(batch["input_ids"])
        for block in self.model.blocks:
            hidden = block(hidden)
        options = {
            name: hidden.new_tensor(o.tolist()) if isinstance(o, Tensor) else o
            for name, o in self.options.items()
        }
        loss, count = token_loss(self.model.norm(hidden), self.model.head, batch["labels"], **options)
        return {"loss": loss, "num_label_tokens": count}

    options: Mapping[str, Any] = {"chunk_elements": CHUNK, "weight": CLASS_WEIGHTS, "label_smoothing": 0.1}


def is_unit(module: nn.Module) -> bool:
    return isinstance(module, Block) or (isinstance(module, nn.Linear) and module.out_features == VOCABULARY)


CASE = Case(seed=41, telling="labels", num_batches=5, gap="rank")
HEADS: dict[str, tuple[type[TinyDecoder], dict[str, Any]]] = {
    "in_the_root": (TinyDecoder, {}),
    "a_unit": (TinyDecoder, {"auto_wrap_policy": is_unit}),
    "tied": (TiedDecoder, {}),
}
ENGINES = {name: STRATEGIES[name] for name in ("kept", "resharded", "ddp")}


def fit_decoder(head: str, options: dict[str, Any], case: Case = CASE) -> dict[str, Tensor]:
    make_model, more = HEADS[head]
    module = InChunks(make_model(CASE.seed).double())
    differ_by_rank(module)
    if "data_parallel" in options:
        more = {}
    strategy = AutomodelStrategy(loss_reduction="sum", **options, **more)
    make_trainer(strategy, accumulate_grad_batches=2).fit(module, loader(case))
    return full_weights(module.model)


def weighted_sums(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Of all logits, with the options of `InChunks`."""
    logits = model(batch["input_ids"])
    options = {"weight": CLASS_WEIGHTS, "label_smoothing": 0.1}
    return of_all_logits(logits, nn.Identity(), batch["labels"], **options)


@pytest.mark.parametrize("options", by_default(ENGINES, "resharded"))
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.every_case
def test_trained(pool2: RankPool, head: str, options: dict[str, Any]) -> None:
    """One rank has no label in any micro-batch."""
    model = HEADS[head][0](CASE.seed).double()
    expected = plain_weights(model, 2, CASE, sums=weighted_sums)
    assert_exact(pool2.run(fit_decoder, head, options), expected)


def gathers_of_a_step(wraps_head: bool, chunked: bool) -> int:
    """All-gathers of a forward and a backward, many chunks long, of a head that is gathered for each of them."""
    model = TinyDecoder(CASE.seed).double()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if wraps_head:
        fully_shard(model.head, mesh=mesh)
    hidden, labels = inputs()
    fully_shard(model, mesh=mesh)
    model.forward = lambda: (token_loss if chunked else of_all_logits)(hidden, model.head, labels, **more)[0]
    more = {"chunk_elements": 1} if chunked else {}
    with OpCounts() as seen:
        model().backward()
    return seen.ops["_allgather_base_"]


@pytest.mark.parametrize("wraps_head", [False, True])
def test_gathers_as_one_call_does(pool2: RankPool, wraps_head: bool) -> None:
    """A unit of its own is gathered for the forward and for the backward, the root once."""
    for chunked in (False, True):
        assert pool2.run(gathers_of_a_step, wraps_head, chunked) == [3 if wraps_head else 1] * 2


def output_dtype_error() -> str:
    head = nn.Linear(WIDTH, VOCABULARY).double()
    policy = MixedPrecisionPolicy(output_dtype=torch.bfloat16)
    fully_shard(head, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=policy)
    hidden, labels = inputs()
    with pytest.raises(ValueError, match="casts its output") as raised:
        token_loss(hidden, head, labels)
    return str(raised.value)


def test_an_output_in_half_precision_is_refused(pool2: RankPool) -> None:
    """A sum of thousands of losses has three digits in bfloat16."""
    for message in pool2.run(output_dtype_error):
        assert message.startswith(
            "The head casts its output to torch.bfloat16, too coarse for a sum of losses"
        )


# --- Tensor parallelism


PLANS: dict[str, ParallelStyle] = {
    "sharded": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    "sharded_local": ColwiseParallel(),
    "gathered": ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel(input_layouts=Replicate()),
}


def tensor_parallel_loss(plan: str, options: dict[str, Any]) -> list[Tensor]:
    """Loss, count and gradients, those of the head gathered; peers have the same data."""
    hidden, labels = inputs(ignore_index=options.get("ignore_index", -100))
    head = nn.Linear(WIDTH, VOCABULARY).double()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor_parallel",))
    parallelize_module(head, mesh, PLANS[plan])
    found = with_gradients(token_loss, hidden, head, labels, chunk_elements=CHUNK, **options)
    return [full(tensor) for tensor in found]


@pytest.mark.parametrize("plan", PLANS)
def test_tensor_parallel(pool2: RankPool, plan: str) -> None:
    """Whatever the plan hands back, over shards of 6 and 5 classes."""
    torch.manual_seed(0)
    options = OPTIONS["all"]
    hidden, labels = inputs(ignore_index=options.get("ignore_index", -100))
    head = nn.Linear(WIDTH, VOCABULARY).double()
    expected = with_gradients(of_all_logits, hidden, head, labels, **options)
    for actual in pool2.run(tensor_parallel_loss, plan, options):
        assert deviation(actual, expected) <= TOLERANCE
