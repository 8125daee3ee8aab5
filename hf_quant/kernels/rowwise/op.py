"""Quantization of activations by rows (tokens), each with an fp32 scale: alone and fused with what comes before it.

`quantize_rowwise` quantizes x as it is, `quantize_static` with a scale that is given; the others quantize a norm or an
activation function of it, whose result never goes to memory. All values are fp32 between the input and the codes,
without the roundings to 16 bit that separate ops make. None is differentiable.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_quant.kernels.codes import ROW_FORMATS, SMALLEST_SCALE, divided, row_max
from hf_quant.kernels.dispatch import define_op
from hf_quant.kernels.sign_matrices import transform
from hf_quant.kernels.weight import check_diagonal, check_input_scale


ACTS = ("silu", "gelu", "gelu_tanh")
# Philox4x32 with 7 rounds passes BigCrush (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
PHILOX_ROUNDS = 7


def row_scale(amax: Tensor, limit: float) -> Tensor:
    """amax fp32 -> scale: amax / limit; 1 if that is below 2**-90; NaN and inf stay."""
    scale = divided(amax, limit)
    return torch.where(scale < SMALLEST_SCALE, 1.0, scale)


def check_seed(x: Tensor, seed: Tensor | None) -> None:
    """Raise ValueError unless seed is None or one int64 on x's device."""
    if seed is not None and (seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != x.device):
        raise ValueError(
            f"seed is {seed.dtype} with shape {tuple(seed.shape)} on {seed.device}; "
            f"needs one torch.int64 on {x.device}"
        )


def quantize_rowwise_reference(x: Tensor, seed: Tensor | None = None, *, format: str) -> tuple[Tensor, Tensor]:
    """x [..., K] floating -> (codes [..., K] int8 | float8_e4m3fn, scale [..., 1] fp32), x ~ codes * scale.

    Both contiguous. scale = amax / max; a row whose scale would be below 2**-90, as one of zeros, gets scale 1 and
    codes of zero. A row with NaN (inf) gets the scale NaN (inf), and codes that mean nothing: no product with it is
    finite. The quotient x / scale is rounded to fp32, then to the format, half to even; with a seed it is rounded to
    one of its two neighbours, at random and without bias, by `round_stochastically`. Not differentiable.

    The seed is a tensor (one int64), so that a captured graph draws new numbers when it is replayed; a CPU and a GPU
    draw the same ones.
    """
    limit = row_max(format)
    check_seed(x, seed)
    values = x.float()
    amax = values.abs().amax(-1, keepdim=True) if x.shape[-1] else values.new_zeros((*x.shape[:-1], 1))
    scale = row_scale(amax, limit)
    codes = (values / scale).clamp(-limit, limit)
    if seed is not None:
        bits = random_bits(seed, math.prod(x.shape[:-1]), x.shape[-1]).view(x.shape)
        codes = round_stochastically(codes, bits, format=format)
    elif format == "int8":
        codes = codes.round()
    return codes.to(ROW_FORMATS[format]).contiguous(), scale


def round_stochastically(values: Tensor, bits: Tensor, *, format: str) -> Tensor:
    """values fp32 within the format's range, bits [0, 2**16) -> values of the format (still fp32), one for each.

    In units of the grid's step, value + ((bits + 1/2) / 2**16 - 1/2) is rounded to fp32, then to the nearest integer,
    half to even. So what is on the grid stays, and the average over the bits is the value to within 2**-17 of a step.
    The step is 1 for int8; for fp8_e4m3 it is 2**-3 of the value's power of two, 2**-9 below 2**-6.
    """
    if format == "int8":
        step = torch.ones((), dtype=torch.float32, device=values.device)
    else:
        power = (values.view(torch.int32) & 0x7F800000).view(torch.float32)
        step = power.clamp(min=2.0**-6) * 2.0**-3
    offset = (bits.float() + 0.5) * 2.0**-16 - 0.5
    return ((values / step + offset).round() + 0.0) * step  # no negative zero


def random_bits(seed: Tensor, M: int, K: int, start: int = 0) -> Tensor:
    """int64 [M, K] in [0, 2**16): the random bits of rows start to start + M under a seed.

    Half k % 2 (low first) of word k % 8 // 2 of Philox4x32-7 with the counter (k // 8, row, 0, 0) and the key
    (seed's low 32 bits, its high ones): eight values for one evaluation.
    """
    low = 0xFFFFFFFF
    groups, rows = torch.meshgrid(
        torch.arange(-(-K // 8), device=seed.device), torch.arange(start, start + M, device=seed.device), indexing="xy"
    )
    key = [seed.view(()) & low, (seed.view(()) >> 32) & low]
    words = [groups, rows, torch.zeros_like(rows), torch.zeros_like(rows)]
    for _ in range(PHILOX_ROUNDS):
        # int64 products wrap, but their bits are those of the unsigned ones.
        a, b = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            (b >> 32 & low) ^ words[1] ^ key[0],
            b & low,
            (a >> 32 & low) ^ words[3] ^ key[1],
            a & low,
        ]
        key = [key[0] + 0x9E3779B9 & low, key[1] + 0xBB67AE85 & low]
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, -1).flatten(1)[:, :K]


