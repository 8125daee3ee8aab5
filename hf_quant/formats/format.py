"""`Format`: the grid of a number format, its byte layout, and the defaults for weights stored in it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_quant.kernels.codes import CodeSpec, decode_codes, pack_codes, packed_words, register_codes, unpack_codes


@dataclass(frozen=True)
class Format:
    """One number format.

    Attributes:
        spec: bits, byte layout and the value of each code; shared with the kernels.
        max: scale = amax / max puts the largest weight of a group on the end of the grid.
        round: fp32 values on the grid's scale -> codes (uint8; the element dtype where codes are not packed). Values
            beyond the grid saturate. It may overwrite its argument.
        snap: (fp32 values, out) -> out, the nearest values of the grid: `decode(encode(values))` without codes.
        granularity, group_size, symmetric: the defaults for weights.
        granularities: the allowed ones.
        allows_asymmetric: True if a zero point is defined.
        scale_dtype: dtype of stored scales: "model" (that of the 16-bit weight), "float32", "float8_e8m0fnu", or
            "float8_e4m3fn" (then one fp32 `global_scale` per tensor completes it).
        group_scale_dtype: default for the scales of groups, where it is not `scale_dtype`.
        fixed_group_size: True if `group_size` belongs to the format (mxfp4, nvfp4).
    """

    spec: CodeSpec
    max: float
    round: Callable[[Tensor], Tensor] = field(repr=False)
    snap: Callable[[Tensor, Tensor], Tensor] = field(repr=False)
    granularity: str = "row"
    group_size: int | None = None
    symmetric: bool = True
    granularities: tuple[str, ...] = ("row", "group", "tensor")
    allows_asymmetric: bool = False
    scale_dtype: str = "model"
    group_scale_dtype: str | None = None
    fixed_group_size: bool = False

    def __post_init__(self) -> None:
        register_codes(self.spec)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def bits(self) -> int:
        return self.spec.bits

    def packed_width(self, K: int) -> int:
        """Size of `qdata`'s last dimension for K codes."""
        return packed_words(K, self.bits) if self.spec.is_packed else K

    def encode(self, values: Tensor) -> Tensor:
        """fp32 values in units of the scale [..., K] -> codes [..., K], nearest on the grid, saturating.

        uint8 for packed formats, else the format's own element dtype.
        """
        return self.round(values.clone())

    def decode(self, codes: Tensor) -> Tensor:
        """Codes [..., K] -> fp32 values in units of the scale."""
        if not self.spec.is_packed:
            return codes.float()
        return torch.tensor(self.spec.levels, dtype=torch.float32, device=codes.device)[codes.int()]

    def pack(self, codes: Tensor) -> Tensor:
        """Codes [..., K] -> `qdata` as stored: int32 words [..., ceil(K / 32) * bits], or the codes themselves."""
        return pack_codes(codes, self.spec.planes) if self.spec.is_packed else codes

    def unpack(self, qdata: Tensor, K: int) -> Tensor:
        """Inverse of `pack`: codes [..., K]."""
        return unpack_codes(qdata, self.spec.planes, K) if self.spec.is_packed else qdata

    def values(self, qdata: Tensor, K: int) -> Tensor:
        """`decode(unpack(qdata))`: fp32 [..., K]."""
        return decode_codes(qdata, self.spec, K)
