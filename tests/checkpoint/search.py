"""`python -m tests.checkpoint.search --cases 300 --seed 7`: search for a state that plain Lightning brings back alone.

Draws a module with buffers and extra states, and an optimizer with trees of tensors and values in the places
where optimizers keep them; saves it in one form and resumes in another, and compares all state with what
plain Lightning, one process, has when it saves the same.
"""

from __future__ import annotations

import random
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_automodel import AutomodelStrategy, spread_experts
from tests import searching
from tests.checkpoint.checkpoints import FORMS, AdamModule, are_equal, batches
from tests.rank_pool import RankError, RankPool
from tests.trainer.exactness import SILENT, full_weights
from tests.trainer.runs import CASE, make_trainer

Case = dict[str, Any]
Spec = tuple[Any, ...]

DTYPES = ("float64", "float32", "bfloat16", "int64", "bool")
KEYS = ("a", "a.b", "b", "step", "state", "param_groups", "params", "0", 0, 1, (1, "two"), "lightning")
VALUES = (0, 1.5, True, None, "text", float("inf"), b"bytes", 1 + 2j)
CLASSES: dict[str, type] = {"dict": dict, "ordered": OrderedDict, "list": list, "tuple": tuple}
SHAPES = ((), (1,), (3,), (2, 2), (0, 3), (7, 7), (11, 7), (7,))


def draw_tree(rng: random.Random, depth: int, leaves: tuple[str, ...]) -> Spec:
    """A tree as nested tuples, which print and pickle."""
    is_tree = depth and rng.random() < 0.6
    kind = rng.choice(["dict", "list", "tuple", "ordered"] if is_tree else leaves)
    if kind in ("dict", "ordered"):
        keys = rng.sample(KEYS, rng.randint(0, 3))
        return kind, tuple((key, draw_tree(rng, depth - 1, leaves)) for key in keys)
    if kind in ("list", "tuple"):
        return kind, tuple(draw_tree(rng, depth - 1, leaves) for _ in range(rng.randint(0, 3)))
    if kind == "tensor":
        return kind, rng.choice(DTYPES), rng.choice(SHAPES), rng.randint(0, 9)
    return (kind, rng.choice(VALUES)) if kind == "value" else (kind, rng.randint(0, 9))


def draw_case(seed: int, number: int) -> Case:
    rng = random.Random(f"{seed} {number}")
    in_state = ("tensor", "like", "like", "number")
    anywhere = ("tensor", "like", "value")
    # Apart, so that a number has the same other draws without it.
    spreads = random.Random(f"{seed} {number} spread")
    return {
        "spread": [spreads.random() < 0.3, spreads.random() < 0.3],  # as it saves, as it resumes
        "saving": rng.choice(list(FORMS)),
        "resuming": rng.choice(list(FORMS)),
        "groups": rng.randint(1, 2),
        "parameters": [(f"k.{i}", draw_tree(rng, 2, in_state)) for i in range(rng.randint(0, 3))],
        "keys": [(("other", i), draw_tree(rng, 2, ("tensor", "value"))) for i in range(rng.randint(0, 2))],
        "made": [(f"made.{i}", draw_tree(rng, 3, anywhere)) for i in range(rng.randint(0, 2))],
        "own": [(f"own.{i}", draw_tree(rng, 3, anywhere)) for i in range(rng.randint(0, 2))],
        "buffers": [("tensor", rng.choice(DTYPES), rng.choice(SHAPES), i) for i in range(rng.randint(0, 4))],
        "extra": [draw_tree(rng, 3, ("tensor", "value")) for _ in range(rng.randint(0, 2))],
    }


def build(spec: Spec, like: Tensor | None = None) -> Any:
    """The tree; a leaf ``like`` is sharded as that tensor is."""
    kind, content = spec[:2]
    if kind in ("dict", "ordered"):
        return CLASSES[kind]((key, build(each, like)) for key, each in content)
    if kind in ("list", "tuple"):
        return CLASSES[kind](build(each, like) for each in content)
    if kind == "tensor":
        _, dtype, shape, start = spec
        count = torch.Size(shape).numel()
        return (start + torch.arange(count)).view(shape).to(getattr(torch, dtype))
    if kind == "like":
        assert like is not None
        whole = (content + torch.arange(like.numel(), dtype=torch.float64)).view(like.shape)
        if isinstance(like, DTensor):
            return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
        return whole
    return content


class Drawn(torch.optim.SGD):
    """Fills its state as a case says; its weights do not depend on it."""

    def __init__(self, groups: Any, case: Case) -> None:
        super().__init__(groups, lr=0.1)
        self.case = case
        self.own: dict[str, Any] = {}

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for key, spec in self.case["keys"]:
            self.state[key] = build(spec)
        for group in self.param_groups:
            group.update({key: build(spec, group["params"][0].detach()) for key, spec in self.case["made"]})
            for parameter in group["params"]:
                state = {key: build(spec, parameter.detach()) for key, spec in self.case["parameters"]}
                self.state[parameter].update(state)
        first = self.param_groups[0]["params"][0].detach()
        self.own = {key: build(spec, first) for key, spec in self.case["own"]}
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self.own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.own = {key: value for key, value in state_dict.items() if key.startswith("own.")}
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


