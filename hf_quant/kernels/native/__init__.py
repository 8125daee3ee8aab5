"""Quantized products, attention and quantizing in C++ for CPUs: codes are decoded in registers, from the stored bytes.

`_native` is an extension that is built when the package is installed where there is a compiler, and shipped in wheels;
it holds every instruction set below and chooses at run time. Without it, or where `refusal` names a reason, the
stock-torch paths of `cpu.product`, `kv_attention` and `algorithms` serve. What concerns caches is in `attention`.

Instruction sets: "avx512" (with VNNI and VBMI: Ice Lake, Zen 4 and later; bf16 dot products where the CPU has them),
"avx2" (with FMA: Haswell, Zen and later), "neon" (Arm with dot products of int8: Armv8.2 DotProd), "portable" (any
other). HF_QUANT_NATIVE chooses one by name, or "off"; `use` does so at run time. Threads are those of torch's own
OpenMP pool, as many as `torch.set_num_threads` says.

Accuracy: codes, less their zero points, times x are exact products, summed in fp32 and then scaled in fp32: nearer to
the reference than a weight rounded to bf16. Where the CPU multiplies bf16, bf16 x is multiplied with levels in
bf16, which holds all but nf4's; everything else is fp32. int8 x and int4 or int8 codes give exact sums of integers, of
whole groups or, of groups above 1024 columns, of parts of them. Quantizing a weight gives the bits of the torch
algorithms.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module

import torch
from torch import Tensor

from hf_quant.kernels.codes import BLOCK_SIZE, CODES, CodeSpec
from hf_quant.kernels.cpu.prepack import clear_prepacked, fact
from hf_quant.kernels.dispatch import is_plain
from hf_quant.kernels.weight import Weight


_INTERFACE = 6  # of the arguments below; an extension built from other sources must not be called
_DTYPES = {
    dtype: i
    for i, dtype in enumerate(
        (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.float8_e4m3fn, torch.int8)
    )
}
_INPUTS = (torch.float32, torch.bfloat16, torch.float16)
_LAYOUTS = {(2,): 0, (2, 1): 1, (4,): 2, (4, 2): 3}  # by bit planes
_BYTES_INT, _BYTES_FLOAT = 4, 5
_BY_F32, _BY_BF16, _BY_INT8 = 0, 1, 2
_MAX_EXACT_K = 65536  # sums of int8 products stay within int32
_FIT = {bits: f"zero points fit {bits} bits" for bits in range(1, 9)}
_UNIT = 16  # group sizes are a multiple of it, for lanes to hold codes of one group


def _load():
    """(the extension or None, why it is missing)."""
    try:
        _native = import_module("hf_quant.kernels.native._native")
    except ImportError as error:
        return None, f"the extension is not built ({error}); install hf-quant from source with a C++ compiler at hand"
    if _native.interface() != _INTERFACE:
        return None, "the extension was built from other sources; install hf-quant again"
    return _native, None


_module, _missing = _load()
_active: str | None = None  # instruction set in use


def instruction_sets() -> tuple[str, ...]:
    """Names of the instruction sets that this build and this CPU have, best first; () without the extension."""
    return () if _module is None else _module.instruction_sets()


def active() -> str | None:
    """The instruction set in use, None if the native kernels are off or missing."""
    return _active


def why_not() -> str | None:
    """The reason why no native kernel is used, None if they are."""
    if _active is not None:
        return None
    return _missing or "the native kernels are turned off"


def use(name: str | None) -> None:
    """Compute by the named instruction set from now on, by torch's own ops if None.

    Raises:
        ValueError: this CPU or this build lacks it.
    """
    global _active
    if name is not None:
        if name not in instruction_sets():
            have = ", ".join(map(repr, instruction_sets())) or f"none: {_missing}"
            raise ValueError(f"instruction set {name!r} is not available here; available: {have}")
        _module.use(name)
    _active = name
    clear_prepacked()  # products that were made ready go by what was in use before


@contextmanager
def using(name: str | None) -> Iterator[None]:
    """`use`, until the end of the block."""
    before = _active
    use(name)
    try:
        yield
    finally:
        use(before)


def _openmp() -> int | None:
    """Address of GOMP_parallel in the OpenMP runtime that torch has loaded, None if it has another entry point."""
    if sys.platform != "linux":
        return None
    with open("/proc/self/maps") as file:
        paths = {line.split(maxsplit=5)[5].strip() for line in file if "/lib" in line and "omp" in line.lower()}
    runtimes = [p for p in paths if os.path.basename(p).startswith(("libgomp", "libiomp", "libomp"))]
    # Another package may bring a runtime of its own: torch's is in torch's folder.
    runtimes.sort(key=lambda path: os.path.dirname(torch.__file__) not in path)
    for path in runtimes:
        try:
            return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):  # deleted since, or without this entry point
            continue
    return None


def features() -> dict[str, bool]:
    """Features of the instruction set in use, beyond its name: bf16 dot products, and threads of torch's own pool."""
    return {
        "has_bf16_dot": _active is not None and _module.has_bf16_dot(),
        "shares_threads_of_torch": _active is not None and _openmp() is not None,
    }


