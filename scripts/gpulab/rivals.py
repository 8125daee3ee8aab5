"""Products of other libraries, and of torch itself, built for a comparison in one process.

Each rival gets a random 16-bit weight, quantizes it its own way, and is called with the same activations. Those that
are not installed, or that do not do a product, say so; none is required.
"""

from collections.abc import Callable
from subprocess import SubprocessError
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpulab.timing import installed


if installed("triton"):
    from triton.errors import TritonError

    _COMPILER: tuple[Any, ...] = (SubprocessError, TritonError)
else:
    _COMPILER = (SubprocessError,)

Product = Callable[[Tensor], Tensor]
# What a kernel may raise that is not made for this device, shape or version, and what its compiler may.
FAILURES = (
    *(RuntimeError, ValueError, TypeError, AttributeError, ImportError, AssertionError, LookupError, OSError),
    *_COMPILER,
)


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message, for a line of a report."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]


class Rival(NamedTuple):
    """A way to compute a product with a weight [N, K].

    Attributes:
        name: for people, and for the targets of gpu_suite.py.
        package: what must be installed; None: torch alone.
        candidates: names of kernel_cases.CANDIDATES that it is a rival of.
        build: weight bf16 [N, K] on a GPU -> product, x [M, K] -> [M, N].
        supports: (M, N, K) -> None, or why not.
    """

    name: str
    package: str | None
    candidates: tuple[str, ...]
    build: Callable[[Tensor], Product]
    supports: Callable[[int, int, int], str | None] = lambda M, N, K: None


def _tinygemm(weight: Tensor) -> Product:
    """torch._weight_int4pack_mm, groups of 128 with a zero point."""
    N, K = weight.shape
    codes = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, device=weight.device)
    packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
    scales = torch.rand(K // 128, N, 2, dtype=torch.bfloat16, device=weight.device).mul_(0.01)
    return lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, 128, scales)


def _tinygemm_supports(M: int, N: int, K: int) -> str | None:
    if M > 128:
        return "more than 128 tokens: it is made for few, and took 11 to 16 times as long as bf16 at 128 on an H200"
    return _divisible(8, 128)(M, N, K)


def _divisible(n: int, k: int) -> Callable[[int, int, int], str | None]:
    return lambda M, N, K: None if N % n == 0 and K % k == 0 else f"needs N % {n} == 0 and K % {k} == 0"


def _int_mm(weight: Tensor) -> Product:
    """torch._int_mm with activations quantized by the row, as torchao's eager int8 dynamic quantization does it."""
    w_scale = weight.abs().amax(1, keepdim=True).float() / 127
    codes = (weight / w_scale).round().to(torch.int8)

    def product(x: Tensor) -> Tensor:
        scale = x.abs().amax(1, keepdim=True).float().clamp(min=1e-6) / 127
        y = torch._int_mm((x / scale).round().to(torch.int8), codes.t())
        return (y.float() * scale * w_scale.t()).to(x.dtype)

    return product


def _int_mm_supports(M: int, N: int, K: int) -> str | None:
    return None if M > 16 and N % 8 == 0 and K % 8 == 0 else "needs M > 16, N % 8 == 0, K % 8 == 0"


