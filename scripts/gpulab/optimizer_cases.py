"""Steps of optimizers that kernels are proven on: the parameters of a transformer block, every kind of state."""

from typing import Any

import torch
from torch import Tensor

from gpulab.cases import LLAMA, OFF_TILE, Case, Linear, randn
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
