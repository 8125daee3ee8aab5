"""The step of AdamW in Triton: one kernel for all parameters of a call, `_adam_step_kernel`.

A table has the addresses of each parameter and its states; a program takes 1024 values of one of them, 8 a thread. It
reads and writes each value once: 10 bytes in all with bf16 parameters and 8-bit states. Products are not fused with
sums, so that the bits are those of the reference; memory bounds the kernel in any case.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from hf_quant.kernels.adam_step import op
from hf_quant.kernels.adam_step.op import BLOCKS, CODECS, ROOM, Codec, coefficients, key_of
from hf_quant.kernels.codes import SMALLEST_SCALE
from hf_quant.kernels.dispatch import implements
from hf_quant.kernels.gpu.launch import launch, tl, triton, unavailable_reason
from hf_quant.kernels.rowwise.op import PHILOX_ROUNDS


_VALUES = 1024  # of a program
_PROGRAMS = 8  # that share an entry of the list of tasks


@triton.jit
def _pointers(address, offsets, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers to elements [R, C] from an address on; ALIGNED: sixteen at a time."""
    pointers = address.to(tl.pointer_type(TYPE)) + offsets
    return tl.multiple_of(pointers, (1, 16)) if ALIGNED else pointers


@triton.jit
def _floats(address, offsets, mask, IS_BF16: tl.constexpr, ALIGNED: tl.constexpr):
    """fp32 values at offsets from an address."""
    if IS_BF16:
        bits = tl.load(_pointers(address, offsets, tl.uint16, ALIGNED), mask=mask, other=0)
        return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return tl.load(_pointers(address, offsets, tl.float32, ALIGNED), mask=mask, other=0.0)


@triton.jit
def _store(address, offsets, mask, values, bits, IS_BF16: tl.constexpr, ALIGNED: tl.constexpr):
    """Write fp32 values; as bf16 with random bits below the last place, or to nearest, half to even."""
    if IS_BF16:
        raw = values.to(tl.uint32, bitcast=True)
        added = 0x7FFF + ((raw >> 16) & 1) if bits is None else bits
        rounded = tl.where(values != values, 0x7FC0, (raw + added) >> 16)
        tl.store(_pointers(address, offsets, tl.uint16, ALIGNED), rounded.to(tl.uint16), mask=mask)
    else:
        tl.store(_pointers(address, offsets, tl.float32, ALIGNED), values, mask=mask)


@triton.jit
def _halves(key, row, group, C: tl.constexpr, ROUNDS: tl.constexpr):
    """16 random bits each: uint32 [R, C] for values 8 * group on; row [R], group [R, C / 8]."""
    rows = row[:, None].to(tl.uint32) + tl.zeros_like(group)
    w0, w1, w2, w3 = tl.philox(key, group, rows, rows * 0, rows * 0, ROUNDS)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (row.shape[0], C // 2))
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (row.shape[0], C))


@triton.jit
def _halves_one_by_one(key, row, place, ROUNDS: tl.constexpr):
    """`_halves` for values at any place: row [R], place [R, C]."""
    rows = row[:, None].to(tl.uint32) + tl.zeros_like(place)
    w0, w1, w2, w3 = tl.philox(key, place // 8, rows, rows * 0, rows * 0, ROUNDS)
    word = place % 8 // 2
    low, high = tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3)
    return (tl.where(word < 2, low, high) >> (place % 2 * 16)) & 0xFFFF


