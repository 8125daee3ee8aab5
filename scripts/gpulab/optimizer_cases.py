"""Calls of training that kernels are proven on: steps of optimizers on a block's parameters, weights as stored."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpulab.cases import LLAMA, OFF_TILE, Case, Linear, randn, rows_per_expert
from hf_quant.kernels import quantize_two_way
from hf_quant.kernels.adam_step.op import BLOCKS, CODECS, STATES


OPTIONS = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "step": 10}


def adam_case(
    states: str, linears: tuple[Linear, ...], param: torch.dtype, grad: torch.dtype, *, seed: int | None = 7
) -> Case:
    """One `adam_step_` of several parameters."""

    def make(device: Any) -> tuple[tuple, dict[str, Any]]:
        def each(dtype: torch.dtype, columns_of: Any = lambda K: K) -> list[Tensor]:
            return [
                torch.zeros((one.N, columns_of(one.K)), dtype=torch.uint8, device=device).to(dtype) for one in linears
            ]

        params, grads = ([randn((one.N, one.K), dtype, device) for one in linears] for dtype in (param, grad))
        packed = 2 if states == "int4" else 1
        moments = [each(STATES[states], lambda K: -(-K // packed)) for _ in range(2)]
        scales = [each(torch.float32, lambda K: -(-K // BLOCKS[states])) if states in CODECS else [] for _ in range(2)]
        origins = torch.zeros(len(linears), 3, dtype=torch.int64)
        return (params, grads, *moments, *scales, origins), {"states": states, "seed": seed, **OPTIONS}

    names = "/".join({torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype] for dtype in (param, grad))
    rounding = "" if seed is not None else ", to nearest"
    name = f"AdamW {states}{rounding}, {linears[0].name} and {len(linears) - 1} others, {names}"
    return Case("adam_step_", name, make, param, sum(one.N for one in linears), 0)


def optimizer_cases() -> list[Case]:
    """List a step for each kind of state, dtype and rounding, and for rows that are no multiple of 16."""
    bf16, fp32 = torch.bfloat16, torch.float32
    found = []
    for states in STATES:
        found += [adam_case(states, LLAMA, param, grad) for param, grad in ((bf16, bf16), (fp32, fp32), (bf16, fp32))]
        found += [adam_case(states, LLAMA, bf16, bf16, seed=None), adam_case(states, OFF_TILE[::-1], bf16, bf16)]
    return found


def fake_case(format: str, linear: Linear, group_size: int, dtype: torch.dtype, *, backward: bool) -> Case:
    """One `fake_quantize`, or its backward, of a weight in groups of `group_size`."""

    def make(device: Any) -> tuple[tuple, dict[str, Any]]:
        weight, grad = (randn((linear.N, linear.K), dtype, device) for _ in range(2))
        scale = randn((linear.N, -(-linear.K // group_size)), torch.float32, device).abs() + 0.1
        tensors = (grad, weight, scale, None) if backward else (weight, scale, None)
        return tensors, {"format": format, "group_size": group_size}

    op = "fake_quantize_backward" if backward else "fake_quantize"
    name = f"{format} g{group_size}, {linear.name} {str(dtype).removeprefix('torch.')}"
    return Case(op, name, make, dtype, linear.N, 0)


def fake_cases() -> list[Case]:
    """List the weights as stored of each kind of format: in groups, in rows, and in odd groups of odd rows."""
    found = []
    for backward in (False, True):
        for format, group_size in (("int4", 32), ("int2", 16), ("int8", LLAMA[1].K), ("mxfp4", 32), ("nf4", 32)):
            for dtype in (torch.bfloat16, torch.float32):
                found.append(fake_case(format, LLAMA[1], group_size, dtype, backward=backward))
        found.append(fake_case("int4", OFF_TILE[1], 40, torch.bfloat16, backward=backward))
    return found


def two_way_case(format: str, scaling: str, K: int, M: int, dtype: torch.dtype) -> Case:
    """One `quantize_two_way` of M rows of K values."""

    def make(device: Any) -> tuple[tuple, dict[str, Any]]:
        return (randn((M, K), dtype, device),), {"format": format, "scaling": scaling}

    name = f"{format}, scales by {scaling}, {M} x {K} {str(dtype).removeprefix('torch.')}"
    return Case("quantize_two_way", name, make, dtype, M, 0)


def two_way_cases(size: int = 4096) -> list[Case]:
    """List each pair of format and scaling that a recipe of training has, in whole tiles and beyond them."""
    pairs = (("int8", "row"), ("fp8_e4m3", "power_of_two"), ("fp8_e4m3", "tensor"), ("fp8_e5m2", "tensor"))
    found = [two_way_case(*pair, size, size, torch.bfloat16) for pair in pairs]
    return found + [two_way_case(*pairs[0], 1040, 80, dtype) for dtype in (torch.bfloat16, torch.float32)]


def experts_cases(linear: Linear, tokens: int) -> list[Case]:
    """List the calls of experts in training, for each pair of formats that a recipe has."""
    M, (E, N, K), bf16 = tokens * linear.per_token, (linear.experts, linear.N, linear.K), torch.bfloat16
    place = f"{linear.name} M={tokens}"

    def quantize(device: Any) -> tuple[tuple, dict[str, Any]]:
        offsets = rows_per_expert(linear, tokens, device)
        return (randn((M, K), bf16, device), offsets), {"format": "int8", "scaling": "row"}

    def rows(formats: tuple[str, str], device: Any) -> tuple[tuple, dict[str, Any]]:
        a, a_scale, *_ = quantize_two_way(randn((M, K), bf16, device), format=formats[0], columns=False)
        b, b_scale, *_ = quantize_two_way(randn((E * N, K), bf16, device), format=formats[1], columns=False)
        bias = randn((E, N), bf16, device) if formats[0] == "int8" else None
        weight = b.view(E, N, K), a_scale, b_scale.view(E, N, 1)
        return (a, *weight, bias, rows_per_expert(linear, tokens, device)), {"out_dtype": bf16}

    def sums(formats: tuple[str, str], device: Any) -> tuple[tuple, dict[str, Any]]:
        offsets = rows_per_expert(linear, tokens, device)
        of_g, of_x = (
            quantize_two_way(randn((M, size), bf16, device), offsets, format=format)[2:]
            for size, format in zip((N, K), formats)
        )
        return (of_g[0], of_x[0], of_g[1], of_x[1], offsets), {"M": M, "out_dtype": bf16}

    found = [Case("quantize_two_way", f"int8, groups of rows, {place}", quantize, bf16, M, 0)]
    for formats in (("int8", "int8"), ("fp8_e4m3", "fp8_e4m3"), ("fp8_e5m2", "fp8_e4m3")):
        for op, make in (("grouped_scaled_mm", rows), ("grouped_scaled_sums", sums)):
            name = f"{formats[0]} x {formats[1]}, {place}"
            found.append(Case(op, name, partial(make, formats), bf16, M, 2 * M * N * K))
    return found


def requantize_cases(size: int = 4096) -> list[Case]:
    """List `requantize_rows_` of a square weight, at random and to nearest, and of rows that fill no block."""

    def case(N: int, K: int, low: int | None) -> Case:
        def make(device: Any) -> tuple[tuple, dict[str, Any]]:
            codes = (randn((N, K), torch.float32, device) * 30).clamp(-127, 127).to(torch.int8)
            scale = randn((N, 1), torch.float32, device).abs() * 0.01 + 0.001
            values = codes * scale + randn((N, K), torch.float32, device) * scale * 0.01
            return (codes, scale, values), {"low": low, "high": 3}

        name = f"{N} x {K}{'' if low is not None else ', to nearest'}"
        return Case("requantize_rows_", name, make, torch.float32, N, 0)

    return [case(size, size, 7), case(size, size, None), case(77, 1040, 7)]
