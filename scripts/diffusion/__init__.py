"""Published diffusion models with random weights: architectures, denoising loops, and how variants are timed.

Used by `bench_pipeline.py`, `diffusion_sizes.py`, `eval_pipeline_quality.py`, `gpu_suite.py` and the tests.
"""
