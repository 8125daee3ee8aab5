"""Attention over quantized caches, and writing into them, as kernels are proven and measured; see gpulab/cases.py."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpulab.cases import DTYPES, Case, randn
from hf_quant.formats import FORMATS
from hf_quant.kernels.kv_attention.op import code_width
from hf_quant.kv_cache import KVCacheConfig


class Cached(NamedTuple):
    """Attention of `batch` times S queries over a quantized cache of T tokens; otherwise as `Attention`."""

    name: str
    batch: int
    S: int
    T: int
    H: int = 32
    kv_heads: int = 8
    D: int = 128


CACHE_GROUPS = {"int8": None, "fp8_e4m3": None, "int4": 64, "int2": 32}  # least channels of a scale; None: a head's
CACHED = (
    Cached("llama", 1, 1, 8192),
    Cached("llama", 1, 1, 32768),
    Cached("llama", 8, 1, 32768),
    Cached("llama", 1, 1, 131072),
    Cached("llama", 8, 1, 131072),
    Cached("llama", 1, 2048, 32768),
)


GEMMA = Cached("gemma", 1, 1, 8192, 16, 8, 256)


def _dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)


def _side_by_side(shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> tuple[Tensor, Tensor]:
    """Scale and offset, as a cache keeps them."""
    pairs = torch.empty((*shape, 2), dtype=dtype, device=device).uniform_(0.5, 1.5)
    return pairs[..., 0], pairs[..., 1]


def _cached(one: Cached, format: str, device: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Random codes, scale and offset of keys or values of variance about 1."""
    spec = FORMATS[format].spec
    shape = (one.batch, one.kv_heads, one.T)
    codes = torch.empty((*shape, code_width(spec, one.D)), dtype=spec.dtype, device=device)
    if spec.dtype.is_floating_point:
        codes.copy_(torch.empty(codes.shape, dtype=torch.bfloat16, device=device).normal_().mul_(64))
    else:
        bounds = (-127, 128) if spec.dtype == torch.int8 else (-(2**31), 2**31)
        codes.random_(*bounds)
    groups = KVCacheConfig(format, group_size=CACHE_GROUPS[format]).layout(one.D).groups  # as a cache of users has
    scale, offset = _side_by_side((*shape, groups), torch.bfloat16, device)
    scale.mul_({"int8": 1 / 73, "fp8_e4m3": 1 / 64, "int4": 1 / 4.6, "int2": 1 / 1.1}[format])
    return codes, scale if spec.is_packed else scale.contiguous(), offset.sub_(1) if spec.is_packed else None


def _frame(one: Cached, device: Any) -> tuple[Tensor, Tensor]:
    """(k_frame, k_first): a mean and a spread of about 1 of each channel, and what the first key lacks."""
    shape = (one.batch, one.kv_heads, 2, one.D)
    frame = torch.empty(shape, dtype=torch.float32, device=device).uniform_(0.5, 1.5)
    return frame, torch.empty((*shape[:2], one.D), dtype=torch.float32, device=device).normal_()


def cached_case(
    one: Cached,
    format: str,
    dtype: torch.dtype,
    *,
    rotates: bool = False,
    masked: bool = False,
    softcap: float | None = None,
) -> Case:
    """`kv_attention`, causal, over a full cache; M is the number of queries of a sequence.

    rotates: as a cache has it by default, keys rotated in a frame, the first key exact, and values rotated; of small
    heads it is told where sequences begin, as in caches of fixed size. masked: a boolean mask, a window, and a cache
    that is not full, too.
    """
    options = {
        "format": format,
        "is_causal": True,
        "window": one.T // 2 if masked else 0,
        "scale": None,
        "rotates_keys": rotates,
        "rotates_values": rotates,
        **({} if softcap is None else {"softcap": softcap}),
    }

    def make(device: Any) -> tuple[tuple, dict[str, Any]]:
        q = randn((one.batch, one.S, one.H, one.D), dtype, device).transpose(1, 2)
        mask = length = None
        if masked:
            mask = torch.empty((one.batch, 1, one.S, one.T), dtype=torch.bool, device=device).bernoulli_(0.9)
            length = torch.empty(1, dtype=torch.int64, device=device).fill_(one.T - 5)
        found = (q, *_cached(one, format, device), *_cached(one, format, device), mask, length)
        frame = dict(zip(("k_frame", "k_first"), _frame(one, device))) if rotates else {}
        if rotates and one.D <= 64:
            frame["starts"] = torch.zeros(one.batch, dtype=torch.int64, device=device)
        return found, {**options, **frame}

    shape = f"{one.batch}x{one.H}/{one.kv_heads}x{one.D}"
    rotated = (", rotated" if rotates else "") + (", masked" if masked else "") + (", capped" if softcap else "")
    name = f"{format} cache, {one.name} {shape}, {one.T} tokens{rotated}, M={one.S}, {_dtype_name(dtype)}"
    num_ops = 4 * one.batch * one.H * one.S * (one.T - one.S // 2) * one.D
    return Case("kv_attention", name, make, dtype, one.S, num_ops)


def append_case(one: Cached, format: str, dtype: torch.dtype) -> Case:
    """`kv_append` of the S tokens of a model's layer, rotated, keys in a frame, into a cache of T tokens."""
    options = {"format": format, "rotates_keys": True, "rotates_values": True}

    def make(device: Any) -> tuple[tuple, dict[str, Any]]:
        k, v = (randn((one.batch, one.S, one.kv_heads, one.D), dtype, device).transpose(1, 2) for _ in range(2))
        start = torch.empty(1, dtype=torch.int64, device=device).fill_(one.T - one.S)
        found = (k, v, start, *_cached(one, format, device), *_cached(one, format, device))
        return found, {**options, "k_frame": _frame(one, device)[0]}

    shape = f"{one.batch}x{one.kv_heads}x{one.D}"
    name = f"{format} cache, append, {one.name} {shape}, M={one.S}, {_dtype_name(dtype)}"
    return Case("kv_append", name, make, dtype, one.S, 0)


def cache_cases(dtype: torch.dtype) -> list[Case]:
    """Attention over, and writing into, quantized caches."""
    small, large = Cached("small", 2, 1, 4096, 16, 4, 64), Cached("large", 1, 1, 8192, 16, 8, 256)
    several = (Cached("draft", 1, 8, 32768), Cached("odd", 1, 3, 1000, 6, 1, 80))
    prefills = (small._replace(S=512), large._replace(S=512))
    found = []
    for format in CACHE_GROUPS:
        for one in (*CACHED, small, large, *several, *prefills) if dtype == torch.bfloat16 else (CACHED[0], CACHED[5]):
            found.append(cached_case(one, format, dtype, rotates=one.name == "small"))
            if dtype == torch.bfloat16 and one in (CACHED[0], CACHED[5]):
                found.append(cached_case(one, format, dtype, rotates=True))
        found += [cached_case(one, format, dtype, masked=True) for one in (CACHED[0], CACHED[5])]
        # Gemma 2 9B caps scores of usual size at 50; at 2 a kernel that does not cap them is noticed.
        capped = (*prefills, GEMMA) if dtype == torch.bfloat16 else ()
        found += [cached_case(one, format, dtype, rotates=True, softcap=2.0) for one in (CACHED[0], *capped)]
        found += [cached_case(one, format, dtype, masked=True, softcap=2.0) for one in (CACHED[0], *capped)]
        for one in (CACHED[0], CACHED[5], small, large):
            found.append(append_case(one, format, dtype))
    return found
