"""In the steady state of a fit the host waits for nothing, but for what is named here, and launches few kernels.

`-m "sweep or not sweep" --support-table benchmarks/results/support_cpu2.md` writes the table of
waits there, and a record of kernels.
"""

from __future__ import annotations

import datetime
import re
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.markdown import merged_table, write_record, write_section
from tests.second_device.steady import ACCUMULATE, FIRST, LAST, STEADY, STEADY_LAYOUTS, Waits, measure

PACKAGE = "lightning_automodel"
COMMAND = (
    'python -m pytest tests/second_device/test_steady_step.py -m "sweep or not sweep"'
    " --support-table benchmarks/results/support_cpu2.md"
)
BY_DEFAULT = {
    ("FSDP2", "activations in host memory"),
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
        write_section(Path(path), "waits", as_markdown(found))
        write_record("kernels", kernels_as_markdown(found))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("layout", "feature"),
    [
        pytest.param(layout, feature, marks=[] if (layout, feature) in BY_DEFAULT else [pytest.mark.sweep])
        for layout in STEADY_LAYOUTS
        for feature in STEADY
    ],
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

    One product at the end of a window; where they are clipped, one more with a norm, or two bounds. Products
    in half precision are not on lists.
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


def as_markdown(found: Table) -> str:
    """Waits of rank 0 a micro-batch, with the notes that name them."""
    intro = (
        f"how often the host waits for the second device in a micro-batch, over micro-batches {FIRST} to"
        f" {LAST - 1} of a fit that accumulates {ACCUMULATE}. The batch alone is copied from pageable memory."
    )
    cells = {key: _cell(*key, found.get(key)) for key in product(STEADY_LAYOUTS, STEADY)}
    notes = [f"{number}. {note}" for number, (_, _, _, note) in enumerate(NAMED, 1)]
    return "\n".join([*_table(intro, cells), "", *notes]) + "\n"


def kernels_as_markdown(found: Table) -> str:
    """Kernels a window that this package, FSDP2 and the optimizer launch on rank 0."""
    intro = (
        f"operators that launch a kernel on rank 0, in a window of {ACCUMULATE} micro-batches, by who calls"
        " them: this package (of these on lists of gradients) + FSDP2 + the optimizer. The model's own are"
        " left out."
    )
    cells = {key: _kernel_cell(found.get(key)) for key in product(STEADY_LAYOUTS, STEADY)}
    return "\n".join(["# Kernels of a window", "", *_table(intro, cells)]) + "\n"


def _table(intro: str, cells: dict[tuple[str, str], str]) -> list[str]:
    """Features down, layouts across."""
    rows = {feature: [cells[layout, feature] for layout in STEADY_LAYOUTS] for feature in STEADY}
    return [
        f"{datetime.date.today()}, torch {torch.__version__}, written by `{COMMAND}`: {intro}",
        "",
        f"Features: {'; '.join(STEADY)}.",
        "",
        *merged_table(["feature", *STEADY_LAYOUTS], rows, "features"),
    ]


def _kernel_cell(found: Waits | str | None) -> str:
    if not isinstance(found, Waits):
        return "not selected" if found is None else "refused"
    numbers: Counter[str] = Counter()
    for (launcher, _, operator), count in found.launched.items():
        numbers[launcher] += count
        numbers["on lists"] += count if launcher == PACKAGE and is_on_lists(operator) else 0
    own, on_lists, fsdp, optimizer = (
        f"{numbers[name] / NUM_STEPS:.3g}" for name in (PACKAGE, "on lists", "FSDP2", "optimizer")
    )
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