def _start() -> None:
    """Share torch's threads, and take the best instruction set or the one of the environment."""
    if _module is None:
        return
    _module.share_threads(_openmp() or 0)
    wanted = os.environ.get("HF_QUANT_NATIVE") or instruction_sets()[0]  # set to nothing is not set
    if wanted not in ("off", *instruction_sets()):
        allowed = ", ".join(map(repr, ("off", *instruction_sets())))
        raise ValueError(f"the environment variable HF_QUANT_NATIVE is {wanted!r}; allowed here: {allowed}")
    use(None if wanted == "off" else wanted)


def refusal(spec: CodeSpec, dtype: torch.dtype, K: int, group_size: int, *, int8: bool = False) -> str | None:
    """The reason why a product is not computed here, None if it is; `int8`: both sides are integers (`takes_int8`)."""
    if _active is None:
        return why_not()
    if not knows(spec.name):
        return f"{spec.name}, whose levels or bit planes are of another kind"
    if dtype not in _INPUTS:
        return f"only bf16, fp16 and fp32 input, not {dtype}"
    if group_size < K and group_size % _UNIT:
        return f"groups of {group_size} are no multiple of {_UNIT}"
    if K == 0:
        return "K=0"
    if int8 and K > _MAX_EXACT_K:
        return f"K={K} could overflow int32 sums; at most {_MAX_EXACT_K}"
    return None


@cache  # asked by every product, and by name: to hash 16 levels takes longer than the answer
def knows(format: str) -> bool:
    """True if the extension reads the codes of a format, and makes them: bytes, integers of up to 4 bits, floats of up
    to 6, and tables of 16 levels."""
    spec = CODES[format]
    if not spec.is_packed:
        return True
    is_kind = spec.bits <= 4 if spec.is_integer else spec.minifloat is not None or spec.bits == 4
    return is_kind and spec.planes in _LAYOUTS


def serves(w: Weight, dtype: torch.dtype, *, int8: bool = False) -> bool:
    """True if products with x of `dtype` (`int8`: with its rows in int8) are computed here for this very weight.

    `refusal` names no reason against it, the scales have a dtype that is known here, and every zero point is a code,
    which is found once for a tensor.
    """
    if refusal(w.spec, dtype, w.K, w.group_size, int8=int8) is not None or w.scale.dtype not in _DTYPES:
        return False
    bits = w.spec.bits
    return w.zero_point is None or fact(_FIT[bits], w.zero_point, _all_codes, bits, w.zero_point)


def _all_codes(bits: int, zero_point: Tensor) -> bool:
    return zero_point.numel() == 0 or int(zero_point.max()) < 2**bits


