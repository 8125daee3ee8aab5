"""The products that kernels are proven and measured on: shapes of real models, formats, numbers of tokens.

One list for aot_compile.py (on meta tensors), bench_kernels.py, tune.py and gpu_suite.py (on a GPU).
"""

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_quant.algorithms import PackedWeight, empty_packed
from hf_quant.formats import FORMATS
from hf_quant.kernels import dispatch
from hf_quant.kernels.codes import pack_codes
from hf_quant.scheme import TensorQuant


class Candidate(NamedTuple):
    """A way to quantize a linear layer: the weight, and the format of its activations or None."""

    name: str
    weight: TensorQuant
    activation: str | None = None

    def group_size(self, K: int) -> int:
        return self.weight.columns_per_scale(K)


def _group(format: str, size: int, symmetric: bool = True, scale_dtype: str = "bfloat16") -> TensorQuant:
    return TensorQuant(format, "group", size, symmetric, scale_dtype)


def _float_zeros(format: str, size: int, dtype: str) -> TensorQuant:
    return TensorQuant(format, "group", size, False, dtype, zero_point_dtype=dtype)


def _by_row(format: str, scale_dtype: str = "float32") -> TensorQuant:
    return TensorQuant(format, "row", scale_dtype=scale_dtype)


CANDIDATES = (
    Candidate("int8", _by_row("int8", "bfloat16")),
    Candidate("int8 g128", _group("int8", 128)),
    Candidate("int4 g128", _group("int4", 128)),
    Candidate("int4 g128 asym", _group("int4", 128, False)),
    Candidate("int4 g32", _group("int4", 32)),
    Candidate("int4 g32 fp8", _group("int4", 32, scale_dtype="float8_e4m3fn")),
    Candidate("int3 g128 asym", _group("int3", 128, False)),
    Candidate("int3 g16 fp8", _group("int3", 16, scale_dtype="float8_e4m3fn")),
    Candidate("int2 g64 asym", _group("int2", 64, False)),
    Candidate("int2 g16 fp8", _group("int2", 16, scale_dtype="float8_e4m3fn")),
    Candidate("fp8_e4m3", _by_row("fp8_e4m3")),
    Candidate("fp8_e4m3 tensor", TensorQuant("fp8_e4m3", "tensor")),
    Candidate("fp8_e4m3 block", TensorQuant("fp8_e4m3", "block")),
    Candidate("fp8_e5m2", _by_row("fp8_e5m2")),
    Candidate("fp6_e3m2", _by_row("fp6_e3m2")),
    Candidate("fp6_e2m3 g32 fp8", _group("fp6_e2m3", 32, scale_dtype="float8_e4m3fn")),
    Candidate("nf4 g64", _group("nf4", 64)),
    Candidate("nf4 g32 fp8", _group("nf4", 32, scale_dtype="float8_e4m3fn")),
    Candidate("mxfp4", _group("mxfp4", 32, scale_dtype="float8_e8m0fnu")),
    Candidate("nvfp4", _group("nvfp4", 16, scale_dtype="float8_e4m3fn")),
    Candidate("int4 g32 float zeros", _float_zeros("int4", 32, "float32")),  # as of GGUF's Q4_K
    Candidate("int4 g128 float zeros", _float_zeros("int4", 128, "bfloat16")),  # as of torchao and HQQ
    Candidate("int8 g32 float zeros", _float_zeros("int8", 32, "float32")),  # as of GGUF's Q5_K
    Candidate("int2 g64 float zeros", _float_zeros("int2", 64, "bfloat16")),
    Candidate("W8A8 int8", _by_row("int8"), "int8"),
    Candidate("W8A8 fp8", _by_row("fp8_e4m3"), "fp8_e4m3"),
    Candidate("W8A8 fp8 block", TensorQuant("fp8_e4m3", "block"), "fp8_e4m3"),
    Candidate("W4A8 int8", _group("int4", 128), "int8"),
    Candidate("W4A8 int8 g32 fp8", _group("int4", 32, scale_dtype="float8_e4m3fn"), "int8"),
    Candidate("W4A8 fp8", _group("int4", 128), "fp8_e4m3"),
)