def _quantize_rowwise_fake(x, seed=None, *, format):
    row_max(format)
    check_seed(x, seed)
    return x.new_empty(x.shape, dtype=ROW_FORMATS[format]), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


quantize_rowwise = define_op(
    "quantize_rowwise", quantize_rowwise_reference, _quantize_rowwise_fake, is_row_by_row=True
)


def quantize_static_reference(
    x: Tensor, input_scale: Tensor, input_diagonal: Tensor | None = None, *, format: str
) -> tuple[Tensor, Tensor]:
    """x [..., K] floating, input_scale [1] fp32 -> as `quantize_rowwise`, but with the one scale for every row.

    Values beyond the largest code become that. The scale of a row with NaN is NaN, and its codes mean nothing: no
    product with it is finite. `input_diagonal` [K / b, b] transforms x first, in fp32, see `Weight`.
    """
    limit = row_max(format)
    check_static(x, input_scale, input_diagonal)
    values = transformed(x.float(), input_diagonal)
    codes = (values / input_scale).clamp(-limit, limit)
    if format == "int8":
        codes = codes.round()
    is_nan = values.isnan().any(-1, keepdim=True)
    return codes.to(ROW_FORMATS[format]).contiguous(), torch.where(is_nan, torch.nan, input_scale).contiguous()


def check_static(x: Tensor, input_scale: Tensor, input_diagonal: Tensor | None) -> None:
    """Raise ValueError unless x is floating-point, input_scale fp32 [1] and input_diagonal None or of x's width."""
    if not x.is_floating_point():
        raise ValueError(f"x is {x.dtype}; needs a floating dtype")
    check_input_scale(input_scale)
    if input_diagonal is not None:
        check_diagonal(input_diagonal, x.shape[-1])


def _quantize_static_fake(x, input_scale, input_diagonal=None, *, format):
    check_static(x, input_scale, input_diagonal)
    return _quantize_rowwise_fake(x, format=format)


quantize_static = define_op("quantize_static", quantize_static_reference, _quantize_static_fake, is_row_by_row=True)


def transformed(values: Tensor, diagonal: Tensor | None) -> Tensor:
    """fp32 values [..., K], multiplied with a diagonal [K / b, b] and the Hadamard matrix of each b columns."""
    return values if diagonal is None else transform(values.double(), diagonal.shape[1], diagonal).float()


def check_vector(name: str, vector: Tensor | None, K: int, input_diagonal: Tensor | None = None) -> None:
    """Raise ValueError unless vector is None or [K], and input_diagonal None or as `Weight` describes it."""
    if input_diagonal is not None:
        check_diagonal(input_diagonal, K)
    if vector is not None and vector.shape != (K,):
        raise ValueError(f"{name} is {tuple(vector.shape)}; needs [{K}], as the last dimension of x")


def check_modulation(x: Tensor, mod_scale: Tensor | None, mod_shift: Tensor | None) -> None:
    """Raise ValueError unless both are None or [B, K], where B divides the rows of x [..., K]."""
    M = math.prod(x.shape[:-1])
    for name, part in (("mod_scale", mod_scale), ("mod_shift", mod_shift)):
        if part is None:
            continue
        if part.dim() != 2 or part.shape[1] != x.shape[-1] or (M and (part.shape[0] == 0 or M % part.shape[0])):
            raise ValueError(
                f"{name} is {tuple(part.shape)} for x {tuple(x.shape)}; needs [B, {x.shape[-1]}] where B divides {M} "
                "rows, which follow each other in x"
            )
    if mod_scale is not None and mod_shift is not None and mod_scale.shape != mod_shift.shape:
        raise ValueError(
            f"mod_scale is {tuple(mod_scale.shape)}, mod_shift is {tuple(mod_shift.shape)}; must be equal"
        )


