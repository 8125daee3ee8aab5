"""One step of AdamW: the reference against fp64 math, and every kernel against the reference, to the bit."""

import pytest
import torch
from torch import Tensor

from hf_quant.kernels import adam_step_, native
from hf_quant.kernels.adam_step import gpu, op
from hf_quant.kernels.gpu.launch import TARGETS, pretend, record_launches
from hf_quant.testing import sqnr


pytestmark = pytest.mark.usefixtures("poison_empty")
OPTIONS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
BF16, FP32 = torch.bfloat16, torch.float32
# Rows shorter than a block, of several, of an odd number of values.
SHAPES = ((3, 256), (2, 700), (5, 7), (1, 129), (4, 33), (70, 300))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def arguments(shapes, states: str, param: torch.dtype = BF16, grad: torch.dtype = BF16) -> list:
    """Arguments of the op for parameters of some shapes, with states of zeros."""
    rows = [normal(N, 1, seed=1).exp() * 0.01 for N, _ in shapes]
    columns = [-(-K // 2) if states == "int4" else K for _, K in shapes]
    moments = [
        [torch.zeros(N, K, dtype=torch.uint8).to(op.STATES[states]) for (N, _), K in zip(shapes, columns)]
        for _ in range(2)
    ]
    scales = [
        [torch.zeros(N, -(-K // op.BLOCKS[states])) for N, K in shapes] if states in op.CODECS else [] for _ in "mv"
    ]
    return [
        [(normal(*shape, seed=2) * 0.1).to(param) for shape in shapes],
        [(normal(*shape, seed=3) * scale).to(grad) for shape, scale in zip(shapes, rows)],
        *moments,
        *scales,
        torch.tensor([[i, 5, 512] for i in range(len(shapes))]),
    ]


def copied(parts: list) -> list:
    return [[t.clone() for t in part] if isinstance(part, list) else part.clone() for part in parts]


def same_bits(parts: list, expected: list) -> bool:
    pairs = [pair for i in (0, 2, 3, 4, 5) for pair in zip(parts[i], expected[i], strict=True)]
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


@pytest.mark.parametrize("states", op.STATES)
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP32, FP32), (BF16, FP32), (FP32, BF16)], ids=str)
def test_every_instruction_set_gives_the_bits_of_the_reference(states, dtypes):
    for seed in (None, 7):
        expected = arguments(SHAPES, states, *dtypes)
        expected[6][1:3, 2] = torch.tensor([509, 3])  # where shards of a vector may begin
        found = {name: copied(expected) for name in native.instruction_sets()}
        for step in (1, 2, 3):
            options = {**OPTIONS, "states": states, "seed": seed, "step": step}
            op.adam_step__reference(*expected, **options)
            for name, parts in found.items():
                with native.using(name):
                    adam_step_(*parts, **options)
                assert same_bits(parts, expected), (name, seed, step)


@pytest.mark.parametrize("states", op.STATES)
def test_the_gpu_kernel_gives_the_bits_of_the_reference(states, monkeypatch):
    """Several dtypes in one call; with rows that allow wide accesses, and without; all programs of a task, and one."""
    bf16, mixed, fp32 = (BF16, BF16), (BF16, FP32), (FP32, FP32)
    for shapes, seed, dtypes, programs in (
        (SHAPES[1:5], 2**31 + 5, (bf16, mixed), 1),
        (((3, 256), (2, 64)), 7, (bf16, fp32), 1),
        (((9, 257),), None, (bf16,), 8),
    ):
        monkeypatch.setattr(gpu, "_PROGRAMS", programs)
        of = [arguments(shapes, states, *pair) for pair in dtypes]
        expected = [[t for parts in of for t in parts[i]] for i in range(6)] + [torch.cat([p[6] for p in of])]
        expected[6][: len(shapes) // 4, 2] = 509
        found = copied(expected)
        for step in (1, 2):
            options = {**OPTIONS, "states": states, "seed": seed, "step": step}
            op.adam_step__reference(*expected, **options)
            gpu.adam_step__gpu(*found, **options)
        assert same_bits(found, expected), (shapes, seed)


def test_one_launch_serves_all_parameters():
    parts = arguments(SHAPES, "int8")
    parts = [[t.to("meta") for t in part] if isinstance(part, list) else part for part in parts]
    with pretend(TARGETS["sm90"]), record_launches() as launches:
        gpu.adam_step__gpu(*parts, **OPTIONS, states="int8", seed=1, step=1)
    assert len(launches) == 1


def test_large_parameters_on_several_threads():
    expected = arguments([(300, 1000)], "int8")
    found = copied(expected)
    before = torch.get_num_threads()
    for parts, threads in ((expected, 1), (found, 3)):
        torch.set_num_threads(threads)
        adam_step_(*parts, **OPTIONS, states="int8", seed=1, step=1)
    torch.set_num_threads(before)
    assert same_bits(found, expected)


@pytest.mark.parametrize("states", op.STATES)
def test_the_step_is_adamw(states):
    """Against torch's own, in fp64; states lose what their SQNR says, and no more."""
    parts = arguments([(40, 512)], states, FP32, FP32)
    parameter = parts[0][0].double().requires_grad_()
    theirs = torch.optim.AdamW([parameter], lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    before = parts[0][0].clone()
    for step in range(1, 6):
        parts[1][0] = normal(40, 512, seed=10 + step) * 0.01
        parameter.grad = parts[1][0].double()
        theirs.step()
        op.adam_step__reference(*parts, **OPTIONS, states=states, seed=3, step=step)
    found = sqnr(parts[0][0] - before, parameter.detach() - before)
    low, high = {"fp32": (100, 150), "bf16": (45, 65), "int8": (22, 45), "fp8": (22, 45), "int4": (7, 20)}[states]
    assert low < found < high
    wrong = copied(parts)
    wrong[0][0] = before.clone()
    op.adam_step__reference(*wrong, **{**OPTIONS, "beta2": 0.9}, states=states, seed=3, step=6)
    assert sqnr(wrong[0][0] - before, parameter.detach() - before) < low


@pytest.mark.parametrize(("states", "bounds"), [("int8", (31, 36)), ("fp8", (31, 31)), ("int4", (14, 15))])
def test_codes_are_as_near_as_their_bits_allow(states, bounds):
    values = normal(50, 1000)
    for moment, low in enumerate(bounds):
        exact = values if moment == 0 else values.square()
        codes = torch.zeros(50, 500 if states == "int4" else 1000, dtype=torch.uint8).to(op.STATES[states])
        scale = torch.zeros(50, -(-1000 // op.BLOCKS[states]))
        op.encode_(codes, scale, exact, None, states, moment)
        assert low < sqnr(op.decode(codes, scale, 1000, states, moment), exact) < low + 8
        assert sqnr(op.decode(codes, scale.roll(1, 0), 1000, states, moment), exact) < low


def test_every_code_is_read_as_it_is_written():
    for states, codecs in op.CODECS.items():
        for moment, codec in enumerate(codecs):
            magnitudes = torch.arange(codec.largest + 1, dtype=torch.uint8)
            codes = (
                magnitudes if not codec.is_signed else torch.cat([magnitudes, magnitudes[1:] + 2 ** (codec.bits - 1)])
            )
            if states == "fp8" and moment == 1:
                codes = codes[1:]  # no second moment is stored as zero
            rows = codes[:, None].repeat(1, 2)
            rows[:, 1] = codec.largest
            packed = rows[:, :1] | rows[:, 1:] << 4 if codec.bits == 4 else rows
            again, scale = torch.zeros_like(packed).view(op.STATES[states]), torch.zeros(len(rows), 1)
            values = op.decode(packed.view(op.STATES[states]), scale + 0.125, 2, states, moment)
            assert (values[:, 1] == 0.125 * codec.top).all()
            op.encode_(again, scale, values, None, states, moment)
            assert torch.equal(again.view(torch.uint8), packed) and (scale == 0.125).all()


def test_second_moments_of_a_block_are_never_zero():
    values = torch.full((1, 256), 1e-12)
    values[0, 0] = 1.0
    for states in op.CODECS:
        codes = torch.zeros(1, 128 if states == "int4" else 256, dtype=torch.uint8).to(op.STATES[states])
        scale = torch.zeros(1, -(-256 // op.BLOCKS[states]))
        for bits in (None, torch.zeros(1, 256, dtype=torch.int32)):
            op.encode_(codes, scale, values, bits, states, 1)
            assert (op.decode(codes, scale, 256, states, 1) > 0).all()
        op.encode_(codes, scale, values, None, states, 0)
        assert (op.decode(codes, scale, 256, states, 0)[0, 1:128] == 0).all()  # first moments are


def test_rounding_to_bf16_is_unbiased_over_all_bits():
    """The mean over the 65,536 draws is the value; what bf16 holds stays; a value next to a power of two carries."""
    bits = torch.arange(2**16, dtype=torch.int32)
    for value in (1 - 2.0**-11, 0.999, 1.0, -3.1415926, 1e-30, 255.9):
        values = torch.full((2**16,), value)
        found = op.to_dtype(values, BF16, bits)
        step = found.float().max().item() - found.float().min().item()
        assert (found.double().mean() - values[0].double()).abs() <= step * 2.0**-16
        assert len(found.unique()) == (1 if value == 1.0 else 2)
    assert op.to_dtype(torch.full((2**16,), 1 - 2.0**-11), BF16, bits).max() == 1.0
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0])
    found = op.to_dtype(special, BF16, torch.full((5,), 0xFFFF, dtype=torch.int32))
    assert torch.equal(found[:2].float(), special[:2]) and found[2].isnan() and (found[3:] == 0).all()


@pytest.mark.parametrize("states", ["bf16", "int8"])
def test_rounding_is_unbiased_and_to_nearest_is_not(states, cpu_kernels):
    """An update of a quarter of bf16's step, on 100,000 parameters: their mean moves by it; to nearest, none does."""
    means = {}
    for seed in (5, None):
        parts = arguments([(100, 1000)], states)
        parts[0][0].fill_(1.0)
        parts[1][0].fill_(0.5)
        adam_step_(*parts, **{**OPTIONS, "weight_decay": 0.0, "lr": 2.0**-10}, states=states, seed=seed, step=1)
        means[seed] = parts[0][0].double().mean().item()
    assert abs(means[5] - (1 - 2.0**-10)) < 4.5 * 2.0**-8 * 0.433 / 1e5**0.5
    assert means[None] == 1.0


def test_draws_differ_between_steps_streams_and_places():
    def rounded(**changes):
        parts = arguments([(4, 512)], "fp32")
        parts[6] = torch.tensor([[changes.pop("stream", 0), changes.pop("row", 0), changes.pop("column", 0)]])
        adam_step_(*parts, **{**OPTIONS, "lr": 1e-4, "step": 1, "seed": 1, "states": "fp32", **changes})
        return parts[0][0]

    first = rounded()
    assert torch.equal(rounded(), first)
    for change in ({"stream": 1}, {"row": 4}, {"column": 512}, {"seed": 2}):
        assert 0.05 < (rounded(**change) != first).float().mean() < 0.9, change
    assert torch.equal(rounded(stream=1), rounded(seed=2))


def test_shards_round_as_the_whole_parameter():
    for states in op.STATES:
        whole = arguments([(9, 700)], states)
        whole[6] = torch.tensor([[3, 0, 0]])
        cuts = [(slice(0, 5), slice(0, 700)), (slice(5, 9), slice(0, 512)), (slice(5, 9), slice(512, 700))]
        shards, unplaced = (
            [
                [[t[0][cut].contiguous()] for t in whole[:2]] + arguments([whole[0][0][cut].shape], states)[2:]
                for cut in cuts
            ]
            for _ in range(2)
        )
        for shard, (rows, columns) in zip(shards, cuts):
            shard[6] = torch.tensor([[3, rows.start, columns.start]])
        for shard in unplaced:
            shard[6] = torch.tensor([[3, 0, 0]])
        for step in (1, 2):
            for parts in (whole, *shards, *unplaced):
                adam_step_(*parts, **OPTIONS, states=states, seed=1, step=step)
        assert all(torch.equal(shard[0][0], whole[0][0][cut]) for shard, cut in zip(shards, cuts))
        assert not torch.equal(unplaced[1][0][0], whole[0][0][cuts[1]])


@pytest.mark.parametrize("states", op.STATES)
def test_a_step_of_zeros_changes_no_bit(states, cpu_kernels):
    parts = arguments(SHAPES, states)
    for gradient in parts[1]:
        gradient.zero_()
    before = copied(parts)
    adam_step_(*parts, **{**OPTIONS, "lr": 0.0}, states=states, seed=1, step=1)
    assert same_bits(parts, before)


def test_wrong_arguments_are_refused():
    good = arguments([(4, 300)], "int8")

    def refused(match: str, states: str = "int8", **changes) -> None:
        parts = copied(good)
        for place, value in changes.items():
            parts[int(place[1:])] = value
        with pytest.raises(ValueError, match=match):
            adam_step_(*parts, **OPTIONS, states=states, seed=1, step=1)

    refused("states is 'int5'; allowed: 'fp32', 'bf16', 'int8'", states="int5")
    refused("exp_avg of parameter 0 is torch.uint8", states="int4")
    refused("needs 1 of each, and 1 scales", _4=[])
    refused("torch.float16", _0=[torch.zeros(4, 300, dtype=torch.float16)])
    refused("shape \\(300,\\)", _0=[torch.zeros(300)])
    refused("gradient of parameter 0", _1=[torch.zeros(4, 200)])
    refused("exp_avg_sq's scale of parameter 0", _5=[torch.zeros(4, 1)])
    refused("must be contiguous", _1=[torch.zeros(300, 4).t()])
    refused("origins is", _6=torch.zeros(2, 3, dtype=torch.int64))
