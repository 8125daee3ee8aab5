"""The cache of prepacked weights: what drops an entry, what it weighs, and that nothing else sees it."""

import copy
import gc
import io
import pickle
import timeit

import pytest
import torch

from hf_quant.kernels import clear_prepacked, prepack, prepacked_bytes, set_prepack_limit, weight_only_mm
from hf_quant.kernels.cpu.scratch import scratch
from hf_quant.scheme import TensorQuant
from hf_quant.tests.kernels.cases import assert_product, decode_slowly, packed_case


pytestmark = pytest.mark.usefixtures("torch_kernels")


INT4 = TensorQuant("int4", "group", 128, scale_dtype="bfloat16")
N, K = 272, 256


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch):
    monkeypatch.setattr(prepack, "_limit", None)
    clear_prepacked()
    yield
    clear_prepacked()


def count_builds():
    built = []

    def build(value):
        built.append(value)
        return torch.zeros(value)

    return built, build


def test_builds_once_and_says_how_much():
    built, build = count_builds()
    codes = torch.zeros(4, 8, dtype=torch.int32)
    first = prepack.get_or_build("kind", (codes,), build, 10)
    assert prepack.get_or_build("kind", (codes,), build, 10) is first and built == [10]
    view = codes.view(torch.float32)  # the same memory by another object
    assert prepack.get_or_build("kind", (view,), build, 10) is first
    assert prepacked_bytes() == 40
    prepack.get_or_build("other", (codes,), build, 5)
    assert built == [10, 5] and prepacked_bytes() == 60
    clear_prepacked()
    assert prepacked_bytes() == 0


def test_changes_in_place_and_replacements_build_anew():
    built, build = count_builds()
    codes, scale = torch.zeros(4, 8, dtype=torch.int32), torch.ones(4, 1)
    for change in (
        lambda: None,
        lambda: codes.add_(1),
        lambda: codes[1].zero_(),
        lambda: scale.view(torch.int32).add_(1),
    ):
        change()
        prepack.get_or_build("kind", (codes, scale), build, 10)
        prepack.get_or_build("kind", (codes, scale), build, 10)
    assert len(built) == 4
    prepack.get_or_build("kind", (codes, scale.clone()), build, 10)
    assert len(built) == 5 and prepacked_bytes() == 0  # the clone is gone, and with it what was made from it
    prepack.get_or_build("kind", (codes.view(8, 4), scale), build, 10)  # the same bytes as another matrix
    assert len(built) == 6


def test_an_entry_dies_with_its_weight():
    built, build = count_builds()
    weight = torch.nn.Parameter(torch.zeros(4, 8, dtype=torch.int32), requires_grad=False)
    prepack.get_or_build("kind", (weight,), build, 10)
    view = weight.data[1:]
    del weight
    gc.disable()  # reference counts alone must do
    try:
        assert prepacked_bytes() == 40  # the memory lives on in the view
        del view
        assert prepacked_bytes() == 0
    finally:
        gc.enable()


def test_inference_mode_and_no_grad_share_an_entry():
    built, build = count_builds()
    stored = torch.zeros(4, 8, dtype=torch.int32)
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            value = prepack.get_or_build("kind", (stored.view(torch.float32), stored), build, 10)
            assert not value.is_inference()
    assert len(built) == 1
    with torch.inference_mode():
        fresh = torch.zeros(4, 8)
        assert prepack.get_or_build("kind", (fresh,), build, 10) is prepack.get_or_build("kind", (fresh,), build, 10)


def test_the_limit():
    built, build = count_builds()
    weights = [torch.zeros(2, 2) for _ in range(3)]
    set_prepack_limit(50)
    values = [prepack.get_or_build("kind", (weight,), build, 10) for weight in weights]
    assert [value is not None for value in values] == [True, True, False]
    assert prepack.constant("constant", weights[2], lambda: "known") == "known"  # weighs nothing
    set_prepack_limit(0)
    clear_prepacked()
    assert prepack.get_or_build("kind", (weights[0],), build, 10) is None
    with pytest.raises(ValueError, match="-1"):
        set_prepack_limit(-1)


