"""x @ dequant(w).T on CPU: `product`, which the CPU backends of all matmul ops share.

The native kernels compute it where they can (`kernels.native`); what follows is for where they are not built, by stock
torch ops. Which path runs depends on format, shapes and dtype only: equal inputs give equal bits, in every process. M
is a run-time value: the ops are opaque to torch.compile. `cpu.paths` tells the plan. Some of torch's paths read a
prepacked copy of the weight, see `kernels.cpu.prepack`.

Their accuracy, bf16 input: weights are rounded to bf16 (their scales too), products accumulate in fp32, the output is
rounded to bf16; where one scale serves a whole row the weights are exact and the scale multiplies the output. fp16 and
fp32 input is computed in fp32 throughout: torch's fp16 GEMM is no faster on CPUs without AVX512-FP16.
"""

import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_quant.kernels import native
from hf_quant.kernels.codes import PACK, CodeSpec
from hf_quant.kernels.cpu.decode import (
    Block,
    column_scaler,
    doubled_block,
    expand_rows,
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
    dequantized,
    expand_to_fp8,
    have_middle_exponents,
    int4pack_group,
    pack_int4,
    pack_qlinear,
    trust_float8,
)
from hf_quant.kernels.cpu.prepack import fact, known, prepacked, remember, scratch
from hf_quant.kernels.rowwise.cpu import row_amax


_BLOCK = 2**20  # weights dequantized at once: 2 MB in bf16, the L2 caches of two cores
DENSE = 2**16  # weights up to which a matrix is kept dequantized: torch's own call costs more than reading it
_SPLIT = 2**23  # weights from which int8 at M <= 4 goes by oneDNN, not int8pack
_VNNI = torch.cpu._is_vnni_supported()
_NO_ZERO_POINT = torch.zeros(1, dtype=torch.int64)
# Largest M of the paths that lose to dequantizing from there on (14336 x 4096, one core of Zen 5).
_SMALL_M = {"int8pack": 4, "split": 256, "int4pack": 40, "terms": 16, "block scale": 128, "fp32": 8, "doubled": 64}
# fp8 codes become bf16 by: sign-extend to 16 bits, shift left, mask; that is the value times 2**-exponent.
SHIFTS = {torch.float8_e4m3fn: (4, -0x7810, 120), torch.float8_e5m2: (5, -0x7020, 112)}


def as_rows(x: Tensor) -> Tensor:
    """x [..., K] -> [M, K], contiguous, without autograd (what `out=` needs)."""
    if x.requires_grad:
        x = x.detach()
    if x.is_contiguous():
        return x if x.dim() == 2 else x.view(-1, x.shape[-1])
    return x.reshape(-1, x.shape[-1]).contiguous()


def product(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    bias: Tensor | None,
    spec: CodeSpec,
    group_size: int,
) -> Tensor:
    """x [M, K] contiguous @ dequant(w [N, K]).T + bias [N] -> [M, N] in x's dtype; the arguments have been checked."""
    (M, K), N, y = x.shape, qdata.shape[0], None
    if M == 0:
        return x.new_empty(0, N)
    weight = (qdata, scale, zero_point, global_scale)
    ready = known(_READY.get(x.dtype, ""), weight)
    if ready is not None and ready.format == spec.name and M <= ready.max_rows:
        return ready.run(x, qdata, bias)
    if scale.shape[1] == 1:
        group_size = K
    if native.refusal(spec, x.dtype, K, group_size) is None and native.tensors_fit(scale, zero_point, spec):
        run = native.prepared(*weight, spec, group_size)
        if run is None:
            return native.product(x, *weight, bias, spec, group_size)
        remember(_READY[x.dtype], tuple(t for t in weight if t is not None), _Ready(spec.name, sys.maxsize, run))
        return run(x, qdata, bias)
    if not qdata.is_contiguous():
        qdata = qdata.contiguous()
    weight = (qdata, scale, zero_point, global_scale)
    if N * K <= DENSE:
        y = _dense(x, *weight, bias, spec, group_size)
    elif spec.dtype == torch.int8 and scale.shape[1] == 1:
        y = _int8(x, qdata, scale, bias)
    elif x.dtype != torch.bfloat16:
        pass
    elif spec.bits <= 4:
        if M <= _SMALL_M["int4pack" if spec.is_integer else "terms"]:
            y = _int4pack(x, *weight, bias, spec, group_size)
    elif spec.dtype != torch.int8:
        y = _float8(x, qdata, scale, bias, spec, group_size)
    return _blocks(x, *weight, bias, spec, group_size) if y is None else y