@triton.jit
def _decoded(address, row, k, K, in_k, C: tl.constexpr, CODEC: tl.constexpr, ALIGNED: tl.constexpr):
    """The values of codes [R, C], without their scale."""
    BITS: tl.constexpr = CODEC[0]
    MANTISSA: tl.constexpr = CODEC[1]
    OFFSET: tl.constexpr = CODEC[2]
    SIGNED: tl.constexpr = CODEC[3]
    ZERO: tl.constexpr = CODEC[4]
    SMALL: tl.constexpr = CODEC[5]
    if BITS == 4:
        width = K // 2 if ALIGNED else (K + 1) // 2
        pair = k // 2 + tl.arange(0, C // 2)[None, :]
        codes = _pointers(address, row[:, None] * width + pair, tl.uint8, ALIGNED)
        both = tl.load(codes, mask=in_k & (pair < width), other=0).to(tl.int32)
        raw = tl.reshape(tl.join(both & 15, both >> 4), (row.shape[0], C))
    else:
        column = k + tl.arange(0, C)[None, :]
        codes = _pointers(address, row[:, None] * K + column, tl.uint8, ALIGNED)
        raw = tl.load(codes, mask=in_k & (column < K), other=0).to(tl.int32)
    magnitude = raw & ((1 << (BITS - SIGNED)) - 1)
    value = ((magnitude + OFFSET) << (23 - MANTISSA)).to(tl.float32, bitcast=True)
    if ZERO == "subnormal":
        value = tl.where(magnitude < (1 << MANTISSA), value * 2.0 - SMALL, value)
    elif ZERO == "shifted":
        value = value - SMALL
    if SIGNED:
        value = tl.where(raw != magnitude, value * -1.0, value)
    return value


