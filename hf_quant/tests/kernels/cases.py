"""What the tests of ops share: every kind of weight, an independent decoder, and a check with negative controls."""

import numpy as np
import torch
from torch import Tensor

from hf_quant.algorithms import PackedWeight, geometry, quantize_matrix
from hf_quant.formats import FORMATS
from hf_quant.scheme import TensorQuant
from hf_quant.testing import PRODUCT_RMS, assert_close


QUANTS = (
    TensorQuant("int8", "row", scale_dtype="bfloat16"),
    TensorQuant("int8", "tensor"),
    TensorQuant("int8", "group", 64, scale_dtype="bfloat16"),
    TensorQuant("int4", "row", scale_dtype="bfloat16"),
    TensorQuant("int4", "group", 128, scale_dtype="bfloat16"),
    TensorQuant("int4", "group", 32, scale_dtype="float16"),
    TensorQuant("int4", "group", 64, symmetric=False, scale_dtype="bfloat16"),
    TensorQuant("int4", "tensor", symmetric=False),
    TensorQuant("int3", "group", 128, symmetric=False, scale_dtype="bfloat16"),
    TensorQuant("int3", "group", 32, scale_dtype="bfloat16"),
    TensorQuant("int2", "group", 64, symmetric=False, scale_dtype="bfloat16"),
    TensorQuant("int2", "row", scale_dtype="bfloat16"),
    TensorQuant("fp8_e4m3", "row"),
    TensorQuant("fp8_e4m3", "tensor"),
    TensorQuant("fp8_e4m3", "block"),
    TensorQuant("fp8_e4m3", "group", 32),
    TensorQuant("fp8_e5m2", "row"),
    TensorQuant("fp6_e3m2", "row"),
    TensorQuant("fp6_e2m3", "group", 64),
    TensorQuant("nf4", "group", 64, scale_dtype="bfloat16"),
    TensorQuant("mxfp4", "group", 32, scale_dtype="float8_e8m0fnu"),
    TensorQuant("nvfp4", "group", 16, scale_dtype="float8_e4m3fn"),
    TensorQuant("int3", "group", 16, scale_dtype="float8_e4m3fn"),
    TensorQuant("int4", "group", 32, scale_dtype="float8_e4m3fn"),  # the default of "int4"
)
# Of floating-point zero points.
FLOAT_ZEROS = (
    TensorQuant("int4", "group", 32, symmetric=False, zero_point_dtype="float32"),
    TensorQuant("int4", "group", 128, symmetric=False, scale_dtype="bfloat16", zero_point_dtype="bfloat16"),
    TensorQuant("int8", "group", 64, symmetric=False, scale_dtype="bfloat16", zero_point_dtype="float16"),
    TensorQuant("int8", "row", symmetric=False, zero_point_dtype="float32"),
    TensorQuant("int2", "group", 16, symmetric=False, scale_dtype="bfloat16", zero_point_dtype="float32"),
)

# (N, K): one that every path takes, one that has a block and a tile left over, one that no packing likes, one beyond
# the weights that are kept dense.
SHAPES = ((64, 256), (7, 100), (33, 33), (272, 256))


def random_weight(N: int, K: int, *, outlier: float = 100) -> Tensor:
    """fp32 [N, K] with what breaks kernels: a row of zeros, an outlier row, and a row at both ends of the grid."""
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    weight[1] = 0
    weight[2] *= outlier
    weight[3] = weight[3].sign()
    return weight


def with_lowest_codes(packed: PackedWeight) -> PackedWeight:
    """Set codes of int8 to -128, which checkpoints of other libraries hold and ours do not."""
    if packed.qdata.dtype == torch.int8:
        packed.qdata[..., 4:, ::3] = -128
    return packed


def packed_case(quant: TensorQuant, N: int, K: int) -> tuple[PackedWeight, dict]:
    """(packed random weight, the keyword arguments `format` and `group_size` of the ops)."""
    weight = random_weight(N, K, outlier=3 if quant.granularity == "tensor" else 100)  # else most codes would be zero
    packed = with_lowest_codes(quantize_matrix(weight, quant, "absmax"))
    return packed, {"format": quant.format, "group_size": geometry(quant, N, K)[1]}


def decode_slowly(packed: PackedWeight, quant: TensorQuant, K: int) -> Tensor:
    """fp64 weight [N, K] by another way than the package's: single bits in numpy, one multiplication per weight."""
    spec = FORMATS[quant.format].spec
    N = packed.qdata.shape[0]
    if not spec.is_packed:
        values = packed.qdata.double().numpy()
    else:
        words = packed.qdata.numpy().view(np.uint32)
        codes = np.zeros((N, K), dtype=np.int64)
        for k in range(K):
            first, shift = k // 32 * spec.bits, 0
            for width in spec.planes:
                bit = k % 32 * width
                codes[:, k] |= ((words[:, first + bit // 32] >> (bit % 32)) & (2**width - 1)).astype(np.int64) << shift
                first, shift = first + width, shift + width
        values = codes if packed.zero_point is not None else np.array(spec.levels)[codes]
    rows, columns = geometry(quant, N, K)
    n, k = np.arange(N)[:, None] // rows, np.arange(K)[None] // columns
    zeros = 0 if packed.zero_point is None else packed.zero_point.double().numpy()[n, k]
    scale = packed.scale.double().numpy()[n, k]
    if packed.global_scale is not None:
        scale = scale * packed.global_scale.double().item()
    return torch.from_numpy(values * scale + zeros if quant.has_float_zeros else (values - zeros) * scale)


def swap_neighbours(packed: PackedWeight) -> PackedWeight:
    """The weight with neighbouring codes (for packed formats: the nibbles of each byte) exchanged."""
    qdata = packed.qdata
    if qdata.dtype == torch.int32:
        codes = qdata.view(torch.uint8)
        swapped = ((codes << 4) | (codes >> 4)).view(torch.int32)
    else:
        codes = qdata.view(torch.uint8)
        pairs = codes[:, : codes.shape[1] // 2 * 2].unflatten(1, (-1, 2)).flip(-1).flatten(1)
        swapped = torch.cat([pairs, codes[:, pairs.shape[1] :]], 1).view(qdata.dtype)
    return packed._replace(qdata=swapped)


def assert_product(y: Tensor, exact: Tensor, weight: Tensor, *, dtype: torch.dtype | None = None) -> None:
    """y [..., N] is the product `exact` (fp64) to within the rounding of its dtype in weight, product and output.

    Every output channel counts the same, whatever the size of its row of `weight` [N, K]; `dtype` judges by another's.
    """
    unit = torch.linalg.vector_norm(weight.double(), dim=1)
    unit = torch.where(unit > 0, unit, 1)
    assert_close(y.double() / unit, exact / unit, rms=PRODUCT_RMS[dtype or y.dtype])


def rejects(y: Tensor, exact: Tensor, weight: Tensor, *, dtype: torch.dtype | None = None) -> bool:
    """Whether `assert_product` fails, as it must for a wrong product."""
    try:
        assert_product(y, exact, weight, dtype=dtype)
    except AssertionError:
        return True
    return False
