"""Blocks of GGUF's types: every value arrives, and bytes come back, against the package gguf and bytes by hand."""

import struct
from dataclasses import replace

import numpy as np
import pytest
import torch

from hf_quant.algorithms import PackedWeight, quantize_matrix
from hf_quant.convert.gguf import blocks
from hf_quant.convert.gguf.blocks import OTHERWISE, TYPES, unpack
from hf_quant.convert.gguf.written import pack, type_for
from hf_quant.kernels import dequantize
from hf_quant.resolve import resolve_scheme
from hf_quant.scheme import LinearScheme, TensorQuant
from integration_tests.support.gguf_files import random_rows, values_of


N, K = 8, 512


def decoded(packed: PackedWeight, quant: TensorQuant, width: int = K) -> torch.Tensor:
    size = quant.columns_per_scale(width)
    return dequantize(*packed, format=quant.format, group_size=size, K=width, dtype=torch.float32)


def multiples(rows: np.ndarray) -> np.ndarray:
    """Blocks of Q4_1 whose minima are multiples of their scales, which are exact."""
    blocks = rows.reshape(N, -1, 20)
    scale = np.ldexp(np.arange(1, blocks.shape[1] + 1), -10).astype(np.float16)
    blocks[..., :2] = scale[:, None].view(np.uint8)
    blocks[..., 2:4] = (-3 * scale)[:, None].view(np.uint8)
    return blocks.reshape(N, -1)


@pytest.mark.parametrize("rows_at_a_time", [3, N])
@pytest.mark.parametrize("kind", TYPES)
def test_every_value_of_a_type_arrives(kind, rows_at_a_time, monkeypatch):
    monkeypatch.setattr(blocks, "_CHUNK", rows_at_a_time * K)
    rows = random_rows(kind, N, K)
    rows = multiples(rows) if kind == "Q4_1" else rows
    rows[0, :100] = 0  # of most types: a scale of 0
    packed = unpack(TYPES[kind], torch.from_numpy(rows), K)
    expected = torch.from_numpy(values_of(kind, rows))
    found = decoded(packed, TYPES[kind].quant)
    assert torch.equal(found, expected) and expected.abs().max() > 0
    assert bool((packed.scale.float() != 0).all())
    other = rows.copy()
    other[1, TYPES[kind].nbytes // 2] ^= 0x31
    assert not torch.equal(decoded(unpack(TYPES[kind], torch.from_numpy(other), K), TYPES[kind].quant), expected)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "MXFP4", "Q4_K", "Q5_K", "Q6_K", "TQ2_0"])
def test_values_and_codes_come_back(kind):
    rows = random_rows(kind, N, K, 3)
    rows = multiples(rows) if kind == "Q4_1" else rows
    quant = TYPES[kind].quant
    packed = unpack(TYPES[kind], torch.from_numpy(rows), K)
    assert type_for(LinearScheme(quant), K) == kind
    back = pack(kind, packed, quant, K)
    assert back.shape == rows.shape and np.array_equal(values_of(kind, back.numpy()), values_of(kind, rows))
    again = unpack(TYPES[kind], back, K)
    assert all(torch.equal(a, b) for a, b in zip(packed, again) if a is not None)
    if kind in ("Q4_0", "Q4_1", "MXFP4", "TQ2_0"):  # of the others, negative scales have turned codes
        assert np.array_equal(back.numpy(), rows)


def test_q4_0_and_q8_0_by_hand():
    # 32 codes q and a scale of 0.5: low halves hold the first 16. Stored is q + 8.
    codes = list(range(-8, 8)) + list(range(7, -9, -1))
    pairs = bytes((codes[i] + 8) | (codes[i + 16] + 8) << 4 for i in range(16))
    block = torch.tensor(list(struct.pack("<e", 0.5) + pairs), dtype=torch.uint8)[None]
    packed = unpack(TYPES["Q4_0"], block, 32)
    assert decoded(packed, TYPES["Q4_0"].quant, 32).tolist() == [[0.5 * q for q in codes]]
    assert torch.equal(pack("Q4_0", packed, TYPES["Q4_0"].quant, 32), block)

    signed = [q * 15 for q in codes]
    block = torch.tensor(list(struct.pack("<e32b", 0.25, *signed)), dtype=torch.uint8)[None]
    packed = unpack(TYPES["Q8_0"], block, 32)
    assert packed.qdata.tolist() == [signed] and packed.scale.tolist() == [[0.25]]
    assert torch.equal(pack("Q8_0", packed, TYPES["Q8_0"].quant, 32), block)


def test_a_group_of_equal_weights_has_a_minimum_and_a_scale_of_0():
    block = torch.tensor(list(struct.pack("<ee16B", 0.0, -3.0, *range(16))), dtype=torch.uint8)[None]
    with pytest.raises(ValueError, match="is no multiple of its scale"):
        unpack(TYPES["Q4_1"], block, 32)
    known = OTHERWISE["Q4_1"]
    assert decoded(unpack(known, block, 32), known.quant, 32).tolist() == [[-3.0] * 32]