def candidate(name: str) -> Candidate:
    """Raises ValueError if there is none of that name."""
    for found in CANDIDATES:
        if found.name == name:
            return found
    raise ValueError(f"no candidate is named {name!r}; known: {', '.join(c.name for c in CANDIDATES)}")


class Linear(NamedTuple):
    """A weight [N, K] of a real model; `experts` of them, of which `per_token` serve each token."""

    name: str
    N: int
    K: int
    experts: int = 0
    per_token: int = 0


LLAMA = (  # Llama-3.1-8B with fused projections
    Linear("llama qkv", 6144, 4096),
    Linear("llama o", 4096, 4096),
    Linear("llama gate_up", 28672, 4096),
    Linear("llama down", 4096, 14336),
)
FLUX = (Linear("flux out", 3072, 3072), Linear("flux up", 12288, 3072), Linear("flux down", 3072, 12288))
EXPERTS = (
    Linear("mixtral gate_up", 28672, 4096, 8, 2),
    Linear("mixtral down", 4096, 14336, 8, 2),
    Linear("qwen3 gate_up", 1536, 2048, 128, 8),
    Linear("qwen3 down", 2048, 768, 128, 8),
)
OFF_TILE = (  # no power of two divides them far; of the last K it is 64
    Linear("off-tile", 4104, 4056),
    Linear("odd", 1001, 1000),
    Linear("small gate_up", 3072, 576),
)
TOKENS = (1, 2, 4, 8, 16, 17, 32, 33, 64, 65, 128, 129, 256, 512, 1024, 2048, 4096, 8192)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def gpu_ops() -> tuple[str, ...]:
    """Names of the ops that have a GPU implementation."""
    return tuple(op for op, key in dispatch._LAZY if key == "CUDA")


def launcher(op: str) -> Callable[..., Any]:
    """The GPU implementation of an op. Raises ValueError if it has none."""
    if op not in gpu_ops():
        raise ValueError(f"{op} has no GPU implementation; these have: {', '.join(gpu_ops())}")
    importlib.import_module(dispatch._LAZY[op, "CUDA"])
    return dispatch._IMPLEMENTATIONS[op]["cuda"]


def reference(op: str) -> Callable[..., Any]:
    """The specification of an op."""
    package, _, _ = dispatch._LAZY[op, "CUDA"].rpartition(".")
    return getattr(importlib.import_module(f"{package}.op"), f"{op}_reference")


class Case(NamedTuple):
    """One call of an op.

    Attributes:
        op: its name in `torch.ops.hf_quant`.
        name: format, shape, dtype and M for people.
        make: device -> (arguments, keyword arguments), random from torch's generator; on "meta" without content.
        dtype: of the activations.
        M: rows of the activations.
        num_ops: multiplications and additions that the result needs.
        touched: share of the weight's experts that the rows need, at least; 1 for a plain weight.
    """

    op: str
    name: str
    make: Callable[[Any], tuple[tuple, dict[str, Any]]]
    dtype: torch.dtype
    M: int
    num_ops: int
    touched: float = 1.0

    def num_bytes(self) -> int:
        """Bytes of arguments and result, each once; of experts only those touched."""
        arguments, options = self.make("meta")
        result = getattr(torch.ops.hf_quant, self.op)(*arguments, **options)
        total = 0.0
        for tensor in _flat((*arguments, result)):
            total += tensor.nbytes * (self.touched if self.touched < 1 and tensor.dim() == 3 else 1)
        return int(total)


def _flat(values: tuple) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _flat(tuple(value))


