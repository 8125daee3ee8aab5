"""The fixture that poisons fresh memory does so, for every dtype that the package stores."""

from types import BuiltinFunctionType

import pytest
import torch


FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", FLOATS)
def test_fresh_floats_are_nan(poison_empty, dtype):
    base = torch.zeros(2, 3).to(dtype)
    fresh = [
        torch.empty(2, 3, dtype=dtype),
        torch.empty_like(base),
        base.new_empty(4),
        base.new_empty_strided((2,), (1,)),
    ]
    assert all(tensor.float().isnan().all() for tensor in fresh)


@pytest.mark.parametrize("dtype", (torch.uint8, torch.int8, torch.int16, torch.int32))
def test_fresh_integers_are_the_largest(poison_empty, dtype):
    assert (torch.empty(5, dtype=dtype) == torch.iinfo(dtype).max).all()


def test_what_has_no_memory_is_left_alone(poison_empty):
    assert torch.empty(3, device="meta").is_meta
    assert torch.empty(0).numel() == 0


def test_without_the_fixture_nothing_is_replaced():
    assert isinstance(torch.empty, BuiltinFunctionType)
