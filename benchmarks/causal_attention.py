"""Peak memory and processor seconds of a sequence's last quarter attending to all of it, with a mask and without.

It is the later of the two chunks that one of two context-parallel ranks has. Each case is a process of its own, with
one thread.

    python benchmarks/causal_attention.py
"""

import argparse
import os
import subprocess
import sys
from time import process_time

import torch
import torch.nn.functional as F  # noqa: N812
from peak_memory import MALLOC, MEBIBYTE, peak, start_peak
from report import describe_environment, table
from torch import Tensor

from lightning_automodel.context_parallel.causal_attention import attend_to_end

HEADS, WIDTH = 8, 64


def measure(tokens: int, way: str) -> tuple[float, float]:
    """Runs forward and backward, and returns MiB beyond what was held before, and processor seconds."""
    torch.set_num_threads(1)
    query = torch.randn(1, HEADS, tokens // 4, WIDTH, requires_grad=True)
    key, value = (torch.randn(1, HEADS, tokens, WIDTH, requires_grad=True) for _ in range(2))

    def mask(dtype: torch.dtype) -> Tensor:
        allowed = torch.ones(tokens // 4, tokens, dtype=torch.bool).tril(tokens * 3 // 4)
        return torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, float("-inf"))

    held, start = start_peak("cpu"), process_time()
    if way == "with a mask":
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask(query.dtype))
    else:
        mixed = attend_to_end(query, key, value, mask, {"dropout_p": 0.0, "scale": None})
    mixed.sum().backward()
    return (peak("cpu") - held) / MEBIBYTE, process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384], help="(%(default)s)")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(*measure(int(args.case[0]), args.case[1]))
        return
    ways, rows = ("with a mask", "without"), []
    for tokens in args.tokens:
        cells = []
        for way in ways:
            command = [sys.executable, sys.argv[0], "--case", str(tokens), way]
            done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **MALLOC})
            mebibytes, seconds = map(float, done.stdout.split())
            cells.append(f"{mebibytes:.0f} MiB, {seconds:.1f} s")
        rows.append((f"{tokens:,}", *cells))
    for name, what in describe_environment().items():
        print(f"- {name}: {what}")
    print(f"\n{table(('tokens', *ways), rows)}")


if __name__ == "__main__":
    main()
