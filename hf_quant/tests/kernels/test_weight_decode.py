"""Decoding by PTX and by Triton, both against the formats' own levels, code by code."""

import numpy as np
import pytest
import torch

from hf_quant.formats import FORMATS
from hf_quant.kernels.gpu import decode
from hf_quant.kernels.gpu.decode import decode_options, e4m3_ptx, ptx, whole_element
from hf_quant.tests.kernels.interpreter import run_ptx


def _values(name, dtype, text):
    """What the PTX makes of every code in every place of a pair of elements: [places, codes]."""
    format = FORMATS[name]
    spec, count = format.spec, whole_element(format.spec)
    options = decode_options(name, dtype, count, use_ptx=True)
    codes = torch.arange(2**spec.bits)
    rows = []
    for place in range(2 * count):
        # All other places hold the complement: a bit that leaks from a neighbour shows.
        element, i = divmod(place, count)
        planes, shift = [], 0
        for width in spec.planes or (8,):
            ones = 2**width - 1
            part, other = (codes >> shift) & ones, (~codes >> shift) & ones
            word = sum(
                (part if p == place else other) << (p // count * 16 + p % count * width) for p in range(2 * count)
            )
            planes.append(word.numpy().astype(np.uint32))
            shift += width
        outputs = run_ptx(text, planes, 2 * count if spec.dtype == torch.int8 and dtype == torch.bfloat16 else count)
        parts = [torch.from_numpy(o.view(np.int16).reshape(-1, 2)[:, element].copy()).view(dtype) for o in outputs]
        value = parts[i].double()
        if len(parts) > count:
            value = value - parts[count + i].double()
        elif spec.is_integer:
            value = value - (128 if dtype == torch.bfloat16 else 1024) - 2 ** (spec.bits - 1)
        rows.append(value * options["MULTIPLIER"])
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_ptx_gives_the_levels_of_the_format(name, dtype):
    spec = FORMATS[name].spec
    if spec.levels:
        expected = torch.tensor(spec.levels, dtype=torch.float64)
        if name == "nf4":
            expected = torch.tensor(spec.levels).to(dtype).double()
    else:
        codes = torch.arange(256).to(torch.uint8)
        expected = codes.view(spec.dtype).double()
    got = _values(name, dtype, ptx(name, dtype))
    for row in got:
        real = ~expected.isnan() & ~expected.isinf()  # fp8's special codes are no weights
        if name == "fp8_e4m3":
            assert real.sum() == 254
        assert torch.equal(row[real], expected[real])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_ptx_gives_the_scales_of_float8(dtype):
    """All of them, NaN excepted, in each place of a word between others."""
    codes = np.arange(256, dtype=np.uint32)
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    real = ~expected.isnan()
    assert real.sum() == 254

    def values(text):
        for place in range(4):
            word = sum((codes if i == place else ~codes & 0xFF) << np.uint32(8 * i) for i in range(4))
            pair = run_ptx(text, [word], 2)[place // 2]
            yield torch.from_numpy(pair.view(np.int16).reshape(-1, 2)[:, place % 2].copy()).view(dtype).double()

    text = e4m3_ptx(dtype)
    assert all(torch.equal(found[real], expected[real]) for found in values(text))
    wrong = text.replace("0x5140", "0x4150")
    assert not all(torch.equal(found[real], expected[real]) for found in values(wrong))


def test_tables_do_not_depend_on_the_default_device():
    expected = ptx("nf4", torch.bfloat16)
    with torch.device("meta"):
        assert ptx.__wrapped__("nf4", torch.bfloat16) == expected


def test_levels_are_made_to_last(monkeypatch):
    """They are kept for the life of the process, and first asked for while a graph may be warming up."""
    asked, device = [], torch.device("cpu")
    monkeypatch.setattr(decode, "lasting", lambda make, device: asked.append(device) or make())
    levels = decode.levels_tensor.__wrapped__("nf4", torch.float32, device)
    assert asked == [device] and levels.tolist() == torch.tensor(FORMATS["nf4"].spec.levels).tolist()


def test_a_wrong_shift_is_noticed():
    wrong = ptx("int4", torch.bfloat16).replace("shr.b32 t, $4, 8;", "shr.b32 t, $4, 4;")
    expected = torch.tensor(FORMATS["int4"].spec.levels, dtype=torch.float64)
    assert not all(torch.equal(row, expected) for row in _values("int4", torch.bfloat16, wrong))