def _scaled_mm(weight: Tensor) -> Product:
    """torch._scaled_mm with scales of rows, activations quantized by the row in eager mode."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    w_scale = weight.abs().amax(1, keepdim=True).float() / limit
    codes = (weight / w_scale).to(torch.float8_e4m3fn)

    def product(x: Tensor) -> Tensor:
        scale = x.abs().amax(1, keepdim=True).float().clamp(min=1e-6) / limit
        a = (x / scale).to(torch.float8_e4m3fn)
        return torch._scaled_mm(
            a, codes.t(), scale_a=scale, scale_b=w_scale.t(), out_dtype=x.dtype, use_fast_accum=True
        )

    return product


def scaled_mm_alone(b: Tensor, b_scale: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """(a [M, K] fp8, its scale [M, 1]) -> torch._scaled_mm with the fp8 weight b [N, K]: without quantization."""
    columns = b_scale.t().contiguous()
    return lambda a, scale: torch._scaled_mm(
        a, b.t(), scale_a=scale, scale_b=columns, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def int_mm_alone(b: Tensor) -> Callable[[Tensor], Tensor]:
    """a [M, K] int8 -> torch._int_mm with the int8 weight b [N, K]: int32, no scales."""
    return lambda a: torch._int_mm(a, b.t())


def _torchao(config: str, *, compiled: bool = False) -> Callable[[Tensor], Product]:
    def build(weight: Tensor) -> Product:
        from torchao import quantization

        options = {
            "Int4WeightOnlyConfig": {"group_size": 128},
            "Float8DynamicActivationFloat8WeightConfig": {"granularity": quantization.PerRow()},
        }
        model = nn.Sequential(_linear(weight))
        quantization.quantize_(model, getattr(quantization, config)(**options.get(config, {})))
        return torch.compile(model, dynamic=False) if compiled else model

    return build


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def _gemlite_int4(weight: Tensor) -> Product:
    from gemlite.helper import A16Wn

    N, K = weight.shape
    codes = torch.randint(0, 16, (N, K), dtype=torch.uint8, device=weight.device)
    scales = torch.rand(N * K // 128, 1, dtype=weight.dtype, device=weight.device).mul_(0.01)
    return A16Wn(device=str(weight.device)).from_weights(codes, scales, torch.full_like(scales, 8), 4, 128)


def _gemlite(name: str) -> Callable[[Tensor], Product]:
    def build(weight: Tensor) -> Product:
        from gemlite import helper

        return getattr(helper, name)(device=str(weight.device)).from_weights(weight)

    return build


def _bitsandbytes_nf4(weight: Tensor) -> Product:
    import bitsandbytes as bnb

    N, K = weight.shape
    linear = bnb.nn.Linear4bit(K, N, bias=False, compute_dtype=weight.dtype, quant_type="nf4")
    linear.weight = bnb.nn.Params4bit(weight.cpu(), requires_grad=False, quant_type="nf4")
    return linear.to(weight.device)


_INT4 = ("int4 g128", "int4 g128 asym")
RIVALS = (
    Rival("tinygemm", None, (*_INT4, "int4 g128 float zeros"), _tinygemm, _tinygemm_supports),
    Rival("_int_mm", None, ("W8A8 int8",), _int_mm, _int_mm_supports),
    Rival("_scaled_mm", None, ("W8A8 fp8",), _scaled_mm, _divisible(16, 16)),
    Rival("torchao", "torchao", _INT4, _torchao("Int4WeightOnlyConfig"), _divisible(8, 128)),
    Rival("torchao", "torchao", ("int8",), _torchao("Int8WeightOnlyConfig")),
    Rival("torchao", "torchao", ("W8A8 int8",), _torchao("Int8DynamicActivationInt8WeightConfig")),
    Rival("torchao", "torchao", ("W8A8 fp8",), _torchao("Float8DynamicActivationFloat8WeightConfig")),
    Rival(
        "torchao compiled",
        "torchao",
        ("W8A8 fp8",),
        _torchao("Float8DynamicActivationFloat8WeightConfig", compiled=True),
    ),
    Rival(
        "torchao compiled",
        "torchao",
        ("W8A8 int8",),
        _torchao("Int8DynamicActivationInt8WeightConfig", compiled=True),
    ),
    Rival("gemlite", "gemlite", _INT4, _gemlite_int4, _divisible(32, 128)),
    Rival("gemlite", "gemlite", ("int8",), _gemlite("A16W8")),
    Rival("gemlite", "gemlite", ("W8A8 int8",), _gemlite("A8W8_int8_dynamic")),
    Rival("gemlite", "gemlite", ("W8A8 fp8",), _gemlite("A8W8_fp8_dynamic")),
    Rival("bitsandbytes", "bitsandbytes", ("nf4 g64", *_INT4), _bitsandbytes_nf4),
)


def rivals_of(candidate: str, M: int, N: int, K: int, wanted: tuple[str, ...] | None = None) -> list[Rival]:
    """The rivals of a candidate that are installed and do this product; `wanted`: the beginnings of their names."""
    return [
        rival
        for rival in RIVALS
        if candidate in rival.candidates
        and (wanted is None or any(rival.name.lstrip("_").startswith(name.lstrip("_")) for name in wanted))
        and (rival.package is None or installed(rival.package))
        and rival.supports(M, N, K) is None
    ]
