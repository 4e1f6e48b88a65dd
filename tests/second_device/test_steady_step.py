"""In the steady state of a fit the host waits for nothing, but for what is named here, and launches few kernels.

`-m "sweep or not sweep" --support-table benchmarks/results/support_cpu2.md` writes the table of
waits there, and a record of kernels.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_automodel import AutomodelStrategy, token_loss
from tests.markdown import merged_table, write_record, write_section
from tests.trainer.cases import Case
from tests.trainer.exactness import WIDTH, Batch, TinyDecoder
from tests.trainer.runs import loader, make_trainer, sampled
from tests.trainer.support import FEATURES, LAYOUTS, Feature, SupportModule, decoder

ACCUMULATE = 2
FIRST = 2 * ACCUMULATE
LAST = 4 * ACCUMULATE
"""The measured micro-batches: two windows, after DDP has rebuilt its buckets."""


class UnusedLayers(TinyDecoder):
    """One layer is used by the first rank (with its `peers`) alone, and another one by none."""

    peers = 1

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = super().forward(input_ids)
        return logits * self.extra(logits) if dist.get_rank() < self.peers else logits


class Scaled(TinyDecoder):
    """Has a parameter that FSDP2 cannot shard."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * self.scale


def add_unused_layers(model: nn.Module) -> None:
    """Make the decoder one of `UnusedLayers`."""
    model.__class__ = UnusedLayers
    model.extra = nn.Linear(model.head.out_features, 1).double()
    model.unused = nn.Linear(WIDTH, WIDTH).double()


def add_scale(model: nn.Module) -> None:
    """Make the decoder `Scaled`."""
    model.__class__ = Scaled
    model.scale = nn.Parameter(torch.ones((), dtype=torch.float64))


