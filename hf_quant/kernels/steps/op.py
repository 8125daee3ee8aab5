"""RMSNorm, gated activation functions, rotary embeddings: the steps between the products of a block of a model.

Each op computes in fp32 and rounds to the dtype where the ops of torch that a model is written in round, so that it
can take their place. None is differentiable.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_quant.kernels.dispatch import define_op


# As in `kernels.native.blocks`, which has more.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu_squared", "quick_gelu")
PAIRS = ("halves", "neighbors", "neighbors_by_pair")


def check_weight(name: str, weight: Tensor | None, K: int) -> None:
    """Raise ValueError unless weight is None or [K]."""
    if weight is not None and weight.shape != (K,):
        raise ValueError(f"{name} is {tuple(weight.shape)}; needs [{K}], as the last dimension of what it scales")


def rms_norm_reference(x: Tensor, weight: Tensor | None, *, eps: float, plus_one: bool, rounds: bool) -> Tensor:
    """x [..., K], weight [K] -> x / sqrt(mean(x**2) + eps) * weight, contiguous, in x's dtype.

    Zhang and Sennrich, https://arxiv.org/abs/1910.07467. plus_one: the factor is 1 + weight, in fp32 (Gemma). rounds:
    the quotient is rounded to x's dtype before it is multiplied with the weight (Llama).
    """
    check_weight("weight", weight, x.shape[-1])
    values = x.float()
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    if rounds:
        values = values.to(x.dtype).float()
    if weight is not None:
        values = values * (weight.float() + 1 if plus_one else weight.float())
    return values.to(x.dtype).contiguous()


def _rms_norm_fake(x, weight, *, eps, plus_one, rounds):
    check_weight("weight", weight, x.shape[-1])
    return x.new_empty(x.shape)


rms_norm = define_op("rms_norm", rms_norm_reference, _rms_norm_fake)


def check_sum(x: Tensor, more: Tensor) -> None:
    """Raise ValueError unless x and more are of one shape and dtype."""
    if x.shape != more.shape or x.dtype != more.dtype:
        raise ValueError(
            f"x is {tuple(x.shape)} {x.dtype}, its partner is {tuple(more.shape)} {more.dtype}; needs one shape and "
            "dtype"
        )


def add_rms_norm_reference(
    x: Tensor, more: Tensor, weight: Tensor | None, *, eps: float, plus_one: bool, rounds: bool
) -> tuple[Tensor, Tensor]:
    """x, more [..., K] -> (x + more, rounded to their dtype; `rms_norm` of that), both contiguous."""
    check_sum(x, more)
    total = (x + more).contiguous()
    return total, rms_norm_reference(total, weight, eps=eps, plus_one=plus_one, rounds=rounds)


def _add_rms_norm_fake(x, more, weight, *, eps, plus_one, rounds):
    check_sum(x, more)
    check_weight("weight", weight, x.shape[-1])
    return x.new_empty(x.shape), x.new_empty(x.shape)


add_rms_norm = define_op("add_rms_norm", add_rms_norm_reference, _add_rms_norm_fake)


def check_gate(x: Tensor, up: Tensor | None, act: str) -> None:
    """Raise ValueError unless act is known, and up None or of x's shape and dtype."""
    if act not in ACTIVATIONS:
        raise ValueError(f"act is {act!r}; allowed: {', '.join(ACTIVATIONS)}")
    if up is not None:
        check_sum(x, up)


def gate_reference(x: Tensor, up: Tensor | None, *, act: str) -> Tensor:
    """x, up [..., K] -> act(x) * up, or act(x), contiguous; act(x) is rounded to the dtype before the product.

    act: "silu", "gelu" (by erf), "gelu_tanh" (its approximation by tanh), "relu", "relu_squared", or "quick_gelu",
    which is x * sigmoid(1.702 * x). x and up may be the halves of one tensor.
    """
    check_gate(x, up, act)
    values = x.float()
    if act == "silu":
        values = F.silu(values)
    elif act in ("gelu", "gelu_tanh"):
        values = F.gelu(values, approximate="tanh" if act == "gelu_tanh" else "none")
    elif act == "quick_gelu":
        values = values * torch.sigmoid(1.702 * values)
    else:
        values = F.relu(values)
        values = values.square() if act == "relu_squared" else values
    values = values.to(x.dtype)
    return (values if up is None else values * up).contiguous()


