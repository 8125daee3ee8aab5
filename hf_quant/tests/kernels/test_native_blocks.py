"""`native.blocks.Block`: each step beside the ops of torch that it stands for, and products within a block."""

import pytest
import torch
import torch.nn.functional as F

from hf_quant.kernels import native
from hf_quant.kernels.native.attention import attention_of_values
from hf_quant.kernels.native.blocks import ACTIVATIONS, ALL_EXPERTS, PAIRS, Block, ExpertGroups
from hf_quant.modules import QuantLinear
from hf_quant.quantize import quantize_


DTYPES = [torch.bfloat16, torch.float16, torch.float32]
M = 3


@pytest.fixture(params=native.instruction_sets(), autouse=True)
def instruction_set(request):
    with native.using(request.param):
        yield


def rows(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(block: Block, *tensors, angle_stride=0):
    block.finish()(len(tensors[0]), *(tensor.data_ptr() for tensor in tensors), angle_stride=angle_stride)


def assert_near(found, expected, roundings=1.0):
    """All values within some roundings of their own size, and a little of the largest."""
    bound = roundings * torch.finfo(found.dtype).eps * (expected.float().abs() + expected.float().abs().max() / 64)
    assert ((found.float() - expected.float()).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "heads"), [(64, 1), (24, 5), (2050, 1)])
