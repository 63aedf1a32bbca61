"""Build of the optional C kernel; everything else about the package is in pyproject.toml."""

from __future__ import annotations

import sys

from setuptools import Extension, setup

# Without contraction every operation rounds on its own, so all clones of a loop agree bit for bit;
# the two flags before it let loops with sqrt and selects vectorise and change no result.
_FLAGS = ["-O3", "-std=c11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]

setup(
    ext_modules=[
        Extension(
            "zenflow._host_kernel",
            sources=["zenflow/_host_kernel.c", "zenflow/_host_pool.c"],
            depends=["zenflow/_host_kernel.h"],
            extra_compile_args=["/O2", "/std:c11"] if sys.platform == "win32" else _FLAGS,
            extra_link_args=[] if sys.platform == "win32" else ["-pthread", "-lm"],
            optional=True,  # without a compiler the package installs and runs on torch operations
        )
    ]
)