# Where one call of torch's is nearly all the work, what the others cost counts: such products are looked up.


class _Ready(NamedTuple):
    """The product of one weight with x of one dtype. It must not hold the weight, whose memory it would keep."""

    format: str
    max_rows: int
    run: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # (x [M, K] contiguous, qdata, bias [N]) -> [M, N]


_READY = {dtype: f"ready {dtype}" for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}


def ready_product(x: Tensor, bias: Tensor | None, *weight: Tensor | None, format: str) -> Tensor | None:
    """x [..., K] @ w.T + bias as `product` has made it ready at its first call, without checks; None if it has not.

    `weight` is (qdata, scale, zero_point, global_scale); views of the same bytes in another dtype do.
    """
    ready = known(_READY.get(x.dtype, ""), weight)
    if ready is None or ready.format != format:
        return None
    shape = x.shape
    rows = as_rows(x)
    if not 0 < len(rows) <= ready.max_rows:
        return None
    y = ready.run(rows, weight[0], bias)
    return y if len(shape) == 2 else y.view(*shape[:-1], -1)


def _dense(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    bias: Tensor | None,
    spec: CodeSpec,
    group_size: int,
) -> Tensor | None:
    dtype = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    sources = tuple(t for t in (qdata, scale, zero_point, global_scale) if t is not None)
    weight = (qdata, scale, zero_point, global_scale)
    dense = prepacked(f"dense {spec.name} {dtype}", sources, dequantized, *weight, spec, group_size, x.shape[1], dtype)
    if dense is None:
        return None

    def run(x: Tensor, qdata: Tensor, bias: Tensor | None) -> Tensor:
        if x.dtype == dtype and (bias is None or bias.dtype == dtype) and not torch.is_autocast_enabled("cpu"):
            return F.linear(x, dense, bias)
        y = torch.empty(x.shape[0], dense.shape[0], dtype=dtype)  # with `out` autocast keeps off
        return _finish(torch.mm(x.to(dtype), dense.t(), out=y), None, bias, x.dtype)

    remember(_READY[x.dtype], sources, _Ready(spec.name, sys.maxsize, run))
    return run(x, qdata, bias)


# int8 with one scale per row


