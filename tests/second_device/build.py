"""Compiles the second device with the C++ compiler alone, once for each torch: objects are kept outside of the tree."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
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


def _run(*arguments: str) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}\n{done.stderr[-8000:]}")


def _object(source: str, folder: Path) -> Path:
    """The compiled file, from an earlier run if neither it, nor a header, nor torch has changed since."""
    text = [(HERE / name).read_bytes() for name in (source, *HEADERS)]
    key = hashlib.sha256(repr((text, FLAGS, torch.__version__, torch.__file__)).encode()).hexdigest()[:16]
    target = folder / f"{Path(source).stem}_{key}.o"
    if not target.exists():
        includes = [f"-I{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_paths()["include"])]
        made = target.with_suffix(f".{os.getpid()}")
        _run(str(compiler()), *FLAGS, *includes, "-c", str(HERE / source), "-o", str(made))
        made.replace(target)
    return target


def built() -> Path:
    """The extension as a file. Processes that need it at the same time wait for one of them to compile it."""
    folder = _folder()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with ThreadPoolExecutor() as threads:
            objects = list(threads.map(lambda source: _object(source, folder), SOURCES))
        key = hashlib.sha256(repr([each.name for each in objects]).encode()).hexdigest()[:16]
        library = folder / f"{NAME}_{key}.so"
        if not library.exists():
            paths = cpp_extension.library_paths()
            made = library.with_suffix(f".{os.getpid()}")
            searched = [flag for path in paths for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
            libraries = ("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")
            _run(str(compiler()), "-shared", *map(str, objects), *searched, *libraries, "-o", str(made))
            made.replace(library)
    return library


def load() -> ModuleType:
    """The extension, imported."""
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(built()))
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    extension = importlib.util.module_from_spec(spec)
    loader.exec_module(extension)
    return extension