def random_weight(quant: TensorQuant, shape: tuple[int, ...], device: torch.device | str) -> PackedWeight:
    """A packed weight [..., N, K] of random codes and scales, of variance about 1 / K; no content on "meta"."""
    packed = empty_packed(shape, quant, device)
    if packed.qdata.device.type == "meta":
        return packed
    spec = FORMATS[quant.format].spec
    for matrix in packed.qdata.flatten(0, -3) if len(shape) > 2 else [packed.qdata]:
        if spec.is_packed:
            codes = torch.randint(0, 2**spec.bits, shape[-2:], dtype=torch.uint8, device=device)
            matrix.copy_(pack_codes(codes, spec.planes))
        elif spec.dtype == torch.int8:
            matrix.random_(-127, 128)
        else:
            matrix.copy_(torch.randn(shape[-2:], device=device).mul_(32))
    levels = torch.tensor(spec.levels or ((32.0,) if spec.dtype.is_floating_point else range(-127, 128)))
    unit = 1 / (levels.square().float().mean().sqrt().item() * shape[-1] ** 0.5)
    factor = torch.rand(packed.scale.shape, device=device) + 0.5
    if packed.global_scale is not None:
        packed.scale.copy_(factor * 64)
        packed.global_scale.fill_(unit / 64)
    else:
        packed.scale.copy_(factor * unit)
    middle = 2 ** (spec.bits - 1) if spec.is_packed else 0
    if quant.has_float_zeros:
        packed.zero_point.copy_((torch.rand(packed.scale.shape, device=device) - middle) * packed.scale)
    elif packed.zero_point is not None:  # near the middle, as in real weights
        packed.zero_point.random_(middle - 1, middle + 1)
    return packed


def randn(shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
    """Normal values; no content on "meta"."""
    return torch.empty(shape, dtype=dtype, device=device).normal_()


def _describe(what: str, M: int, linear: Linear, dtype: torch.dtype) -> str:
    name = next(name for name, value in DTYPES.items() if value == dtype)
    return f"{what}, {linear.name} {linear.N}x{linear.K}, M={M}, {name}"


def linear_case(
    candidate: Candidate, linear: Linear, M: int, dtype: torch.dtype, *, bias: bool = False, rotates: bool = False
) -> Case:
    """`weight_only_mm` or `dynamic_mm`, as the candidate is; `rotates`: with an input transform."""
    options = {"format": candidate.weight.format, "group_size": candidate.group_size(linear.K)}
    if candidate.activation is not None:
        options["activation"] = candidate.activation

    def make(device: Any) -> tuple[tuple, dict[str, Any]]:
        packed = random_weight(candidate.weight, (linear.N, linear.K), device)
        added = randn((linear.N,), dtype, device) if bias else None
        diagonal = _signs(linear.K, device) if rotates else None
        return (randn((M, linear.K), dtype, device), *packed, added, diagonal), options

    op = "weight_only_mm" if candidate.activation is None else "dynamic_mm"
    name = _describe(f"{candidate.name}, rotated" if rotates else candidate.name, M, linear, dtype)
    return Case(op, name, make, dtype, M, 2 * M * linear.N * linear.K)


def quantized_case(candidate: Candidate, linear: Linear, M: int, dtype: torch.dtype) -> Case:
    """`quantized_mm`: `dynamic_mm` of an input that is quantized already."""
    dynamic = linear_case(candidate, linear, M, dtype, bias=True)
    codes = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}[candidate.activation]

    def make(device: Any) -> tuple[tuple, dict[str, Any]]:
        (x, *weight, _), options = dynamic.make(device)
        row_scale = torch.empty((M, 1), device=device).uniform_(0.01, 0.03)
        given = {"format": options["format"], "group_size": options["group_size"], "out_dtype": dtype}
        return ((x.float() * 32).clamp(-127, 127).to(codes), row_scale, *weight), given

    name = _describe(f"{candidate.name}, codes given", M, linear, dtype)
    return dynamic._replace(op="quantized_mm", name=name, make=make)