class HasExtra(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


class Stack(nn.Module):
    """The weights of some experts, whose gradients are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.arange(24, dtype=torch.float64).view(4, 3, 2))

    def forward(self) -> Tensor:
        local = self.weights.to_local() if isinstance(self.weights, DTensor) else self.weights
        return 0 * local.sum()


class DrawnModule(AdamModule):
    """What a case draws; fresh ones have zeros and nothing."""

    def __init__(self, case: Case, is_fresh: bool) -> None:
        super().__init__(CASE.seed + 2 * is_fresh)
        self.case = case
        for index, spec in enumerate(case["buffers"]):
            value = build(spec)
            self.register_buffer(f"buffer_{index}", torch.zeros_like(value) if is_fresh else value)
        if any(case["spread"]):
            self.model.stack = Stack()
        self.extra = nn.ModuleList(HasExtra(None if is_fresh else build(spec)) for spec in case["extra"])

    def configure_model(self) -> None:
        mesh = self.device_mesh  # None in one process
        if mesh is not None and "expert_parallel" in mesh.mesh_dim_names:
            spread_experts(self.model.stack, mesh["expert_parallel"])

    def forward(self, batch: Any) -> Tensor:
        loss = super().forward(batch)
        return loss + self.model.stack() if any(self.case["spread"]) else loss

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        step = -(-len(parameters) // self.case["groups"])
        groups = [{"params": parameters[start : start + step]} for start in range(0, len(parameters), step)]
        return Drawn(groups, self.case)


def described(value: Any, with_kind: bool) -> Any:
    """Plain data that is equal where types and contents are; whole tensors, and whether they were sharded."""
    if isinstance(value, Tensor):
        is_sharded = isinstance(value, DTensor)
        whole = value.full_tensor() if is_sharded else value
        values = "none" if whole.is_meta else str(whole.to_dense().tolist())
        dtype = f"{whole.dtype} {whole.layout}"
        return ["tensor", is_sharded and with_kind, dtype, list(whole.shape), values]
    if isinstance(value, Mapping):
        items = [[repr(key), described(each, with_kind)] for key, each in value.items()]
        return [type(value).__name__, items]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, [described(each, with_kind) for each in value]]
    return repr(value)


def state_of(trainer: Trainer, module: DrawnModule, with_kind: bool) -> dict[str, Any]:
    """All that was drawn. A collective where it is sharded."""
    state = trainer.optimizers[0].state_dict()
    optimizer: Any = trainer.optimizers[0]
    found: dict[str, Any] = {"own": optimizer.own, "state": state["state"]}
    found["groups"] = [
        {key: group[key] for key, _ in module.case["made"]} for group in state["param_groups"]
    ]
    found["buffers"] = dict(module.named_buffers())
    found["extra"] = [each.value for each in module.extra]
    return {key: described(value, with_kind) for key, value in found.items()}


def _fit(trainer: Trainer, module: DrawnModule, path: str | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, batches(), ckpt_path=path)


def options_of(case: Case) -> list[dict[str, Any]]:
    """Options of the strategy that saves, and of the one that resumes."""
    found = []
    for key, is_spread in zip(("saving", "resuming"), case["spread"], strict=True):
        options = FORMS[case[key]]
        can_spread = is_spread and options.get("data_parallel") != "ddp"
        found.append({**options, "expert_parallel_size": 2} if can_spread else options)
    return found


def save_and_resume(case: Case, path: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], bool]:
    """On ranks: state that was saved and that was resumed, with kinds; the latter without; and equal weights."""
    saving, resuming = (make_trainer(AutomodelStrategy(**options)) for options in options_of(case))
    saved = DrawnModule(case, is_fresh=False)
    resumed = DrawnModule(case, is_fresh=True)
    _fit(saving, saved, None)
    saving.save_checkpoint(path)
    _fit(resuming, resumed, path)
    is_equal = are_equal(full_weights(saved.model), full_weights(resumed.model))
    of_saved = state_of(saving, saved, True)
    of_resumed = state_of(resuming, resumed, True)
    return of_saved, of_resumed, state_of(resuming, resumed, False), is_equal


def plainly(case: Case) -> dict[str, Any]:
    """State that one process of plain Lightning would save."""
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, use_distributed_sampler=False, **SILENT)
    module = DrawnModule(case, is_fresh=False)
    _fit(trainer, module, None)
    return state_of(trainer, module, False)


def judge(pool: RankPool, case: Case) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            expected = plainly(case)
        except Exception as error:
            return f"plain Lightning: {type(error).__name__}: {error}"
        try:
            outcomes = pool.run(save_and_resume, case, f"{folder}/last.ckpt")
        except (RankError, TimeoutError) as error:
            return str(error)[-1500:]
    is_sharded = {key: "replicated" not in case[key] for key in ("saving", "resuming")}
    for of_saved, of_resumed, without_kinds, has_equal_weights in outcomes:
        if not has_equal_weights:
            return "weights differ"
        for part, value in expected.items():
            if without_kinds[part] != value:
                return f"{part} is\n{without_kinds[part]}\ninstead of\n{value}"
        # Of parameters; what else is sharded comes back whole.
        kinds = zip(sharded(of_saved["state"]), sharded(of_resumed["state"]), strict=True)
        if all(is_sharded.values()) and any(was and not now for was, now in kinds):
            return f"the state was\n{of_saved['state']}\nand is\n{of_resumed['state']}"
    return None


def sharded(value: Any) -> list[bool]:
    if not isinstance(value, list):
        return []
    if value[:1] == ["tensor"]:
        return [value[1]]
    return [found for each in value for found in sharded(each)]


if __name__ == "__main__":
    searching.main(draw_case, judge)