def rms_norm_values(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., K] -> fp32 x / sqrt(mean(x**2) + eps) * weight."""
    values = x.float()
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return values if weight is None else values * weight.float()


def rms_norm_quantize_rowwise_reference(
    x: Tensor, weight: Tensor | None, input_diagonal: Tensor | None = None, *, eps: float, format: str
) -> tuple[Tensor, Tensor]:
    """Quantize x / sqrt(mean(x**2) + eps) * weight; x [..., K], weight [K] -> as `quantize_rowwise`.

    Zhang and Sennrich, https://arxiv.org/abs/1910.07467. A norm that multiplies by 1 + weight passes that as weight.
    With `input_diagonal` [K / b, b] the result is transformed before it is quantized, see `Weight`.
    """
    check_vector("weight", weight, x.shape[-1], input_diagonal)
    values = transformed(rms_norm_values(x, weight, eps), input_diagonal)
    return quantize_rowwise_reference(values, format=format)


def _rms_norm_quantize_rowwise_fake(x, weight, input_diagonal=None, *, eps, format):
    check_vector("weight", weight, x.shape[-1], input_diagonal)
    return _quantize_rowwise_fake(x, format=format)


rms_norm_quantize_rowwise = define_op(
    "rms_norm_quantize_rowwise", rms_norm_quantize_rowwise_reference, _rms_norm_quantize_rowwise_fake
)


def modulation_rows(part: Tensor, M: int, rows: slice) -> Tensor:
    """part [B, K] -> fp32, what is added to or multiplied with `rows` of M: row m takes m // (M / B)."""
    if M == 0:
        return part[:0].float()
    return part[torch.arange(rows.start, rows.stop, device=part.device) // (M // part.shape[0])].float()


def layer_norm_values(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mod_scale: Tensor | None,
    mod_shift: Tensor | None,
    eps: float,
) -> Tensor:
    """x [M, K], mod_scale and mod_shift [M, K] fp32 -> fp32 norm(x) * (1 + mod_scale) + mod_shift."""
    affine = [None if part is None else part.float() for part in (weight, bias)]
    values = F.layer_norm(x.float(), x.shape[-1:], *affine, eps)
    values = values if mod_scale is None else values * (1 + mod_scale)
    return values if mod_shift is None else values + mod_shift


def check_layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mod_scale: Tensor | None,
    mod_shift: Tensor | None,
    input_diagonal: Tensor | None,
) -> None:
    """Raise ValueError unless the shapes are as `layer_norm_quantize_rowwise_reference` describes."""
    check_vector("weight", weight, x.shape[-1], input_diagonal)
    check_vector("bias", bias, x.shape[-1])
    check_modulation(x, mod_scale, mod_shift)


def layer_norm_quantize_rowwise_reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mod_scale: Tensor | None,
    mod_shift: Tensor | None,
    input_diagonal: Tensor | None = None,
    *,
    eps: float,
    format: str,
) -> tuple[Tensor, Tensor]:
    """Quantize (norm(x) * weight + bias) * (1 + mod_scale) + mod_shift; x [..., K] -> as `quantize_rowwise`.

    weight, bias [K]; mod_scale, mod_shift [B, K], as the adaptive norms of diffusion transformers make them: each of
    their rows serves the next 1 / B of the rows of x, so B is the batch of x [B, S, K], 1, or the number of rows.
    `input_diagonal` [K / b, b] transforms the result before it is quantized, see `Weight`.
    """
    check_layer_norm(x, weight, bias, mod_scale, mod_shift, input_diagonal)
    M = math.prod(x.shape[:-1])
    rows = x.reshape(M, x.shape[-1])
    modulation = [None if part is None else modulation_rows(part, M, slice(0, M)) for part in (mod_scale, mod_shift)]
    values = transformed(layer_norm_values(rows, weight, bias, *modulation, eps), input_diagonal)
    return quantize_rowwise_reference(values.view(x.shape), format=format)


def _layer_norm_quantize_rowwise_fake(x, weight, bias, mod_scale, mod_shift, input_diagonal=None, *, eps, format):
    check_layer_norm(x, weight, bias, mod_scale, mod_shift, input_diagonal)
    return _quantize_rowwise_fake(x, format=format)


layer_norm_quantize_rowwise = define_op(
    "layer_norm_quantize_rowwise", layer_norm_quantize_rowwise_reference, _layer_norm_quantize_rowwise_fake
)


def check_act(x: Tensor, up: Tensor | None, act: str, input_diagonal: Tensor | None) -> None:
    """Raise ValueError unless act is known, up None or of x's shape, and input_diagonal None or of x's width."""
    if input_diagonal is not None:
        check_diagonal(input_diagonal, x.shape[-1])
    if act not in ACTS:
        raise ValueError(f"act is {act!r}; allowed: {', '.join(ACTS)}")
    if up is not None and up.shape != x.shape:
        raise ValueError(f"up is {tuple(up.shape)}, x is {tuple(x.shape)}; the shapes must be equal")


def act_values(x: Tensor, up: Tensor | None, act: str) -> Tensor:
    """fp32 act(x) * up."""
    values = x.float()
    if act == "silu":
        values = F.silu(values)
    else:
        values = F.gelu(values, approximate="tanh" if act == "gelu_tanh" else "none")
    return values if up is None else values * up.float()


def act_quantize_rowwise_reference(
    x: Tensor, up: Tensor | None, input_diagonal: Tensor | None = None, *, act: str, format: str
) -> tuple[Tensor, Tensor]:
    """Quantize act(x) * up (act(x) without up); x, up [..., K] -> as `quantize_rowwise`.

    act: "silu", "gelu" (by erf) or "gelu_tanh" (its approximation by tanh). x and up may be the halves of one tensor.
    `input_diagonal` [K / b, b] transforms the result before it is quantized, see `Weight`.
    """
    check_act(x, up, act, input_diagonal)
    return quantize_rowwise_reference(transformed(act_values(x, up, act), input_diagonal), format=format)


def _act_quantize_rowwise_fake(x, up, input_diagonal=None, *, act, format):
    check_act(x, up, act, input_diagonal)
    return _quantize_rowwise_fake(x, format=format)


act_quantize_rowwise = define_op("act_quantize_rowwise", act_quantize_rowwise_reference, _act_quantize_rowwise_fake)
