"""16-bit products on CPUs that have no instructions for them, computed in fp32."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


_aten = torch.ops.aten
_PRODUCTS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.convolution.default,
        _aten.convolution_backward.default,
    }
)


class _ProductsInFp32(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _PRODUCTS or not args[0].is_cpu or args[0].dtype not in (torch.bfloat16, torch.float16):
            return func(*args, **kwargs)
        dtype = args[0].dtype

        def widened(x: Tensor) -> Tensor:
            return x.float() if x.dtype == dtype else x

        def rounded(y: Tensor) -> Tensor:
            return y.to(dtype)

        args, kwargs = tree_map_only(Tensor, widened, (args, kwargs))
        return tree_map_only(Tensor, rounded, func(*args, **kwargs))


def fast_products() -> AbstractContextManager[Any]:
    """A context in which products of 16-bit tensors on the CPU are fast, forward and backward.

    On CPUs with AVX2 alone, as most laptops have, torch computes them value by value: matrix products take 8 times as
    long as in fp32, and convolutions 100 times. It sums in fp32 there, so that only the order of the sums differs.
    """
    return _ProductsInFp32() if torch.backends.cpu.get_cpu_capability() == "AVX2" else nullcontext()
