"""Each error and warning says what to do, or docs/troubleshooting.md does; the page explains none that is gone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import lightning_automodel
from lightning_automodel.sharding.checks import _EXPLANATIONS

PACKAGE = Path(lightning_automodel.__file__).parent
PAGE = PACKAGE.parent / "docs" / "troubleshooting.md"
TELLS = ("Error", "Exception", "rank_zero_warn", "say_once", "log.warning", "log.error", "log.exception")
"""How a call's function ends whose texts are messages, however short they are."""
WORDS_OF_PROSE = 4
"""A text of so many words is a message wherever it stands: a helper or a constant may hold what is raised elsewhere."""
VALUE = "…"
VERBS = (
    "add apply begin build call change check choose collect combine compile compute configure count create end"
    " evaluate export freeze gather give import install keep leave let load log look make pad pass pip plan put"
    " register remove rename resume return run save say see set shard spread start step take use validate"
    " write"
)
NEXT_STEP = re.compile(
    rf"(?:^|[.:;,] (?:or )?|\bor )(?:{VERBS.replace(' ', '|')})\b"  # "...: pass data_parallel='fsdp2'"
    r"|\bmust\b|\bvalid (?:sizes )?are\b",
    re.IGNORECASE,
)
"""How a message tells the next step: a verb that opens a clause, or what a value must be."""
EXACTNESS = ("comparison", "counting", "recording", "replay", "report")
NOT_MESSAGES = {
    "checkpoint/__main__.py": "what the command's --help prints",
    "plan/__main__.py": "what the command prints",
    "callbacks/report_page.py": "texts of the report",
    **dict.fromkeys(
        [f"callbacks/exactness/{name}.py" for name in EXACTNESS],
        "parts of a verdict, which docs/is_my_training_exact.md explains",
    ),
    "AutomodelStrategy: … over …, precision …, gradients per …; trainer.strategy.describe() has the details.": (
        "what rank 0 says where all is well"
    ),
    "auto: manual optimization may step between two forwards of a step": "in describe()",
    "auto: an estimated … MiB … what … of the free memory of the rank with least leaves beside its optimizer"
    " state, and what else is kept (… MiB)": "in describe()",
    "No checkpoint was written at …: ….": "the beginning of messages that say what to do",
    "one rank reduces nothing": "in describe()",
    "ranks that parameters are sharded over": "a part of a message",
    "Slicing a flattened dim": "torch's own warning, which is filtered",
    "<…, which a shard has replaced>": "how it is printed",
    "You're resuming from a checkpoint that ended before the epoch ended": "Lightning's own warning, which is filtered",
    "auto: 1 on a CPU, where FSDP2 by itself waits for each all-gather, else 0": "in describe()",
    "Using DistributedSampler with the dataloaders": "a warning of Lightning's that is filtered",
    # Parts of messages whose whole is explained.
    "an import (…)": "of `lightning_automodel needs …`",
    "world size … and backend …": "of `give every rank the same WORLD_SIZE and backend`",
    "was told to save and requeue": "of `all ranks stop after this step`",
    "the number of label tokens": "of `must be finite`",
    "the num_label_tokens that … returned": "of `must be finite`",
    "per_token_loss=False (means of slices are not the mean of a batch)": "of `context_parallel_size=… does not work`",
    "count='samples' (a slice is not a sample)": "of `context_parallel_size=… does not work`",
    "… is … on rank 0 and … on rank …": "a part of messages that name what ranks must have alike",
    "… of … (group … of optimizer …)": "a part of `Ranks step with different options`",
    "the work of rank … in … …": "what others wait for, a part of `is missing at`",
    # Parts of messages whose rest says what to do.
    "… writes …": "the rest is a text of its own",
    "A backward reaches what was written …": "the rest is a text of its own",
    "some of its tensors are on the meta device": "of `the module in this process cannot hold the trained weights`",
    "in on_train_batch_start or on_train_batch_end, where module.parameters() are the sharded ones": "of `Write it`",
    "Ranks have ended one accumulation window in different batches, this rank in batch … of epoch …": (
        "a text follows, which does"
    ),
    "A hook of the transfer of a batch": "of `… raised StopIteration`",
    "the end of an evaluation": "a barrier's name",
}