def test_a_row_with_a_negative_scale_of_int8_turns_its_codes_and_cannot_hold_128():
    rows = random_rows("Q8_0", 1, 32)
    rows[0, :2] = np.frombuffer(struct.pack("<e", -0.5), np.uint8)
    packed = unpack(TYPES["Q8_0"], torch.from_numpy(rows), 32)
    assert packed.scale.item() == 0.5 and packed.qdata[0, 0] == -int(rows[0, 2].astype(np.int8))
    rows[0, 2] = 128
    with pytest.raises(ValueError, match="code of -128"):
        unpack(TYPES["Q8_0"], torch.from_numpy(rows), 32)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"weights": "int4"}, "Q4_0"),
        ({"weights": "int4", "group_size": 96, "scale_dtype": "bfloat16"}, "Q4_0"),
        ({"weights": "int4", "symmetric": False}, "Q4_1"),
        ({"weights": "int8", "scale_dtype": "float16"}, "Q8_0"),
        ({"weights": "int8", "granularity": "tensor", "scale_dtype": "bfloat16"}, "Q8_0"),
        ({"weights": "int8", "group_size": 64, "scale_dtype": "float16"}, "Q8_0"),
        ({"weights": "int4", "group_size": 128}, "Q4_0"),  # the last group of a row is shorter
        ({"weights": "int4", "group_size": 128, "symmetric": False}, "Q4_1"),
        ({"weights": "mxfp4"}, "MXFP4"),
    ],
)
def test_schemes_of_this_package_are_written_without_rounding(fields, kind, monkeypatch):
    monkeypatch.setattr(blocks, "_CHUNK", 3 * 192)
    scheme, _ = resolve_scheme(fields, torch.bfloat16)
    width = 192
    assert type_for(scheme, width) == kind
    torch.manual_seed(0)
    packed = quantize_matrix(torch.randn(N, width) * 0.02, scheme.weight)
    rows = pack(kind, packed, scheme.weight, width)
    expected = decoded(packed, scheme.weight, width)
    assert torch.equal(torch.from_numpy(values_of(kind, rows.numpy())), expected)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weights": "int3"}, "int3 is not written: quantize it to int4, int8 or mxfp4"),
        ({"weights": "nf4"}, "nf4 is not written"),
        ({"weights": "int4", "group_size": 16}, "take group_size=32"),
        ({"weights": "int8", "input_transform": "hadamard"}, 'quantize with input_transform="none"'),
        ({"weights": "int8", "sparsity": "2:4"}, "2:4 sparsity has no type in GGUF"),
    ],
)
def test_schemes_without_a_type_are_refused_with_the_way_out(fields, message):
    with pytest.raises(ValueError, match=message):
        type_for(resolve_scheme(fields, torch.bfloat16)[0], K)


def test_scales_that_would_be_rounded_are_refused():
    quant = resolve_scheme({"weights": "int8", "scale_dtype": "float32"}, torch.float32)[0].weight
    packed = quantize_matrix(torch.randn(N, K), quant)
    with pytest.raises(ValueError, match="are no fp16 numbers: quantize it with scale_dtype='float16'"):
        pack("Q8_0", packed, quant, K)
    halved = packed._replace(scale=packed.scale.half().float())
    assert torch.equal(
        torch.from_numpy(values_of("Q8_0", pack("Q8_0", halved, quant, K).numpy())), decoded(halved, quant)
    )
    with pytest.raises(ValueError, match="blocks of 32 do not divide its 48 columns"):
        type_for(LinearScheme(quant), 48)


def test_scales_that_are_no_products_and_codes_of_8_bits_are_no_q6_k():
    quant = TYPES["Q6_K"].quant
    packed = quantize_matrix(torch.randn(N, K), quant)
    with pytest.raises(ValueError, match="no fp16 number times integers"):
        pack("Q6_K", packed, quant, K)
    packed = packed._replace(scale=torch.ones_like(packed.scale))
    with pytest.raises(ValueError, match="more than 6 bits"):
        pack("Q6_K", packed, quant, K)


def test_minima_that_are_no_multiples_of_the_scale_are_refused():
    rows = multiples(random_rows("Q4_1", N, K))
    rows[2, 2:4] = np.frombuffer(struct.pack("<e", -0.00125), np.uint8)
    with pytest.raises(ValueError, match="no multiple of its scale"):
        unpack(TYPES["Q4_1"], torch.from_numpy(rows), K)
    quant = replace(TYPES["Q4_1"].quant, scale_dtype="bfloat16")
    packed = quantize_matrix(torch.randn(N, K), quant)  # 8 digits of a scale times 4 of a zero point
    with pytest.raises(
        ValueError, match="are no fp16 numbers: .* symmetric=True, or with scale_dtype='float8_e4m3fn'"
    ):
        pack("Q4_1", packed, quant, K)
