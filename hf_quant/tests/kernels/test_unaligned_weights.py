"""Weights mapped from a safetensors file begin at any multiple of 8 bytes; some CPU kernels load 16 at once."""

import pytest
import torch

from hf_quant.algorithms import PackedWeight, quantize_matrix
from hf_quant.formats import FORMATS
from hf_quant.kernels import weight_only_mm
from hf_quant.resolve import resolve_scheme


pytestmark = pytest.mark.usefixtures("cpu_kernels")


def unaligned(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The same tensor, 8 bytes after a multiple of 64."""
    if tensor is None:
        return None
    room = torch.empty(tensor.nbytes + 128, dtype=torch.uint8)
    start = -room.data_ptr() % 64 + 8
    copy = room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    assert copy.data_ptr() % 64 == 8
    return copy


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("M", [1, 2, 3, 4, 5, 24])
def test_the_address_of_a_weight_does_not_matter(format, M):
    torch.manual_seed(0)
    scheme, _ = resolve_scheme({"weights": format}, torch.bfloat16)
    packed = quantize_matrix(torch.randn(64, 128, dtype=torch.bfloat16), scheme.weight)
    moved = PackedWeight(*map(unaligned, packed))
    x = torch.randn(M, 128, dtype=torch.bfloat16)
    group_size = scheme.weight.group_size or 128
    for _ in range(2):  # some weights are repacked at their second use; from then on they are the same
        y, other = (weight_only_mm(x, *w, None, format=format, group_size=group_size) for w in (packed, moved))
    assert torch.equal(y, other)
