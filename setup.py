"""Build of the optional C code, and of the commit that a package was built from.

Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent

# Without contraction every operation rounds on its own, so all clones of a loop agree bit for bit;
# the two flags before it let loops with sqrt and selects vectorise and change no result.
_FLAGS = ["-O3", "-std=c11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]


def files(pattern: str) -> list[str]:
    """Return the paths, from here, of the files that a pattern names."""
    return sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))


def bake_commit(folder: str) -> None:
    """Write the commit below a folder that gets a copy of this tree; nothing if it is unknown."""
    own = runpy.run_path(str(ROOT / "zenflow" / "commit.py"))
    commit = own["commit"]()
    target = Path(folder, "zenflow", own["BAKED"])
    if commit is not None and target.parent.is_dir():
        target.unlink(missing_ok=True)  # it may be a hard link into this tree
        target.write_text(f"{commit}\n", encoding="utf-8")


class BuildPy(build_py):
    """Packages with the commit; an installation in place is a clone, where git knows it."""

    def run(self):
        super().run()
        if not self.editable_mode:
            bake_commit(self.build_lib)


class BuildLibrary(build_ext):
    """C code as plain shared libraries, with nothing of Python in its name or content."""

    def get_ext_filename(self, fullname):
        return str(
            Path(*fullname.split(".")).with_suffix(".so")
        )  # as zenflow/host/library.py and sim/replay/library.py have it

    def get_export_symbols(self, ext):
        return ext.export_symbols  # and no function that would initialise a module


class Wheel(bdist_wheel):
    """A wheel for every Python: of one platform if the kernel is in it, else of any."""

    def run(self):
        self.run_command("build")  # which may end without the kernel: it is optional
        built = self.get_finalized_command("build_ext").get_outputs()
        if not any(Path(path).is_file() for path in built):
            self.distribution.ext_modules, self.root_is_pure = [], True
        super().run()

    def get_tag(self):
        *_, platform = super().get_tag()
        return "py3", "none", platform


class SourceArchive(sdist):
    """Sources with the commit, for a wheel that is built where there is no repository."""

    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        bake_commit(base_dir)


setup(
    cmdclass={
        "bdist_wheel": Wheel,
        "build_ext": BuildLibrary,
        "build_py": BuildPy,
        "sdist": SourceArchive,
    },
    ext_modules=[
        Extension(
            "zenflow.host._host_kernel",
            sources=files("zenflow/host/csrc/*.c"),
            depends=files("zenflow/host/csrc/*.h"),
            extra_compile_args=["/O2", "/std:c11"] if sys.platform == "win32" else _FLAGS,
            extra_link_args=[] if sys.platform == "win32" else ["-pthread", "-lm"],
            optional=True,  # without a compiler the package installs and runs on torch operations
        ),
        Extension(
            "sim.replay._replay",
            sources=files("sim/replay/*.c"),
            depends=files("sim/replay/*.h"),
            extra_compile_args=["/O2", "/std:c11"] if sys.platform == "win32" else _FLAGS,
            extra_link_args=[] if sys.platform == "win32" else ["-lm"],
            optional=True,  # without a compiler sweeps simulate by SimPy
        ),
    ],
)
