"""The command line: ``python -m lightning_automodel.checkpoint inspect|consolidate|export PATH ...``."""

import argparse
import importlib
import json
import sys
from collections import Counter
from typing import Any

import torch
from fsspec.core import url_to_fs
from torch import Tensor

from lightning_automodel.checkpoint import paths
from lightning_automodel.checkpoint.consolidate import consolidate
from lightning_automodel.checkpoint.errors import CheckpointError, on_this_rank
from lightning_automodel.checkpoint.export import export_hugging_face
from lightning_automodel.checkpoint.reading import open_directory, open_tree
from lightning_automodel.checkpoint.safe_load import NotPlainDataError
from lightning_automodel.checkpoint.state_dict import MODEL, STATES
from lightning_automodel.resume import CHECKPOINT_KEY

_DTYPES = ("float32", "bfloat16", "float16", "float64")

_INSPECT_EXAMPLES = """the usual cases:
  inspect checkpoints/last.ckpt             what it holds, and whether files are missing or cut off
  inspect --verify checkpoints/*.ckpt       the same, and whether any content has changed; reads all of it
  inspect --json s3://bucket/last.ckpt      for a program
"""
_EXPORT_EXAMPLES = """the usual cases, for a LightningModule named Writer in train.py:
  export last.ckpt my-model --class train.Writer --dtype bfloat16
  export last.ckpt my-adapter --class train.Writer --adapter-only
  export last.ckpt teacher --class train.Distillation --key teacher
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one command, with ``arguments`` in place of this process's; returns the exit status."""
    parsed = _parser().parse_args(arguments)
    try:
        return parsed.run(parsed)
    except (CheckpointError, OSError) as error:
        reason = str(error)
    except Exception as error:  # a file that another program wrote can raise anything
        reason = f"{parsed.path}: {type(error).__name__}: {error}"
    print(f"error: {_printable(reason)}", file=sys.stderr)
    return 1


