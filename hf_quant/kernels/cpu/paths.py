"""What the plan and the support matrix are told of the CPU paths; `product` takes them."""

import torch

from hf_quant.kernels import native
from hf_quant.kernels.codes import CODES
from hf_quant.kernels.cpu.layouts import int4pack_group
from hf_quant.kernels.cpu.product import DENSE, SHIFTS, no_qlinear
from hf_quant.kernels.dispatch import Path, Problem


def _supports_native(problem: Problem) -> str | None:
    spec = CODES[problem.format]
    int8 = problem.activation == "int8" and native.takes_int8(spec)
    return native.refusal(spec, problem.dtype, problem.K, problem.group_size, int8=int8)


def _supports_dense(problem: Problem) -> str | None:
    return None if problem.N * problem.K <= DENSE else f"only matrices of at most {DENSE} weights"


def _supports_int8(problem: Problem) -> str | None:
    return None if problem.format == "int8" and problem.group_size >= problem.K else "only int8 with one scale per row"


def _supports_int8pack(problem: Problem) -> str | None:
    if problem.K % 16:
        return f"K={problem.K} is not a multiple of 16"
    return _supports_int8(problem) or _needs_bf16(problem)


def _supports_split(problem: Problem) -> str | None:
    return _supports_int8(problem) or no_qlinear(problem.K)


def _supports_int4pack(problem: Problem) -> str | None:
    spec = CODES[problem.format]
    if spec.bits > 4:
        return "only formats of at most 4 bits"
    if int4pack_group(spec, problem.N, problem.K, min(problem.group_size, problem.K)) is None:
        return (
            f"N={problem.N} must be a multiple of 16, and K={problem.K} of the group size {problem.group_size}, which "
            f"must be one of {32 if spec.is_integer else 16}"
        )
    return _needs_bf16(problem)


def _supports_shift(problem: Problem) -> str | None:
    spec = CODES[problem.format]
    if spec.dtype not in SHIFTS and (spec.bits != 6 or problem.group_size < problem.K):
        return "only fp8, and fp6 with one scale per row"
    return _needs_bf16(problem)


def _needs_bf16(problem: Problem) -> str | None:
    return None if problem.dtype == torch.bfloat16 else "only bf16 input"


NATIVE_PATH = Path("native kernels (C++)", "any M", _supports_native)
PATHS = (
    NATIVE_PATH,
    Path("bf16 (fp32) copy of a tiny weight", "any M", _supports_dense),
    Path("int8 GEMM, x in two bytes (oneDNN)", "M <= 256", _supports_split),
    Path("int8pack", "M <= 4, fewer than 2**23 weights", _supports_int8pack),
    Path("int4pack", "M <= 40 (codebooks 16)", _supports_int4pack),
    Path("GEMM of shifted codes", "any M", _supports_shift),
    Path("dequantize blocks", "any other M", lambda problem: None),
)