@triton.jit
def _encode(
    address,
    scale_address,
    row,
    k,
    K,
    in_k,
    index,
    values,
    bits,
    C: tl.constexpr,
    CODEC: tl.constexpr,
    SMALLEST: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Write the codes of fp32 values [R, C], 0 beyond K, and the scales of their rows."""
    BITS: tl.constexpr = CODEC[0]
    MANTISSA: tl.constexpr = CODEC[1]
    OFFSET: tl.constexpr = CODEC[2]
    SIGNED: tl.constexpr = CODEC[3]
    ZERO: tl.constexpr = CODEC[4]
    SMALL: tl.constexpr = CODEC[5]
    TOP: tl.constexpr = CODEC[6]
    BELOW: tl.constexpr = CODEC[7]
    # As integers magnitudes have the same order, NaN last.
    amax = tl.max(tl.abs(values).to(tl.int32, bitcast=True), axis=1).to(tl.float32, bitcast=True)
    found = tl.div_rn(amax, TOP)
    is_zero = found < SMALLEST
    inverse = tl.where(is_zero, 0.0, tl.div_rn(BELOW, tl.where(is_zero, 1.0, amax)))
    tl.store(
        scale_address.to(tl.pointer_type(tl.float32)) + index, tl.where(is_zero, 0.0, found), mask=tl.max(in_k, 1) > 0
    )
    magnitude = tl.abs(values) * inverse[:, None]
    is_small = magnitude < SMALL
    if ZERO == "subnormal":
        magnitude = tl.where(is_small, magnitude + SMALL, magnitude)
    elif ZERO == "shifted":
        magnitude = magnitude + SMALL
    raw = magnitude.to(tl.int32, bitcast=True)
    SHIFT: tl.constexpr = 23 - MANTISSA
    if bits is None:
        raw += (1 << (SHIFT - 1)) - 1 + ((raw >> SHIFT) & 1)
    else:
        raw += bits.to(tl.int32) << (SHIFT - 16)
    code = (raw >> SHIFT) - OFFSET
    if ZERO == "subnormal":
        code -= is_small.to(tl.int32) << MANTISSA
    if SIGNED:
        code |= (values < 0).to(tl.int32) << (BITS - 1)
    elif ZERO == "none":
        code = tl.maximum(code, 0)
    else:
        code = tl.maximum(code, tl.where(is_zero, 0, 1)[:, None])
    column = k + tl.arange(0, C)[None, :]
    if BITS == 4:
        code = tl.where(column < K, code, 0)
        low, high = tl.split(tl.reshape(code, (row.shape[0], C // 2, 2)))
        width = K // 2 if ALIGNED else (K + 1) // 2
        pair = k // 2 + tl.arange(0, C // 2)[None, :]
        target = _pointers(address, row[:, None] * width + pair, tl.uint8, ALIGNED)
        tl.store(target, (low | (high << 4)).to(tl.uint8), mask=in_k & (pair < width))
    else:
        target = _pointers(address, row[:, None] * K + column, tl.uint8, ALIGNED)
        tl.store(target, code.to(tl.uint8), mask=in_k & (column < K))


@triton.jit(do_not_specialize=["decay", "beta1", "rest1", "beta2", "rest2", "step_size", "correction", "eps"])
def _adam_step_kernel(
    table,
    tasks,
    decay,
    beta1,
    rest1,
    beta2,
    rest2,
    step_size,
    correction,
    eps,
    P_BF16: tl.constexpr,
    G_BF16: tl.constexpr,
    STATES: tl.constexpr,  # "fp32", "bf16" or "codes"
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,  # rows are multiples of 32 values, addresses of 16 bytes
    BY_EIGHT: tl.constexpr,  # first columns are multiples of 8
    FIRST: tl.constexpr,  # the codec of exp_avg, see `_codec`
    SECOND: tl.constexpr,
    SMALLEST: tl.constexpr,
    ROUNDS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    task = tl.program_id(0)
    entry = table + tl.load(tasks + 2 * task) * 11
    param, grad, exp_avg, exp_avg_sq = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    first_scale, second_scale, N, K = tl.load(entry + 4), tl.load(entry + 5), tl.load(entry + 6), tl.load(entry + 7)
    if ALIGNED:
        K = tl.multiple_of(K, 32)
    blocks = (K + C - 1) // C
    # Blocks of a parameter are counted in 32 bits, values in 64.
    index = tl.load(tasks + 2 * task + 1).to(tl.int32) + tl.program_id(1) * R + tl.arange(0, R)
    row = (index // blocks.to(tl.int32)).to(tl.int64)
    k = ((index % blocks.to(tl.int32)) * C).to(tl.int64)[:, None]
    in_k = row[:, None] < N
    column = k + tl.arange(0, C)[None, :]
    mask = in_k & (column < K)
    offsets = row[:, None] * K + column
    if STOCHASTIC:
        first_column, rows = tl.load(entry + 10), tl.load(entry + 9) + row
        if BY_EIGHT:
            group = (first_column + k) // 8 + tl.arange(0, C // 8)[None, :]
            bits = _halves(tl.load(entry + 8), rows, group.to(tl.uint32), C, ROUNDS)
        else:
            bits = _halves_one_by_one(tl.load(entry + 8), rows, (first_column + column).to(tl.uint32), ROUNDS)
    else:
        bits = None
    p = _floats(param, offsets, mask, P_BF16, ALIGNED)
    g = _floats(grad, offsets, mask, G_BF16, ALIGNED)
    if STATES == "codes":
        m_scale = tl.load(first_scale.to(tl.pointer_type(tl.float32)) + index, mask=row < N, other=0.0)[:, None]
        v_scale = tl.load(second_scale.to(tl.pointer_type(tl.float32)) + index, mask=row < N, other=0.0)[:, None]
        m = _decoded(exp_avg, row, k, K, in_k, C, FIRST, ALIGNED) * m_scale
        v = _decoded(exp_avg_sq, row, k, K, in_k, C, SECOND, ALIGNED) * v_scale
    else:
        m = _floats(exp_avg, offsets, mask, STATES == "bf16", ALIGNED)
        v = _floats(exp_avg_sq, offsets, mask, STATES == "bf16", ALIGNED)
    m = m * beta1 + g * rest1
    v = v * beta2 + g * rest2 * g
    change = tl.div_rn(m, tl.sqrt_rn(v) * correction + eps)
    _store(param, offsets, mask, p * decay - change * step_size, bits, P_BF16, ALIGNED)
    if STATES == "codes":
        m, v = tl.where(mask, m, 0.0), tl.where(mask, v, 0.0)
        _encode(exp_avg, first_scale, row, k, K, in_k, index, m, bits, C, FIRST, SMALLEST, ALIGNED)
        _encode(exp_avg_sq, second_scale, row, k, K, in_k, index, v, bits, C, SECOND, SMALLEST, ALIGNED)
    else:
        _store(exp_avg, offsets, mask, m, bits, STATES == "bf16", ALIGNED)
        _store(exp_avg_sq, offsets, mask, v, bits, STATES == "bf16", ALIGNED)


@implements(op.adam_step_, "XPU")
@implements(op.adam_step_, "CUDA")
def adam_step__gpu(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    exp_avg_scales: Sequence[Tensor],
    exp_avg_sq_scales: Sequence[Tensor],
    origins: Tensor,
    *,
    states: str,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    seed: int | None = None,
) -> None:
    """Compute `adam_step__reference`, bit for bit: one launch for each pair of dtypes of parameters and gradients."""
    tensors = (params, grads, exp_avgs, exp_avg_sqs, exp_avg_scales, exp_avg_sq_scales)
    options = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay, "step": step}
    if params and unavailable_reason(params[0].device) is not None:
        op.adam_step__reference(*tensors, origins, states=states, seed=seed, **options)
        return
    op.check(*tensors, origins, states)
    dtypes = [(p.dtype, g.dtype) for p, g in zip(params, grads)]
    for pair in dict.fromkeys(dtypes):
        chosen = [i for i, found in enumerate(dtypes) if found == pair and params[i].numel() > 0]
        if chosen:
            parts = [[of[i] for i in chosen] if of else [] for of in tensors]
            _launch(*parts, origins[chosen].tolist(), states, coefficients(**options), step, seed)


def _launch(params, grads, exp_avgs, exp_avg_sqs, scales, sq_scales, origins, states, factors, step, seed) -> None:
    device = params[0].device
    rows = []
    for i, (p, (stream, row, column)) in enumerate(zip(params, origins)):
        tensors = (p, grads[i], exp_avgs[i], exp_avg_sqs[i], *((scales[i], sq_scales[i]) if scales else ()))
        addresses = [0 if t.is_meta else t.data_ptr() for t in tensors] + [0] * (6 - len(tensors))
        rows.append([*addresses, *p.shape, key_of((seed or 0) + stream, step), row, column])
    block = BLOCKS.get(states, 256)
    table = torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)
    tasks = _tasks(tuple(tuple(p.shape) for p in params), block, _VALUES // block * _PROGRAMS, device)
    first, second = CODECS.get(states, (None, None))
    launch(
        _adam_step_kernel,
        (tasks.shape[0], _PROGRAMS),
        table,
        tasks,
        *factors,
        P_BF16=params[0].dtype == torch.bfloat16,
        G_BF16=grads[0].dtype == torch.bfloat16,
        STATES=states if first is None else "codes",
        STOCHASTIC=seed is not None,
        ALIGNED=all(row[7] % 32 == 0 and not any(value % 16 for value in row[:4]) for row in rows),
        BY_EIGHT=all(row[10] % 8 == 0 for row in rows),
        FIRST=_codec(first),
        SECOND=_codec(second),
        SMALLEST=SMALLEST_SCALE,
        ROUNDS=PHILOX_ROUNDS,
        R=_VALUES // block,
        C=block,
        num_warps=4,
        enable_fp_fusion=False,
    )


def _codec(codec: Codec | None) -> tuple[int | bool | str | float, ...]:
    """Bits, mantissa bits, offset, sign or none, zero, 2**smallest, the largest value, and that with `ROOM`."""
    if codec is None:
        return ()
    sizes = (codec.bits, codec.mantissa_bits, codec.offset, codec.is_signed, codec.zero)
    return (*sizes, 2.0**codec.smallest, codec.top, codec.top * ROOM)


@lru_cache(maxsize=64)  # the groups of a model: their shapes stay
def _tasks(shapes: tuple[tuple[int, int], ...], block: int, at_once: int, device: torch.device) -> Tensor:
    """int64 [tasks, 2]: the parameter of each task, and the first of its `at_once` blocks."""
    counts = [-(-(N * -(-K // block)) // at_once) for N, K in shapes]
    with torch.inference_mode(False):
        numbers = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        ends = torch.tensor(counts).cumsum(0)
        within = torch.arange(len(numbers)) - (ends - torch.tensor(counts))[numbers]
        return torch.stack([numbers, within * at_once], 1).to(device)
