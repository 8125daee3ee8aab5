"""Prove and measure the GPU kernels: cases, compiled code, timing, targets.

The entry scripts `aot_compile.py`, `bench_kernels.py`, `gpu_suite.py` and `tune.py` are built from these modules;
nothing here is a part of the installed package. From the bottom up: `cases` and `cache_cases` define calls of ops,
`all_cases` lists them; `build` compiles what they launch, `machine_code` reads it, `code_checks` judges it, `model`
predicts its time; `timing` and `measures` time it on a GPU, `checks` compares it with the reference, `targets` says
what is aimed at. `cells`, `suite_models` and `suite_diffusion` are the sections of `gpu_suite.py`.
"""