def _int8(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor | None:
    M, K = x.shape
    N = qdata.shape[0]
    bf16 = x.dtype == torch.bfloat16
    # Splitting x costs some 30 us of small ops: more than it saves on a small matrix at small M.
    small = bf16 and N * K < _SPLIT
    max_rows = _SMALL_M["split"] if bf16 else sys.maxsize
    if not (small and M <= _SMALL_M["int8pack"]) and M <= max_rows and not no_qlinear(K):
        packed = prepacked("qlinear", (qdata,), pack_qlinear, qdata)
        if packed is not None:
            factors, pieces = row_vector(scale, N, torch.float32).clone(), 2 if bf16 else 3

            def split(x: Tensor, qdata: Tensor, bias: Tensor | None) -> Tensor:
                return _split(x, packed, factors, bias, pieces)

            if not small:
                remember(_READY[x.dtype], (qdata, scale), _Ready("int8", max_rows, split))
            return split(x, qdata, bias)
    # With K % 16 != 0 int8pack reads out of bounds: NaN, or a crash. It also loads 16 bytes by instructions that crash
    # at other addresses than multiples of 16 (M=4, torch 2.13); a mapped safetensors file has multiples of 8.
    if bf16 and M <= _SMALL_M["int8pack"] and K % 16 == 0:
        copy = None if qdata.data_ptr() % 16 == 0 else prepacked("aligned", (qdata,), torch.clone, qdata)
        # Without a copy that lasts, too: by another path a reloaded model would differ in its last bits.
        aligned = qdata.data_ptr() % 16 == 0 or copy is not None
        factor = row_vector(scale, N, torch.bfloat16).clone()

        def run(x: Tensor, qdata: Tensor, bias: Tensor | None) -> Tensor:
            y = torch._weight_int8pack_mm(x, qdata if copy is None else copy, factor)
            return y if bias is None else y.add_(bias)

        if aligned:
            remember(_READY[x.dtype], (qdata, scale), _Ready("int8", _SMALL_M["int8pack"], run))
        return run(x, qdata if aligned else qdata.clone(), bias)
    return None


def row_vector(scale: Tensor, N: int, dtype: torch.dtype) -> Tensor:
    """Scales [N | 1, 1] -> [N], contiguous: torch's kernels ignore strides here."""
    if scale.dtype != dtype:
        scale = scale.to(dtype)
    if scale.shape[0] != N:
        scale = scale.repeat(N, 1)
    return (scale if scale.is_contiguous() else scale.contiguous()).view(-1)


def no_qlinear(K: int) -> str | None:
    """Why oneDNN's int8 GEMM cannot be used, None if it can."""
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


def _int4pack(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    bias: Tensor | None,
    spec: CodeSpec,
    group_size: int,
) -> Tensor | None:
    K = x.shape[1]
    group = int4pack_group(spec, qdata.shape[0], K, group_size)
    if group is None:
        return None
    sources = tuple(t for t in (qdata, scale, zero_point, global_scale) if t is not None)
    weight = (qdata, scale, zero_point, global_scale)
    packed = prepacked(f"int4pack {spec.name}", sources, pack_int4, *weight, spec, K, group_size, group)
    if packed is None:
        return None
    words, pairs, terms = packed

    def run(x: Tensor, qdata: Tensor, bias: Tensor | None) -> Tensor:
        if not spec.is_integer:
            x = (x.view(x.shape[0], -1, 1, group // 2) * terms).to(x.dtype).view(-1, 2 * K)
        y = torch._weight_int4pack_mm_for_cpu(x, words, group, pairs)
        return y if bias is None else y.add_(bias)

    max_rows = _SMALL_M["int4pack" if spec.is_integer else "terms"]
    remember(_READY[x.dtype], sources, _Ready(spec.name, max_rows, run))
    return run(x, qdata, bias)


# 8-bit floats, and fp6 expanded to them


def _float8(
    x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None, spec: CodeSpec, group_size: int
) -> Tensor | None:
    """GEMM of the codes shifted into place in bf16, which makes values times 2**-exponent of them.

    Half of that is made up for in x and half in the scale, so that neither leaves the range of bf16.
    """
    M, K = x.shape
    N = qdata.shape[0]
    trust = "normal"
    if not spec.is_packed:
        trust = fact("trust", qdata, trust_float8, qdata, group_size)
    elif scale.shape[1] == 1:
        qdata = prepacked("fp8", (qdata,), expand_to_fp8, qdata, spec, K)
    else:
        return None
    if qdata is None or trust == "no":
        return None
    shift, mask, exponent = SHIFTS[qdata.dtype]
    half = 2.0 ** (exponent // 2)
    factor = scale_values(scale, None).float() * (2.0**exponent / half)
    codes = qdata.view(torch.int8)
    x = x * half

    def shifted(n: int) -> Block:
        words = scratch("block", (n, K), torch.int16)

        def fill(start: int) -> None:
            words.copy_(codes[start : start + n]).bitwise_left_shift_(shift).bitwise_and_(mask)

        return Block(words.view(x.dtype), fill)

    def scaled(n: int) -> Block:
        weights, fill = shifted(n)
        # Times the scale, the subnormals become numbers that a bf16 GEMM takes.
        multiply = column_scaler(weights, expand_rows(factor, N).to(x.dtype), group_size)
        return Block(weights, lambda start: (fill(start), multiply(start)))

    if scale.shape[1] == 1 and trust == "normal":
        return _finish(_by_blocks(x, N, shifted), expand_rows(factor, N), bias, x.dtype)
    if M <= _SMALL_M["block scale"] and trust == "normal" and scale.shape[0] != N and K % group_size == 0:
        y = _scales_on_x(x, scale_values(scale, None).to(x.dtype), N, group_size, shifted)
        return _finish(y.mul_(2.0**exponent / half), None, bias, x.dtype)
    return _finish(_by_blocks(x, N, scaled), None, bias, x.dtype)


def _scales_on_x(x: Tensor, scale: Tensor, N: int, group_size: int, make: Callable[[int], Block]) -> Tensor:
    """x @ w.T where 128 rows share their scales [ceil(N/128), G]: these multiply x, which at small M is smaller."""
    M, K = x.shape
    by_group, scale = x.view(M, -1, group_size), scale.unsqueeze(-1)
    y = x.new_empty(M, N)
    weights, fill = make(min(128, N))
    for i, start in enumerate(range(0, N, 128)):
        if start + 128 > N:
            weights, fill = make(N - start)
        fill(start)
        torch.mm((by_group * scale[i]).view(M, K), weights.t(), out=y[:, start : start + 128])
    return y


# Any format, any M


def _blocks(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    bias: Tensor | None,
    spec: CodeSpec,
    group_size: int,
) -> Tensor:
    """Dequantize a block of rows into scratch, multiply, go on."""
    (M, K), N, dtype = x.shape, qdata.shape[0], x.dtype
    zero_point = None if zero_point is None else expand_rows(zero_point, N)
    if dtype == torch.bfloat16 and spec.planes == (4,):
        if spec.is_integer and K % PACK == K % group_size == 0 and group_size % PACK == 0:
            factor = expand_rows(scale_values(scale, None), N).float()
            make = lambda n: half_block(qdata, factor, zero_point, group_size, K, n)  # noqa: E731
            return _finish(_by_blocks(split_columns(x), N, make), None, bias, dtype)
        if scale.dtype == torch.float8_e8m0fnu and fact("exponents", scale, have_middle_exponents, scale):
            exponents = expand_rows(scale_exponents(scale), N)
            make = lambda n: exponent_block(qdata, exponents, spec, group_size, K, n)  # noqa: E731
            y = _by_blocks(x * 2.0**-32, N, make)
            return _finish(y.mul_(2.0**-32), None, bias, dtype)
        if spec.name == "nvfp4" and M <= _SMALL_M["doubled"]:
            factor = expand_rows(scale_values(scale, global_scale), N).float()
            make = lambda n: doubled_block(qdata, factor, spec, group_size, K, n)  # noqa: E731
            return _finish(_by_blocks(x, N, make), None, bias, dtype)
    factor = expand_rows(scale_values(scale, global_scale), N)
    by_table = is_table_decoded(spec) and zero_point is None
    # What is decoded by way of fp32 is multiplied in it at small M: two passes over the weights less.
    if dtype != torch.bfloat16 or (M <= _SMALL_M["fp32"] and not by_table):
        x = x.float()
    if factor.shape[1] == 1 and zero_point is None:
        y = _by_blocks(x, N, lambda n: level_block(qdata, spec, K, x.dtype, n))
        return _finish(y, factor, bias, dtype)
    if by_table and group_size >= 32:
        factor = factor.to(x.dtype)  # torch multiplies in bf16 by scalar code in groups of 16
    y = _by_blocks(x, N, lambda n: weight_block(qdata, factor, zero_point, spec, group_size, K, x.dtype, n))
    return _finish(y, None, bias, dtype)


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


def scaled(
    y: Tensor, row_factor: Tensor | None, factor: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """(y [M, N] * row_factor [M, 1] * factor [N] + bias [N]) in fp32 -> dtype; y may be overwritten."""
    M, step = y.shape[0], max(_BLOCK // max(y.shape[1], 1), 1)
    if M > step:  # temporaries of a block stay in the cache
        out = y if y.dtype == dtype else y.new_empty(y.shape, dtype=dtype)
        for start in range(0, M, step):
            rows = slice(start, start + step)
            out[rows] = scaled(y[rows], None if row_factor is None else row_factor[rows], factor, bias, dtype)
        return out
    total = y.float()
    if row_factor is not None:
        total.mul_(row_factor)
    if factor is not None:
        total.mul_(factor)
    if bias is not None:
        total.add_(bias)
    return total.to(dtype)
