"""Installs the package with its compiled kernels, where there is a compiler; pyproject.toml says everything else.

Nothing here may fail an installation: without the libraries parley runs on torch's kernels and says so when it loads.
"""

import importlib.util
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path("parley", "native")

spec = importlib.util.spec_from_file_location("build", Path(__file__).parent / NATIVE / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)


class Modules(build_py):
    """The Python modules, and beside them the libraries: of every level in a wheel, of this CPU in a checkout."""

    def run(self):
        super().run()
        editable = self.editable_mode
        folder = Path(__file__).parent / NATIVE if editable else Path(self.build_lib) / NATIVE
        try:
            build.install(folder, build.usable()[:1] if editable else build.levels())
        except (build.BuildError, OSError) as error:
            self.announce(f"The kernels are not compiled, parley will use torch's: {error}", level=3)


class Wheel(bdist_wheel):
    """A wheel for any Python 3, of this platform if it holds libraries."""

    def get_tag(self):
        if any(Path(self.bdist_dir, NATIVE).glob("*.so")):
            self.root_is_pure = False
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": Modules, "bdist_wheel": Wheel})
