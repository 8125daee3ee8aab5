"""The native CPU kernels: numbers of every instruction set on random shapes, and their boundary with Python."""

import multiprocessing
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from hf_quant import quantize_
from hf_quant.algorithms import PackedWeight, empty_packed, geometry
from hf_quant.formats import FORMATS
from hf_quant.kernels import clear_prepacked, dynamic_mm, grouped_mm, int8_scaled_mm, native, weight_only_mm
from hf_quant.kernels.native import extension
from hf_quant.kernels.rowwise.op import quantize_rowwise_reference
from hf_quant.kernels.weight import Weight
from hf_quant.kernels.weight_only.op import dequantize_reference
from hf_quant.scheme import TensorQuant
from hf_quant.tests.kernels.cases import decode_slowly, swap_neighbours


SETS = native.instruction_sets()
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}  # half a unit in the last place
ROWS = (0, 1, 2, 3, 5, 9, 15, 17, 100, 485)  # of x: both ways to multiply, and more than are packed at once
INT4 = TensorQuant("int4", "group", 64, symmetric=False, scale_dtype="bfloat16")

pytestmark = [
    pytest.mark.usefixtures("poison_empty"),
    pytest.mark.skipif(not SETS, reason=f"no native kernels: {native.unavailable_reason()}"),
]


@pytest.fixture(params=SETS)
def instructions(request):
    with native.using(request.param):
        yield request.param


@pytest.fixture
def calls(monkeypatch):
    """One entry per product that the extension has computed."""
    made, matmul = [], native.products._matmul
    monkeypatch.setattr(native.products, "_matmul", lambda *args: made.append(0) or matmul(*args))
    clear_prepacked()
    yield made
    clear_prepacked()


def random_packed(quant: TensorQuant, N: int, K: int, seed: int) -> PackedWeight:
    """Every code and zero point that there is, also where K is padded; scales around 0.01."""
    generator = torch.Generator().manual_seed(seed)
    packed, spec = empty_packed((N, K), quant, "cpu"), FORMATS[quant.format].spec
    if spec.dtype in (torch.int32, torch.int8):
        packed.qdata.random_(torch.iinfo(spec.dtype).min, torch.iinfo(spec.dtype).max + 1, generator=generator)
    else:
        packed.qdata.copy_(torch.randn(N, K, generator=generator))
    packed.scale.copy_(torch.rand(packed.scale.shape, generator=generator) * 0.01 + 0.005)
    if packed.zero_point is not None:
        packed.zero_point.random_(0, 2**spec.bits, generator=generator)
    if packed.global_scale is not None:
        packed.scale.copy_(torch.rand(packed.scale.shape, generator=generator) + 0.5)
        packed.global_scale.fill_(0.0123)
    return packed


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def options_of(quant: TensorQuant, N: int, K: int) -> dict:
    return {"format": quant.format, "group_size": geometry(quant, N, K)[1]}


def random_quant(draw: random.Random) -> TensorQuant:
    format = draw.choice([name for name in FORMATS if native.arguments.knows(name)])
    if format in ("mxfp4", "nvfp4"):
        scale_dtype, group_size = ("float8_e8m0fnu", 32) if format == "mxfp4" else ("float8_e4m3fn", 16)
        return TensorQuant(format, "group", group_size, scale_dtype=scale_dtype)
    symmetric = not FORMATS[format].allows_asymmetric or draw.random() < 0.5
    granularity = draw.choice(("row", "group", "group", "group", FORMATS[format].granularities[-1]))
    scale_dtypes = ("float32", "bfloat16", "float16", *["float8_e4m3fn"] * (granularity == "group"))
    scale_dtype = draw.choice(scale_dtypes)
    group_size = draw.choice((16, 32, 64, 96, 128, 256, 48)) if granularity == "group" else None
    return TensorQuant(format, granularity, group_size, symmetric, scale_dtype)


