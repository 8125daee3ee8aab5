"""Builds the native CPU kernels where there is a C++ compiler; everything else is in pyproject.toml.

Without a compiler, or if it fails, the package installs without them and says so in `hf-quant doctor`.
"""

import sys
from glob import glob

from setuptools import Extension, setup


SOURCES = "hf_quant/kernels/native/src"

setup(
    ext_modules=[
        Extension(
            "hf_quant.kernels.native._native",
            sources=sorted(glob(f"{SOURCES}/*.cpp")),
            depends=sorted(glob(f"{SOURCES}/*.h")),
            # Instruction sets are chosen by pragmas in the sources. Without traps comparisons vectorize; no result
            # changes. -w: GCC 12 warns of its own headers.
            extra_compile_args=[
                *("-O3", "-std=c++17", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-g0", "-w")
            ],
            extra_link_args=["-pthread"] if sys.platform == "linux" else [],
            language="c++",
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