def takes_int8(spec: CodeSpec) -> bool:
    """True if products with int8 x are sums of integers for this format, not of bf16 or fp32."""
    return spec.is_integer and spec.bits in (4, 8)


@cache
def _levels(name: str, unsigned: bool) -> Tensor:
    """fp32 value of each code; `unsigned`: of the code itself, from which a zero point is taken."""
    spec = CODES[name]
    with torch.inference_mode(False):
        if not spec.is_packed:
            return torch.arange(256, dtype=torch.uint8, device="cpu").view(spec.dtype).float()
        levels = torch.tensor(spec.levels, dtype=torch.float32, device="cpu")
        return levels + 2 ** (spec.bits - 1) if unsigned else levels


def _layout(spec: CodeSpec) -> int:
    if spec.is_packed:
        return _LAYOUTS[spec.planes]
    return _BYTES_INT if spec.dtype == torch.int8 else _BYTES_FLOAT


def _weight_arguments(w: Weight) -> tuple[int, ...]:
    """Arguments of the extension for a weight [N, K], or experts [E, N, K]: addresses and sizes; all contiguous."""
    qdata, scale, zero_point, global_scale = w.packed
    N, rows, groups = qdata.shape[-2], scale.shape[-2], scale.shape[-1]
    return (
        _layout(w.spec),
        _levels(w.format, zero_point is not None).data_ptr(),
        w.group_size,
        groups,
        qdata.data_ptr(),
        qdata.shape[-1] * qdata.element_size(),
        scale.data_ptr(),
        _DTYPES[scale.dtype],
        0 if rows == 1 else groups,
        1 if rows in (1, N) else BLOCK_SIZE,
        0 if zero_point is None else zero_point.data_ptr(),
        0 if global_scale is None else global_scale.data_ptr(),
        qdata.shape[0] if qdata.dim() == 3 else 1,
        N * qdata.shape[-1] * qdata.element_size(),
        rows * groups,
        N,
    )


