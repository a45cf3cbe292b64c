"""Compiles the kernels: one library per instruction set, all from the same sources. File names hold a hash of these.

This module runs when parley is installed, when a library is missing, and as ``python parley/native/build.py``, with
``--usable`` only for the instruction sets of this CPU. setup.py loads this file by its path, so it must import only the
standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
COMPILER_FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fopenmp", "-fPIC", "-Wall", "-Wextra"]
if os.environ.get("PARLEY_SANITIZE"):
    # With sanitizers, -O3 takes too long to compile.
    COMPILER_FLAGS[COMPILER_FLAGS.index("-O3")] = "-O1"
    COMPILER_FLAGS += ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]

AVX2 = ("avx2", "fma", "f16c")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni")
# CPU flags that each level needs, as spelled in /proc/cpuinfo. Best level first.
AVX512_BF16 = (*AVX512, "avx512_bf16")
AMX = ("amx_tile", "amx_bf16", "amx_int8")
LEVELS = {
    "amx": (*AVX512_BF16, *AMX),
    "avx512bf16": AVX512_BF16,
    "avx512": AVX512,
    "avx2": AVX2,
    "generic": (),
}
X86 = ("x86_64", "AMD64")
# A shell script that runs its arguments as a command, and kills its process group at the end of its standard input. The
# input is duplicated as descriptor 3 first, because a background command has the null device as its standard input. All
# commands of the script itself are builtins.
KILLED_AT_END_OF_INPUT = 'exec 3<&0; { read -r _ <&3; kill -9 0; } >/dev/null 2>&1 & exec "$@" 3<&- </dev/null'
COMPILE_TIMEOUT = 1800  # seconds for one source file: seconds on an idle machine, minutes with sanitizers on a busy one
ELF_HEADER_BYTES = 64
BUILD_PREFIX = ".build-"  # of the folders in which libraries are compiled
PROCESSORS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

_compilers = threading.BoundedSemaphore(PROCESSORS)  # one for each processor, whatever the number of levels


class BuildError(Exception):
    """The kernels cannot be compiled on this machine. The message gives the reason."""


def buildable_levels() -> list[str]:
    """Return the levels that this machine's architecture can compile, best first."""
    return [level for level, needs in LEVELS.items() if not needs or platform.machine() in X86]