def template(node: ast.AST) -> str | None:
    """A string or an f-string with ``…`` for each value; None for another expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = re.sub(r"%[sdg]|\{\w+\}", VALUE, node.value)
    elif isinstance(node, ast.JoinedStr):
        text = "".join(str(each.value) if isinstance(each, ast.Constant) else VALUE for each in node.values)
    else:
        return None
    return " ".join(text.replace("`", "").split())


def texts(node: ast.AST, is_told: bool = False) -> Iterator[tuple[str, int]]:
    """Messages below ``node``, with their lines: all texts of a call that raises or warns, elsewhere only prose."""
    if (text := template(node)) is not None:
        num_words = sum(any(map(str.isalpha, word)) for word in text.split())
        if num_words >= (1 if is_told and " " in text else WORDS_OF_PROSE):
            yield text, node.lineno  # type: ignore[attr-defined]
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".split"):
        return  # a table of names
    if isinstance(node, ast.Call):
        is_told = ast.unparse(node.func).endswith(TELLS)
    for child in ast.iter_child_nodes(node):
        yield from texts(child, is_told)


@cache
def messages() -> dict[str, str]:
    """Every message of the package, and the place of its text."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if name not in NOT_MESSAGES:
            found.update({text: f"{name}:{line}" for text, line in texts(ast.parse(path.read_text()))})
    return {
        text: place
        for text, place in found.items()
        if text not in _EXPLANATIONS and text.partition(". ")[0] not in NOT_MESSAGES
    }


def entries() -> dict[str, int]:
    """The messages that the page explains, with their lines: headings and items of lists that are nothing but code."""
    lines = enumerate(PAGE.read_text().splitlines(), start=1)
    return {
        found[1]: number for number, line in lines if (found := re.fullmatch(r"(?:### |- )`([^`]+)`", line))
    }


def explains(entry: str, message: str) -> bool:
    """Whether the parts of ``entry`` between its ``…`` stand in ``message`` in their order."""
    start = 0
    for part in entry.split(VALUE):
        start = message.find(part, start) + len(part)
        if start < len(part):
            return False
    return True


def test_each_message_has_a_remedy() -> None:
    """In its own text or on the page; the failure says what to write, and where."""
    missing = [
        f"lightning_automodel/{place}\n\n### `{message}`\n\n<why it comes, and what to do, in a line or"
        " two>\n"
        for message, place in messages().items()
        if not NEXT_STEP.search(message) and not any(explains(entry, message) for entry in entries())
    ]
    assert not missing, (
        "These messages do not say what to do, and docs/troubleshooting.md does not either. Let the message"
        " name the next step (NEXT_STEP), or add it to the page, below the heading that says what the user"
        " was doing, or to an entry with the same remedy, as an item of its list. A constant part of the"
        " message is enough. A text"
        " that no user gets to see goes into NOT_MESSAGES.\n\n" + "\n".join(missing)
    )


def test_each_entry_is_a_message() -> None:
    """An entry names a message that is gone, or too little of one to tell it from others."""
    known = messages()
    stale = [
        f"docs/troubleshooting.md:{line}: no message has these words in this order: {entry}"
        for entry, line in entries().items()
        if not any(explains(entry, message) for message in known)
    ]
    vague = [
        f"docs/troubleshooting.md:{line}: too few words: {entry}"
        for entry, line in entries().items()
        if len(entry.replace(VALUE, "")) < 10
    ]
    assert stale + vague == []


def test_each_entry_has_a_remedy() -> None:
    """Below the messages stands a sentence."""
    sections = re.split(r"\n(?=##)", PAGE.read_text())
    bare = [
        section
        for section in sections
        if section.startswith("### ") and not re.search(r"\n\n[^#-]", section)
    ]
    assert bare == []


def test_exceptions_are_needed() -> None:
    """What NOT_MESSAGES lists is in the package."""
    every = (text for path in PACKAGE.rglob("*.py") for text, _ in texts(ast.parse(path.read_text())))
    found = {text.partition(". ")[0] for text in every}
    assert [text for text in NOT_MESSAGES if text not in found and not (PACKAGE / text).exists()] == []