def multiply(
    x: Tensor,
    N: int,
    weight: tuple[int, ...],
    bias: Tensor | None,
    *,
    integer: bool = False,
    row_scale: Tensor | None = None,
    ends: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """(x [M, K] @ w.T) * row_scale [M, 1] + bias [N] or [E, N] -> [M, N]; `weight` as `_weight_arguments` gives it.

    `integer`: in integer sums; x is int8 codes with their row_scale, or its rows are quantized on the way. `ends` [E]
    int32: the end of each expert's rows; rows past the last end give zeros. `out_dtype`: any, None for that of x; what
    the extension does not know is rounded from fp32. The caller has checked everything, and asked `serves`.
    """
    M, K = x.shape
    wanted = x.dtype if out_dtype is None else out_dtype
    dtype = wanted if wanted in _INPUTS else torch.float32
    y = (torch.empty if ends is None else torch.zeros)(M, N, dtype=dtype, device="cpu")
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()
    if bias is not None and bias.dtype not in _INPUTS:
        bias = bias.float()
    _module.matmul(
        M,
        N,
        K,
        x.data_ptr(),
        _DTYPES[x.dtype],
        K,
        0 if row_scale is None else row_scale.data_ptr(),
        y.data_ptr(),
        _DTYPES[dtype],
        0 if bias is None else bias.data_ptr(),
        0 if bias is None else _DTYPES[bias.dtype],
        0 if ends is None else ends.data_ptr(),
        torch.get_num_threads(),
        _BY_INT8 if integer else _BY_BF16 if x.dtype == torch.bfloat16 else _BY_F32,
        *weight,
    )
    return y if dtype == wanted else y.to(wanted)


def product(x: Tensor, w: Weight, bias: Tensor | None, **how) -> Tensor:
    """`multiply` for the tensors of a weight of any strides; x [M, K] contiguous."""
    w = w.contiguous()
    return multiply(x, w.N, _weight_arguments(w), bias, **how)


def prepared(w: Weight, *, integer: bool = False) -> Callable[..., Tensor]:
    """`multiply` as a function of (x [M, K] contiguous, qdata, bias, **how) for a contiguous weight, as long as its
    memory lives: the function does not hold it."""
    N, weight = w.N, _weight_arguments(w)
    return lambda x, qdata, bias, **how: multiply(x, N, weight, bias, integer=integer, **how)


def dequantize(w: Weight, dtype: torch.dtype) -> Tensor:
    """The weight [N, K], or experts [E, N, K], in `dtype`: the bits of the reference. Ask `serves` first."""
    w = w.contiguous()
    y = torch.empty(*w.qdata.shape[:-1], w.K, dtype=dtype, device="cpu")
    _module.dequantize(w.N, w.K, y.data_ptr(), _DTYPES[dtype], torch.get_num_threads(), *_weight_arguments(w))
    return y


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """x [M, K] contiguous -> (int8 codes [M, K], fp32 scales [M, 1]) as `quantize_rowwise`; None: not here."""
    if _active is None or x.dtype not in _INPUTS:
        return None
    codes = torch.empty(x.shape, dtype=torch.int8, device="cpu")
    scales = torch.empty(x.shape[0], 1, device="cpu")
    _module.quantize_rows(
        *(*x.shape, x.data_ptr(), _DTYPES[x.dtype], x.shape[1]),
        *(codes.data_ptr(), scales.data_ptr(), torch.get_num_threads()),
    )
    return codes, scales


def quantizes(weight: Tensor, spec: CodeSpec) -> bool:
    """True if `quantize` is for this weight [L, N, K] and these codes."""
    if _active is None or not knows(spec.name):
        return False
    return is_plain(weight) and weight.device.type == "cpu" and weight.dtype in _INPUTS


def quantize(
    weight: Tensor,
    group_size: int,
    spec: CodeSpec,
    largest: float,
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    *,
    shrinks: tuple[float, ...],
    turns: bool,
    moves: bool,
    steps: tuple[float, ...],
    fits: bool,
    norm: bool,
) -> bool:
    """Fill qdata, scale and zero_point [L, N, ...], contiguous, for weight [L, N, K]; False if one is NaN or inf.

    Each row's groups of `group_size` get what `hf_quant.algorithms` would choose, bit for bit: absmax, with `shrinks`
    the search of mse, with `norm` its norm. `largest` is the value at amax (Format.max); global_scale [L] is given.
    The weight's last dimension is contiguous. Ask `quantizes` first.
    """
    matrices, N, K = weight.shape
    low, high = (int(spec.levels[0]), int(spec.levels[-1])) if spec.is_packed else (-int(largest), int(largest))
    factors = torch.tensor([largest, *shrinks, *steps], dtype=torch.float32, device="cpu")
    return _module.quantize(
        *(matrices, N, K, group_size, scale.shape[-1]),
        *(weight.data_ptr(), _DTYPES[weight.dtype], weight.stride(0), weight.stride(1)),
        *(qdata.data_ptr(), qdata.shape[-1] * qdata.element_size(), _layout(spec)),
        *(scale.data_ptr(), _DTYPES[scale.dtype]),
        0 if zero_point is None else zero_point.data_ptr(),
        0 if global_scale is None else global_scale.data_ptr(),
        *(low, high),
        *(spec.minifloat or (0, 0, 0)),
        0 if spec.is_integer or spec.minifloat else _levels_and_midpoints(spec.name).data_ptr(),
        factors.data_ptr(),
        *(len(shrinks), len(steps), turns, moves, fits, norm),
        torch.get_num_threads(),
    )


@cache
def _levels_and_midpoints(name: str) -> Tensor:
    """fp32: the levels, ascending, and the midpoints between them."""
    with torch.inference_mode(False):
        levels = torch.tensor(CODES[name].levels, dtype=torch.float64, device="cpu")
        return torch.cat([levels, (levels[1:] + levels[:-1]) / 2]).float()


_start()
