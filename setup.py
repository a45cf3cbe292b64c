"""Installs the package with its compiled kernels if there is a compiler. pyproject.toml holds everything else.

Without a compiler, parley is installed without libraries: it uses torch's kernels and logs so. A wheel has the library
of every level or none: if there is a compiler and one level fails, so does the build, instead of a slower package that
nobody notices. ``PARLEY_REQUIRE_KERNELS=1``, for wheels that others install, fails without a compiler too.
``PARLEY_MACHINE=aarch64`` with a cross compiler in ``CXX`` makes a wheel for that architecture.
"""

import importlib.util
import os
import platform
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path("parley", "native")
MACHINE = os.environ.get("PARLEY_MACHINE") or platform.machine()  # the architecture that is compiled for

spec = importlib.util.spec_from_file_location("build", Path(__file__).parent / NATIVE / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)


class BuildModules(build_py):
    """Install the Python modules and kernel libraries: every level in a wheel, this CPU's best level in a checkout."""

    def run(self):
        """Copy the modules and compile the kernels. Without a compiler, say that parley will use torch's."""
        super().run()
        editable = self.editable_mode
        source = Path(__file__).parent / NATIVE
        folder = source if editable else Path(self.build_lib) / NATIVE
        levels = build.usable_levels()[:1] if editable else wheel_levels()
        try:
            if not editable and platform.machine() == MACHINE:
                copy_libraries(source, folder, levels)
            build.install_levels(folder, levels)
        except (build.BuildError, OSError) as error:
            if not editable and (has_compiler() or os.environ.get("PARLEY_REQUIRE_KERNELS")):
                raise SystemExit(f"error: {error}. A newer g++ compiles every level; CXX names one.") from None
            self.announce(f"The kernels were not compiled, so parley will use torch's: {error}", level=3)


def has_compiler():
    """Whether there is a C++ compiler."""
    try:
        build.find_compiler()
    except build.BuildError:
        return False
    return True


def wheel_levels():
    """Return the levels of a wheel, best first: all of its architecture."""
    if platform.machine() == MACHINE:
        return build.buildable_levels()
    return [level for level, needs in build.LEVELS.items() if not needs or MACHINE in build.X86]


def copy_libraries(source, folder, levels):
    """Copy the libraries that this checkout already compiled from the same sources, to save compiling them again."""
    for name in map(build.library_name, levels):
        if (source / name).exists():
            shutil.copy(source / name, folder)


class PlatformWheel(bdist_wheel):
    """Build a wheel for any Python 3, tagged with this platform if it holds libraries."""

    def get_tag(self):
        """Return Python 3, no ABI and the platform, which is "any" if the wheel holds no libraries."""
        if any(Path(self.bdist_dir, NATIVE).glob("*.so")):
            self.root_is_pure = False
        platform_tag = super().get_tag()[2]
        return "py3", "none", platform_tag.replace(platform.machine(), MACHINE)


setup(cmdclass={"build_py": BuildModules, "bdist_wheel": PlatformWheel})
