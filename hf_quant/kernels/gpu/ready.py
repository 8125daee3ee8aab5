"""Products of few tokens on a GPU that an earlier call has made ready; importable without importing triton.

An eager call spends more time on the checks of its weight and on its plan than on its launch, and decoding calls the
same weights again for each token.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hf_quant.kernels import prepack
from hf_quant.kernels.weight import Weight


MOST_TOKENS = 64
Run = Callable[[Tensor, Tensor | None], Tensor]
_era = 0  # part of the key: plans that were made before are not used any more


def forget() -> None:
    """Make all products ready anew, as what their launches follow from has changed."""
    global _era
    _era += 1


def _key(format: str, dtype: torch.dtype, M: int) -> tuple[int, str, torch.dtype, int]:
    return _era, format, dtype, M


def ready_product(x: Tensor, bias: Tensor | None, weight: tuple[Tensor | None, ...], format: str) -> Tensor | None:
    """x [..., K] @ w.T + bias as an earlier call has made it ready, without checks; None if none has.

    `weight` is (qdata, scale, zero_point, global_scale, input_scale); views of the same bytes in another dtype do.
    """
    shape = x.shape
    M = x.numel() // shape[-1]
    if M > MOST_TOKENS or not x.is_contiguous() or x.device != weight[0].device:
        return None
    run = prepack.get(_key(format, x.dtype, M), weight)
    if run is None:
        return None
    y = run(x.view(M, shape[-1]), bias)
    return y.view(*shape[:-1], y.shape[1])


def make_ready(x: Tensor, w: Weight, make: Callable[[], Run]) -> None:
    """Let `ready_product` find the product of x [M, K] with w, as long as the tensors of w live unchanged.

    What `make()` returns holds none of them.
    """
    key = _key(w.format, x.dtype, x.shape[0])
    if x.shape[0] <= MOST_TOKENS and x.is_contiguous() and prepack.get(key, w.packed) is None:
        prepack.put(key, w.tensors, make())