def backward_case(candidate: Candidate, linear: Linear, M: int, dtype: torch.dtype) -> Case:
    """`weight_only_mm_backward`: the gradient of the input."""
    options = {"format": candidate.weight.format, "group_size": candidate.group_size(linear.K), "K": linear.K}

    def make(device: Any) -> tuple[tuple, dict[str, Any]]:
        packed = random_weight(candidate.weight, (linear.N, linear.K), device)
        return (randn((M, linear.N), dtype, device), *packed), options

    name = _describe(f"{candidate.name} backward", M, linear, dtype)
    return Case("weight_only_mm_backward", name, make, dtype, M, 2 * M * linear.N * linear.K)


def dequantize_case(candidate: Candidate, linear: Linear, dtype: torch.dtype) -> Case:
    """`dequantize`: the whole weight in `dtype`."""
    shape = (linear.N, linear.K) if not linear.experts else (linear.experts, linear.N, linear.K)
    options = {"format": candidate.weight.format, "group_size": candidate.group_size(linear.K)}
    options |= {"K": linear.K, "dtype": dtype}

    def make(device: Any) -> tuple[tuple, dict[str, Any]]:
        return random_weight(candidate.weight, shape, device), options

    return Case("dequantize", _describe(candidate.name, 0, linear, dtype), make, dtype, 0, 0)


def scaled_case(activation: str, linear: Linear, M: int, dtype: torch.dtype) -> Case:
    """`int8_scaled_mm` or `fp8_scaled_mm`: activations quantized before; fp8_e5m2 meets weights in fp8_e4m3."""
    types = {"int8": (torch.int8,) * 2, "fp8_e4m3": (torch.float8_e4m3fn,) * 2}
    types["fp8_e5m2"] = (torch.float8_e5m2, torch.float8_e4m3fn)

    def make(device: Any) -> tuple[tuple, dict[str, Any]]:
        operands = []
        for rows, codes in zip((M, linear.N), types[activation]):
            values = randn((rows, linear.K), torch.float32, device) * 32
            operands.append(values.round().clamp(-127, 127).to(codes) if codes == torch.int8 else values.to(codes))
        scales = [torch.empty((rows, 1), device=device).uniform_(0.5e-3, 1.5e-3) for rows in (M, linear.N)]
        return (*operands, *scales, None), {"out_dtype": dtype}

    op = "int8_scaled_mm" if activation == "int8" else "fp8_scaled_mm"
    return Case(op, _describe(activation, M, linear, dtype), make, dtype, M, 2 * M * linear.N * linear.K)


def rows_per_expert(linear: Linear, M: int, device: Any) -> Tensor:
    """The end of each expert's rows [experts] int32, for M tokens that choose at random; M * per_token in total."""
    if torch.device(device).type == "meta":
        return torch.empty(linear.experts, dtype=torch.int32, device=device)
    chosen = torch.rand(M, linear.experts, device=device).topk(linear.per_token).indices
    return torch.bincount(chosen.flatten(), minlength=linear.experts).cumsum(0).int()


def grouped_case(candidate: Candidate, linear: Linear, M: int, dtype: torch.dtype) -> Case:
    """`grouped_mm` of M tokens, each of which uses `per_token` experts."""
    rows = M * linear.per_token
    options = {
        "activation": candidate.activation,
        "format": candidate.weight.format,
        "group_size": candidate.group_size(linear.K),
    }

    def make(device: Any) -> tuple[tuple, dict[str, Any]]:
        packed = random_weight(candidate.weight, (linear.experts, linear.N, linear.K), device)
        x = randn((rows, linear.K), dtype, device)
        return (x, *packed, None, rows_per_expert(linear, M, device)), options

    touched = 1 - (1 - linear.per_token / linear.experts) ** M  # expected: tokens choose independently
    name = _describe(f"{candidate.name} experts", M, linear, dtype)
    return Case("grouped_mm", name, make, dtype, rows, 2 * rows * linear.N * linear.K, touched)


