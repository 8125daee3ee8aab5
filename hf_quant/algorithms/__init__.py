"""How values are chosen: weight -> codes, scale, zero point.

An algorithm is one function in one file, `(groups) -> (scale, zero_point)`; it sees only the groups' values and the
format's grid (`_groups.Groups`), hence works for every format and granularity. Codes are then the nearest on the grid.
"""

import torch
from torch import Tensor

from hf_quant.algorithms._driver import Algorithm, PackedWeight, Quantization, empty_packed, geometry
from hf_quant.algorithms.absmax import absmax
from hf_quant.algorithms.hqq import hqq
from hf_quant.algorithms.mse import mse
from hf_quant.algorithms.norm import norm
from hf_quant.formats import FORMATS
from hf_quant.scheme import TensorQuant


ALGORITHMS: dict[str, Algorithm] = {"absmax": absmax, "mse": mse, "norm": norm, "hqq": hqq}

__all__ = ["ALGORITHMS", "PackedWeight", "default_algorithm", "empty_packed", "geometry", "quantize_matrix"]


def default_algorithm(quant: TensorQuant) -> str:
    """The best data-free algorithm for a format, by the measurements of `scripts/eval_quality.py`.

    8 bits: absmax, the others gain nothing. 2 and 3 bits: norm (at 2 bits a quarter less KL to the 16-bit model than
    mse, at equal distance of an encoder's embeddings). Else mse.
    """
    bits = FORMATS[quant.format].bits
    return "absmax" if bits == 8 else "norm" if bits < 4 else "mse"


def quantize_matrix(
    weight: Tensor, quant: TensorQuant, algorithm: str | None = None, *, name: str = "weight"
) -> PackedWeight:
    """Quantize weight [..., N, K] (fp16, bf16, fp32) on its device, in row blocks with bounded temporaries.

    `algorithm` is a key of ALGORITHMS, None the default for the format; `name` is what errors call the weight.
    Raises ValueError on NaN or inf, on an unknown algorithm, and on a weight without elements.
    """
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm is {algorithm!r}; allowed: {', '.join(ALGORITHMS)}")
    if not weight.is_floating_point() or weight.dim() < 2 or weight.numel() == 0:
        raise ValueError(
            f"{name} is {tuple(weight.shape)} {weight.dtype}; needs a floating-point matrix [N, K] with elements"
        )
    packed = empty_packed(weight.shape, quant, weight.device)
    with torch.no_grad():
        finite = Quantization(weight, quant, packed).run(ALGORITHMS[algorithm or default_algorithm(quant)])
    if not finite:
        raise ValueError(f"{name} contains NaN or inf and cannot be quantized; repair the checkpoint or exclude it")
    return packed