@pytest.mark.parametrize(("plus_one", "rounds_weight"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("rounds", [False, True])
def test_norm(dtype, width, heads, plus_one, rounds_weight, rounds):
    x, weight = rows(M, heads * width, dtype=dtype), rows(width, dtype=dtype, seed=1)
    block, y = Block(dtype, heads * width, heads * width), torch.empty_like(x)
    options = {"plus_one": plus_one, "rounds_weight": rounds_weight, "rounds": rounds, "centers": False}
    block.norm(0, 1, weight, None, 1e-5, **options)
    run(block, x, y)
    values = x.view(M, heads, width).float()
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + 1e-5)
    values = values.to(dtype) if rounds else values
    factor = weight + 1 if rounds_weight else weight.float() + plus_one
    expected = (values.float() * factor.float()).to(dtype)
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        assert torch.equal(y, expected.view(M, -1))  # torch adds in the same order
    assert_near(y, expected.view(M, -1), 2 if dtype == torch.float32 else 1)


def test_norm_without_weight():
    x = rows(M, 96, dtype=torch.bfloat16)
    block, y = Block(torch.bfloat16, 96, 96), torch.empty_like(x)
    block.norm(0, 1, None, None, 1e-6, plus_one=False, rounds_weight=False, rounds=True, centers=False)
    run(block, x, y)
    assert_near(y, F.rms_norm(x, (96,), eps=1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [7, 2050])
def test_layer_norm(dtype, width):
    x, weight, bias = (rows(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(M, width), (width,), (width,)]))
    x, y = x + 3, torch.empty_like(x)
    block = Block(dtype, width, width)
    block.norm(0, 1, weight, bias, 1e-5, plus_one=False, rounds_weight=False, rounds=False, centers=True)
    run(block, x, y)
    expected = F.layer_norm(x.double(), (width,), weight.double(), bias.double(), 1e-5).to(dtype)
    assert_near(y, expected, 64 if dtype == torch.float32 else 1)


@pytest.mark.parametrize(
    ("dtype", "angle_dtype"),
    [*((dtype, dtype) for dtype in DTYPES), (torch.bfloat16, torch.float32), (torch.float16, torch.float32)],
)
@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize("turned", [16, 10])
@pytest.mark.parametrize("shared", [False, True])
def test_turn(dtype, angle_dtype, pairs, turned, shared):
    heads, D = 3, 16
    x = rows(M, heads * D, dtype=dtype)
    width = turned // 2 if pairs == "halves_by_pair" else turned
    angles = rows(1 if shared else M, width, dtype=torch.float32, seed=1)
    cos, sin = angles.cos().to(angle_dtype), angles.sin().to(angle_dtype)
    block, y = Block(dtype, heads * D, width, width), x.clone()
    block.turn(0, 1, 2, head_dim=D, pairs=pairs, rounds=angle_dtype is dtype, angle_dtype=angle_dtype)
    run(block, y, cos, sin, angle_stride=0 if shared else width)
    part = x.view(M, heads, D)[..., :turned]
    if pairs == "halves_of_neighbors":
        part = torch.cat([part[..., ::2], part[..., 1::2]], -1)
    if pairs.startswith("halves"):
        other = torch.cat([-part[..., turned // 2 :], part[..., : turned // 2]], -1)
    else:
        other = torch.stack([-part[..., 1::2], part[..., ::2]], -1).flatten(-2)
    if pairs == "neighbors_by_pair":
        cos, sin = (angle[..., : turned // 2].repeat_interleave(2, -1) for angle in (cos, sin))
    if pairs == "halves_by_pair":
        cos, sin = (angle.repeat(1, 2) for angle in (cos, sin))
    expected = x.view(M, heads, D).clone()
    expected[..., :turned] = (part * cos[:, None] + other * sin[:, None]).to(dtype)
    assert torch.equal(y.view(M, heads, D)[..., turned:], expected[..., turned:])
    assert_near(y, expected.view(M, -1), 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "clamped_pairs"])
def test_gate(dtype, gated, activation):
    functions = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
        "relu_squared": lambda x: F.relu(x).square(),
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "identity": lambda x: x,
        "sigmoid": torch.sigmoid,
    }
    x, up = 4 * rows(M, 1501, dtype=dtype), rows(M, 1501, dtype=dtype, seed=1)
    block, y = Block(dtype, 1501, 1501, 1501), torch.empty_like(x)
    block.gate(0, 1 if gated else None, 2, activation)
    run(block, x, up, y)
    expected = functions[activation](x.float()).to(dtype)
    expected = expected * up if gated else expected
    assert_near(y, expected, 64 if dtype == torch.float32 else 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_of_halves_and_of_pairs(dtype):
    x = 4 * rows(M, 2 * 1501, dtype=dtype)
    y = x.new_empty(M, 1501)
    block = Block(dtype, 2 * 1501, 1501)
    block.gate(0, 0, 1, "silu", width=1501)
    run(block, x, y)
    gate, up = x.chunk(2, -1)
    assert_near(y, F.silu(gate.float()).to(dtype) * up, 64 if dtype == torch.float32 else 1)
    block = Block(dtype, 2 * 1501, 1501)
    block.gate(0, 0, 1, "clamped_pairs", width=1501, alpha=1.702, limit=3.0)
    run(block, x, y)
    gate, up = x[:, ::2].clamp(max=3.0), x[:, 1::2].clamp(-3.0, 3.0)
    assert_near(y, (up + 1) * (gate * torch.sigmoid(gate * 1.702)), 64 if dtype == torch.float32 else 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_that_is_not_rounded(dtype):
    x, up = 4 * rows(M, 1501, dtype=dtype), rows(M, 1501, dtype=dtype, seed=1)
    block, y = Block(dtype, 1501, 1501, 1501), torch.empty_like(x)
    block.gate(0, 1, 2, "silu", rounds=False)
    run(block, x, up, y)
    assert_near(y, (F.silu(x.float()) * up.float()).to(dtype), 64 if dtype == torch.float32 else 0.51)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "taps"), [(7, 3), (2050, 4)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_convolution_moves_its_state_on(dtype, width, taps, has_bias):
    x, state, weight, bias = (
        rows(*shape, dtype=dtype, seed=i)
        for i, shape in enumerate([(M, width), (M, width, taps), (width, taps), (width,)])
    )
    bias = bias if has_bias else None
    moved = torch.cat([state[..., 1:], x[..., None]], -1)
    expected = F.silu((moved.double() * weight.double()).sum(-1).add(bias.double() if has_bias else 0).to(dtype))
    block, y = Block(dtype, width, width * taps, width), torch.empty_like(x)
    block.convolve(0, 2, 1, weight, bias, "silu")
    run(block, x, state, y)
    assert torch.equal(state, moved)
    assert_near(y, expected, 64 if dtype == torch.float32 else 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dims"), [((2, 4), (32, 48)), ((3, 3), (4, 7)), ((1, 2), (128, 128))])
def test_delta_rule(dtype, heads, dims):
    (shared, count), (key_dim, value_dim) = heads, dims
    keys, values = shared * key_dim, count * value_dim
    x, hidden = rows(M, 2 * keys + values, dtype=dtype), rows(M, 24, dtype=dtype, seed=1)
    state = rows(M, count, key_dim, value_dim, dtype=torch.float32, seed=2)
    log_decay, time_bias = rows(count, dtype=torch.float32, seed=3), rows(count, dtype=dtype, seed=4)
    weights = rows(2, count, 24, dtype=dtype, seed=5)
    a, b = (F.linear(hidden.float(), weight.float()).to(dtype) for weight in weights)
    q, k, v = x.double().split([keys, keys, values], -1)
    q, k = (part.view(M, shared, key_dim).repeat_interleave(count // shared, 1) for part in (q, k))
    q, k = (part * (part.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for part in (q, k))
    decay = (-log_decay.double().exp() * F.softplus(a.double() + time_bias.double())).exp()
    moved = state.double() * decay[..., None, None]
    change = (v.view(M, count, -1) - (moved * k[..., None]).sum(-2)) * b.sigmoid().double()[..., None]
    moved = moved + k[..., None] * change[..., None, :]
    expected = (moved * q[..., None]).sum(-2) / key_dim**0.5

    block, y = Block(dtype, x.shape[1], 24, state[0].numel(), values), x.new_empty(M, values)
    places = [block.small(1, weight, None) for weight in weights]
    options = {"heads": heads, "dims": dims, "log_decay": log_decay, "time_bias": time_bias}
    block.delta(0, *places, 3, 2, **options)
    run(block, x, hidden, state, y)
    roundings = 256 if dtype == torch.float32 else 2
    assert_near(y.view_as(expected), expected.to(dtype), roundings)
    assert_near(state.to(dtype), moved.to(dtype), roundings)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "head_dim", "size", "groups"), [(100, 1, 16, 1), (4, 24, 48, 2), (3, 64, 128, 3), (1, 512, 512, 1)]
)
def test_selective_state_space(dtype, heads, head_dim, size, groups):
    of_head = head_dim > 1  # one decay for all states
    width, state = heads * head_dim, rows(M, heads, head_dim, size, dtype=torch.float32)
    x, inputs = rows(M, width + 5, dtype=dtype, seed=1), rows(M, 7 + 2 * groups * size, dtype=dtype, seed=2)
    step, bias = rows(M, heads, dtype=dtype, seed=3), rows(heads, dtype=dtype, seed=4)
    step[0] = 30  # beyond what torch's softplus computes
    decay = rows(heads, *(() if of_head else (size,)), dtype=torch.float32, seed=5)
    skip = rows(heads, dtype=torch.float32, seed=6)
    steps = F.softplus(step + bias).double()[..., None, None]
    b, c = (
        part.view(M, groups, size).repeat_interleave(heads // groups, 1) for part in inputs[:, 7:].double().chunk(2, 1)
    )
    values = x[:, :width].double().view(M, heads, head_dim)
    decays = (-decay.double().exp().view(heads, 1, -1) * steps).exp()
    moved = state.double() * decays + steps * values[..., None] * b[:, :, None]
    expected = (moved @ c[..., None])[..., 0] + values * skip.double()[:, None]

    block, y = Block(dtype, x.shape[1], inputs.shape[1], heads, state[0].numel(), width), x.new_empty(M, width)
    options = {"head_dim": head_dim, "state_size": size, "groups": groups, "first": 7}
    block.scan(0, 2, 1, 4, 3, **options, log_decay=decay, time_bias=bias, skip=skip)
    run(block, x, inputs, step, state, y)
    roundings = 256 if dtype == torch.float32 else 2
    assert_near(y.view_as(expected), expected.to(dtype), roundings)
    assert_near(state.to(dtype), moved.to(dtype), roundings)


def test_tokens_of_a_sequence_in_one_call_are_those_of_many():
    heads, D, taps, S, dtype = 2, 8, 3, 7, torch.bfloat16
    x, gates = rows(2 * S, 3 * heads * D, dtype=dtype), rows(2 * S, heads, dtype=dtype, seed=1)
    weight, of_heads = rows(3 * heads * D, taps, dtype=dtype, seed=2), rows(heads, dtype=dtype, seed=3)
    conv = rows(2, 3 * heads * D, taps, dtype=dtype, seed=4)
    state = rows(2, heads, D, D, dtype=torch.float32, seed=5)
    block = Block(dtype, 3 * heads * D, heads, conv[0].numel(), state[0].numel(), heads * D)
    y = block.buffer(3 * heads * D)
    block.convolve(0, y, 2, weight, None, "silu")
    block.delta(y, 1, 1, 4, 3, heads=(heads, heads), dims=(D, D), log_decay=of_heads, time_bias=of_heads)
    block.finish()
    found = []
    for calls in (1, S):
        states, results = (conv.clone(), state.clone()), []
        for part in zip(*(given.view(2, S, -1).chunk(calls, 1) for given in (x, gates))):
            result = torch.empty(*part[0].shape[:2], heads * D, dtype=dtype)
            given = [tensor.contiguous() for tensor in part]
            block(2 * S // calls, *(t.data_ptr() for t in (*given, *states, result)), sequences=2)
            results.append(result)
        found.append((torch.cat(results, 1), *states))
    assert all(map(torch.equal, *found)) and not torch.equal(found[0][2], state)


def test_pick():
    x = rows(M, 2 * 3 * 8, dtype=torch.bfloat16)
    first, second = torch.empty(2, M, 3 * 8, dtype=torch.bfloat16)
    block = Block(torch.bfloat16, 48, 24, 24)
    block.pick(0, 1, slice(0, 8), group=16)
    block.pick(0, 2, slice(8, 12), group=16, column=12)
    block.pick(0, 2, slice(12, 16), group=16)
    run(block, x, first, second)
    expected = x.view(M, 3, 4, 4).transpose(1, 2).flatten(2)
    assert torch.equal(first, x.view(M, 3, 2, 8)[:, :, 0].flatten(1))
    assert torch.equal(second, torch.cat([expected[:, 3], expected[:, 2]], -1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("experts", "chosen", "groups"),
    [
        (5, 2, ALL_EXPERTS),
        (200, 3, ALL_EXPERTS),
        (4, 4, ALL_EXPERTS),
        (32, 6, ExpertGroups(4, 2, 2)),
        (24, 6, ExpertGroups(4, 1, 1, 0.0)),
    ],
)
@pytest.mark.parametrize("by_sigmoid", [False, True])
@pytest.mark.parametrize("normalizes", [False, True])
def test_routes(dtype, experts, chosen, groups, by_sigmoid, normalizes):
    K = 24
    x, weight, bias = (
        rows(M, K, dtype=dtype),
        rows(experts, K, dtype=dtype, seed=1),
        rows(experts, dtype=dtype, seed=2),
    )
    weight[1::2] = weight[::2][: experts // 2]  # many scores are equal, and torch.topk says which one is taken
    bias[1::2] = bias[::2][: experts // 2]
    correction = (
        rows(experts, dtype=torch.float32, seed=3)[: experts // 2 + 1].repeat_interleave(2)[:experts].contiguous()
    )
    if groups.count > 1:  # of equal ones none comes first
        weight, bias = rows(experts, K, dtype=dtype, seed=4), rows(experts, dtype=dtype, seed=5)
        correction = rows(experts, dtype=torch.float32, seed=6).abs()
    options = {"chosen": chosen, "correction": correction, "by_sigmoid": by_sigmoid, "normalizes": normalizes}
    options["groups"] = groups
    block, y = Block(dtype, K, K), torch.empty_like(x)
    places = block.buffer(chosen * K)
    block.route(0, places, weight, bias, factor=1.5, rounds=True, rounds_weights=True, **options)
    block.gate(places, None, places, "relu")
    block.combine(places, 1, rounds=True)
    block.weigh(0, 1, weight[:1])
    run(block, x, y)
    logits = F.linear(x.float(), weight.float(), bias.float()).to(dtype).float()
    scores = logits.sigmoid() if by_sigmoid else logits.softmax(-1)
    choice = (scores + correction).view(M, groups.count, -1)
    best = choice.topk(groups.summed).values.sum(-1).topk(groups.chosen).indices
    seen = torch.zeros(M, groups.count, 1, dtype=torch.bool).scatter(1, best.unsqueeze(-1), True)
    found = torch.topk(choice.masked_fill(~seen, groups.outside).view(M, -1), chosen).indices
    weights = scores.gather(-1, found)
    weights = (1.5 * weights / (weights.sum(-1, keepdim=True) if normalizes else 1)).to(dtype)
    expected = sum((x.relu() * weights[:, j, None]).float() for j in range(chosen)).to(dtype)
    expected = expected * torch.sigmoid(F.linear(x, weight[:1]))
    assert_near(y, expected, 256 if dtype == torch.float32 else 2)


@pytest.mark.parametrize("x", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_no_numbers_come_through(x):
    given = torch.tensor([[x, 1.0, 0.0, -2.0]])
    block, y = Block(torch.float32, 4, 4), torch.empty_like(given)
    block.gate(0, None, 1, "relu")
    run(block, given, y)
    assert torch.equal(y.nan_to_num(7.0), F.relu(given).nan_to_num(7.0))


@pytest.mark.parametrize("config", ["int4", {"weights": "int8", "cpu_activations": "int8"}, "nf4"], ids=str)
def test_products_in_a_block_are_those_of_the_layers(config):
    first, second = torch.nn.Linear(96, 160), torch.nn.Linear(160, 64, bias=False)
    model = quantize_(torch.nn.Sequential(first, second).bfloat16(), config)
    from hf_quant.integrations.transformers.blocks.base import add_product

    assert all(isinstance(layer, QuantLinear) for layer in model)
    x, y = rows(M, 96, dtype=torch.bfloat16), torch.empty(M, 64, dtype=torch.bfloat16)
    block = Block(torch.bfloat16, 96, 64)
    h = block.buffer(160)
    add_product(block, 0, h, model[0])
    block.gate(h, None, h, "silu")
    add_product(block, h, 1, model[1])
    run(block, x, y)
    with torch.no_grad():
        expected = model[1](F.silu(model[0](x))).float()
    assert (y.float() - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("S", "T", "heads", "D"), [(37, 37, (6, 2), 64), (5, 600, (4, 4), 128), (70, 70, (3, 1), 72)])
@pytest.mark.parametrize("kind", ["causal", "full", "mask", "added"])
def test_attention_of_values(dtype, S, T, heads, D, kind):
    q, k, v = (
        rows(2, length, count, D, dtype=dtype, seed=i).transpose(1, 2)
        for i, (length, count) in enumerate([(S, heads[0]), (T, heads[1]), (T, heads[1])])
    )
    mask = rows(2, 1, S, T, dtype=torch.float32, seed=3) > -0.5
    mask[..., 0] = True
    added = torch.zeros(mask.shape).masked_fill_(~mask, torch.finfo(torch.float32).min)
    given = {"mask": mask, "added": added}.get(kind)
    y = attention_of_values(q, k, v, given, is_causal=kind == "causal", scale=0.3)
    seen = {"causal": torch.ones(S, T, dtype=torch.bool).tril(T - S), "full": None}.get(kind, mask)
    expected = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), seen, scale=0.3, enable_gqa=True)

    def error(of):
        return ((y.transpose(1, 2).double() - of).norm() / of.norm()).item()

    assert y.shape == (2, S, heads[0], D) and (y.is_contiguous() or D % 16)
    assert error(expected) < (1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps)
    less = F.scaled_dot_product_attention(
        *(x.double() for x in (q, k[:, :, :-16], v[:, :, :-16])),
        None if seen is None else seen[..., :-16],
        **{"scale": 0.3, "enable_gqa": True},
    )
    assert error(less) > 1e-2  # negative control: without the last tokens


def test_attention_of_values_with_sinks_and_capped_scores():
    q, k, v = (4 * rows(1, 4, 9, 32, dtype=torch.float32, seed=i) for i in range(3))
    sinks = rows(4, dtype=torch.float32, seed=3)
    y = attention_of_values(q, k, v, None, is_causal=False, scale=0.2, softcap=5.0, sinks=sinks)
    scores = 5.0 * torch.tanh(q @ k.mT * 0.2 / 5.0)
    scores = torch.cat([scores, sinks.view(1, 4, 1, 1).expand(1, 4, 9, 1)], -1).softmax(-1)[..., :-1]
    assert_near(y, (scores @ v).transpose(1, 2), 64)
    narrow = attention_of_values(q, k, v[..., :20], None, is_causal=False, scale=0.2, softcap=5.0, sinks=sinks)
    assert torch.equal(narrow, y[..., :20])
    assert attention_of_values(q, k[..., :16], v, None, is_causal=False, scale=0.2) is None
    assert attention_of_values(q, k, torch.cat([v, v], -1), None, is_causal=False, scale=0.2) is None
    assert attention_of_values(q, k.half(), v, None, is_causal=False, scale=0.2) is None
