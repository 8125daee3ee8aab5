"""Byte layouts: packing is lossless for every length, and the bits lie where the documents say."""

import pytest
import torch

from hf_quant.formats import FORMATS, Format


PACKED = {name: format for name, format in FORMATS.items() if format.spec.is_packed}
ALL_PACKED = pytest.mark.parametrize("format", PACKED.values(), ids=PACKED)


def random_codes(format: Format, *shape: int) -> torch.Tensor:
    return torch.randint(0, 2**format.bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@ALL_PACKED
@pytest.mark.parametrize("K", [1, 7, 31, 32, 33, 64, 96, 100, 257])
def test_unpack_inverts_pack(format: Format, K: int) -> None:
    codes = random_codes(format, 3, K)
    qdata = format.pack(codes)
    assert qdata.dtype == torch.int32 and qdata.shape == (3, format.packed_width(K))
    assert qdata.shape[-1] == -(-K // 32) * format.bits
    assert torch.equal(format.unpack(qdata, K), codes)
    assert torch.equal(format.values(qdata, K), format.decode(codes))


@ALL_PACKED
def test_padding_is_code_zero(format: Format) -> None:
    qdata = format.pack(torch.full((2, 33), 2**format.bits - 1, dtype=torch.uint8))
    assert format.unpack(qdata, 64)[:, 33:].count_nonzero() == 0


@ALL_PACKED
def test_leading_dimensions_and_views(format: Format) -> None:
    codes = random_codes(format, 64, 2, 5)
    view = codes.permute(1, 2, 0)
    assert torch.equal(format.pack(view), format.pack(view.contiguous()))
    assert torch.equal(format.unpack(format.pack(view), 64), view)


@ALL_PACKED
def test_bits_lie_where_documented(format: Format) -> None:
    """Planes in turn every 32 codes, low bits of the code in the first, low bits of the word first."""
    codes = random_codes(format, 96).tolist()
    words = []
    for start in range(0, 96, 32):
        shift = 0
        for width in format.spec.planes:
            parts = [(code >> shift) & (2**width - 1) for code in codes[start : start + 32]]
            per_word = 32 // width
            for first in range(0, 32, per_word):
                words.append(sum(part << (width * i) for i, part in enumerate(parts[first : first + per_word])))
            shift += width
    signed = [word - 2**32 if word >= 2**31 else word for word in words]
    assert format.pack(torch.tensor(codes, dtype=torch.uint8)).tolist() == signed


def test_int4_is_the_layout_of_compressed_tensors() -> None:
    """Its `weight_packed`: code + 8, eight in an int32, low bits first.

    https://github.com/vllm-project/compressed-tensors, compressors/pack_quantized.
    """
    signed = torch.randint(-8, 8, (4, 64), generator=torch.Generator().manual_seed(2))
    offset = (signed + 8).to(torch.int64)
    expected = sum(offset[:, i::8] << (4 * i) for i in range(8))
    expected = torch.where(expected >= 2**31, expected - 2**32, expected).to(torch.int32)
    format = FORMATS["int4"]
    assert torch.equal(format.pack(format.encode(signed.float())), expected)


@ALL_PACKED
def test_swapped_neighbours_are_noticed(format: Format) -> None:
    """Negative control: the same codes in another order give other bytes."""
    codes = torch.arange(64, dtype=torch.uint8) % 2**format.bits
    assert not torch.equal(format.pack(codes), format.pack(codes.view(-1, 2).flip(1).flatten()))


@pytest.mark.parametrize("name", sorted(set(FORMATS) - set(PACKED)))
def test_eight_bits_are_stored_as_they_are(name: str) -> None:
    format = FORMATS[name]
    codes = format.encode(torch.linspace(-2, 2, 33))
    assert format.pack(codes) is codes and format.unpack(codes, 33) is codes
    assert codes.dtype == format.spec.dtype and format.packed_width(33) == 33