def _gate_fake(x, up, *, act):
    check_gate(x, up, act)
    return x.new_empty(x.shape)


gate = define_op("gate", gate_reference, _gate_fake)


def check_rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    pairs: str,
) -> None:
    """Raise ValueError unless the shapes are as `rotary_reference` describes."""
    if pairs not in PAIRS:
        raise ValueError(f"pairs is {pairs!r}; allowed: {', '.join(PAIRS)}")
    if q.dim() != 4 or k.dim() != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3] or q.dtype != k.dtype:
        raise ValueError(
            f"q is {tuple(q.shape)} {q.dtype}, k is {tuple(k.shape)} {k.dtype}; needs [B, S, heads, D], of one B, S, "
            "D and dtype"
        )
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        check_weight(name, weight, q.shape[3])
    if (cos is None) != (sin is None):
        raise ValueError("cos and sin: needs both or neither")
    if cos is None or sin is None:
        return
    fits = cos.dim() == 3 and cos.shape[0] in (1, q.shape[0]) and cos.shape[1] == q.shape[1]
    if not fits or sin.shape != cos.shape or cos.shape[2] > q.shape[3] or cos.shape[2] % 2:
        raise ValueError(
            f"cos is {tuple(cos.shape)}, sin is {tuple(sin.shape)}, q is {tuple(q.shape)}; needs [1 or B, S, turned] "
            "of an even number of channels, D at most"
        )


def turn(x: Tensor, cos: Tensor, sin: Tensor, pairs: str, rounds: bool) -> Tensor:
    """Turn the first channels of x [B, S, H, D], see `rotary_reference`."""
    turned = cos.shape[-1]
    cos, sin, own = cos.float().unsqueeze(2), sin.float().unsqueeze(2), x[..., :turned].float()
    if pairs == "halves":
        first, second = own.chunk(2, -1)
        other = torch.cat([-second, first], -1)
    else:
        other = torch.stack([-own[..., 1::2], own[..., ::2]], -1).flatten(-2)
    if pairs == "neighbors_by_pair":
        cos, sin = (part[..., : turned // 2].repeat_interleave(2, -1) for part in (cos, sin))
    own, other = own * cos, other * sin
    if rounds:
        own, other = own.to(x.dtype).float(), other.to(x.dtype).float()
    return torch.cat([(own + other).to(x.dtype), x[..., turned:]], -1)


def rotary_reference(
    q: Tensor,
    k: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    *,
    pairs: str,
    rounds: bool,
    eps: float | None,
    plus_one: bool,
    norm_rounds: bool,
) -> tuple[Tensor, Tensor]:
    """q [B, S, H, D], k [B, S, Hk, D], cos, sin [1 or B, S, turned] -> turned q and k, both contiguous.

    Su et al., https://arxiv.org/abs/2104.09864. A pair of channels (a, b) becomes (a cos - b sin, b cos + a sin);
    those behind the first `turned` ones stay, all of them without cos and sin.

    Args:
        q_weight, k_weight: [D], of norms that are computed first if there is an eps.
        pairs: "halves": channel c and c + turned / 2; "neighbors": 2 c and 2 c + 1; "neighbors_by_pair": the same, and
            the pair has the angle of number c.
        rounds: both products are rounded to the dtype before they are added.
        eps: of `rms_norm` of each head, whose other options are `plus_one` and `norm_rounds`; None: no norm.
    """
    check_rotary(q, k, cos, sin, q_weight, k_weight, pairs)
    if eps is not None:
        q = rms_norm_reference(q, q_weight, eps=eps, plus_one=plus_one, rounds=norm_rounds)
        k = rms_norm_reference(k, k_weight, eps=eps, plus_one=plus_one, rounds=norm_rounds)
    if cos is None or sin is None:
        return q.clone(memory_format=torch.contiguous_format), k.clone(memory_format=torch.contiguous_format)
    return turn(q, cos, sin, pairs, rounds).contiguous(), turn(k, cos, sin, pairs, rounds).contiguous()


def _rotary_fake(q, k, cos, sin, q_weight, k_weight, *, pairs, rounds, eps, plus_one, norm_rounds):
    check_rotary(q, k, cos, sin, q_weight, k_weight, pairs)
    return q.new_empty(q.shape), k.new_empty(k.shape)


rotary = define_op("rotary", rotary_reference, _rotary_fake)
