"""Builds the native CPU kernels where there is a C++ compiler; everything else is in pyproject.toml.

Without a compiler, or if it fails, the package installs without them and says so in `hf-quant doctor`.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError


SOURCES = "hf_quant/kernels/native/src"
# Intel's CPUs of 2015 to 2020 are slow at jumps that touch a boundary of 32 bytes, and assemblers can avoid those:
# https://www.intel.com/content/dam/support/us/en/documents/processors/mitigations-jump-conditional-code-erratum.pdf
# All CPUs that run this source are of that kind.
OLD_INTEL, WITHIN_BOUNDARIES = "avx512_vnni.cpp", "-Wa,-mbranches-within-32B-boundaries"


class BuildInParallel(build_ext):
    """Compiles the sources side by side: one core would need minutes for the larger instruction sets."""

    def build_extension(self, ext):
        compile_sources = self.compiler.compile

        def compile_each(sources, extra_postargs, **options):
            aligned = [*extra_postargs, WITHIN_BOUNDARIES]
            try:  # neon.cpp has no code on x86
                compile_sources([f"{SOURCES}/neon.cpp"], extra_postargs=aligned, **options)
            except CompileError:  # by an assembler without the option, or for another kind of CPU
                aligned = extra_postargs

            def compile_one(source):
                flags = aligned if os.path.basename(source) == OLD_INTEL else extra_postargs
                return compile_sources([source], extra_postargs=flags, **options)

            with ThreadPoolExecutor(os.cpu_count()) as pool:
                return [each for objects in pool.map(compile_one, sources) for each in objects]

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
