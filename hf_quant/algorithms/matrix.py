"""`quantize_matrix`, `solve_matrix`, `calibrated_matrix`: a weight through an algorithm without data, or a solver."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_quant.algorithms.absmax import absmax
from hf_quant.algorithms.driver import Algorithm, Quantization, empty_packed
from hf_quant.algorithms.float_zeros import quantize_with_float_zeros
from hf_quant.algorithms.gptq import gptq
from hf_quant.algorithms.groups import Choice, Groups
from hf_quant.algorithms.hqq import hqq
from hf_quant.algorithms.imatrix import imatrix
from hf_quant.algorithms.mse import mse
from hf_quant.algorithms.norm import norm
from hf_quant.algorithms.solver import Solver, Statistics
from hf_quant.formats import FORMATS
from hf_quant.kernels import dequantize
from hf_quant.kernels.weight import PackedWeight
from hf_quant.scheme import TensorQuant


ALGORITHMS: dict[str, Algorithm] = {"absmax": absmax, "mse": mse, "norm": norm, "hqq": hqq}
SOLVERS: dict[str, Solver] = {"gptq": gptq, "imatrix": imatrix}  # algorithms that need data


def default_algorithm(quant: TensorQuant) -> str:
    """The best data-free algorithm for a format, by the measurements in docs/accuracy.md.

    8 bits: absmax, the others gain nothing. 2 bits: norm, a quarter less KL to the 16-bit model than mse on a small
    model that bears 2 bits. Else mse: at 3 bits norm loses to absmax on SmolLM2 (KL 1.06, 1.04 and .96 by mse).
    """
    bits = FORMATS[quant.format].bits
    return "absmax" if bits == 8 else "norm" if bits == 2 else "mse"


def quantize_matrix(
    weight: Tensor, quant: TensorQuant, algorithm: str | None = None, *, name: str = "weight"
) -> PackedWeight:
    """Quantize weight [..., N, K] (fp16, bf16, fp32) on its device, in row blocks with bounded temporaries.

    `algorithm` is a key of ALGORITHMS, None the default for the format; `name` is what errors call the weight. Weights
    of which a matrix has but one magnitude, and zeros (BitNet's), become exact codes in int2 by the default. With
    floating-point zero points there is one way, `quantize_with_float_zeros`, whatever `algorithm` is.
    Raises ValueError on NaN or inf, on an unknown algorithm, and on a weight without elements.
    """
    choose = _algorithm(quant, algorithm)
    _check(weight, name)
    total = _magnitude_if_ternary(weight) if algorithm is None and quant.format == "int2" and quant.symmetric else None
    packed = empty_packed(weight.shape, quant, weight.device)
    with torch.no_grad():
        if quant.has_float_zeros:
            finite = quantize_with_float_zeros(weight, quant, packed)
        else:
            finite = Quantization(weight, quant, packed).run(choose if total is None else _ternary, total)
    if not finite:
        raise _not_finite(name)
    return packed


@torch.no_grad()
def _magnitude_if_ternary(weight: Tensor) -> Tensor | None:
    """The magnitude of each matrix [N, K] that holds nothing else, beside zeros; None if one has others."""
    if weight.device.type == "meta" or not _has_one_magnitude(weight[..., :1, :]):  # most weights end here
        return None
    return weight.abs().amax((-2, -1)) if _has_one_magnitude(weight) else None


def _has_one_magnitude(weight: Tensor) -> bool:
    size = weight.abs()
    return bool(((size == 0) | (size == size.amax((-2, -1), keepdim=True))).all())


def _ternary(groups: Groups) -> Choice:
    return Choice(groups.round_scale(torch.maximum(groups.high, -groups.low)))


def solve_matrix(
    weight: Tensor,
    quant: TensorQuant,
    solver: Solver,
    statistics: Statistics,
    algorithm: str | None = None,
    *,
    name: str = "weight",
) -> PackedWeight:
    """Quantize weight [N, K] by a solver, which sees the statistics of the layer's inputs; see `solver`.

    `algorithm` chooses the scales of the groups that the solver asks for. None: absmax for 8 bits, else mse, as the
    codes are the nearest by the stored scale, which those of norm are not.

    Raises ValueError as `quantize_matrix` does, if the weight is not a matrix, and if the inputs had another width.
    """
    choose = _algorithm(quant, algorithm or ("absmax" if FORMATS[quant.format].bits == 8 else "mse"))
    _check(weight, name)
    if weight.dim() != 2:
        raise ValueError(f"{name} is {tuple(weight.shape)}; a solver needs one matrix [N, K] at a time")
    if statistics.num_features != weight.shape[1]:
        raise ValueError(
            f"{name} is {tuple(weight.shape)}; the statistics are of inputs {statistics.num_features} wide, and need "
            f"{weight.shape[1]}: calibrate this layer itself"
        )
    if quant.has_float_zeros:
        raise ValueError(f"{name} has {quant}; a solver needs zero points that are codes, or none")
    packed = empty_packed(weight.shape, quant, weight.device)
    with torch.no_grad():
        finite = Quantization(weight, quant, packed).solve(solver, statistics, choose)
    if not finite:
        raise _not_finite(name)
    return packed


def calibrated_matrix(
    weight: Tensor, quant: TensorQuant, algorithm: str, statistics: Sequence[Statistics], *, name: str = "weight"
) -> tuple[PackedWeight, int]:
    """Quantize weight [..., N, K] by a key of SOLVERS, each of its matrices [N, K] with its own statistics.

    A matrix keeps the codes of the default algorithm where those of the solver give no smaller squared error of the
    output, on the inputs that were held out.

    Returns:
        The codes, and the number of matrices that keep the default's.

    Raises:
        ValueError: as `solve_matrix`.
    """
    matrices = weight.reshape(-1, *weight.shape[-2:])
    if len(matrices) != len(statistics):
        raise ValueError(f"{name} is {tuple(weight.shape)}, with statistics of {len(statistics)} matrices")
    packed = empty_packed(weight.shape, quant, weight.device)
    parts = [None if part is None else part.reshape(len(matrices), *part.shape[weight.dim() - 2 :]) for part in packed]
    num_kept = 0
    for i, (matrix, found) in enumerate(zip(matrices, statistics)):
        chosen = solve_matrix(matrix, quant, SOLVERS[algorithm], found, name=name)
        if found.held_out is not None:
            plain = quantize_matrix(matrix, quant, name=name)
            if _output_error(matrix, plain, quant, found.held_out) <= _output_error(
                matrix, chosen, quant, found.held_out
            ):
                chosen, num_kept = plain, num_kept + 1
        for target, source in zip(parts, chosen):
            if target is not None and source is not None:
                target[i] = source.view(target[i].shape)
    return packed, num_kept


def _output_error(weight: Tensor, packed: PackedWeight, quant: TensorQuant, inputs: Tensor) -> Tensor:
    """Squared error of the product of inputs [T, K] with the quantized weight [N, K]."""
    K = weight.shape[1]
    options = {"format": quant.format, "group_size": quant.columns_per_scale(K), "K": K, "dtype": torch.float32}
    difference = dequantize(*packed, **options).sub_(weight)
    return (inputs.to(difference) @ difference.t()).square_().sum()


def _algorithm(quant: TensorQuant, algorithm: str | None) -> Algorithm:
    if algorithm in SOLVERS:
        raise ValueError(f"algorithm is {algorithm!r}, which needs the statistics of the layer's inputs: calibrate")
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm is {algorithm!r}; allowed: {', '.join(ALGORITHMS)}")
    return ALGORITHMS[algorithm or default_algorithm(quant)]


def _check(weight: Tensor, name: str) -> None:
    if not weight.is_floating_point() or weight.dim() < 2 or weight.numel() == 0:
        raise ValueError(
            f"{name} is {tuple(weight.shape)} {weight.dtype}; needs a floating-point matrix [N, K] with elements"
        )


def _not_finite(name: str) -> ValueError:
    return ValueError(f"{name} contains NaN or inf and cannot be quantized; repair the checkpoint or exclude it")
