"""nf4: the 16 levels of QLoRA (https://arxiv.org/abs/2305.14314), see `kernels.codes`."""

from functools import cache

import torch
from torch import Tensor

from hf_quant.formats.format import Format
from hf_quant.kernels.codes import CODES


_LEVELS = CODES["nf4"].levels
_CELLS = 64  # over [-1, 1]; the closest midpoints are 0.08 apart, so that a cell of 0.03 holds one at most


def _cell(values: Tensor) -> Tensor:
    """The cell of each value, int32 in [0, _CELLS]; monotonic, hence sound whatever the rounding. NaN: any cell."""
    return values.clamp(-1, 1).add_(1).mul_(_CELLS / 2).to(torch.int32).clamp_(0, _CELLS)


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Per cell its midpoint (fp32, inf if none); per cell and side of it, code (uint8) and level (fp32)."""
    levels = torch.tensor(_LEVELS, dtype=torch.float64, device="cpu")
    midpoints = ((levels[1:] + levels[:-1]) / 2).float()
    at = _cell(midpoints).long()
    midpoint = torch.full((_CELLS + 1,), float("inf"), dtype=torch.float32, device="cpu").index_put_((at,), midpoints)
    below = torch.bucketize(torch.arange(_CELLS + 1, device="cpu"), at)
    code = torch.stack([below, (below + 1).clamp(max=15)], 1).flatten()
    return midpoint.to(device), code.to(torch.uint8).to(device), levels.float()[code].to(device)


def _cell_and_side(values: Tensor) -> Tensor:
    """2 * cell, plus 1 above its midpoint: an index (1-D int32) into the tables of codes and levels.

    A tie belongs to the lower level; ties have no "even" side in a table. Two look-ups for each value take a tenth of
    the time of torch.bucketize, which searches 15 midpoints.
    """
    values = values.flatten()
    cell = _cell(values)
    # The sign bit of (midpoint - value): an integer shift vectorizes, a comparison to bool does not.
    side = _tables(values.device)[0].index_select(0, cell).sub_(values).view(torch.int32).bitwise_right_shift_(31)
    return cell.mul_(2).sub_(side)


def _encode(values: Tensor) -> Tensor:
    return _tables(values.device)[1].index_select(0, _cell_and_side(values)).view_as(values)


def _snap(values: Tensor, out: Tensor) -> Tensor:
    levels = _tables(values.device)[2]
    torch.index_select(levels, 0, _cell_and_side(values), out=out.view(-1))
    return out


NF4 = Format(
    spec=CODES["nf4"],
    max=1.0,
    round=_encode,
    snap=_snap,
    granularity="group",
    group_size=32,
    group_scale_dtype="float8_e4m3fn",
)
