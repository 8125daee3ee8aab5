"""Products with a quantized weight, and the weight itself, computed by the extension.

Accuracy: codes, less their zero points, times x are exact products, summed in fp32 and then scaled in fp32: nearer to
the reference than a weight rounded to bf16. On x86, bf16 x meets integer codes in fixed point of 16 bits, with a power
of two for every 4 to 16 columns, or in many rows for every group: a relative error of 1e-5, a hundredth of that of
rounding y. So do levels of fp4 and fp6_e2m3 times 2 and 8. Levels of nf4, fp4 and fp6 may meet it as words; those of
nf4 are rounded then, in many rows to 10 bits: an error of 3e-4 to 6e-4. Else, where the CPU multiplies bf16 faster
than fp32, bf16 x is multiplied with levels in bf16, which holds all but nf4's; all else is fp32. int8 x and int4 or
int8 codes give exact sums of integers, of whole groups or, of groups above 1024 columns, of parts of them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hf_quant.kernels import float_zeros, prepack
from hf_quant.kernels.codes import CodeSpec
from hf_quant.kernels.native.arguments import DTYPES, INPUTS, UNIT, knows, weight_arguments
from hf_quant.kernels.native.extension import active, module, unavailable_reason
from hf_quant.kernels.weight import Weight


_BY_F32, _BY_BF16, _BY_INT8 = 0, 1, 2
# Names of this module are found faster than attributes of others.
_matmul, _num_threads = getattr(module, "matmul", None), torch.get_num_threads
_OFFSET_LANES = 16  # kOffsetLanes of src/offsets.h
_MAX_EXACT_K = 65536  # sums of int8 products stay within int32
_FIT = {bits: f"zero points fit {bits} bits" for bits in range(1, 9)}


def unsupported_reason(
    spec: CodeSpec, dtype: torch.dtype, K: int, group_size: int, *, int8: bool = False
) -> str | None:
    """The reason why a product is not computed here, None if it is; `int8`: both sides are integers (`takes_int8`)."""
    if active() is None:
        return unavailable_reason()
    if not knows(spec.name):
        return f"{spec.name}, whose levels or bit planes are of another kind"
    if dtype not in INPUTS:
        return f"only bf16, fp16 and fp32 input, not {dtype}"
    if group_size < K and group_size % UNIT:
        return f"groups of {group_size} are no multiple of {UNIT}"
    if K == 0:
        return "K=0"
    if int8 and K > _MAX_EXACT_K:
        return f"K={K} could overflow int32 sums; at most {_MAX_EXACT_K}"
    return None


def serves(w: Weight, dtype: torch.dtype, *, int8: bool = False) -> bool:
    """True if products with x of `dtype` (`int8`: with its rows in int8) are computed here for this very weight.

    `unsupported_reason` returns None, the extension knows the dtype of the scales, and every zero point is a code,
    which is checked once for a tensor. With floating-point zero points x must neither be transformed nor quantized on
    the way.
    """
    if unsupported_reason(w.spec, dtype, w.K, w.group_size, int8=int8) is not None or w.scale.dtype not in DTYPES:
        return False
    bits = w.spec.bits
    if w.has_float_zeros:
        return w.input_diagonal is None
    return w.zero_point is None or prepack.constant(_FIT[bits], w.zero_point, _all_codes, bits, w.zero_point)


def _all_codes(bits: int, zero_point: Tensor) -> bool:
    return zero_point.numel() == 0 or int(zero_point.max()) < 2**bits


def decodes(w: Weight, dtype: torch.dtype) -> bool:
    """True if this very weight can be dequantized here to `dtype`."""
    return not w.has_float_zeros and serves(w, dtype)


def takes_int8(spec: CodeSpec) -> bool:
    """True if products with int8 x are sums of integers for this format, not of bf16 or fp32."""
    return spec.is_integer and spec.bits in (2, 4, 8)


def prepared(w: Weight, *, integer: bool = False) -> Callable[..., Tensor]:
    """The product with a contiguous weight as a function, which must not be called after the weight's memory is gone.

    It computes (x [..., K] contiguous @ w.T) * row_scale [M, 1] + bias [N] or [E, N] -> [..., N] from x,
    the codes (which it ignores), and the bias. `integer`: in integer sums; x is int8 codes with their row_scale, or
    its rows are quantized on the way. `ends` [E] int32: the end of each expert's rows, x is [M, K]; rows past the last
    end give zeros. `out_dtype`: any, None for that of x; what the extension does not know is rounded from fp32. The
    caller has checked everything, and asked `serves`.
    """
    N, K, (weight, held) = w.N, w.K, prepare(w)

    def run(
        x: Tensor,
        qdata: Tensor,
        bias: Tensor | None,
        row_scale: Tensor | None = None,
        ends: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        _held: tuple[Tensor | None, ...] = held,  # as their addresses are in use
    ) -> Tensor:
        given = x.dtype
        wanted = given if out_dtype is None else out_dtype
        dtype = wanted if wanted in INPUTS else torch.float32
        y = _empty(x, N, dtype) if ends is None else torch.zeros(len(x), N, dtype=dtype, device="cpu")
        if bias is not None:
            if not bias.is_contiguous():
                bias = bias.contiguous()
            if bias.dtype not in INPUTS:
                bias = bias.float()
        _matmul(
            weight,
            x.numel() // K,
            x.data_ptr(),
            DTYPES[given],
            0 if row_scale is None else row_scale.data_ptr(),
            y.data_ptr(),
            DTYPES[dtype],
            0 if bias is None else bias.data_ptr(),
            0 if bias is None else DTYPES[bias.dtype],
            0 if ends is None else ends.data_ptr(),
            _num_threads(),
            compute_mode(given, integer=integer),
        )
        return y if dtype is wanted else y.to(wanted)

    return run


def prepare(w: Weight) -> tuple[object, tuple[Tensor | None, ...]]:
    """A contiguous weight for the extension, and tensors to hold: its addresses must not outlive it and these."""
    transform = (0, 0) if w.input_diagonal is None else (w.input_diagonal.data_ptr(), w.input_diagonal.shape[1])
    offsets = _offsets_in_lanes(w) if w.has_float_zeros else None
    address = 0 if offsets is None else offsets.data_ptr()
    weight = module.prepare(w.N, w.K, *transform, address, *weight_arguments(float_zeros.symmetric(w)))
    return weight, (w.input_diagonal, offsets)


def _offsets_in_lanes(w: Weight) -> Tensor:
    """The offsets of 16 rows side by side, fp32 [..., ceil(N / 16), groups, 16]; made once for a weight."""
    made = prepack.get_or_build("offsets in lanes", w.tensors, _in_lanes, w)
    return _in_lanes(w) if made is None else made


def _in_lanes(w: Weight) -> Tensor:
    found = float_zeros.offsets_of(w)
    padded = torch.nn.functional.pad(found, (0, 0, 0, -w.N % _OFFSET_LANES))
    return padded.unflatten(-2, (-1, _OFFSET_LANES)).transpose(-1, -2).contiguous()


def compute_mode(dtype: torch.dtype, *, integer: bool) -> int:
    """The extension's number of how products with x of a dtype are computed; `integer` as in `prepared`."""
    return _BY_INT8 if integer else _BY_BF16 if dtype is torch.bfloat16 else _BY_F32


