"""gptq: round column by column, and correct the columns that follow for the error of those that are rounded.

Frantar et al., "GPTQ", https://arxiv.org/abs/2210.17323. The Hessian of the output's squared error is the mean of
x x^T over the layer's inputs; the correction of a column is read off the Cholesky factor of its inverse.

Groups are taken in the order of their part of the Hessian's diagonal, largest first, and so are the columns of a
group: what matters most is rounded while nothing has been added to it. The layout of the weight stays. The scales of a
group are chosen when it is reached, for the weights as corrected by then. An error of column k that nothing corrects
any more costs error**2 / factor[k, k]**2: by that the scales are chosen, which takes 3 % off the KL of SmolLM2.
"""

import torch
from torch import Tensor

from hf_quant.algorithms.solver import Grid, Scales, Solution, Statistics


# Columns whose corrections are added up before the columns behind them are changed.
_BLOCK = 128
_DAMPING = (0.01, 0.1, 1.0, 10.0)  # of the mean of the Hessian's diagonal, until the factorization succeeds


def gptq(weight: Tensor, statistics: Statistics, grid: Grid) -> Solution:
    """Round weight [N, K] with the correction of its columns for each other.

    Columns whose input was always 0 are rounded to the nearest. Raises ValueError if no Hessian was recorded, if it
    contains NaN or inf, and if it has no Cholesky factorization even with a damping of ten times its mean diagonal.
    """
    hessian = statistics.hessian
    if hessian is None:
        raise ValueError("gptq needs the Hessian of the layer's inputs: calibrate with kind='hessian'")
    diagonal = hessian.diagonal()
    spans = torch.arange(len(hessian), device=hessian.device).split(grid.group_size)
    sums = torch.stack([diagonal[span].sum() for span in spans])
    groups = sums.argsort(descending=True, stable=True).tolist()
    order = torch.cat([spans[g][diagonal[spans[g]].argsort(descending=True, stable=True)] for g in groups])
    factor = _inverse_factor(hessian, order)
    columns = weight.t()[order].contiguous()  # [K, N]: a column is a row
    scales: dict[int, Scales] = {}
    start = 0
    for g in groups:
        end = start + len(spans[g])
        back = order[start:end].argsort()
        importance = factor.diagonal()[start:end][back].square().reciprocal()
        scales[g] = grid.choose(columns[start:end][back].t().contiguous(), importance)
        for k in range(start, end, _BLOCK):
            _round_block(columns, factor, grid, scales[g], k, min(k + _BLOCK, end))
        start = end
    rounded = torch.empty_like(weight)
    rounded[:, order] = columns.t()
    return Solution(rounded, [scales[g] for g in range(grid.num_groups)])


def _round_block(columns: Tensor, factor: Tensor, grid: Grid, scales: Scales, start: int, end: int) -> None:
    """Correct `columns` [K, N] from `start` on for the errors of those up to `end`."""
    errors = torch.empty_like(columns[start:end])
    for i, k in enumerate(range(start, end)):
        column = columns[k]
        error = errors[i]
        torch.sub(column, grid.snap(column.unsqueeze(1), scales).squeeze(1), out=error)
        error.div_(factor[k, k])
        if k + 1 < end:
            columns[k + 1 : end].addr_(factor[k, k + 1 : end], error, alpha=-1)
    columns[end:].addmm_(factor[start:end, end:].t(), errors, alpha=-1)


def _inverse_factor(hessian: Tensor, order: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse of the Hessian [K, K] of the columns in `order`.

    The Hessian is damped until it has one. At most two more matrices of its size are held at a time.
    """
    diagonal = hessian.diagonal()[order]
    if not bool(diagonal.sum().isfinite()):
        raise ValueError("the Hessian of the inputs contains NaN or inf")
    mean = diagonal.mean()
    never_seen = torch.where(diagonal == 0, torch.where(mean > 0, mean, 1.0), 0.0)
    for damping in _DAMPING:
        damped = hessian[order][:, order]
        damped.diagonal().add_(never_seen + damping * mean)
        factor, info = torch.linalg.cholesky_ex(damped)
        del damped
        if int(info) == 0:
            inverse = torch.cholesky_inverse(factor)
            del factor
            factor, info = torch.linalg.cholesky_ex(inverse, upper=True)
            if int(info) == 0 and bool(factor.diagonal().isfinite().all()):
                return factor
    raise ValueError("the Hessian of the inputs has no Cholesky factorization, with any damping")
