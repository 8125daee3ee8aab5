"""Large linear layers that stay in 16 bit, such as output embeddings: one native call for few rows on a CPU.

What a token costs there is the reading of the weight. For one row in bf16 torch's product reads it at half the speed
of a core's memory or less.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hf_quant.integrations.transformers.blocks.base import (
    LINEAR,
    TOLERANCE,
    Classes,
    State,
    Unproven,
    Watch,
    difference,
    new_result,
    random_rows,
    rows_given,
)
from hf_quant.kernels.dispatch import is_plain
from hf_quant.kernels.native.blocks import Block


_LEAST = 2**20  # weights
_MOST_ROWS = 4  # that a weight meets at once while it is read
_DTYPES = (torch.bfloat16, torch.float16)


def is_plain_linear(module: nn.Module, linear: Classes = LINEAR) -> bool:
    """True for a linear layer in 16 bit, of many weights, in a model whose other ones (`linear`) are quantized."""
    weight = module._parameters.get("weight")
    if type(module) is not nn.Linear or nn.Linear in linear or weight is None:
        return False
    return weight.dtype in _DTYPES and weight.numel() >= _LEAST


class PlainLinearBlock:
    """The native block of a linear layer for few rows of its dtype."""

    def __init__(self, module: nn.Linear) -> None:
        self.watch, (self.N, self.K) = Watch(module), module.weight.shape
        weight, bias = module.weight, module.bias
        if not (is_plain(weight) and weight.is_contiguous() and weight.is_cpu):
            raise Unproven("its weight is no plain tensor in the memory of the CPU")
        self.dtype = weight.dtype
        self.block = Block(self.dtype, self.K, self.N)
        self.block.plain_product(0, 1, weight.detach(), None if bias is None else bias.detach())
        self.block.finish()
        probe = random_rows(2, self.K, dtype=self.dtype)
        if not difference(self(probe), nn.functional.linear(probe, weight, bias)) <= TOLERANCE[self.dtype]:
            raise Unproven("its product is another one")

    def __call__(self, x: Tensor) -> Tensor:
        return self.block.of_rows(x, new_result((*x.shape[:-1], self.N), x.dtype))


def run_plain_linear(module: nn.Linear, state: State, *args: Any, **kwargs: Any) -> Tensor | None:
    """The product of x [..., K], None where the host has to compute it."""
    x = rows_given(args, kwargs, _MOST_ROWS)
    if x is None or x.dtype not in _DTYPES:
        return None
    block = state.block(module, x.dtype, lambda: PlainLinearBlock(module))
    return None if block is None or block.K != x.shape[-1] or block.dtype != x.dtype else block(x)