class TokenLossModule(SupportModule):
    """Computes its loss in chunks."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        model = self.model
        hidden = model.embedding(batch["input_ids"])
        for block in model.blocks:
            hidden = block(hidden)
        loss, count = token_loss(model.norm(hidden), model.head, batch["labels"])
        return {"loss": loss / count.clamp(min=1), "num_label_tokens": count}


MORE = {
    "batches drawn ahead of unequal data": Feature({"uneven_inputs": "pad"}),
    "norm clipped and tracked": Feature({"track_grad_norm": True}, trainer={"gradient_clip_val": 0.05}),
    "non-finite check": Feature({"error_if_nonfinite": True}),
    "bf16-mixed": Feature(trainer={"precision": "bf16-mixed", "gradient_clip_val": 0.05}),
    "16-mixed": Feature(trainer={"precision": "16-mixed", "gradient_clip_val": 0.05}),
    "bf16-true": Feature(trainer={"precision": "bf16-true", "gradient_clip_val": 0.05}),
    "token_loss": Feature(),
    "layers that ranks leave unused": Feature(prepare=add_unused_layers),
    "a scalar parameter": Feature(prepare=add_scale),
    "CPU offload, clip by norm": Feature({"cpu_offload": True}, trainer={"gradient_clip_val": 0.05}),
}
MODULES = {"token_loss": TokenLossModule}
CHOSEN = (
    "accumulation, short window",
    "clip by norm",
    "clip by value",
    "manual optimization",
    "parameters kept gathered",
    "parameters resharded",
    "reduction each micro-batch",
    "all-reduce once",
    "no reshard after forward",
    "CPU offload",
    "activation checkpointing",
    "activations in host memory",
    "gathers two units ahead",
    "frozen parameters",
    "window counted ahead",
)
STEADY = {**{name: FEATURES[name] for name in CHOSEN}, **MORE}
STEADY_LAYOUTS = {
    "FSDP2": LAYOUTS["FSDP2"],
    "DDP": LAYOUTS["DDP"],
    "TP": dataclasses.replace(LAYOUTS["TP x FSDP2"], num_ranks=1),
    "CP x FSDP2": LAYOUTS["CP x FSDP2"],
    "HSDP": LAYOUTS["HSDP"],
}


@dataclass(frozen=True)
class Waits:
    """Of one rank, in the measured micro-batches: how often, by what it was and the line that asked for it.

    `launched` has kernels by launcher, line and operator, see `device.py`.
    """

    waits: dict[tuple[str, str], int]
    pageable: dict[tuple[str, str], int]
    launched: dict[tuple[str, str, str], int]


class Recorder(Callback):
    """Records from the start of micro-batch `FIRST` to the end of micro-batch `LAST - 1`."""

    def __init__(self) -> None:
        self.found: Counter[tuple[str, str]] = Counter()
        self.launched: Counter[tuple[str, str, str]] = Counter()
        self._recording = ExitStack()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        from tests.second_device import device

        if batch_idx == FIRST:
            self.found = self._recording.enter_context(device.recorded_waits())
            self.launched = self._recording.enter_context(device.recorded_kernels())

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == LAST - 1:
            self._recording.close()


def measure(layout_name: str, feature: str) -> Waits | str:
    """Runs on every rank: what was recorded, or the message with which the layout refuses the feature."""
    from tests.second_device import device

    layout = STEADY_LAYOUTS[layout_name]
    switched_on = STEADY[feature]
    case = Case(seed=7, telling="labels", num_batches=LAST + 1, num_ranks=layout.num_ranks, gap="none")
    make_module = MODULES.get(feature, SupportModule)
    module = make_module(decoder(switched_on, layout).float(), switched_on, layout)
    recorder = Recorder()
    module.model.peers = layout.peers
    kwargs = dict(layout.options)
    if feature == "layers that ranks leave unused" and kwargs.get("data_parallel") == "ddp":
        kwargs["ddp_kwargs"] = {"find_unused_parameters": True}
    options = {"accumulate_grad_batches": ACCUMULATE, "callbacks": [recorder]}
    try:
        trainer = make_trainer(
            AutomodelStrategy(**kwargs, **switched_on.options), **options | switched_on.trainer
        )
        trainer.fit(module, loader(case, layout.peers))
    except ValueError as error:
        return str(error)
    found = recorder.found.items()
    return Waits(
        {key: count for key, count in found if key[0] != device.PAGEABLE},
        {key: count for key, count in found if key[0] == device.PAGEABLE},
        dict(recorder.launched),
    )


PACKAGE = "lightning_automodel"
COMMAND = (
    'python -m pytest tests/second_device/test_steady_step.py -m "sweep or not sweep"'
    " --support-table benchmarks/results/support_cpu2.md"
)
BY_DEFAULT = {
    ("DDP", "norm clipped and tracked"),
    ("FSDP2", "non-finite check"),
    ("FSDP2", "bf16-true"),
    ("FSDP2", "token_loss"),
    ("FSDP2", "layers that ranks leave unused"),
    ("FSDP2", "a scalar parameter"),
    ("FSDP2", "CPU offload, clip by norm"),
}
NUM_STEPS = (LAST - FIRST) // ACCUMULATE
BATCH_TO_DEVICE = "utilities/apply_func.py:"  # Lightning's
NAMED = [
    (
        ".*",
        "non-finite check",
        r"item at gradients/rescale_clip\.py:",
        "`error_if_nonfinite` has the host read the norm, once a step.",
    ),
    (
        "^(?!DDP)",
        "CPU offload",
        r"event\.synchronize at _fully_shard/_fsdp_param_group\.py:",
        "FSDP2 waits for gradients on their way to the host, once for each parameter and step.",
    ),
    (
        "^(?!DDP)",
        "CPU offload",
        r"copy to the host at gradients/rescale_clip\.py:",
        "Gradients that are on the host are divided and clipped there: the number of label tokens comes to"
        " them, and with clipping the norm, once a step each.",
    ),
    (
        "TP",
        "CPU offload",
        r"copy to the host at _fully_shard/_fsdp_collectives\.py:",
        "FSDP2 copies gradients of tensor-parallel parameters to the host without pinned memory.",
    ),
    (
        "TP",
        ".*",
        r"_index_put_impl_ at ",
        "torch's vocabulary-parallel embedding writes zero through a mask; CUDA does not wait for that.",
    ),
    (
        "DDP",
        "layers that ranks leave unused",
        "copy to the host at a thread of torch's",
        "DDP reads which parameters some rank has used (`find_unused_parameters`), once a step.",
    ),
]
"""What may wait: layout, feature, what and where, and why."""

Table = dict[tuple[str, str], Waits | str]


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """What was measured; with --support-table, it is written at the end."""
    found: Table = {}
    yield found
    if (path := request.config.getoption("--support-table")) and found:
        notes = "\n".join(f"{number}. {note}" for number, (_, _, _, note) in enumerate(NAMED, 1))
        write_section(Path(path), "waits", f"{as_markdown(found, WAITS, _cell)}\n{notes}\n")
        write_record("kernels", f"# Kernels of a window\n\n{as_markdown(found, KERNELS, _kernel_cell)}")


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("layout", "feature"), sampled(itertools.product(STEADY_LAYOUTS, STEADY), BY_DEFAULT)
)
def test_the_host_waits_for_nothing(
    request: pytest.FixtureRequest, layout: str, feature: str, table: Table
) -> None:
    """But for what is named, and it copies nothing from pageable memory but the batch. What is named does wait."""
    pool = request.getfixturevalue(f"pool{STEADY_LAYOUTS[layout].world_size}")
    found = pool.run(measure, layout, feature, timeout_s=120)
    table[layout, feature] = found[0]
    for each in found:
        if isinstance(each, str):
            assert "does not work with" in each
            continue
        sites = {f"{what} at {line}" for what, line in each.waits}
        named = [pattern for _, pattern in _named(layout, feature)]
        assert {site for site in sites if not any(re.search(pattern, site) for pattern in named)} == set()
        assert {line for _, line in each.pageable if not line.startswith(BATCH_TO_DEVICE)} == set()
        on_lists = sum(
            count for (who, _, name), count in each.launched.items() if who == PACKAGE and is_on_lists(name)
        )
        assert on_lists / NUM_STEPS <= most_on_lists(feature)
        if feature == "non-finite check":
            assert sum(count for (what, _), count in each.waits.items() if what == "item") == NUM_STEPS


def is_on_lists(operator: str) -> bool:
    """Whether an operator takes all gradients at once."""
    return operator.startswith("_foreach_")


def most_on_lists(feature: str) -> int:
    """Kernels on lists of gradients that this package may launch in a window of one dtype.

    Products in half precision are not on lists.
    """
    trainer = STEADY[feature].trainer
    options = STEADY[feature].options
    clips_values = trainer.get("gradient_clip_algorithm") == "value"
    clips_norm = "gradient_clip_val" in trainer and not clips_values
    takes_norm = clips_norm or options.get("error_if_nonfinite", False)
    product = 0 if trainer.get("precision") == "bf16-true" else 1
    return product * (1 + clips_norm) + takes_norm + 2 * clips_values


def _named(layout: str, feature: str) -> list[tuple[int, str]]:
    """Numbers of the notes that fit, and what they allow."""
    return [
        (number, site)
        for number, (layouts, features, site, _) in enumerate(NAMED, 1)
        if re.search(layouts, layout) and re.search(features, feature)
    ]


WAITS = (
    f"how often the host waits for the second device in a micro-batch, over micro-batches {FIRST} to"
    f" {LAST - 1} of a fit that accumulates {ACCUMULATE}. The batch alone is copied from pageable memory."
)
KERNELS = (
    f"operators that launch a kernel on rank 0, in a window of {ACCUMULATE} micro-batches, by who calls them:"
    " this package (of these on lists of gradients) + FSDP2 + the optimizer. The model's own are left out."
)


def as_markdown(found: Table, intro: str, cell: Callable[[str, str, Waits | str | None], str]) -> str:
    """Of rank 0: features down, layouts across."""
    rows = {
        feature: [cell(layout, feature, found.get((layout, feature))) for layout in STEADY_LAYOUTS]
        for feature in STEADY
    }
    lines = [
        f"{datetime.date.today()}, torch {torch.__version__}, written by `{COMMAND}`: {intro}",
        "",
        f"Features: {'; '.join(STEADY)}.",
        "",
        *merged_table(["feature", *STEADY_LAYOUTS], rows, "features"),
    ]
    return "\n".join(lines) + "\n"


def _kernel_cell(layout: str, feature: str, found: Waits | str | None) -> str:
    if not isinstance(found, Waits):
        return "not selected" if found is None else "refused"
    numbers: Counter[str] = Counter()
    for (launcher, _, operator), count in found.launched.items():
        numbers[launcher] += count
        numbers["on lists"] += count if launcher == PACKAGE and is_on_lists(operator) else 0
    names = (PACKAGE, "on lists", "FSDP2", "optimizer")
    own, on_lists, fsdp, optimizer = (f"{numbers[name] / NUM_STEPS:.3g}" for name in names)
    return f"{own} ({on_lists}) + {fsdp} + {optimizer}"


def _cell(layout: str, feature: str, found: Waits | str | None) -> str:
    if not isinstance(found, Waits):
        return "not selected" if found is None else "refused"
    if not found.waits:
        return "0"
    sites = [f"{what} at {line}" for what, line in found.waits]
    numbers = [
        str(number)
        for number, pattern in _named(layout, feature)
        if any(re.search(pattern, s) for s in sites)
    ]
    return f"{sum(found.waits.values()) / (LAST - FIRST):.3g} ({', '.join(numbers)})"