def excess(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, nf4: bool) -> float:
    """The largest error of an element, relative to what rounding may do to it.

    That is one rounding of y and, in proportion to the sum of the magnitudes that were added up, the roundings of fp32
    sums over K, in 16 lanes; levels of nf4 are rounded to bf16 where x is.
    """
    x, magnitude = x.double(), x.double().abs() @ weight.abs().t()
    exact = x @ weight.t()
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    relative = (x.shape[1] / 16 + 64) * 2**-24 + (2**-8 if nf4 else 0)
    allowed = relative * magnitude + ROUNDING[y.dtype] * exact.abs() + (2**-25 if y.dtype == torch.float16 else 1e-30)
    assert y.shape == exact.shape and not y.isnan().any()
    return ((y.double() - exact).abs() / allowed).max().item() if y.numel() else 0.0


@pytest.mark.parametrize("seed", range(16))
def test_products_of_random_shapes(seed, calls):
    draw = random.Random(seed)
    for number in range(25):
        quant, N, dtype = random_quant(draw), draw.randint(1, 200), draw.choice(DTYPES)
        K = draw.choice((4160, 4224) if number == 0 else (draw.randint(1, 700), 128 * draw.randint(1, 5)))
        M = draw.choice(ROWS[:8] if number == 0 else ROWS)
        N = min(N, 3_000_000 // (max(M, 1) * K) + 1)
        packed, options = random_packed(quant, N, K, number), options_of(quant, N, K)
        weight = decode_slowly(packed, quant, K)
        x = normal(M, K, seed=number).to(dtype)
        bias = normal(N, seed=1).to(draw.choice(DTYPES)) if draw.random() < 0.5 else None
        rule = {"nf4": quant.format == "nf4" and dtype == torch.bfloat16}
        where = f"{quant}, {quant.scale_dtype} scales, {dtype}, M={M}, N={N}, K={K}"
        for name in SETS:
            with native.using(name):
                calls.clear()
                y = weight_only_mm(x, *packed, bias, **options)
                assert y.dtype == dtype and len(calls) == (M > 0), where
                assert excess(y, x, weight, bias, **rule) <= 1, f"{name}: {where}"
        if M > 0 and N >= 8 and K >= 32 and not rule["nf4"]:
            y = weight_only_mm(x, *swap_neighbours(packed), bias, **options)
            assert excess(y, x, weight, bias, **rule) > 2, where
            less = x.clone()
            less[:, -max(K % options["group_size"], 16) :] = 0  # the last group dropped
            assert excess(weight_only_mm(less, *packed, bias, **options), x, weight, bias, **rule) > 2, where


@pytest.mark.parametrize("format", ["int4", "nf4", "int8", "fp8_e4m3", "int2"])
@pytest.mark.parametrize("K", [12_300, 20_480])
def test_one_row_that_the_l1_cache_does_not_hold(format, K, instructions, calls):
    """Then rows of the weight share what is read of x, four at a time, or meet it block by block."""
    for number, (N, symmetric) in enumerate(((1, True), (3, True), (19, True), (19, False))):
        if not symmetric and not FORMATS[format].allows_asymmetric:
            continue
        quant = TensorQuant(format, "group", 128, symmetric, "bfloat16")
        packed, options = random_packed(quant, N, K, number), options_of(quant, N, K)
        weight = decode_slowly(packed, quant, K)
        for dtype in (torch.bfloat16, torch.float32):
            x = normal(1, K, seed=number).to(dtype)
            y = weight_only_mm(x, *packed, None, **options)
            assert excess(y, x, weight, None, nf4=format == "nf4" and dtype == torch.bfloat16) <= 1, f"{N}, {dtype}"
        if format.startswith("int"):
            codes, row_scale = quantize_rowwise_reference(x, format="int8")
            values = codes.float() * row_scale
            y = dynamic_mm(x, *packed, None, activation="int8", **options)
            assert excess(y, values, weight, None, nf4=False) <= 1, f"{N}, int8"
    assert calls


@pytest.mark.parametrize("format", ["int2", "int4", "int8"])
def test_products_of_integers(format, instructions, calls):
    """Sums of integers are exact. With one scale a row they are rounded once, else their lanes are, for each group."""
    draw = random.Random(0)
    for number in range(40):
        N, K = draw.randint(1, 150), draw.choice((draw.randint(1, 700), 768, 2080))
        M = draw.choice((1, 2, 4, 11, 17, 100))
        group_size = draw.choice((16, 32, 64, 96, 128, 256, None, None))
        symmetric = format == "int8" or draw.random() < 0.5
        quant = TensorQuant(format, "group" if group_size else "row", group_size, symmetric)
        packed, options = random_packed(quant, N, K, number), options_of(quant, N, K)
        weight, groups = decode_slowly(packed, quant, K), packed.scale.shape[1]
        x = normal(M, K, seed=number) + draw.choice((0, 3))
        codes, row_scale = quantize_rowwise_reference(x, format="int8")
        values = codes.double() * row_scale.double()
        exact, magnitudes = values @ weight.t(), values.abs() @ weight.abs().t()
        # 2**-48: sums of 0 are not quite 0 in fp64, with scales in them.
        allowed = (groups + 3) * 2**-24 * (exact.abs() if groups == 1 else magnitudes) + 2**-48 * magnitudes + 1e-30

        y = dynamic_mm(x, *packed, None, activation="int8", **options)
        assert ((y.double() - exact).abs() / allowed).max() <= 1, f"{quant}, M={M}, N={N}, K={K}"
        changed = packed.qdata.clone()
        k = int(codes.int().abs().sum(0).argmax())
        bits = FORMATS[format].bits
        changed.view(torch.uint8)[N // 2, k * bits // 8] ^= 1 << k * bits % 8  # one of the codes, by one
        y = dynamic_mm(x, *packed._replace(qdata=changed), None, activation="int8", **options)
        assert ((y.double() - exact).abs() / allowed).max() > 1
    assert len(calls) == 80


@pytest.mark.parametrize("activation", [None, "int8"])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_every_fp8_scale(group_size, activation, instructions, calls):
    """A row of x with one column picks the scales of a group: every finite value of float8_e4m3fn comes out itself."""
    N, groups = 70, 150  # more than are converted at once
    quant = TensorQuant("int4", "group", group_size, scale_dtype="float8_e4m3fn")
    packed, options = random_packed(quant, N, groups * group_size, 0), options_of(quant, N, groups * group_size)
    packed.qdata.fill_(-1 - (6 * 0x11111111))  # every code is 9: the level 1
    packed.global_scale.fill_(1)
    values = [code for code in range(256) if code & 127 != 127]
    codes = torch.tensor([values[i % len(values)] for i in range(N * groups)], dtype=torch.uint8).view(N, groups)
    packed.scale.copy_(codes.view(torch.float8_e4m3fn))
    for M in (1, 4, 40):
        picked = torch.arange(M) * 37 % groups
        x = torch.zeros(M, groups * group_size)
        x[torch.arange(M), picked * group_size + group_size - 1] = 127 if activation else 1
        if activation is None:
            y = weight_only_mm(x, *packed, None, **options)
        else:
            y = dynamic_mm(x, *packed, None, activation=activation, **options) / 127
        torch.testing.assert_close(y, packed.scale.float()[:, picked].t(), rtol=2**-22, atol=0)
    packed.scale.view(torch.uint8)[3, 149] = 0xFF
    y = weight_only_mm(x, *packed, None, **options)
    assert y[:, 3].isnan().all() and y.isnan().sum() == len(y)
    assert len(calls) == 4


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2"])
def test_every_fp8_code(format, instructions, calls):
    """A row of x with one column picks a code of each row: every finite value comes out itself, and NaN is NaN."""
    N, K = 70, 256
    quant = TensorQuant(format, "row", scale_dtype="float32")
    packed, options = random_packed(quant, N, K, 0), options_of(quant, N, K)
    codes = (torch.arange(N)[:, None] * 11 + torch.arange(K)).to(torch.uint8).view(packed.qdata.dtype)
    values = codes.float()
    values[~values.isfinite()] = 0
    packed.scale.fill_(1)
    for M in (1, 4, 40):
        for dtype in (torch.bfloat16, torch.float32):
            picked = torch.arange(M) * 37 % K
            packed.qdata.copy_(values.to(codes.dtype))
            y = weight_only_mm(torch.eye(K, dtype=dtype)[picked], *packed, None, **options)
            assert torch.equal(y.float(), values.t()[picked]), (M, dtype)
            packed.qdata.view(torch.uint8)[3, 5], packed.qdata.view(torch.uint8)[69, 255] = 0x7F, 0xFF
            y = weight_only_mm(torch.ones(M, K, dtype=dtype), *packed, None, **options)
            assert y.isnan().sum() == 2 * M and y[:, (3, 69)].isnan().all()
    assert len(calls) == 12


def test_extreme_integers(instructions, calls):
    """With scales of one a result is the exact sum, rounded once to fp32; K is the largest whose sums fit int32."""
    for K, N in ((65536, 8), (4160, 70)):
        weight = torch.randint(-1, 2, (N, K), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
        weight[0], weight[1], weight[2], weight[3] = -128, 127, 0, 0
        weight[2, -1], weight[4, ::2], weight[4, 1::2] = 1, 127, -128
        for M in (1, 4, 17):
            x = torch.full((M, K), 127, dtype=torch.int8)
            x[M // 2], x[M - 1, ::3] = -128, -127
            one = torch.ones(M, 1), torch.ones(N, 1)
            exact = (x.double() @ weight.double().t()).float()
            assert torch.equal(int8_scaled_mm(x, weight, *one, None, out_dtype=torch.float32), exact)
            for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2):
                y = int8_scaled_mm(x, weight, *one, None, out_dtype=dtype)
                assert y.dtype == dtype and torch.equal(y.view(torch.uint8), exact.to(dtype).view(torch.uint8))
    assert len(calls) == 2 * 3 * 4  # fp64 is left to torch
    assert "overflow" in native.unsupported_reason(FORMATS["int8"].spec, torch.float32, 65537, 65537, int8=True)


@pytest.mark.parametrize("group_size", [16, 48, 64, 1040, 2048, None])
def test_extreme_int4_sums_are_exact(group_size, instructions, calls):
    """Of the largest codes, zero points and x, scales of one: no sum of 16 bits overflows, no group is rounded."""
    N, K = 70, 2100
    quant = TensorQuant("int4", "group" if group_size else "row", group_size, symmetric=False)
    packed, options = random_packed(quant, N, K, 0), options_of(quant, N, K)
    packed.qdata[0], packed.zero_point[0], packed.qdata[1], packed.zero_point[1] = -1, 0, 0, 15
    packed.scale.fill_(1)
    weight = decode_slowly(packed, quant, K)
    for M in (1, 3, 4, 6, 17):
        x = torch.full((M, K), 127.0)
        x[M // 2], x[M - 1, ::3] = -127, 5
        y = dynamic_mm(x, *packed, None, activation="int8", **options)
        assert torch.equal(y.double(), x.double() @ weight.t())
    assert len(calls) == 5


@pytest.mark.parametrize(
    "name", [name for name in SETS if name not in ("amx", "avx512", "avx512_vnni")]
)  # they round each panel of K
def test_sums_of_long_groups_are_rounded_once(name, calls):
    """The halves of a group cancel but for one product; rounded by themselves they would leave another rest."""
    N, K, half = 20, 4160, 1024
    quant = TensorQuant("int8", "group", 2 * half)
    packed, options = random_packed(quant, N, K, 0), options_of(quant, N, K)
    packed.qdata[:, :half], packed.qdata[:, half:] = 127, -127
    packed.qdata[:, 2 * half :], packed.qdata[:, 5] = 0, 126
    exact = -127.0 * packed.scale[:, 0].double()
    for M in (1, 3, 17):
        with native.using(name):
            y = dynamic_mm(torch.full((M, K), 127.0), *packed, None, activation="int8", **options)
        assert ((y.double() - exact).abs() <= 2**-23 * exact.abs()).all(), M
    assert len(calls) == 3


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def products(case: int = 0) -> list[torch.Tensor]:
    """Products of several kinds: streamed and in tiles, of bf16, fp32 and integers, with experts."""
    results, N, K = [], 150, 1024
    packed, options = random_packed(INT4, N, K, case), options_of(INT4, N, K)
    stack = [part if part is None else torch.stack([part] * 3) for part in packed]
    ends = torch.tensor([5, 40, 90], dtype=torch.int32)
    for M in (1, 6, 90):
        x = normal(M, K, seed=case)
        results += [weight_only_mm(rows, *packed, None, **options) for rows in (x, x.bfloat16())]
        results.append(dynamic_mm(x, *packed, None, activation="int8", **options))
        results.append(grouped_mm(x, *stack, None, ends.clamp(max=M), activation=None, **options))
    return results


def same(results: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(results, others))


def test_the_number_of_threads_changes_no_bit(instructions, threads):
    threads(1)
    expected = products()
    for count in (2, 3):
        threads(count)
        assert same(products(), expected)
    threads(1)
    assert same(products(), expected)


def test_calls_from_several_threads(instructions, threads):
    threads(1)
    expected = [products(case) for case in range(4)]

    def work(case: int) -> bool:
        torch.set_num_threads(1 + case % 3)  # of calls from this thread
        return all(same(products(case), expected[case]) for _ in range(3))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def _in_child(pipe) -> None:
    torch.set_num_threads(1)  # as workers of a DataLoader do; a pool of OpenMP does not survive a fork
    pipe.send([y.tolist() for y in products()])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_computes(instructions, threads):
    threads(2)
    expected = [y.tolist() for y in products()]
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    child = context.Process(target=_in_child, args=(theirs,), daemon=True)
    child.start()
    try:
        assert mine.poll(60), "the child hangs"
        assert mine.recv() == expected
    finally:
        child.kill()
        child.join()


@pytest.mark.parametrize("quant", [INT4, TensorQuant("int8", "row"), TensorQuant("nvfp4", "group", 16)], ids=str)
@pytest.mark.parametrize("op", [weight_only_mm, dynamic_mm])
@pytest.mark.parametrize("K", [200, 256])
def test_nan_and_inf_stay_in_their_rows_and_columns(K, op, quant, instructions):
    N = 70
    packed, options = random_packed(quant, N, K, 0), options_of(quant, N, K)
    if op is dynamic_mm:
        options["activation"] = "int8"
    for dtype in (torch.bfloat16, torch.float32):
        for M in (4, 20):
            x, bias = normal(M, K, seed=1).to(dtype), normal(N, seed=2)
            x[0] = 0
            y = op(x, *packed, bias, **options)
            assert torch.equal(y[0], bias.to(dtype))
            bad_x = x.clone()
            bad_x[1, 7], bad_x[2, K - 1] = float("nan"), float("-inf")
            bad = op(bad_x, *packed, bias, **options)
            assert not bad[1:3].isfinite().any()
            bad[1:3] = y[1:3]
            assert torch.equal(bad, y)
            bad_scale, bad_bias = packed.scale.clone(), bias.clone()
            bad_scale[5, -1], bad_scale[69, 0], bad_bias[9] = float("nan"), float("inf"), float("nan")
            bad = op(x, *packed._replace(scale=bad_scale), bad_bias, **options)
            assert not bad[1:, [5, 69, 9]].isfinite().any()
            bad[:, [5, 69, 9]] = y[:, [5, 69, 9]]
            assert torch.equal(bad, y)


def at_odd_address(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The same tensor, one byte after a multiple of 64, as foreign memory may lie."""
    if tensor is None:
        return None
    room = torch.zeros(tensor.nbytes + 128, dtype=torch.uint8)
    start = -room.data_ptr() % 64 + 1
    room[start : start + tensor.nbytes] = tensor.contiguous().flatten().view(torch.uint8)
    moved = torch.frombuffer(room.numpy(), dtype=tensor.dtype, count=tensor.numel(), offset=start).view(tensor.shape)
    assert moved.data_ptr() % 2 == 1
    return moved


@pytest.mark.parametrize("quant", [INT4, TensorQuant("int8", "row"), TensorQuant("nvfp4", "group", 16)], ids=str)
def test_odd_addresses_and_strides(quant, instructions, calls):
    N, K = 70, 212
    packed, options = random_packed(quant, N, K, 0), options_of(quant, N, K)
    spread = [p if p is None else p.view(torch.uint8).repeat_interleave(2, 0)[::2].view(p.dtype) for p in packed]
    assert not spread[0].is_contiguous()
    for dtype in DTYPES:
        for M in (1, 6, 20):
            x, bias = normal(M, K, seed=1).to(dtype), normal(2 * N, seed=2)[::2]
            y = weight_only_mm(x, *packed, bias, **options)
            odd = [at_odd_address(part) for part in packed]
            assert torch.equal(weight_only_mm(at_odd_address(x), *odd, at_odd_address(bias), **options), y)
            wide = torch.zeros(M, 2 * K, dtype=dtype)[:, ::2].copy_(x)
            assert torch.equal(weight_only_mm(wide, *spread, bias.double(), **options), y)
    assert len(calls) == 3 * 3 * 3


def test_the_instruction_set_is_chosen(monkeypatch):
    with native.using(None):
        with pytest.raises(ValueError, match="'nope'.*'portable'"):
            native.use("nope")
        for wanted, active in (("off", None), ("portable", "portable"), ("", SETS[0])):
            monkeypatch.setenv("HF_QUANT_NATIVE", wanted)
            extension._start()
            assert native.active() == active and (native.unavailable_reason() is None) == (active is not None)
        monkeypatch.setenv("HF_QUANT_NATIVE", "nonsense")
        with pytest.raises(ValueError, match="HF_QUANT_NATIVE is 'nonsense'; allowed here: 'off', .*'portable'"):
            extension._start()


def test_without_the_extension():
    """In a process that cannot import it everything works, as where nothing was built."""
    code = """
import sys
sys.modules["hf_quant.kernels.native._native"] = None
import torch
from hf_quant.kernels import native
from hf_quant.tests.kernels import test_native as tests
from hf_quant.tests.kernels.cases import assert_product, decode_slowly
assert native.instruction_sets() == () and native.active() is None and "not built" in native.unavailable_reason()
try:
    native.use("portable")
except ValueError as error:
    assert "not built" in str(error)
packed, x = tests.random_packed(tests.INT4, 300, 256, 0), tests.normal(5, 256, seed=0)
weight = decode_slowly(packed, tests.INT4, 256)
y = tests.weight_only_mm(x, *packed, None, **tests.options_of(tests.INT4, 300, 256))
assert_product(y, x.double() @ weight.t(), weight)
print("right")
"""
    environment = {**os.environ, "HF_QUANT_NATIVE": "avx512"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "right\n" and done.returncode == 0, done.stderr


def test_an_extension_of_other_sources_is_not_called(monkeypatch):
    monkeypatch.setattr(extension, "_INTERFACE", -1)
    module, reason = extension._load()
    assert module is None and "other sources" in reason


def test_tensors_that_torch_computes(instructions, calls):
    """Zero points that are no code, scales of other dtypes, groups of other sizes: right, and not by our kernels."""
    packed, options = random_packed(INT4, 40, 128, 0), options_of(INT4, 40, 128)
    x, ends = normal(3, 128, seed=0), torch.tensor([3], dtype=torch.int32)
    far = packed.zero_point.clone()
    far[7, 1] = 200
    weight_only_mm(x, *packed, None, **options)
    assert len(calls) == 1
    other = random_packed(TensorQuant("int4", "group", 24), 40, 128, 0)
    for case, size in (
        (packed._replace(zero_point=far), 64),
        (packed._replace(scale=packed.scale.double()), 64),
        (packed._replace(scale=packed.scale.to(torch.float8_e5m2)), 64),
        (other, 24),
    ):
        options["group_size"] = size
        weight = dequantize_reference(*case, **options, K=128, dtype=torch.float32).double()
        y = weight_only_mm(x, *case, None, **options)
        assert excess(y, x, weight, None, nf4=False) <= 1
        stack = [part if part is None else part[None] for part in case]
        assert torch.equal(grouped_mm(x, *stack, None, ends, activation=None, **options), y)
        y = dynamic_mm(x, *case, None, activation="int8", **options)
        codes, row_scale = quantize_rowwise_reference(x, format="int8")
        assert excess(y, codes * row_scale.double(), weight, None, nf4=False) <= 2
    assert len(calls) == 1  # none of these
    small = packed._replace(zero_point=packed.zero_point.clamp(max=9))
    assert native.serves(Weight(*small, "int4", 64, 128), torch.bfloat16)
    assert not native.serves(Weight(*small, "int2", 64, 128), torch.bfloat16)  # the same tensor as another format's


def test_a_default_device_is_not_ours(instructions):
    layer = quantize_(torch.nn.Sequential(torch.nn.Linear(64, 80)), "int4")
    x = normal(3, 64, seed=0)
    with torch.no_grad():
        y = layer(x)
        with torch.device("meta"):
            assert torch.equal(layer(x), y)


def test_five_lengths_are_one_graph(instructions, calls):
    layer = quantize_(torch.nn.Linear(256, 72, dtype=torch.bfloat16), "int4")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        for M in (2, 3, 9, 20, 500):
            x = normal(M, 256, seed=M).bfloat16()
            assert torch.equal(compiled(x), layer(x))
    assert counter.frame_count == 1 and len(calls) == 10


@pytest.mark.parametrize("format", ["int8", "int4", "int3", "int2", "nf4", "fp6_e3m2"])
@pytest.mark.parametrize("group_size", [16, 64, None])
@pytest.mark.parametrize("values", ["outliers", "tiny", "huge", "zero", "nan", "inf"])
def test_bf16_rows_of_every_magnitude(instructions, format, group_size, values):
    """Rows in bf16 may be multiplied in fixed point: nothing of that shows."""
    K = 592 if group_size == 16 else 640  # 592: no multiple of what is decoded at once
    scales = ("row", None) if group_size is None else ("group", group_size)
    quant = TensorQuant(format, *scales, symmetric=True, scale_dtype="float32")
    packed, options = random_packed(quant, 40, K, 0), options_of(quant, 40, K)
    w = dequantize_reference(*packed, **options, K=K, dtype=torch.float32).double()
    # Levels that are no integers may be rounded: nf4's, by half a word of 1023 at least for the largest, or to bf16.
    rounding = packed.scale.double().abs().repeat_interleave(group_size or K, 1) * (2**-11 if format == "nf4" else 0)
    if format == "nf4" and instructions == "avx512":
        rounding = torch.maximum(rounding, 2**-9 * w.abs())
    neighbours = group_size or 128
    for M in (1, 3, 70):
        x = normal(M, K, seed=1)
        x[:, 5] *= {"outliers": 3e3, "nan": float("nan"), "inf": float("inf")}.get(values, 1.0)
        x = (x * {"tiny": 1e-30, "huge": 1e30, "zero": 0.0}.get(values, 1.0)).bfloat16()
        y = weight_only_mm(x, *packed, None, **options).double()
        expected = x.double() @ w.T
        if values in ("nan", "inf"):
            assert torch.equal(y.isfinite(), expected.isfinite())
        else:
            largest = x.double().abs().view(M, -1, neighbours).amax(-1).repeat_interleave(neighbours, 1)
            allowed = 2**-8 * expected.abs() + 2**-15 * (largest @ w.abs().T) + x.double().abs() @ rounding.T
            assert ((y - expected).abs() <= allowed).all()


@pytest.mark.parametrize("quant", [INT4, TensorQuant("int8", "row"), TensorQuant("nvfp4", "group", 16)])
def test_rows_by_their_numbers(quant, instructions):
    N, K = 70, 192
    w = Weight(*random_packed(quant, N, K, 0), *options_of(quant, N, K).values(), K, None, None)
    read, rows = native.products.row_reader(w, torch.bfloat16), torch.tensor([[3, 69], [0, 3]])
    assert torch.equal(read(rows), native.dequantize(w, torch.bfloat16)[rows])
    for wrong in (-1, N):
        with pytest.raises(IndexError, match=f"row {wrong} of a weight with 70 rows"):
            read(torch.tensor([wrong]))
