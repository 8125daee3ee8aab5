"""Measure and test the CPU kernels: timing in turns, attention over a cache, and a driver for random calls.

`bench_cpu.py` uses the Python modules; `sanitize_native.py` and `emulate_arm.py` build `native_driver.cpp`.
"""
