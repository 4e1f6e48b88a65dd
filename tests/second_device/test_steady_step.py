"""In the steady state of a fit the host waits for nothing, but for what is named here.

`-m "sweep or not sweep" --support-table docs/support.md` writes the table.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.second_device.steady import ACCUMULATE, FIRST, LAST, STEADY, STEADY_LAYOUTS, Waits, measure

COMMAND = (
    'python -m pytest tests/second_device/test_steady_step.py -m "sweep or not sweep" --support-table docs/support.md'
)
BY_DEFAULT = {
    ("FSDP2", "activations in host memory"),
    ("DDP", "norm clipped and tracked"),
    ("FSDP2", "non-finite check"),
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
        "Gradients that are on the host are divided there: the number of label tokens comes to them, once a step.",
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
]
"""What may wait: layout, feature, what and where, and why."""

Table = dict[tuple[str, str], Waits | str]


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """What was measured; with --support-table, it is written at the end."""
    found: Table = {}
    yield found
    if (path := request.config.getoption("--support-table")) and found:
        written = "<!-- waits -->\n" + as_markdown(found) + "<!-- /waits -->"
        page = Path(path).read_text()
        Path(path).write_text(re.sub(r"<!-- waits -->.*<!-- /waits -->", lambda _: written, page, flags=re.DOTALL))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("layout", "feature"),
    [
        pytest.param(layout, feature, marks=[] if (layout, feature) in BY_DEFAULT else [pytest.mark.sweep])
        for layout in STEADY_LAYOUTS
        for feature in STEADY
    ],
)
def test_the_host_waits_for_nothing(request: pytest.FixtureRequest, layout: str, feature: str, table: Table) -> None:
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
        if feature == "non-finite check":
            assert sum(count for (what, _), count in each.waits.items() if what == "item") == NUM_STEPS


def _named(layout: str, feature: str) -> list[tuple[int, str]]:
    """Numbers of the notes that fit, and what they allow."""
    return [
        (number, site)
        for number, (layouts, features, site, _) in enumerate(NAMED, 1)
        if re.search(layouts, layout) and re.search(features, feature)
    ]


def as_markdown(found: Table) -> str:
    """Features down, layouts across: waits of rank 0 a micro-batch, with the notes that name them."""
    lines = [
        f"{datetime.date.today()}, torch {torch.__version__}, written by `{COMMAND}`: how often the host waits for the"
        f" device, a micro-batch, in micro-batches {FIRST} to {LAST - 1} of a fit that accumulates {ACCUMULATE}, on the"
        " second device of `tests/second_device`, which is a CPU's memory behind the interface of an accelerator."
        " Copies from pageable memory: those of the batch alone.",
        "",
        f"|  | {' | '.join(STEADY_LAYOUTS)} |",
        "| --- " * (len(STEADY_LAYOUTS) + 1) + "|",
    ]
    for feature in STEADY:
        cells = [_cell(layout, feature, found.get((layout, feature))) for layout in STEADY_LAYOUTS]
        lines.append(f"| {feature} | {' | '.join(cells)} |")
    notes = [f"{number}. {note}" for number, (_, _, _, note) in enumerate(NAMED, 1)]
    return "\n".join([*lines, "", *notes]) + "\n"


def _cell(layout: str, feature: str, found: Waits | str | None) -> str:
    if not isinstance(found, Waits):
        return "not selected" if found is None else "refused"
    if not found.waits:
        return "0"
    sites = [f"{what} at {line}" for what, line in found.waits]
    numbers = [str(number) for number, pattern in _named(layout, feature) if any(re.search(pattern, s) for s in sites)]
    return f"{sum(found.waits.values()) / (LAST - FIRST):.3g} ({', '.join(numbers)})"
