"""x @ dequant(w).T on CPU: `product`, which the CPU backends of all matmul ops share, and `PATHS`, its one table.

A product takes the first path of the table that is for M rows, supports the problem and can prepare the weight; the
plan and the support matrix print the same table. The native kernels come first (`kernels.native`); the other paths are
stock torch ops, for machines where those are not built. The choice depends on format, shapes and dtype only: equal
inputs give equal bits, in every process. M is a run-time value: the ops are opaque to torch.compile.

Accuracy of torch's paths, bf16 input: weights are rounded to bf16 (their scales too), products accumulate in fp32, the
output is rounded to bf16. With one scale for a whole row the weights are exact, and the scale multiplies the output.
fp16 and fp32 input is computed in fp32 throughout: torch's fp16 GEMM is no faster on CPUs without AVX512-FP16.
"""

import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_quant.kernels import native, prepack
from hf_quant.kernels.codes import CODES, PACK, expand_rows
from hf_quant.kernels.cpu.decode import (
    Block,
    doubled_block,
    exponent_block,
    half_block,
    is_table_decoded,
    level_block,
    scale_exponents,
    scale_values,
    split_columns,
    weight_block,
)
from hf_quant.kernels.cpu.layouts import (
    TERMS,
    dequantized,
    have_middle_exponents,
    int4pack_group,
    pack_int4,
    pack_qlinear,
)
from hf_quant.kernels.cpu.rows import as_rows, row_amax, row_vector, scaled, transform_rows
from hf_quant.kernels.dispatch import Problem
from hf_quant.kernels.weight import Weight


_BLOCK = 2**20  # weights dequantized at once: 2 MB in bf16, the L2 caches of two cores
DENSE = 2**16  # weights up to which a matrix is kept dequantized: torch's own call costs more than reading it
_SPLIT = 2**23  # weights from which int8 at M <= 4 goes by oneDNN, not int8pack
_VNNI = torch.cpu._is_vnni_supported()
_NO_ZERO_POINT = torch.zeros(1, dtype=torch.int64)
# Largest M of ways that lose to others from there on (14336 x 4096, one core of Zen 5).
_FP32_ROWS, _DOUBLED_ROWS = 8, 64

Run = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # (x [M, K] contiguous, qdata, bias [N]) -> [M, N]


class Prepared(NamedTuple):
    """The product with one weight for x of one dtype.

    `lasts`: it holds none of the weight's tensors, so that later calls find it by them instead of asking the table.
    `is_native`: x may have any shape [..., K], of which the result has [..., N].
    """

    run: Run
    lasts: bool = True
    is_native: bool = False


class CpuPath(NamedTuple):
    """One way to compute a product on CPU, see `dispatch.Path`.

    `max_rows`: the largest M it is taken for. `prepare(w, dtype of x)` gives the product, None if this weight or the
    limit on prepacked memory forbids it.
    """

    name: str
    max_rows: int
    supports: Callable[[Problem], str | None]
    prepare: Callable[[Weight, torch.dtype], Prepared | None]

    @property
    def when(self) -> str:
        return "any M" if self.max_rows == sys.maxsize else f"M <= {self.max_rows}"


