"""The step of AdamW on CPUs, by the native kernels."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from hf_quant.kernels import native
from hf_quant.kernels.adam_step import op
from hf_quant.kernels.dispatch import implements


@implements(op.adam_step_, "CPU")
def adam_step__cpu(
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
    """Compute `adam_step__reference`, bit for bit."""
    tensors = (params, grads, exp_avgs, exp_avg_sqs, exp_avg_scales, exp_avg_sq_scales, origins)
    options = (lr, beta1, beta2, eps, weight_decay, step)
    if native.active() is None:
        names = ("lr", "beta1", "beta2", "eps", "weight_decay", "step")
        op.adam_step__reference(*tensors, states=states, seed=seed, **dict(zip(names, options)))
        return
    op.check(*tensors, states)
    native.adam_step_(*tensors, states=states, factors=_factors(*options), step=step, seed=seed)


@lru_cache(maxsize=64)  # the groups of a model: a step has several
def _factors(*options: float) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(op.coefficients(*options), dtype=torch.float32, device="cpu")
