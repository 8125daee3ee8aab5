"""Latent attention of one new token on a GPU: the host's module, with keys and values that are not expanded.

The host multiplies the latents of all tokens with `kv_b_proj`. Here only what is of the new token meets its weight,
as on CPUs (`latent`); the weight is dequantized for the call. All else is an op of torch.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_quant import kv_cache
from hf_quant.integrations.transformers.blocks.base import MAX_ROWS, State, by_name
from hf_quant.integrations.transformers.blocks.calls import implementation_of, past_of
from hf_quant.integrations.transformers.blocks.gpu import block_of, check_place, is_served
from hf_quant.integrations.transformers.blocks.latent import READING, Expanding, LatentBlock


class DenseRows(NamedTuple):
    """Rows [H, count, K] of each head of a weight: what `HeadRows` is on CPUs."""

    rows: Tensor

    def scores(self, x: Tensor) -> Tensor:
        """x [M, H, K] times each head's rows -> [M, H, count]."""
        return torch.bmm(x.transpose(0, 1), self.rows.mT).transpose(0, 1)

    def sums(self, x: Tensor) -> Tensor:
        """The sums of each head's rows times x [M, H, count] -> [M, H, K]."""
        return torch.bmm(x.transpose(0, 1), self.rows).transpose(0, 1)


class GpuExpanding(Expanding):
    """`Expanding` on a GPU."""

    attend = staticmethod(kv_cache.attend_to_latents_by_products)

    @staticmethod
    def are_few(B: int, S: int, before: int) -> bool:
        """True of one token of each sequence."""
        return S == 1

    def read(self, layer: Any, dtype: torch.dtype) -> None:
        """Keep the layer."""
        self.layer = layer

    def rows(self, dtype: torch.dtype) -> tuple[DenseRows, DenseRows]:
        """The rows of the weight, dequantized now: it may have been written in place."""
        weight = self.layer.dequantize_weight(dtype=dtype).view(self.heads, self.unturned + self.widths[1], -1)
        return DenseRows(weight[:, : self.unturned]), DenseRows(weight[:, self.unturned :])


class GpuLatentBlock(LatentBlock):
    """The twin of a module for one token of each sequence."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        check_place(module, device)
        super().__init__(module, dtype, GpuExpanding)


def run_latent_attention(module: nn.Module, state: State, *args: Any, **kwargs: Any) -> Any:
    """The module's result for one token of each sequence, None where the host has to compute it."""
    x, named = args[0] if args else kwargs.get("hidden_states"), by_name(module, args, kwargs)
    if module.training or not is_served(module, x) or x.dim() != 3 or kv_cache.is_recorded():
        return None
    if x.shape[1] != 1 or len(x) > MAX_ROWS or past_of(named) is None:
        return None
    if implementation_of(module) not in READING or kv_cache.wants_weights(module, named):
        return None
    block = block_of(module, state, x, lambda: GpuLatentBlock(module, x.dtype, x.device))
    return None if block is None else block(*args, **kwargs)