class ReadyRun(NamedTuple):
    """A product that an earlier call has prepared for all calls with `min_rows` <= M <= `max_rows`; see `Prepared`."""

    format: str
    min_rows: int
    max_rows: int
    run: Run
    is_native: bool

    def product(self, x: Tensor, qdata: Tensor, bias: Tensor | None) -> Tensor | None:
        """The product for x [..., K] of any strides; None if it is not for so many rows."""
        shape = x.shape
        if not self.min_rows <= (shape[0] if len(shape) == 2 else x.numel() // shape[-1]) <= self.max_rows:
            return None
        if self.is_native:
            return self.run(x if x.is_contiguous() else x.contiguous(), qdata, bias)
        y = self.run(as_rows(x), qdata, bias)
        return y if len(shape) == 2 else y.view(*shape[:-1], -1)


def product(x: Tensor, w: Weight, bias: Tensor | None) -> Tensor:
    """x [M, K] contiguous @ dequant(w [N, K]).T + bias [N] -> [M, N] in x's dtype."""
    M = x.shape[0]
    if M == 0:
        return x.new_empty(0, w.N)
    y = ready_product(x, bias, w.packed, w.format, None, w.input_diagonal)
    if y is not None:
        return y
    min_rows = 1
    problem = Problem(w.format, w.group_size, w.N, w.K, x.dtype, w.zero_point is None)
    for path in PATHS:
        if path.supports(problem) is not None:
            continue
        if M > path.max_rows:
            min_rows = max(min_rows, path.max_rows + 1)
            continue
        found = path.prepare(w, x.dtype)
        if found is not None:
            run = found.run if path is NATIVE_PATH else _of_transformed(found.run, w.input_diagonal)
            if found.lasts:
                make_ready(w, x.dtype, None, run, min_rows, path.max_rows, is_native=found.is_native)
            return run(x, w.qdata, bias)
    raise AssertionError("the last path takes everything")


def _of_transformed(run: Run, diagonal: Tensor | None) -> Run:
    """`run` for x in the host's basis; the native kernels transform x themselves."""
    if diagonal is None:
        return run
    return lambda x, qdata, bias: run(transform_rows(x, diagonal.shape[1], diagonal, x.dtype), qdata, bias)


def make_ready(
    w: Weight,
    dtype: torch.dtype,
    activation: str | None,
    run: Run,
    min_rows: int = 1,
    max_rows: int = sys.maxsize,
    *,
    is_native: bool,
) -> None:
    """Let `ready_product` find `run` by the tensors of w and its input's scale, as long as they live unchanged."""
    sources = w.tensors if w.input_scale is None else (*w.tensors, w.input_scale)
    ready = ReadyRun(w.format, min_rows, max_rows, run, is_native)
    prepack.put(_key(dtype, activation, w.input_diagonal), sources, ready)


def _key(dtype: torch.dtype, activation: str | None, diagonal: Tensor | None) -> tuple:
    """The key of a ready product; it holds the diagonal, so that no other can have its address."""
    return dtype, activation, None if diagonal is None else diagonal.data_ptr()


def find_ready(
    dtype: torch.dtype,
    weight: tuple[Tensor | None, ...],
    format: str,
    activation: str | None,
    diagonal: Tensor | None,
) -> ReadyRun | None:
    """The product that an earlier call with x of `dtype` and this weight has made ready, None if none has.

    `weight` is (qdata, scale, zero_point, global_scale, input_scale); views of the same bytes in another dtype do.
    """
    ready = prepack.get(_key(dtype, activation, diagonal), weight)
    return None if ready is None or ready.format != format else ready


def ready_product(
    x: Tensor,
    bias: Tensor | None,
    weight: tuple[Tensor | None, ...],
    format: str,
    activation: str | None,
    diagonal: Tensor | None,
) -> Tensor | None:
    """x [..., K] @ w.T + bias as an earlier call has made it ready, without checks; None if none has."""
    ready = find_ready(x.dtype, weight, format, activation, diagonal)
    return None if ready is None else ready.product(x, weight[0], bias)


# The native kernels


def supports_native(problem: Problem) -> str | None:
    """The reason why the native kernels do not compute a product, None if they do."""
    spec = CODES[problem.format]
    int8 = problem.activation == "int8" and native.takes_int8(spec)
    return native.unsupported_reason(spec, problem.dtype, problem.K, problem.group_size, int8=int8)


def _native(w: Weight, dtype: torch.dtype) -> Prepared | None:
    if not native.serves(w, dtype):
        return None
    whole = w.contiguous()
    if whole is w:
        return Prepared(native.prepared(w), is_native=True)
    return Prepared(lambda x, qdata, bias: native.product(x, whole, bias), lasts=False)


# A tiny weight, dequantized


def _supports_dense(problem: Problem) -> str | None:
    return None if problem.N * problem.K <= DENSE else f"only matrices of at most {DENSE} weights"


def _dense(w: Weight, x_dtype: torch.dtype) -> Prepared | None:
    dtype = torch.bfloat16 if x_dtype == torch.bfloat16 else torch.float32
    dense = prepack.get_or_build(f"dense {w.format} {dtype}", w.tensors, dequantized, _contiguous_codes(w), dtype)
    if dense is None:
        return None

    def run(x: Tensor, qdata: Tensor, bias: Tensor | None) -> Tensor:
        if x.dtype == dtype and (bias is None or bias.dtype == dtype) and not torch.is_autocast_enabled("cpu"):
            return F.linear(x, dense, bias)
        y = torch.empty(x.shape[0], dense.shape[0], dtype=dtype)  # with `out` autocast keeps off
        return _finish(torch.mm(x.to(dtype), dense.t(), out=y), None, bias, x.dtype)

    return Prepared(run)


def _contiguous_codes(w: Weight) -> Weight:
    return w if w.qdata.is_contiguous() else w._replace(qdata=w.qdata.contiguous())


# int8 with one scale per row


def _supports_int8(problem: Problem) -> str | None:
    return None if problem.format == "int8" and problem.group_size >= problem.K else "only int8 with one scale per row"


def _supports_int8pack(problem: Problem) -> str | None:
    # With K % 16 != 0 int8pack reads out of bounds: NaN, or a crash.
    if problem.K % 16:
        return f"K={problem.K} is not a multiple of 16"
    # Splitting x costs some 30 us of small ops: more than it saves on a small matrix at small M.
    if problem.N * problem.K >= _SPLIT and qlinear_unsupported_reason(problem.K) is None:
        return f"{problem.N} x {problem.K} are {_SPLIT} weights or more, for which oneDNN is faster"
    return _supports_int8(problem) or _needs_bf16(problem)


def _int8pack(w: Weight, dtype: torch.dtype) -> Prepared:
    # It loads 16 bytes by instructions that crash at other addresses than multiples of 16 (M=4, torch 2.13); a mapped
    # safetensors file has multiples of 8.
    is_aligned = w.qdata.is_contiguous() and w.qdata.data_ptr() % 16 == 0
    copy = None if is_aligned else prepack.get_or_build("aligned", (w.qdata,), _aligned, w.qdata)
    factor = row_vector(w.scale, w.N, torch.bfloat16).clone()

    def run(x: Tensor, qdata: Tensor, bias: Tensor | None) -> Tensor:
        # Without a copy that lasts, too: by another path a reloaded model would differ in its last bits.
        codes = qdata if is_aligned else _aligned(qdata) if copy is None else copy
        y = torch._weight_int8pack_mm(x, codes, factor)
        return y if bias is None else y.add_(bias)

    return Prepared(run)


def _aligned(qdata: Tensor) -> Tensor:
    return qdata.clone(memory_format=torch.contiguous_format)


def _supports_two_bytes(problem: Problem) -> str | None:
    return _supports_int8(problem) or qlinear_unsupported_reason(problem.K) or _needs_bf16(problem)


def _supports_three_bytes(problem: Problem) -> str | None:
    reason = _supports_int8(problem) or qlinear_unsupported_reason(problem.K)
    return "only fp32 and fp16 input" if reason is None and problem.dtype == torch.bfloat16 else reason


def _int8_split(w: Weight, dtype: torch.dtype) -> Prepared | None:
    packed = prepack.get_or_build("qlinear", (w.qdata,), pack_qlinear, w.qdata)
    if packed is None:
        return None
    factors, pieces = row_vector(w.scale, w.N, torch.float32).clone(), 2 if dtype == torch.bfloat16 else 3
    return Prepared(lambda x, qdata, bias: _split(x, packed, factors, bias, pieces))


def qlinear_unsupported_reason(K: int) -> str | None:
    """The reason why oneDNN's int8 GEMM cannot be used, None if it can."""
    if not _VNNI:
        return "needs a CPU with VNNI: others saturate sums of pairs in 16 bits"
    return f"K={K} could overflow int32 sums; at most 65536" if K > 65536 else None


def qlinear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """(x - 128) [M, K] uint8 @ weight.T * scale [N] fp32 -> fp32 [M, N]; sums are exact.

    With int8 x oneDNN would silently run its reference code, 300 times slower.
    """
    return torch.ops.onednn.qlinear_pointwise.default(
        x, 1.0, 128, weight, scale, _NO_ZERO_POINT, None, 1.0, 0, torch.float32, "none", [], ""
    )


def _split(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, pieces: int) -> Tensor:
    """x in fixed point with 8 * pieces bits, relative to each row's largest magnitude: one byte of it per GEMM row.

    The error, 2**-16 (2**-24) of the largest magnitude per element, stays below bf16's (fp32's) rounding of y for K up
    to 2**16 even where one element dominates its row. Few ops matter more than fast ones: at M = 1 each finds the
    caches full of weights.
    """
    M, K = x.shape
    limit = 2 ** (8 * pieces - 1) - 2 ** (8 * pieces - 8)  # a little less than fits, as x / unit may round up
    offset = sum(128 << (8 * i) for i in range(pieces))  # every byte becomes uint8 with zero point 128
    unit = row_amax(x).clamp_(min=1e-30).div_(limit)
    fixed = torch.div(x, unit).round_().to(torch.int32).add_(offset)
    rows = torch.empty(pieces, M, K, dtype=torch.uint8)
    for row in rows:  # low bytes first; a conversion to uint8 takes the low byte
        row.copy_(fixed)
        fixed.bitwise_right_shift_(8)
    sums = qlinear(rows.view(-1, K), weight, scale)
    y = sums[:M].add_(sums[M : 2 * M], alpha=256)
    if pieces == 3:
        y.add_(sums[2 * M :], alpha=65536)
    y.mul_(unit)
    return (y if bias is None else y.add_(bias)).to(x.dtype)


# Formats of at most 4 bits


def _supports_int4pack(problem: Problem) -> str | None:
    if not CODES[problem.format].is_integer:
        return "only integers"
    return _int4pack_unsupported_reason(problem)


def _supports_terms(problem: Problem) -> str | None:
    if problem.format not in TERMS:
        return f"only {', '.join(TERMS)}"
    return _int4pack_unsupported_reason(problem)


def _int4pack_unsupported_reason(problem: Problem) -> str | None:
    spec = CODES[problem.format]
    if spec.bits > 4:
        return "only formats of at most 4 bits"
    if int4pack_group(spec, problem.N, problem.K, min(problem.group_size, problem.K)) is None:
        return (
            f"N={problem.N} must be a multiple of 16, and K={problem.K} of the group size {problem.group_size}, which "
            f"must be one of {32 if spec.is_integer else 16}"
        )
    return _needs_bf16(problem)


def _needs_bf16(problem: Problem) -> str | None:
    return None if problem.dtype == torch.bfloat16 else "only bf16 input"


def _int4pack(w: Weight, dtype: torch.dtype) -> Prepared | None:
    group = int4pack_group(w.spec, w.N, w.K, w.group_size)
    packed = prepack.get_or_build(f"int4pack {w.format}", w.tensors, pack_int4, _contiguous_codes(w), group)
    if packed is None:
        return None
    words, pairs, terms = packed
    is_integer, K = w.spec.is_integer, w.K

    def run(x: Tensor, qdata: Tensor, bias: Tensor | None) -> Tensor:
        if not is_integer:
            x = (x.view(x.shape[0], -1, 1, group // 2) * terms).to(x.dtype).view(-1, 2 * K)
        y = torch._weight_int4pack_mm_for_cpu(x, words, group, pairs)
        return y if bias is None else y.add_(bias)

    return Prepared(run)


# Any format, any M


def _blocks(w: Weight, dtype: torch.dtype) -> Prepared:
    w = _contiguous_codes(w)
    return Prepared(lambda x, qdata, bias: _by_decoded_blocks(x, w, bias), lasts=False)


def _by_decoded_blocks(x: Tensor, w: Weight, bias: Tensor | None) -> Tensor:
    """Dequantize a block of rows into scratch, multiply, go on."""
    (M, K), dtype, spec = x.shape, x.dtype, w.spec
    if dtype == torch.bfloat16 and spec.planes == (4,):
        if spec.is_integer and K % PACK == K % w.group_size == 0 and w.group_size % PACK == 0:
            factor = expand_rows(scale_values(w.scale, w.global_scale), w.N).float()
            return _finish(_by_blocks(split_columns(x), w.N, lambda n: half_block(w, factor, n)), None, bias, dtype)
        has_exponents = w.scale.dtype == torch.float8_e8m0fnu
        if has_exponents and prepack.constant("exponents", w.scale, have_middle_exponents, w.scale):
            exponents = expand_rows(scale_exponents(w.scale), w.N)
            y = _by_blocks(x * 2.0**-32, w.N, lambda n: exponent_block(w, exponents, n))
            return _finish(y.mul_(2.0**-32), None, bias, dtype)
        if w.format == "nvfp4" and M <= _DOUBLED_ROWS:
            factor = expand_rows(scale_values(w.scale, w.global_scale), w.N).float()
            return _finish(_by_blocks(x, w.N, lambda n: doubled_block(w, factor, n)), None, bias, dtype)
    factor = expand_rows(scale_values(w.scale, w.global_scale), w.N)
    by_table = is_table_decoded(spec) and w.zero_point is None
    # What is decoded by way of fp32 is multiplied in it at small M: two passes over the weights less.
    if dtype != torch.bfloat16 or (M <= _FP32_ROWS and not by_table):
        x = x.float()
    if factor.shape[1] == 1 and w.zero_point is None:
        y = _by_blocks(x, w.N, lambda n: level_block(w.qdata, spec, K, x.dtype, n))
        return _finish(y, factor, bias, dtype)
    if by_table and w.group_size >= 32:
        factor = factor.to(x.dtype)  # torch multiplies in bf16 by scalar code in groups of 16
    return _finish(_by_blocks(x, w.N, lambda n: weight_block(w, factor, x.dtype, n)), None, bias, dtype)


def _by_blocks(x: Tensor, N: int, make: Callable[[int], Block]) -> Tensor:
    """x [M, K] @ w.T -> [M, N] in x's dtype, where make(n) decodes n rows of w at a time."""
    M, K = x.shape
    y = x.new_empty(M, N)
    step = min(max(_BLOCK // max(K, 1), 1), N)
    # oneDNN's fp32 GEMM is on AMD twice as fast as MKL's, which `torch.mm` takes.
    onednn = x.dtype == torch.float32 and M >= 4 and torch.backends.mkldnn.is_available()
    weights, fill = make(step)
    for start in range(0, N, step):
        if start + step > N:
            weights, fill = make(N - start)
        fill(start)
        if onednn:
            y[:, start : start + step] = torch.ops.mkldnn._linear_pointwise(x, weights, None, "none", [], "")
        else:
            torch.mm(x, weights.t(), out=y[:, start : start + step])
    return y


def _finish(y: Tensor, factor: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(y [M, N] * factor [N, 1] + bias [N]) in fp32 -> dtype; y may be overwritten, factor may have one element."""
    if factor is None and bias is None:
        return y.to(dtype)
    return scaled(y, None, None if factor is None else factor.reshape(-1).float(), bias, dtype)


NATIVE_PATH = CpuPath("native kernels (C++)", sys.maxsize, supports_native, _native)
PATHS = (
    NATIVE_PATH,
    CpuPath("bf16 (fp32) copy of a tiny weight", sys.maxsize, _supports_dense, _dense),
    CpuPath("int8pack", 4, _supports_int8pack, _int8pack),
    CpuPath("int8 GEMM, x in two bytes (oneDNN)", 256, _supports_two_bytes, _int8_split),
    CpuPath("int8 GEMM, x in three bytes (oneDNN)", sys.maxsize, _supports_three_bytes, _int8_split),
    CpuPath("int4pack", 40, _supports_int4pack, _int4pack),
    CpuPath("int4pack of two terms", 16, _supports_terms, _int4pack),
    CpuPath("dequantize blocks", sys.maxsize, lambda problem: None, _blocks),
)
