"""Several documents in a row instead of padding, and how much padding that saves on the docstrings of this machine.

    python examples/packing.py

`Packer` is a `collate_fn` for Hugging Face causal language models, whose labels are not shifted. Three
things keep the documents of a row apart:

- position ids start at 0 for each, from which transformers makes block-diagonal masks. It does so only with
  `use_cache=False` and without an `attention_mask`: otherwise documents attend to those before them,
  silently;
- the first label of each is -100: no document's end predicts the beginning of the next;
- so the label tokens are the same as without packing, and `label_shift=1` counts them as usual.

Shapes: b = rows, s = longest row.
"""

from collections.abc import Sequence

import torch
from docstrings import END, IGNORE_INDEX, Example, build_corpus, encode_prompt
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

Document = dict[str, Tensor]


class Packer:
    """Packs the documents of a batch into few rows: the longest first, each into the first row with room for it.

    Args:
        length: Longest row.
        pad_token: Fills rows up to the longest of the batch, as a document of its own without labels.
    """

    def __init__(self, length: int, pad_token: int = 0) -> None:
        self.length = length
        self.pad_token = pad_token

    def __call__(self, documents: Sequence[Document]) -> dict[str, Tensor]:
        """Packs a batch of documents.

        Args:
            documents: `input_ids` and `labels` of each, both [length of the document].

        Returns:
            `input_ids`, `labels` and `position_ids`, each [b, s].
        """
        rows: list[list[Document]] = []
        for document in sorted(documents, key=size, reverse=True):
            if size(document) > self.length:
                raise ValueError(
                    f"A document of {size(document)} tokens does not fit into rows of {self.length}."
                )
            row = next((row for row in rows if sum(map(size, row)) + size(document) <= self.length), None)
            if row is None:
                rows.append(row := [])
            row.append(document)
        longest = max(sum(map(size, row)) for row in rows)
        padded = [[*row, self.padding(longest - sum(map(size, row)))] for row in rows]
        return {
            "input_ids": joined([[document["input_ids"] for document in row] for row in padded]),
            "labels": joined([[without_first(document["labels"]) for document in row] for row in padded]),
            "position_ids": joined([[torch.arange(size(document)) for document in row] for row in padded]),
        }

    def padding(self, num_tokens: int) -> Document:
        return {
            "input_ids": torch.full((num_tokens,), self.pad_token),
            "labels": torch.full((num_tokens,), IGNORE_INDEX),
        }


def size(document: Document) -> int:
    return document["input_ids"].numel()


def joined(rows: list[list[Tensor]]) -> Tensor:
    return torch.stack([torch.cat(row) for row in rows])


def without_first(labels: Tensor) -> Tensor:
    """A document's labels without the first, which nothing predicts."""
    labels = labels.clone()
    labels[:1] = IGNORE_INDEX
    return labels


def document_of(example: Example) -> Document:
    """A function with its docstring; each label is at the position of its token."""
    prompt = encode_prompt(example.prompt)
    answer = [*example.docstring.encode(), END]
    labels = [IGNORE_INDEX] * len(prompt) + answer
    return {"input_ids": torch.tensor(prompt + answer), "labels": torch.tensor(labels)}


def padded(documents: Sequence[Document]) -> dict[str, Tensor]:
    """One document per row."""
    return {
        key: pad_sequence([document[key] for document in documents], batch_first=True, padding_value=value)
        for key, value in (("input_ids", 0), ("labels", IGNORE_INDEX))
    }


def main() -> None:
    documents = [
        document_of(example) for example in build_corpus(max_prompt_bytes=512, max_docstring_bytes=1024)
    ]
    num_tokens = sum(map(size, documents))
    print(f"{len(documents):,} documents of {num_tokens:,} tokens, 32 a batch")
    for name, collate in (("one a row", padded), ("packed into rows of 2,048", Packer(2048))):
        torch.manual_seed(0)
        batches = list(DataLoader(documents, batch_size=32, shuffle=True, collate_fn=collate))
        positions = sum(batch["input_ids"].numel() for batch in batches)
        labelled = sum(int((batch["labels"][:, 1:] != IGNORE_INDEX).sum()) for batch in batches)
        print(f"{name}: {1 - num_tokens / positions:.1%} padding, {labelled:,} label tokens")


if __name__ == "__main__":
    main()