def grouped_backward_case(candidate: Candidate, linear: Linear, M: int, dtype: torch.dtype) -> Case:
    """`grouped_mm_backward`: the gradient of the input."""
    forward = grouped_case(candidate, linear, M, dtype)
    options = {"format": candidate.weight.format, "group_size": candidate.group_size(linear.K), "K": linear.K}

    def make(device: Any) -> tuple[tuple, dict[str, Any]]:
        (_, *packed, _, offsets), _ = forward.make(device)
        return (randn((forward.M, linear.N), dtype, device), *packed, offsets), options

    name = f"{forward.name} backward"
    return forward._replace(op="grouped_mm_backward", name=name, make=make)


def _row(K: int, dtype: torch.dtype, device: Any) -> Tensor:
    return randn((K,), dtype, device)


def _halves(M: int, K: int, dtype: torch.dtype, device: Any) -> tuple[Tensor, Tensor]:
    return randn((M, 2 * K), dtype, device).chunk(2, -1)


def _seed(device: Any) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=device).fill_(7)


def _signs(K: int, device: Any) -> Tensor:
    """The diagonal of an input transform in blocks of up to 128 columns, fp32 [K / b, b]."""
    block = min(K & -K, 128)
    return randn((K // block, block), torch.float32, device).sign()


def _static_scale(device: Any) -> Tensor:
    """A scale [1] of activations, under which randn saturates from 2.5 on as int8."""
    return torch.empty(1, device=device).fill_(2.5 / 127)


# Ops that move data: name -> (op, (M, K, dtype, device) -> arguments, options besides "format").
Maker = Callable[[int, int, torch.dtype, Any], tuple]
MEMORY: dict[str, tuple[str, Maker, dict[str, Any]]] = {
    "quantize": ("quantize_rowwise", lambda M, K, t, d: (randn((M, K), t, d),), {}),
    "quantize, random rounding": ("quantize_rowwise", lambda M, K, t, d: (randn((M, K), t, d), _seed(d)), {}),
    "quantize, static": ("quantize_static", lambda M, K, t, d: (randn((M, K), t, d), _static_scale(d)), {}),
    "quantize, static, rotate": (
        "quantize_static",
        lambda M, K, t, d: (randn((M, K), t, d), _static_scale(d), _signs(K, d)),
        {},
    ),
    "RMSNorm": (
        "rms_norm_quantize_rowwise",
        lambda M, K, t, d: (randn((M, K), t, d), _row(K, t, d)),
        {"eps": 1e-6},
    ),
    "LayerNorm": (
        "layer_norm_quantize_rowwise",
        lambda M, K, t, d: (randn((M, K), t, d), _row(K, t, d), _row(K, t, d), None, None),
        {"eps": 1e-6},
    ),
    "LayerNorm, modulated": (  # the factor less one, in fp32: 16 bit would round it
        "layer_norm_quantize_rowwise",
        lambda M, K, t, d: (randn((M, K), t, d), None, None, randn((1, K), torch.float32, d), randn((1, K), t, d)),
        {"eps": 1e-6},
    ),
    "SiLU * up": ("act_quantize_rowwise", lambda M, K, t, d: _halves(M, K, t, d), {"act": "silu"}),
    "GELU": ("act_quantize_rowwise", lambda M, K, t, d: (randn((M, K), t, d), None), {"act": "gelu"}),
    "GELU, tanh": ("act_quantize_rowwise", lambda M, K, t, d: (randn((M, K), t, d), None), {"act": "gelu_tanh"}),
    "Hadamard": ("hadamard", lambda M, K, t, d: (randn((M, K), t, d),), {}),
    "Hadamard, blocks of 128": ("hadamard", lambda M, K, t, d: (randn((M, K), t, d),), {"block_size": 128}),
    "Hadamard, signed": (
        "hadamard",
        lambda M, K, t, d: (randn((M, K), t, d), _signs(K, d)),
        {"block_size": 128},
    ),
    "Hadamard, quantize": ("hadamard_quantize_rowwise", lambda M, K, t, d: (randn((M, K), t, d),), {}),
    "Hadamard, signed, quantize": (
        "hadamard_quantize_rowwise",
        lambda M, K, t, d: (randn((M, K), t, d), _signs(K, d)),
        {"block_size": 128},
    ),
    "RMSNorm, rotate": (
        "rms_norm_quantize_rowwise",
        lambda M, K, t, d: (randn((M, K), t, d), _row(K, t, d), _signs(K, d)),
        {"eps": 1e-6},
    ),
    "LayerNorm, modulated, rotate": (
        "layer_norm_quantize_rowwise",
        lambda M, K, t, d: (
            *(randn((M, K), t, d), None, None),
            *(randn((1, K), torch.float32, d), randn((1, K), t, d), _signs(K, d)),
        ),
        {"eps": 1e-6},
    ),
    "SiLU * up, rotate": (
        "act_quantize_rowwise",
        lambda M, K, t, d: (*_halves(M, K, t, d), _signs(K, d)),
        {"act": "silu"},
    ),
    "GELU, tanh, rotate": (
        "act_quantize_rowwise",
        lambda M, K, t, d: (randn((M, K), t, d), None, _signs(K, d)),
        {"act": "gelu_tanh"},
    ),
}


def memory_case(name: str, K: int, M: int, dtype: torch.dtype, format: str = "int8") -> Case:
    """One of MEMORY: quantization by the row and what it is fused with, Hadamard transforms."""
    op, arguments, options = MEMORY[name]
    if op != "hadamard":
        options = {**options, "format": format}

    def make(device: Any) -> tuple[tuple, dict[str, Any]]:
        return arguments(M, K, dtype, device), options

    label = name if op == "hadamard" else f"{name} -> {format}"
    return Case(op, _describe(label, M, Linear("rows", M, K), dtype), make, dtype, M, 0)


class Attention(NamedTuple):
    """Attention of a real model: S queries and as many keys, H heads, of which `kv_heads` for keys and values."""

    name: str
    S: int
    H: int
    kv_heads: int
    D: int
    is_causal: bool = False


ATTENTION = (
    Attention("flux", 4608, 24, 24, 128),
    Attention("cogvideox-5b", 17776, 48, 48, 64),
    Attention("llama", 4096, 32, 8, 128, is_causal=True),
)


def attention_case(one: Attention, dtype: torch.dtype, value_format: str | None = None, *, loud: int = 0) -> Case:
    """`int8_attention`; M is the number of queries. loud: so many heads have queries of 30 times the size."""

    def make(device: Any) -> tuple[tuple, dict[str, Any]]:
        q = randn((1, one.H, one.S, one.D), dtype, device)
        q[:, :loud] *= 30
        k, v = (randn((1, one.kv_heads, one.S, one.D), dtype, device) for _ in range(2))
        return (q, k, v), {"is_causal": one.is_causal, "scale": None, "value_format": value_format}

    values = (f", {value_format} values" if value_format else "") + (f", {loud} loud heads" if loud else "")
    causal = ", causal" if one.is_causal else ""
    kind = next(name for name, known in DTYPES.items() if known == dtype)
    name = f"int8 attention{values}, {one.name} {one.H}x{one.S}x{one.D}{causal}, M={one.S}, {kind}"
    num_ops = 4 * one.H * one.S**2 * one.D // (2 if one.is_causal else 1)
    return Case("int8_attention", name, make, dtype, one.S, num_ops)


MAIN = ("int4 g128", "int8", "fp8_e4m3", "nf4 g64", "W8A8 int8", "W8A8 fp8", "W4A8 int8")