def _printable(text: str) -> str:
    """``text`` on one line without control characters: it quotes names from files of unknown origin."""
    line = " ".join(text.split())
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in line)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_automodel.checkpoint", description="Look at checkpoints, and convert them."
    )
    commands = parser.add_subparsers(required=True, metavar="inspect | consolidate | export")

    command = commands.add_parser(
        "inspect",
        help="what a checkpoint is, and whether it is complete",
        epilog=_INSPECT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_path(command, "checkpoints", nargs="+")
    command.add_argument(
        "--verify",
        action="store_true",
        help="read all content and compare it with its checksums",
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=_inspect)

    command = commands.add_parser("consolidate", help="write a directory of shards as one file")
    _add_path(command, "the checkpoint")
    command.add_argument("out", help="the file to write; a local path that does not exist yet")
    command.set_defaults(run=_consolidate)

    _add_export(commands)
    return parser


def _add_export(commands: Any) -> None:
    command = commands.add_parser(
        "export",
        help="write a Hugging Face model, for from_pretrained",
        epilog=_EXPORT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_path(command, "the checkpoint")
    command.add_argument("out", help="the directory to write; a local path that does not exist yet")
    command.add_argument(
        "--class",
        dest="module_class",
        metavar="MODULE.CLASS",
        required=True,
        help="the LightningModule, whose load_from_checkpoint makes the model; importing it runs its code",
    )
    command.add_argument(
        "--arguments",
        metavar="JSON",
        default="{}",
        help="for its __init__, beside those of save_hyperparameters(), such as '{\"rank\": 8}'",
    )
    command.add_argument(
        "--max-shard-size", default="5GB", help="largest size of a file; the default is 5GB"
    )
    command.add_argument(
        "--dtype", choices=_DTYPES, help="of floating-point tensors; the default is each tensor's own"
    )
    command.add_argument(
        "--adapter-only", action="store_true", help="export only the adapters of a PEFT model"
    )
    command.add_argument(
        "--key",
        metavar="PREFIX",
        help="of the model's names in the LightningModule, if that has several models",
    )
    command.set_defaults(run=_export)


def _add_path(parser: argparse.ArgumentParser, what: str, **options: Any) -> None:
    parser.add_argument("path", help=f"{what}; local, or a URL", **options)
    parser.add_argument(
        "--trust",
        action="store_true",
        help="run the code that the checkpoint may hold: only if you trust its source",
    )


def _inspect(parsed: argparse.Namespace) -> int:
    reports = [_report(paths.normalize(path), parsed.verify, not parsed.trust) for path in parsed.path]
    if parsed.json:
        print(json.dumps({"checkpoints": reports}))
    else:
        for report in reports:
            for name, value in report.items():
                print(f"{name + ':':<14}{json.dumps(value)}")
    return int(any(report["damage"] is not None for report in reports))


def _consolidate(parsed: argparse.Namespace) -> int:
    consolidate(paths.normalize(parsed.path), parsed.out, not parsed.trust)
    print(f"Wrote {parsed.out}")
    return 0


def _export(parsed: argparse.Namespace) -> int:
    path = paths.normalize(parsed.path)
    weights_only = not parsed.trust
    open_tree(path, weights_only)  # which compares a file with its checksums; entries are, as they are read
    place, _, name = parsed.module_class.rpartition(".")
    module_class = getattr(importlib.import_module(place), name)
    module = module_class.load_from_checkpoint(
        path, map_location="cpu", weights_only=weights_only, **json.loads(parsed.arguments)
    )
    export_hugging_face(
        module,
        parsed.out,
        max_shard_size=parsed.max_shard_size,
        dtype=None if parsed.dtype is None else getattr(torch, parsed.dtype),
        adapter_only=parsed.adapter_only,
        prefix=parsed.key,
    )
    print(f"Wrote {parsed.out}")
    return 0


def _report(path: str, verify: bool, weights_only: bool) -> dict[str, Any]:
    """Describe a checkpoint; ``not_plain`` names the classes and functions that loading it needs."""
    filesystem, place = url_to_fs(path)
    if not filesystem.exists(place):
        raise CheckpointError(f"Cannot load {path}: there is no such file or directory")
    report: dict[str, Any] = {
        "path": path,
        "form": "directory of shards" if paths.is_directory(path) else "one file",
        "damage": None,
        "verified": verify,
        "not_plain": [],
    }
    try:
        report.update(_described(open_tree(path, weights_only, reads_content=verify)))
        if verify and paths.is_directory(path):
            with on_this_rank(f"Cannot load {path}"):
                open_directory(path, weights_only).check()
    except Exception as error:  # a file that another program wrote can raise anything
        if isinstance(error.__cause__, NotPlainDataError):
            report["not_plain"] = error.__cause__.names
        elif isinstance(error, CheckpointError):
            report["damage"] = str(error)
        else:
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            report["damage"] = f"it is damaged, or not a checkpoint ({reason})"
    return {**report, "num_bytes": filesystem.du(place)}


def _described(tree: dict[str, Any]) -> dict[str, Any]:
    written_by = "lightning_automodel"
    world_size = None
    mesh = None
    if (of_run := tree.get(CHECKPOINT_KEY)) is None:
        written_by = f"Lightning {tree.get('pytorch-lightning_version')}"
    else:
        world_size = len(of_run["ranks"])
        mesh = {str(name): int(size) for name, size in of_run["sizes"].items()}
    dtypes: Counter[str] = Counter()
    for tensor in tree[MODEL].values():
        if isinstance(tensor, Tensor):
            dtypes[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    return {
        "written_by": written_by,
        "world_size": world_size,
        "mesh": mesh,
        **{key: tree[key] if isinstance(tree.get(key), int) else None for key in ("epoch", "global_step")},
        "num_elements": sum(dtypes.values()),
        "dtypes": dict(dtypes),
        "rest": sorted(key for key in tree if isinstance(key, str) and key not in STATES),
    }


if __name__ == "__main__":
    sys.exit(main())
