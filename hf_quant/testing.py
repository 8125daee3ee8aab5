"""Helpers of tests and scripts: error measures, checks with a lower and an upper bound, and a list of all schemes.

Not imported by the package itself; needs nothing but torch.
"""

import math
from typing import Any

import torch
from torch import Tensor

from hf_quant.formats import FORMATS


# Allowed RMS error of a product in a dtype against fp64: the rounding of the product and of the weight.
PRODUCT_RMS = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def sqnr(value: Tensor, reference: Tensor) -> float:
    """Signal-to-quantization-noise ratio in dB; inf if the tensors are equal.

    10 * log10(sum(reference**2) / sum((value - reference)**2)), in fp64. Raises ValueError if the shapes differ.
    """
    ratio = rms_error(value, reference)
    return math.inf if ratio == 0 else -20 * math.log10(ratio)


def rms_error(value: Tensor, reference: Tensor) -> float:
    """RMS of the error relative to the RMS of the reference; 0 if the tensors are equal.

    Raises ValueError if the shapes differ.
    """
    if value.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(value.shape)} and {tuple(reference.shape)}")
    exact = reference.detach().double()
    noise = torch.linalg.vector_norm(value.detach().double() - exact).item()
    return 0.0 if noise == 0 else noise / max(torch.linalg.vector_norm(exact).item(), 1e-300)


def assert_close(value: Tensor, reference: Tensor, *, rms: float, name: str = "value") -> None:
    """Raise AssertionError unless the relative RMS error is at most `rms` and no single element is far off.

    "Far off" is 10 * `rms` of the reference's largest magnitude: one wrong row in a thousand hides in an average.
    NaN anywhere fails.
    """
    ratio = rms_error(value, reference)
    error = (value.detach().double() - reference.detach().double()).abs()
    worst = error.max().item() / max(reference.detach().double().abs().max().item(), 1e-300) if error.numel() else 0.0
    if not (ratio <= rms and worst <= 10 * rms):
        raise AssertionError(
            f"{name}: RMS error {ratio:.2e}, largest {worst:.2e}; allowed {rms:.2e} and {10 * rms:.2e}"
        )


def assert_sqnr(value: Tensor, reference: Tensor, *, at_least: float, at_most: float, name: str = "value") -> None:
    """Raise AssertionError unless `at_least` <= SQNR in dB <= `at_most`: infinite means that nothing was quantized."""
    decibels = sqnr(value, reference)
    if not at_least <= decibels <= at_most:
        raise AssertionError(f"{name}: SQNR {decibels:.1f} dB; expected {at_least} to {at_most}")


def all_scheme_fields() -> dict[str, dict[str, Any]]:
    """{readable id: `QuantizerConfig` fields} for every format with each granularity and symmetry it allows."""
    found = {}
    for name, format in FORMATS.items():
        for granularity in format.granularities:
            for symmetric in (True, False) if format.allows_asymmetric else (True,):
                label = f"{name}-{granularity}" + ("" if symmetric else "-asym")
                found[label] = {"weights": name, "granularity": granularity, "symmetric": symmetric}
    return found
