"""``parley version``: the version, and with ``--all`` everything that decides how fast and how it computes."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from parley import control_groups
from parley.child_process import python_command
from parley.settings.option_kinds import switch_kind
from parley.settings.options import Option, ResolvedOptions
from parley.version import __version__

USAGE = """\
usage: parley version [options]

Prints the version. With --all also those of Python and the packages, the kernels, the processor and the compiler."""

OPTIONS = [Option("all", switch_kind(), "Print everything that a bug report needs.", False)]
PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy", "llguidance", "uvicorn",
    "uvloop", "httptools", "h2", "msgspec", "grpcio", "ray", "pillow", "av", "pyzmq",
)  # fmt: skip
USEFUL_FLAGS = (
    "avx2", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_bf16", "amx_int8", "asimd", "sve",
    "bf16", "i8mm",
)  # fmt: skip
# A process of its own asks, because importing torch takes seconds and may fail.
KERNEL_PROBE = """
import torch
from parley.native import build, kernel_choice
kernels = kernel_choice.compiled_kernels()
print(kernels.library_name if kernels else "none: torch's are used")
print(" ".join(level for level in build.buildable_levels() if (build.HERE / build.library_name(level)).exists()))
print(" ".join(build.usable_levels()))
print(torch.cuda.get_device_name() if torch.cuda.is_available() else "none")
"""


def run_command(config: ResolvedOptions) -> int:
    """Print the version, or all versions. Return the exit code."""
    print(f"parley {__version__}")
    if config["all"]:
        for name, value in all_versions():
            print(f"{name:<17} {value}", flush=True)
    return 0


def all_versions() -> Iterator[tuple[str, str]]:
    """Yield the names and versions of installed packages; missing ones are left out."""
    yield "python", f"{platform.python_version()} in {sys.prefix}"
    yield (
        "system",
        f"{platform.system()} {platform.release()} {platform.machine()}, libc {platform.libc_ver()[1] or '?'}",
    )
    yield "installed in", str(Path(__file__).parents[2])
    for name in PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    yield from _kernel_lines()
    yield "processor", _processor_name()
    yield "compiler", _compiler_version()
    variables = sorted(name for name in os.environ if name.startswith(("PARLEY_", "HF_", "OMP_", "CUDA_")))
    yield "variables", ", ".join(variables) or "none of PARLEY_, HF_, OMP_, CUDA_"


def _kernel_lines() -> Iterator[tuple[str, str]]:
    try:
        probe_run = subprocess.run(
            python_command("-c", KERNEL_PROBE), capture_output=True, text=True, timeout=120, check=True
        )
        used, there, usable, gpu = probe_run.stdout.splitlines()[-4:]
    except (OSError, subprocess.SubprocessError, ValueError):
        yield "kernels", "cannot be loaded; `parley doctor` says why"
        return
    yield "kernels in use", used
    yield "kernel levels", f"{there or 'none'} installed; this processor can run {usable}"
    yield "GPU", gpu


def _processor_name() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return f"{os.cpu_count()} cores of an unknown kind"
    model = re.search(r"^model name\s*:\s*(.*)$", info, re.M)
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", info, re.M)
    vector_flags = [flag for flag in USEFUL_FLAGS if flags and flag in flags[1].split()]
    cores = control_groups.describe_cores()
    return f"{model[1] if model else 'unknown'}, {cores}, {' '.join(vector_flags) or 'no vector extensions'}"


def _compiler_version() -> str:
    command = os.environ.get("CXX", "g++")
    try:
        done = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "none"
    return done.stdout.partition("\n")[0]
