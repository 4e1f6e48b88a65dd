"""Supervised fine-tuning data from the Python standard library: a function is the prompt, its docstring the completion.

Every function of the library that has a docstring becomes one byte sequence of its own length:

    signature and first lines of the body, START, docstring, END

Only the docstring and END carry labels, so every micro-batch of every rank has its own number of label
tokens.

Shapes: b = examples in a micro-batch, s = longest sequence in it.
"""

import ast
import json
import os
import platform
import random
import sysconfig
import textwrap
import tokenize
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import lightning as L  # noqa: N812
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

IGNORE_INDEX = -100
# The byte values come first.
START = 256
END = 257
PAD = 258
VOCABULARY_SIZE = 259
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo"}
SAMPLE_PROMPT = """\
def read_lines(path, encoding="utf-8"):
    with open(path, encoding=encoding) as file:
        return file.readlines()"""


class Example(NamedTuple):
    """One function of the standard library.

    Attributes:
        file: Source file, relative to the library's folder.
        prompt: Signature and first lines of the body, without the docstring.
        docstring: What the model learns to write.
    """

    file: str
    prompt: str
    docstring: str


def build_corpus(max_prompt_bytes: int, max_docstring_bytes: int) -> list[Example]:
    """Parses the whole standard library, in an order that does not depend on the machine.

    Args:
        max_prompt_bytes: A body ends with the last line that fits; a function whose signature does not fit
            is left out.
        max_docstring_bytes: A function with a longer docstring is left out.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    corpus = []
    for path in sorted(library.rglob("*.py")):
        file = path.relative_to(library)
        if SKIPPED_FOLDERS.isdisjoint(file.parts):
            corpus += examples_of_file(path, file.as_posix(), max_prompt_bytes, max_docstring_bytes)
    return corpus


def examples_of_file(
    path: Path, file: str, max_prompt_bytes: int, max_docstring_bytes: int
) -> Iterator[Example]:
    """Yields an example for each function of one file that has a docstring; see `build_corpus` for the limits."""
    with tokenize.open(path) as opened:  # honours the file's encoding declaration
        source = opened.read()
    lines = source.split("\n")  # as `ast` counts lines; `splitlines` would split at form feeds too
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = (ast.get_docstring(node) or "").strip()
        if docstring and len(docstring.encode()) <= max_docstring_bytes:
            prompt = prompt_of_function(node, lines, max_prompt_bytes)
            if prompt:
                yield Example(file, prompt, docstring)


def prompt_of_function(
    node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str], max_bytes: int
) -> str:
    """Returns the signature and as many whole lines of the body as fit, or "" if the signature does not fit."""
    first_statement = node.body[0]
    signature = lines[node.lineno - 1 : first_statement.lineno - 1]
    body = lines[first_statement.end_lineno : node.end_lineno]
    source = textwrap.dedent("\n".join(signature + body)).split("\n")

    num_bytes = 0
    for kept, line in enumerate(source):
        num_bytes += len(line.encode()) + 1
        if num_bytes > max_bytes:
            return "\n".join(source[:kept]) if kept >= len(signature) else ""
    return "\n".join(source)


def encode_prompt(prompt: str) -> list[int]:
    """Returns the prompt's bytes and START, after which the model writes the docstring."""
    return [*prompt.encode(), START]


class DocstringDataset(Dataset[dict[str, Tensor]]):
    """Token sequences whose labels are shifted here, once: `labels[i]` is what `input_ids[: i + 1]` predicts."""

    def __init__(self, examples: list[Example]) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        example = self.examples[index]
        prompt = encode_prompt(example.prompt)
        tokens = torch.tensor([*prompt, *example.docstring.encode(), END])
        labels = tokens[1:].clone()
        labels[: len(prompt) - 1] = IGNORE_INDEX
        return {"input_ids": tokens[:-1], "labels": labels}


def collate(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pads to the longest example of this micro-batch: `input_ids` and `labels`, both [b, s]."""
    input_ids = pad_sequence(
        [example["input_ids"] for example in examples], batch_first=True, padding_value=PAD
    )
    labels = pad_sequence(
        [example["labels"] for example in examples], batch_first=True, padding_value=IGNORE_INDEX
    )
    return {"input_ids": input_ids, "labels": labels}


class DocstringData(L.LightningDataModule):
    """Builds the corpus once, and holds back whole files for validation.

    Args:
        cache_dir: Folder of the corpus file.
        batch_size: Examples in a micro-batch of one rank.
        max_prompt_bytes: Longest prompt, see `build_corpus`.
        max_docstring_bytes: Longest docstring, see `build_corpus`.
        num_val_examples: Examples to validate on, a multiple of the number of ranks: Lightning's own
            strategies repeat examples until all ranks have as many, and repeated ones would count twice.
    """

    def __init__(
        self,
        cache_dir: str = "outputs/corpus",
        batch_size: int = 2,
        max_prompt_bytes: int = 128,
        max_docstring_bytes: int = 256,
        num_val_examples: int = 128,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.max_prompt_bytes = max_prompt_bytes
        self.max_docstring_bytes = max_docstring_bytes
        self.num_val_examples = num_val_examples
        limits = f"{max_prompt_bytes}-{max_docstring_bytes}"
        self.corpus_file = Path(cache_dir) / f"stdlib-{platform.python_version()}-{limits}.json"

    def prepare_data(self) -> None:
        if self.corpus_file.exists():
            return
        self.corpus_file.parent.mkdir(parents=True, exist_ok=True)
        corpus = build_corpus(self.max_prompt_bytes, self.max_docstring_bytes)
        # Renamed into place, so that an interrupted run leaves no half-written corpus behind.
        unfinished = self.corpus_file.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(corpus), encoding="utf-8")
        unfinished.replace(self.corpus_file)

    def setup(self, stage: str) -> None:
        corpus = [Example(*fields) for fields in json.loads(self.corpus_file.read_text(encoding="utf-8"))]
        held_back = [example for example in corpus if zlib.crc32(example.file.encode()) % 10 == 0]
        random.Random(0).shuffle(held_back)
        self.val_set = DocstringDataset(held_back[: self.num_val_examples])
        self.train_set = DocstringDataset([e for e in corpus if zlib.crc32(e.file.encode()) % 10 != 0])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True, collate_fn=collate)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val_set, batch_size=8 * self.batch_size, collate_fn=collate)