def _empty(x: Tensor, N: int, dtype: torch.dtype) -> Tensor:
    """Uninitialized memory for the result [..., N] of x [..., K]; with strides torch makes it in half the time."""
    shape = x.shape
    if len(shape) == 2:
        size, strides = (shape[0], N), (N, 1)
    elif len(shape) == 3:
        size, strides = (shape[0], shape[1], N), (shape[1] * N, N, 1)
    else:
        return torch.empty((*shape[:-1], N), dtype=dtype, device="cpu")
    return x.new_empty_strided(size, strides) if dtype is x.dtype else x.new_empty_strided(size, strides, dtype=dtype)


def product(x: Tensor, w: Weight, bias: Tensor | None, *, integer: bool = False, **how) -> Tensor:
    """`prepared` for one call, with a weight of any strides; x [M, K] contiguous."""
    w = w.contiguous()
    return prepared(w, integer=integer)(x, w.qdata, bias, **how)


def dequantize(w: Weight, dtype: torch.dtype) -> Tensor:
    """The weight [N, K], or experts [E, N, K], in `dtype`: the bits of the reference. Ask `serves` first."""
    w = w.contiguous()
    y = torch.empty(*w.qdata.shape[:-1], w.K, dtype=dtype, device="cpu")
    module.dequantize(w.N, w.K, y.data_ptr(), DTYPES[dtype], torch.get_num_threads(), *weight_arguments(w))
    return y


def row_reader(w: Weight, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A function that dequantizes rows of a contiguous weight [N, K]: numbers, int64 [...] -> [..., K] in `dtype`.

    For few rows: each is a call of its own. It must not be called after the weight's memory is gone. It raises
    IndexError for numbers outside of 0 to N - 1. Ask `serves` first; each row has scales of its own.
    """
    N, K, size = w.N, w.K, dtype.itemsize * w.K
    before, arguments = (1, K), weight_arguments(w)
    kind, (qdata, row_bytes, scale, *middle), (zero, *rest) = arguments[:4], arguments[4:10], arguments[10:]
    groups = w.scale.shape[1]
    scale_bytes, zero_bytes = groups * w.scale.element_size(), groups if zero else 0
    number = DTYPES[dtype]

    def read(rows: Tensor) -> Tensor:
        y = torch.empty((*rows.shape, K), dtype=dtype, device="cpu")
        to = y.data_ptr()
        for row in rows.flatten().tolist():
            if not 0 <= row < N:
                raise IndexError(f"row {row} of a weight with {N} rows")
            at = (qdata + row * row_bytes, row_bytes, scale + row * scale_bytes, *middle, zero + row * zero_bytes)
            module.dequantize(*before, to, number, 1, *kind, *at, *rest)
            to += size
        return y

    return read
