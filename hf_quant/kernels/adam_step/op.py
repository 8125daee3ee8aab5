"""One step of AdamW whose states are stored in fp32, bf16, 8 or 4 bits, and whose parameters are written once.

AdamW: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101. States in blocks that share a scale: Dettmers et al.,
"8-bit optimizers via block-wise quantization", https://arxiv.org/abs/2110.02861; second moments without a zero: Li et
al., "Memory efficient optimizers with 4-bit states", https://arxiv.org/abs/2309.01507. Their codes are looked up in
tables; these are small floats, which are made and read by shifts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_quant.kernels.codes import SMALLEST_SCALE
from hf_quant.kernels.dispatch import define_op
from hf_quant.kernels.rowwise.op import random_bits


class Codec(NamedTuple):
    """A small float of one moment, with `mantissa_bits` below the power of two; no inf, no NaN.

    Attributes:
        bits: of a code.
        smallest: the exponent of the smallest power of two.
        largest: the largest code without its sign.
        is_signed: the highest bit of a code is the sign.
        zero: "none": code 0 is 2**smallest and nothing is stored as zero, so that no update is divided by it.
            "subnormal": below 2**smallest the grid goes on in equal steps, as in IEEE 754. "shifted": 2**smallest is
            taken from the value of every code, which gives nearly the same grid without a case.
    """

    bits: int
    mantissa_bits: int
    smallest: int
    largest: int
    is_signed: bool
    zero: str

    @property
    def offset(self) -> int:
        """Difference between the upper bits of an fp32 number and its code."""
        return (self.smallest + 127 - (self.zero == "subnormal")) << self.mantissa_bits

    @property
    def top(self) -> float:
        """The largest value."""
        exponent, mantissa = divmod(self.largest + self.offset, 1 << self.mantissa_bits)
        power = (1 + mantissa / (1 << self.mantissa_bits)) * 2.0 ** (exponent - 127)
        return power - 2.0**self.smallest if self.zero == "shifted" else power


# The codecs of exp_avg and exp_avg_sq, and how many values of a row share a scale.
CODECS = {
    "int8": (Codec(8, 3, 0, 127, True, "shifted"), Codec(8, 4, 0, 255, False, "none")),
    "fp8": (Codec(8, 3, -6, 126, True, "subnormal"), Codec(8, 3, -6, 126, False, "subnormal")),
    "int4": (Codec(4, 1, 0, 7, True, "shifted"), Codec(4, 1, 0, 15, False, "none")),
}
BLOCKS = {"int8": 256, "fp8": 256, "int4": 128}
ROOM = 1 - 2.0**-21  # by which blocks stay below the largest value, so that no rounding leads beyond its code
STATES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "int8": torch.uint8,
    "fp8": torch.float8_e4m3fn,
    "int4": torch.uint8,
}
FLOATS = (torch.float32, torch.bfloat16)


class Coefficients(NamedTuple):
    """Coefficients: the numbers that a step multiplies by, each rounded to fp32 once; `coefficients` makes them."""

    decay: float
    beta1: float
    rest1: float
    beta2: float
    rest2: float
    step_size: float
    correction: float
    eps: float


def coefficients(lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int) -> Coefficients:
    """1 - lr * weight_decay, beta, 1 - beta (of both), lr / (1 - beta1**step), (1 - beta2**step)**-.5, eps."""
    exact = (
        *(1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2),
        *(lr / (1 - beta1**step), (1 - beta2**step) ** -0.5, eps),
    )
    return Coefficients(*torch.tensor(exact, dtype=torch.float64, device="cpu").float().tolist())


def adam_step__reference(
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
    """Make step number `step` (from 1 on) of AdamW on each of `params`; in place, and so are the states.

    params and grads: fp32 or bf16 [N, K]. exp_avgs and exp_avg_sqs: [N, K] in the dtype of `states` ("fp32", "bf16",
    "int8": uint8, "fp8": float8_e4m3fn), with "int4" uint8 [N, ceil(K / 2)], the first of two codes in the low bits.
    exp_avg_scales and exp_avg_sq_scales: fp32 [N, ceil(K / B)], one for B = 256 ("int4": 128) values of a row; empty
    lists where the states are floats. All contiguous. States of zeros are those of a parameter that had no step yet.

        param = param * (1 - lr * weight_decay) - lr / (1 - beta1**step) * exp_avg / (sqrt(exp_avg_sq /
        (1 - beta2**step)) + eps)

    All in fp32, each operation rounded by itself, with the moments before they are stored. With a seed, bf16
    parameters and all states below fp32 are rounded to one of their two neighbours, at random and without bias, by
    `random_bits` with the key (seed + stream, step): origins, int64 [number of params, 3] on the CPU, has the stream
    of each parameter and the row and column in the whole tensor at which it begins, so that its shards round as the
    whole one does. One draw of 16 bits serves a parameter and both of its moments. Without a seed all round to the
    nearest.

    A block whose scale would be below 2**-90 gets scale 0. Parameters and states of a block with NaN or inf mean
    nothing afterwards. Not differentiable.
    """
    check(params, grads, exp_avgs, exp_avg_sqs, exp_avg_scales, exp_avg_sq_scales, origins, states)
    factors = coefficients(lr, beta1, beta2, eps, weight_decay, step)
    scales = [(None, None)] * len(params) if states not in CODECS else list(zip(exp_avg_scales, exp_avg_sq_scales))
    for p, g, m, v, scale, (stream, row, column) in zip(
        params, grads, exp_avgs, exp_avg_sqs, scales, origins.tolist()
    ):
        if p.numel() > 0:
            bits = None if seed is None else noise(seed + stream, step, p.shape, row, column, p.device)
            _step(p, g, m, v, scale, bits, factors, states)


def _step(p: Tensor, g: Tensor, m: Tensor, v: Tensor, scale: tuple, bits: Tensor | None, f: Coefficients, states: str):
    moments = []
    for i, stored in enumerate((m, v)):
        moments.append(stored.float() if states not in CODECS else decode(stored, scale[i], p.shape[1], states, i))
    gradient = g.float()
    first = moments[0] * f.beta1 + gradient * f.rest1
    second = moments[1] * f.beta2 + (gradient * f.rest2) * gradient
    root = second.double().sqrt().float()  # rounded correctly, which torch's fp32 root is not on every CPU
    update = first / (root * f.correction + f.eps)
    p.copy_(to_dtype(p.float() * f.decay - update * f.step_size, p.dtype, bits))
    for i, (stored, moment) in enumerate(((m, first), (v, second))):
        if states in CODECS:
            encode_(stored, scale[i], moment, bits, states, i)
        else:
            stored.copy_(to_dtype(moment, stored.dtype, bits))


def noise(low: int, high: int, shape: torch.Size, row: int, column: int, device: torch.device) -> Tensor:
    """int32 [N, K] in [0, 2**16): `random_bits` under the key (low, high) from a row and a column on."""
    key = torch.tensor(key_of(low, high), dtype=torch.int64, device=device)
    return random_bits(key, shape[0], column + shape[1], row)[:, column:].int()


def key_of(low: int, high: int) -> int:
    """The int64 whose low and high 32 bits are those of two numbers."""
    value = (low & 0xFFFFFFFF) | (high & 0xFFFFFFFF) << 32
    return value - (value >> 63 << 64)


def to_dtype(values: Tensor, dtype: torch.dtype, bits: Tensor | None) -> Tensor:
    """fp32 -> dtype; to bf16 with 16 random bits each added below its last place, then cut. NaN is 0x7FC0."""
    if dtype == torch.float32 or bits is None:
        return values.to(dtype)
    raw = values.view(torch.int32) + bits
    raw = torch.where(values.isnan(), 0x7FC00000, raw)
    return (raw >> 16).to(torch.int16).view(torch.bfloat16)


def blocks_of(values: Tensor, size: int) -> Tensor:
    """values [N, K] -> [N, ceil(K / size), size], filled up with zeros."""
    N, K = values.shape
    return torch.nn.functional.pad(values, (0, -K % size)).view(N, -1, size)


def decode(codes: Tensor, scale: Tensor, K: int, states: str, moment: int) -> Tensor:
    """Codes and scales of exp_avg (moment 0) or exp_avg_sq (1) -> fp32 [N, K]."""
    codec, size = CODECS[states][moment], BLOCKS[states]
    raw = codes.view(torch.uint8).int()
    if codec.bits == 4:
        raw = torch.stack([raw & 15, raw >> 4], -1).flatten(1)[:, :K]
    magnitude = raw & (1 << codec.bits - codec.is_signed) - 1
    values = ((magnitude + codec.offset) << 23 - codec.mantissa_bits).view(torch.float32)
    small = 2.0**codec.smallest
    if codec.zero == "subnormal":
        values = torch.where(magnitude < 1 << codec.mantissa_bits, values * 2 - small, values)
    elif codec.zero == "shifted":
        values = values - small
    if codec.is_signed:
        values = torch.where(raw != magnitude, -values, values)
    return (blocks_of(values, size) * scale.unsqueeze(-1)).flatten(1)[:, :K]


def encode_(codes: Tensor, scale: Tensor, values: Tensor, bits: Tensor | None, states: str, moment: int) -> None:
    """Write fp32 values [N, K] into codes and scales."""
    codec, size = CODECS[states][moment], BLOCKS[states]
    K = values.shape[1]
    blocks = blocks_of(values, size)
    amax = blocks.abs().amax(-1)
    top = torch.full_like(amax, codec.top)  # torch multiplies a number by the reciprocal, and rounds twice
    is_zero = amax / top < SMALLEST_SCALE
    inverse = torch.where(is_zero, 0.0, top * ROOM / amax)
    scale.copy_(torch.where(is_zero, 0.0, amax / top))
    magnitude = blocks.abs() * inverse.unsqueeze(-1)
    shift, small = 23 - codec.mantissa_bits, 2.0**codec.smallest
    is_small = magnitude < small if codec.zero == "subnormal" else torch.full_like(blocks, codec.zero == "shifted") > 0
    magnitude = torch.where(is_small, magnitude + small, magnitude)
    raw = magnitude.view(torch.int32)
    if bits is None:
        raw = raw + ((1 << shift - 1) - 1) + ((raw >> shift) & 1)  # half to even
    else:
        raw = raw + (blocks_of(bits, size) << shift - 16)
    code = (raw >> shift) - codec.offset
    if codec.zero == "subnormal":
        code = code - (is_small.int() << codec.mantissa_bits)
    if not codec.is_signed:  # a second moment: of a block that is not zero none is
        code = torch.maximum(code, (codec.zero != "none") * (~is_zero).int().unsqueeze(-1))
    if codec.is_signed:
        code = code + ((blocks < 0).int() << codec.bits - 1)
    code = code.flatten(1)[:, :K]
    if codec.bits == 4:
        code = torch.nn.functional.pad(code, (0, K % 2))
        code = code[:, ::2] | code[:, 1::2] << 4
    codes.view(torch.uint8).copy_(code)


def check(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    exp_avg_scales: Sequence[Tensor],
    exp_avg_sq_scales: Sequence[Tensor],
    origins: Tensor,
    states: str,
) -> None:
    """Raise ValueError unless all is as `adam_step__reference` describes."""
    if states not in STATES:
        raise ValueError(f"states is {states!r}; allowed: {', '.join(map(repr, STATES))}")
    count, num_scales = len(params), len(params) if states in CODECS else 0
    lengths = tuple(map(len, (grads, exp_avgs, exp_avg_sqs, exp_avg_scales, exp_avg_sq_scales)))
    if lengths != (count, count, count, num_scales, num_scales):
        raise ValueError(
            f"grads, exp_avgs, exp_avg_sqs and their scales are {lengths} tensors for {count} params; {states!r} "
            f"needs {count} of each, and {num_scales} scales"
        )
    if origins.shape != (count, 3) or origins.dtype != torch.int64 or origins.device.type == "cuda":
        raise ValueError(
            f"origins is {origins.dtype} with shape {tuple(origins.shape)} on {origins.device}; needs torch.int64 "
            f"with shape ({count}, 3) on the CPU"
        )
    packed, block = 1 + (states == "int4"), BLOCKS.get(states)
    for i, (p, g) in enumerate(zip(params, grads)):
        if p.dim() != 2 or p.dtype not in FLOATS or g.dtype not in FLOATS:
            raise ValueError(
                f"parameter {i} is {p.dtype} with shape {tuple(p.shape)}, its gradient {g.dtype}; both must be "
                "torch.float32 or torch.bfloat16, and have two dimensions"
            )
        N, K = p.shape
        wanted = [("gradient", g, (N, K), g.dtype)]
        wanted += [(name, of[i], (N, -(-K // packed)), STATES[states]) for name, of in _named(exp_avgs, exp_avg_sqs)]
        if block is not None:
            scales = _named(exp_avg_scales, exp_avg_sq_scales)
            wanted += [(f"{name}'s scale", of[i], (N, -(-K // block)), torch.float32) for name, of in scales]
        for name, tensor, shape, dtype in wanted:
            if tensor.shape != shape or tensor.dtype != dtype or tensor.device != p.device:
                raise ValueError(
                    f"{name} of parameter {i} is {tensor.dtype} with shape {tuple(tensor.shape)} on {tensor.device}; "
                    f"needs {dtype} with shape {shape} on {p.device}, for {states!r} states of {tuple(p.shape)}"
                )
        if not all(tensor.is_contiguous() for tensor in (p, *(part[1] for part in wanted))):
            raise ValueError(f"parameter {i}, its gradient and its states must be contiguous")


def _named(exp_avg: Sequence[Tensor], exp_avg_sq: Sequence[Tensor]) -> tuple[tuple[str, Sequence[Tensor]], ...]:
    return ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)


def _adam_step__fake(
    params, grads, exp_avgs, exp_avg_sqs, exp_avg_scales, exp_avg_sq_scales, origins, *, states, **_options
):
    check(params, grads, exp_avgs, exp_avg_sqs, exp_avg_scales, exp_avg_sq_scales, origins, states)


adam_step_ = define_op(
    "adam_step_",
    adam_step__reference,
    _adam_step__fake,
    mutates=("params", "exp_avgs", "exp_avg_sqs", "exp_avg_scales", "exp_avg_sq_scales"),
)
