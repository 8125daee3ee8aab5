"""Prove and measure the GPU kernels: cases, compiled code, timing, targets.

The entry scripts `aot_compile.py`, `bench_kernels.py`, `gpu_suite.py` and `tune.py` are built from these modules.
`cases.py` and `cache_cases.py` define the calls; nothing here is a part of the installed package.
"""