def usable_levels() -> list[str]:
    """Return the levels that this CPU can run, best first."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    has = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return [level for level in buildable_levels() if set(LEVELS[level]) <= set(has)]


@functools.cache
def library_name(level: str) -> str:
    """Return the file name of a library. It changes with the sources and the compiler flags."""
    digest = hashlib.sha256()
    for path in [*source_files("*.h"), *source_files("*.cpp"), Path(__file__)]:
        digest.update(path.read_bytes())
    digest.update(" ".join(COMPILER_FLAGS).encode())
    return f"kernels-{digest.hexdigest()[:12]}-{level}.so"


def source_files(pattern: str = "*.cpp") -> list[Path]:
    """Return the kernel sources that match ``pattern``, sorted."""
    return sorted((HERE / "source").rglob(pattern))


def find_compiler() -> str:
    """Return the C++ compiler: $CXX, else g++ or c++. Raises BuildError."""
    for command in (os.environ.get("CXX"), "g++", "c++"):
        if command and (compiler := shutil.which(command)):
            return compiler
    raise BuildError("no C++ compiler was found (g++)")


def compile_level(level: str, folder: Path) -> Path:
    """Compile one level into ``folder`` unless it is there, and not damaged. Of several processes, one compiles.

    Raises BuildError.
    """
    target = folder / library_name(level)
    if is_whole(target):
        return target
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _lock_target(target) as is_locked:
            if is_whole(target):
                return target
            with _build_folder(target, is_locked) as scratch:
                os.replace(_link_objects(_compile_objects(level, scratch), scratch / target.name), target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(str(error)) from None
    return target


def is_whole(path: Path) -> bool:
    """Whether a library exists and is complete. A file that was cut off, by a full disk or a power failure, would kill
    the process that opens it by a signal. The table of sections is the last part of an ELF file."""
    try:
        with path.open("rb") as file:
            head, size = file.read(ELF_HEADER_BYTES), os.fstat(file.fileno()).st_size
    except OSError:
        return False
    if sys.platform != "linux":
        return bool(size)
    if len(head) < ELF_HEADER_BYTES or not head.startswith(b"\x7fELF"):
        return False
    (table,) = struct.unpack_from("<Q", head, 40)  # e_shoff of the 64-bit format
    row_bytes, rows = struct.unpack_from("<HH", head, 58)  # e_shentsize, e_shnum
    return bool(table + row_bytes * rows <= size)


def _compile_objects(level: str, scratch: Path) -> list[Path]:
    """Compile each source file into ``scratch`` unless its object is there, one for each processor at a time."""
    machine = [f"-m{need.replace('_', '')}" for need in LEVELS[level] if need not in AMX]
    if set(AMX) <= set(LEVELS[level]):
        machine.append("-DPARLEY_AMX")  # the sources write AMX in assembly, for compilers without its flags, as GCC 10

    def compile_source(path: Path) -> Path:
        target = scratch / f"{path.relative_to(HERE / 'source').as_posix().replace('/', '-')}.o"
        if not target.exists():
            partial = target.with_suffix(".partial")
            _run_compiler([find_compiler(), *COMPILER_FLAGS, *machine, "-c", str(path), "-o", str(partial)])
            os.replace(partial, target)
        return target

    largest_first = sorted(source_files(), key=lambda path: -path.stat().st_size)
    with ThreadPoolExecutor(PROCESSORS) as pool:
        return list(pool.map(compile_source, largest_first))  # after an error, no other file is started


def _link_objects(objects: list[Path], library: Path) -> Path:
    """Link objects into a library and return its path."""
    _run_compiler([find_compiler(), *COMPILER_FLAGS, "-shared", *map(str, sorted(objects)), "-o", str(library)])
    return library


@contextlib.contextmanager
def _build_folder(target: Path, is_locked: bool) -> Iterator[Path]:
    """Make the folder of a build's objects. It stays if this process is ended or a compiler takes too long, and the
    next build continues with it; ``remove_unfinished_builds`` removes old ones. Without a lock, each process has one of
    its own."""
    if not is_locked:
        with tempfile.TemporaryDirectory(prefix=BUILD_PREFIX, dir=target.parent) as scratch:
            yield Path(scratch)
        return
    path = target.parent / f"{BUILD_PREFIX}{target.stem}"
    path.mkdir(mode=0o700, exist_ok=True)
    try:
        yield path
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        raise
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    shutil.rmtree(path, ignore_errors=True)


def _run_compiler(command: list[str]) -> None:
    """Run a compiler, which is killed with all its processes when this process ends. Raises BuildError, OSError,
    subprocess.TimeoutExpired."""
    with _compilers:
        end_of_pipe, own_end = os.pipe()
        try:
            result = subprocess.run(
                ["/bin/sh", "-c", KILLED_AT_END_OF_INPUT, "sh", *command],
                stdin=end_of_pipe,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=COMPILE_TIMEOUT,
                start_new_session=True,  # so it has a process group
            )
        finally:
            os.close(end_of_pipe)
            os.close(own_end)
    if result.returncode:
        raise BuildError(f"the compiler failed: {(result.stderr.strip() or str(result.returncode))[:2000]}")


@contextlib.contextmanager
def _lock_target(target: Path) -> Iterator[bool]:
    """Wait while another process compiles the same library, and return true. On file systems without locks, return
    false: all compile it."""
    path = _lock_path(target)
    while True:
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                is_locked = True
            except OSError:
                is_locked = False
            # The process that had the lock has removed the file, and another one may hold the lock of a new file.
            if is_locked and not _is_same_file(file.fileno(), path):
                continue
            try:
                yield is_locked
            finally:
                path.unlink(missing_ok=True)
            return


def _lock_path(target: Path) -> Path:
    """Return the file that a process locks while it compiles a library."""
    return target.with_suffix(".lock")


def remove_unfinished_builds(folder: Path) -> None:
    """Remove old folders of processes that were ended while they compiled into ``folder``."""
    for unfinished in folder.glob(f"{BUILD_PREFIX}*"):
        with contextlib.suppress(OSError):  # another process removes it, too
            if time.time() - unfinished.stat().st_mtime > COMPILE_TIMEOUT:
                _remove_unless_locked(unfinished)


def _remove_unless_locked(build_folder: Path) -> None:
    """Remove the folder of a build unless a process compiles there: it may seem old only because the machine's time was
    set. Raises OSError."""
    path = _lock_path(build_folder.parent / f"{build_folder.name.removeprefix(BUILD_PREFIX)}.so")
    with path.open("w") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            if not _is_same_file(file.fileno(), path):
                return  # another process has removed the folder, and may compile there again
        try:
            shutil.rmtree(build_folder)
        finally:
            path.unlink(missing_ok=True)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def install_levels(folder: Path, wanted_levels: Iterable[str]) -> list[Path]:
    """Compile levels into ``folder`` in parallel, and delete libraries of other sources there. Raises BuildError."""
    wanted_levels = list(wanted_levels)
    with ThreadPoolExecutor(len(wanted_levels)) as pool:
        libraries = list(pool.map(lambda level: compile_level(level, folder), wanted_levels))
    for path in set(folder.glob("kernels-*.so")) - {folder / library_name(level) for level in LEVELS}:
        path.unlink(missing_ok=True)
    return libraries


if __name__ == "__main__":
    try:
        for path in install_levels(HERE, usable_levels() if "--usable" in sys.argv else buildable_levels()):
            print(path)
    except BuildError as error:
        raise SystemExit(f"error: {error}") from None