INT8 = pytest.param(
    TensorQuant("int8", "row"),
    marks=pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="prepacked for CPUs with VNNI only"),
)


@pytest.mark.parametrize("quant", [INT4, INT8, TensorQuant("nf4", "group", 64)], ids=str)
def test_without_prepacked_weights_the_products_are_right(quant):
    packed, options = packed_case(quant, N, K)
    weight = decode_slowly(packed, quant, K)
    x = torch.randn(7, K).bfloat16()
    fast = weight_only_mm(x, *packed, None, **options)
    assert prepacked_bytes() > 0
    clear_prepacked()
    set_prepack_limit(0)
    slow = weight_only_mm(x, *packed, None, **options)
    assert prepacked_bytes() == 0
    assert not torch.equal(fast, slow)  # two paths indeed
    for y in (fast, slow):
        assert_product(y, x.double() @ weight.t(), weight)


def test_int4_takes_four_bits_more_once_it_is_used():
    packed, options = packed_case(INT4, N, K)
    weight_only_mm(torch.randn(64, K).bfloat16(), *packed, None, **options)
    assert prepacked_bytes() == 0  # a long prompt dequantizes
    weight_only_mm(torch.randn(1, K).bfloat16(), *packed, None, **options)
    scales = N * K // 128 * 4  # a bf16 scale and a bf16 zero per group
    assert N * K // 2 <= prepacked_bytes() <= N * K // 2 + scales + 64


def test_results_follow_a_weight_that_changes_in_place():
    packed, options = packed_case(INT4, N, K)
    x = torch.randn(1, K).bfloat16()
    before = weight_only_mm(x, *packed, None, **options)
    packed.scale.mul_(2)
    assert torch.equal(weight_only_mm(x, *packed, None, **options), before * 2)
    packed.qdata.copy_(packed.qdata.roll(1, 0))
    packed.scale.copy_(packed.scale.roll(1, 0))
    assert torch.equal(weight_only_mm(x, *packed, None, **options), before.roll(1, 1) * 2)


def test_modules_do_not_see_it():
    from hf_quant import quantize_

    layer = quantize_(torch.nn.Sequential(torch.nn.Linear(K, N, dtype=torch.bfloat16)), "nf4")
    stored = sum(part.numel() * part.element_size() for part in layer.parameters())
    x = torch.randn(8, K).bfloat16()
    with torch.no_grad():
        keys, size = set(layer.state_dict()), len(pickle.dumps(layer))
        y = layer(x)
        assert prepacked_bytes() > 0
        assert set(layer.state_dict()) == keys and len(pickle.dumps(layer)) == size
        buffer = io.BytesIO()
        torch.save(layer.state_dict(), buffer)
        assert buffer.tell() < stored + 20000
        assert torch.equal(copy.deepcopy(layer)(x), y)
        assert torch.equal(pickle.loads(pickle.dumps(layer))(x), y)


def test_a_look_up_is_cheap():
    codes, scale = torch.zeros(4, 8, dtype=torch.int32), torch.ones(4, 1)

    def look_up():
        return prepack.get_or_build("kind", (codes, scale), torch.zeros, 10)

    assert look_up() is not None
    seconds = min(timeit.repeat(look_up, number=1000, repeat=5))
    assert seconds / 1000 < 20e-6  # 1.6 us on an idle machine


def test_scratch_is_reused_and_outlives_inference_mode():
    with torch.inference_mode():
        first = scratch("test", (4, 5), torch.bfloat16)
    assert first.shape == (4, 5) and first.dtype == torch.bfloat16
    second = scratch("test", (2, 3), torch.int32)
    assert second.data_ptr() == first.data_ptr()
    second.zero_()
    assert scratch("test", (100, 100), torch.float32).data_ptr() != first.data_ptr()
