"""The calls of what lies between products (norms, gates, rotary embeddings) that kernels are proven on."""

from typing import Any

import torch
from torch import Tensor

from gpulab.cases import DTYPES, Case, randn
from hf_quant.kernels.steps.op import ACTIVATIONS, PAIRS


def _label(dtype: torch.dtype) -> str:
    return next(name for name, value in DTYPES.items() if value == dtype)


def norm_case(K: int, M: int, dtype: torch.dtype, *, adds: bool = False, plus_one: bool = False) -> Case:
    """`rms_norm` of Llama, or of Gemma with `plus_one`; `adds`: of a sum."""
    options = {"eps": 1e-6, "plus_one": plus_one, "rounds": not plus_one}

    def make(device: Any) -> tuple[tuple, dict[str, Any]]:
        parts = [randn((M, K), dtype, device) for _ in range(1 + adds)]
        return (*parts, randn((K,), dtype, device)), options

    name = (
        f"{'sum, ' if adds else ''}RMSNorm{', 1 + weight' if plus_one else ''}, rows {M}x{K}, M={M}, {_label(dtype)}"
    )
    return Case("add_rms_norm" if adds else "rms_norm", name, make, dtype, M, 0)


def gate_case(K: int, M: int, dtype: torch.dtype, act: str = "silu", *, gated: bool = True) -> Case:
    """`gate` of the halves of one product, or of one tensor."""

    def make(device: Any) -> tuple[tuple, dict[str, Any]]:
        x, up = randn((M, 2 * K), dtype, device).chunk(2, -1)
        return (x, up if gated else None), {"act": act}

    name = f"{act}{' * up' if gated else ''}, rows {M}x{K}, M={M}, {_label(dtype)}"
    return Case("gate", name, make, dtype, M, 0)


def rotary_case(
    heads: tuple[int, int],
    D: int,
    turned: int,
    M: int,
    dtype: torch.dtype,
    pairs: str = "halves",
    *,
    norms: bool = False,
    batch: int = 1,
) -> Case:
    """`rotary` of queries and keys that are parts of one product; `norms`: with those of Qwen3."""
    options = {"pairs": pairs, "rounds": pairs != "neighbors", "eps": 1e-6 if norms else None}
    options |= {"plus_one": False, "norm_rounds": True}
    H, shared = heads

    def make(device: Any) -> tuple[tuple, dict[str, Any]]:
        q, k, _ = randn((batch, M, (H + 2 * shared) * D), dtype, device).split([H * D, shared * D, shared * D], -1)
        cos, sin = ((angle * 0.5).to(dtype) for angle in _angles(M, turned, device)) if turned else (None, None)
        weights = [randn((D,), dtype, device) if norms else None for _ in range(2)]
        return (q.unflatten(-1, (H, D)), k.unflatten(-1, (shared, D)), cos, sin, *weights), options

    kind = ("odd " if D % 16 or turned % 64 else "") + pairs + (", norms" if norms else "")
    name = f"{kind}, {H}/{shared}x{D}, {turned} turned, M={M}, {_label(dtype)}"
    return Case("rotary", name, make, dtype, M, 0)


def _angles(M: int, turned: int, device: Any) -> list[Tensor]:
    return [randn((1, M, turned), torch.float32, device) for _ in range(2)]


def step_cases(tokens: tuple[int, ...] = (1, 17, 4096)) -> list[Case]:
    """Calls of the sizes of Llama-3.1-8B (Qwen3 and Gemma3 with norms of heads), for M of `tokens`."""
    found = []
    for M in tokens:
        for dtype in DTYPES.values():
            found += [norm_case(4096, M, dtype, adds=adds) for adds in (False, True)]
            found += [gate_case(14336, M, dtype), rotary_case((32, 8), 128, 128, M, dtype)]
        bf16 = torch.bfloat16
        found += [norm_case(K, M, bf16, plus_one=True) for K in (576, 2048, 16384, 28672)]
        found += [gate_case(K, M, bf16, act, gated=K > 128) for K in (128, 3072) for act in ACTIVATIONS]
        for pairs in PAIRS:
            found += [rotary_case((32, 8), 128, turned, M, bf16, pairs, norms=True) for turned in (0, 64, 128)]
            found.append(rotary_case((16, 4), 256, 256, M, bf16, pairs, batch=2))
        found.append(rotary_case((3, 1), 80, 32, M, bf16, norms=True))
    return found
