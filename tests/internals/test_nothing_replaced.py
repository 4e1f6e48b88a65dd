"""Nothing is replaced on classes and modules of others, and objects of others get back what they had."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import pytest
from torch import nn

from tests.internals import replaced_script
from tests.processes import forked

pytestmark = pytest.mark.timeout(600)
DOCUMENTED = {"lightning.pytorch.core.saving.pl_load"}
"""What the package replaces for good, when it is imported: `load_from_checkpoint` reads directories too."""
BY_THEMSELVES = {
    # torch, for each class of optimizers, when the first one is made: profilers see its steps.
    "torch.optim.adamw.AdamW.step",
    # torch keeps a class that it imports late (until 2.14, and since 2.15).
    "torch._opaque_base._FakeScriptObject_cls",
    "torch._custom_class_base._FakeScriptObject_cls",
    # DDP, while it is in its forward.
    "torch.nn.parallel.distributed.DistributedDataParallel._active_ddp_module",
    # Lightning, while it looks at data loaders. It gives back what a class inherited as the class's own.
    "torch.utils.data.dataloader.DataLoader.__delattr__",
    "torch.utils.data.sampler.BatchSampler.__delattr__",
    "torch.utils.data.sampler.BatchSampler.__setattr__",
}
"""What a fit without the package changes as well."""
MOMENTS = {
    "training_step",
    "on_before_optimizer_step",
    "optimizer_step",
    "on_train_batch_end",
    "validation_step",
    "after the fit",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What differs in a process that had not imported the package before, by moment."""
    folder = tmp_path_factory.mktemp("nothing_replaced")
    process = forked().Process(target=replaced_script.main, args=(folder,))
    process.start()
    process.join(500)
    assert process.exitcode == 0
    return json.loads((folder / "found.json").read_text())


def test_import_replaces_one_function(found: dict[str, Any]) -> None:
    assert set(found["at_import"]) == DOCUMENTED


@pytest.mark.parametrize("kind", replaced_script.FITS)
def test_fits_replace_nothing(found: dict[str, Any], kind: str) -> None:
    """Neither while user code runs, nor afterwards, on either rank."""
    assert len(found["ranks"]) == replaced_script.NUM_RANKS
    for by_kind in found["ranks"]:
        looks = by_kind[kind]["looks"]
        assert set(looks) == MOMENTS
        different = {name for names in looks.values() for name in names}
        replaced = sorted(different - BY_THEMSELVES)
        assert replaced == sorted(DOCUMENTED), f"{len(replaced)} attributes are replaced: {replaced}"


NOT_OURS = {"__slotnames__", "log", "log_dict", "step"}
"""What copying sets, Lightning for its callbacks, and torch for the class of each optimizer."""
STEPS = {"forward", "training_step", "validation_step", "test_step", "predict_step"}
STAYS: dict[str, set[tuple[str, str]]] = {
    "automatic": {("Watched", name) for name in STEPS} | {("TinyDecoder", "forward")},
    "manual": set(),
    # Lightning runs steps as `forward`, and gives that back as an attribute of the module, under its own DDP too.
    "ddp": {("Watched", "forward")},
}


@pytest.mark.parametrize("kind", STAYS)
def test_what_stays_is_listed(found: dict[str, Any], kind: str) -> None:
    """Every other attribute of the objects that a fit and a validation touch is the same object afterwards."""
    for by_kind in found["ranks"]:
        left = by_kind[kind]
        assert left["num_patched"] > 20
        assert left["patched"] == left["filters"] == []
        others = {(target, name) for target, name in left["others"] if name not in NOT_OURS}
        assert others == STAYS[kind], sorted(others ^ STAYS[kind])
        assert left["hooks"] == [0, 1]  # the module's own


def test_what_is_replaced_is_found() -> None:
    """What a class or module has as its own: replaced, hidden, removed."""
    before = replaced_script.snapshot()
    with (
        mock.patch.object(nn.Linear, "forward"),
        mock.patch.object(nn.Linear, "half", create=True),
        mock.patch("torch.randn_like"),
        mock.patch.object(nn.Parameter, "data", property()),
    ):
        assert replaced_script.differing(before) == [
            "torch.nn.modules.linear.Linear.forward",
            "torch.nn.modules.linear.Linear.half",
            "torch.nn.parameter.Parameter.data",
            "torch.randn_like",
        ]
    assert replaced_script.differing(before) == []
