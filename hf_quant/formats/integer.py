"""int8, int4, int3, int2: equally spaced codes.

int8 is symmetric in [-127, 127] and stored as it is. The others store code + 2**(bits - 1); with a zero point z (both
q and z unsigned) a weight is (q - z) * scale. Their symmetric scale is amax / (2**(bits - 1) - 0.5), so that the full
range of codes is used: -amax rounds to the lowest code, +amax to the highest.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hf_quant.formats.format import Format
from hf_quant.kernels.codes import CODES, integer_codes


def _integer_snap(low: int, high: int) -> Callable[[Tensor, Tensor], Tensor]:
    def snap(values: Tensor, out: Tensor) -> Tensor:
        return torch.round(values, out=out).clamp_(low, high)

    return snap


def packed_integer(
    bits: int, planes: tuple[int, ...], group_size: int, symmetric: bool, group_scale_dtype: str | None = None
) -> Format:
    """Make an integer format of `bits` bits in bit planes; what follows is its defaults for weights, see `Format`."""
    low = -(2 ** (bits - 1))

    def encode(values: Tensor) -> Tensor:
        # By int8, whose conversion vectorizes: six times as fast as fp32 -> uint8.
        return values.round_().sub_(low).clamp_(0, 2**bits - 1).to(torch.int8).view(torch.uint8)

    return Format(
        spec=integer_codes(bits, planes),
        max=-low - 0.5,
        round=encode,
        snap=_integer_snap(low, -low - 1),
        granularity="group",
        group_size=group_size,
        symmetric=symmetric,
        allows_asymmetric=True,
        group_scale_dtype=group_scale_dtype,
    )


INT8 = Format(
    spec=CODES["int8"],
    max=127.0,
    round=lambda values: values.round_().clamp_(-127, 127).to(torch.int8),
    snap=_integer_snap(-127, 127),
)
# Chosen by the KL of trained LLMs (docs/accuracy.md): scales of 8 bits for 32 weights each are worth more than
# those of 16 bits for 64, and with few codes twice as many scales are worth more than zero points.
INT4 = packed_integer(4, CODES["int4"].planes, 32, symmetric=True, group_scale_dtype="float8_e4m3fn")
INT3 = packed_integer(3, CODES["int3"].planes, 16, symmetric=True, group_scale_dtype="float8_e4m3fn")
INT2 = packed_integer(2, CODES["int2"].planes, 16, symmetric=True, group_scale_dtype="float8_e4m3fn")
