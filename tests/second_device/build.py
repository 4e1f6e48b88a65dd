"""Compiles the second device with the C++ compiler alone, once for each torch: it is kept outside of the tree."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import threading
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

NAME = "second_device_extension"
HERE = Path(__file__).parent
SOURCES = (
    "device.cpp",
    "operators.cpp",
    "kernels.cpp",
    "pending.cpp",
    "collectives.cpp",
    "nccl_like.cpp",
    "bindings.cpp",
)
HEADERS = ("device.h", "pending.h", "collectives.h", "nccl_like.h")
FLAGS = ("-std=c++20", "-O0", "-fPIC", f"-DTORCH_EXTENSION_NAME={NAME}")


def compiler() -> str | None:
    """The C++ compiler, None where there is none."""
    return shutil.which(os.environ.get("CXX", "c++"))


def _folder() -> Path:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = caches / "lightning_automodel_tests" / torch.__version__
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def compile_ahead() -> None:
    """Start to compile beside whatever this process does next; `built` waits for it. Without a compiler, nothing."""
    if compiler() is not None:
        threading.Thread(target=_try_to_build, daemon=True).start()


def _try_to_build() -> None:
    """What fails here fails in `built` again, and is told there."""
    with contextlib.suppress(RuntimeError):
        built()


def built() -> Path:
    """The extension as a file. Processes that need it at the same time wait for one of them to compile it."""
    text = [(HERE / name).read_bytes() for name in (*SOURCES, *HEADERS)]
    key = hashlib.sha256(repr((text, FLAGS, torch.__version__, torch.__file__)).encode()).hexdigest()[:16]
    folder = _folder()
    library = folder / f"{NAME}_{key}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    """All sources at once: most of the time goes into torch's headers, which are then read once."""
    made = library.with_suffix(f".{os.getpid()}")
    includes = [f"-I{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_paths()["include"])]
    searched = [
        flag for path in cpp_extension.library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")
    ]
    libraries = ("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")
    command = [
        str(compiler()),
        *FLAGS,
        *includes,
        "-shared",
        "-x",
        "c++",
        "-",
        *searched,
        *libraries,
        "-o",
        str(made),
    ]
    everything = "".join(f'#include "{HERE / name}"\n' for name in SOURCES)
    done = subprocess.run(command, input=everything, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-8000:]}")
    made.replace(library)


def load() -> ModuleType:
    """The extension, imported."""
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(built()))
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    extension = importlib.util.module_from_spec(spec)
    loader.exec_module(extension)
    return extension
