"""Builds the native CPU kernels where there is a C++ compiler; everything else is in pyproject.toml.

Without a compiler, or if it fails, the package installs without them and says so in `hf-quant doctor`.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


SOURCES = "hf_quant/kernels/native/src"


class BuildInParallel(build_ext):
    """Compiles the sources side by side: one core would need minutes for the larger instruction sets."""

    def build_extension(self, ext):
        compile_sources = self.compiler.compile

        def compile_each(sources, **options):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda source: compile_sources([source], **options), sources)
                return [each for of_source in objects for each in of_source]

        self.compiler.compile = compile_each
        super().build_extension(ext)


setup(
    cmdclass={"build_ext": BuildInParallel},
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
