"""Drive a weight of any shape through an algorithm: in blocks of rows, on its device, with bounded temporaries."""

import math
from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from hf_quant.algorithms.absmax import absmax
from hf_quant.algorithms.groups import Choice, Groups, TensorGroups
from hf_quant.algorithms.mse import Search, mse, search_for
from hf_quant.algorithms.norm import norm
from hf_quant.algorithms.solver import Grid, PackedScales, Solver, Statistics
from hf_quant.formats import FORMATS
from hf_quant.kernels import native
from hf_quant.kernels.weight import PackedWeight
from hf_quant.scheme import BLOCK_SIZE, TensorQuant


Algorithm = Callable[[Groups], Choice]

# Weights quantized at a time. On a CPU the three fp32 scratch buffers of that size should stay in the cache; elsewhere
# a kernel should take longer than its launch.
_BLOCK_ELEMENTS_CPU = 2**19
_BLOCK_ELEMENTS = 2**23


def geometry(quant: TensorQuant, N: int, K: int) -> tuple[int, int]:
    """(rows, columns) of a [N, K] weight that share one scale."""
    rows = {"block": BLOCK_SIZE, "tensor": N}.get(quant.granularity, 1)
    return rows, quant.columns_per_scale(K)


def empty_packed(shape: torch.Size | tuple[int, ...], quant: TensorQuant, device: torch.device | str) -> PackedWeight:
    """Uninitialized `PackedWeight` tensors for a weight of `shape` [..., N, K] (use device "meta" for sizes)."""
    *lead, N, K = shape
    spec = FORMATS[quant.format].spec
    rows, columns = geometry(quant, N, K)
    scale_shape = (*lead, -(-N // rows), -(-K // columns))
    scale_dtype = getattr(torch, quant.scale_dtype)
    width = FORMATS[quant.format].packed_width(K)
    return PackedWeight(
        qdata=torch.empty((*lead, N, width), dtype=spec.dtype, device=device),
        scale=torch.empty(scale_shape, dtype=scale_dtype, device=device),
        zero_point=(
            None
            if quant.symmetric
            else torch.empty(scale_shape, dtype=getattr(torch, quant.zero_point_dtype), device=device)
        ),
        global_scale=(
            torch.empty(tuple(lead) or (1,), dtype=torch.float32, device=device)
            if scale_dtype == torch.float8_e4m3fn
            else None
        ),
    )


class _Piece(NamedTuple):
    """Rows of a weight [L, N, K] that are quantized together: whole matrices, or some rows of one."""

    matrices: slice
    rows: slice


_EVERYTHING = _Piece(slice(None), slice(None))
_NATIVE: tuple[Algorithm, ...] = (absmax, mse, norm)  # which native kernels know


class Quantization:
    """One weight [..., N, K] on its way into its packed tensors."""

    def __init__(
        self, weight: Tensor, quant: TensorQuant, packed: PackedWeight, importance: Tensor | None = None
    ) -> None:
        self.importance = importance  # of each column [K], see `Groups`
        self.weight = weight.flatten(0, -3) if weight.dim() > 2 else weight.unsqueeze(0)  # [L, N, K]
        L, N, K = self.weight.shape
        self.quant, self.format = quant, FORMATS[quant.format]
        rows, self.columns = geometry(quant, N, K)
        self.tile_rows = rows if quant.granularity == "block" else 1  # rows of a block of weights that share a scale
        self.qdata = packed.qdata.view(L, N, -1)
        self.scale = packed.scale.view(L, *packed.scale.shape[-2:])
        self.zero_point = None if packed.zero_point is None else packed.zero_point.view_as(self.scale)
        self.global_scale = None if packed.global_scale is None else packed.global_scale.view(L)
        # NaN once a weight was NaN or inf. Read once, at the end, so that a GPU is never waited for.
        self.poison = torch.zeros((), dtype=torch.float32, device=weight.device)
        limit = _BLOCK_ELEMENTS_CPU if weight.device.type == "cpu" else _BLOCK_ELEMENTS
        self.step = max(limit // K // self.tile_rows, 1) * self.tile_rows
        padded = -(-K // self.columns) * self.columns
        largest = min(self.step, -(-L * N // self.tile_rows) * self.tile_rows) * padded
        self.scratch = torch.empty(3, largest, dtype=torch.float32, device=weight.device).unbind()

    def run(self, choose: Algorithm, total: Tensor | None = None) -> bool:
        """Fill the packed tensors; False if the weight has NaN or inf, which makes them worthless.

        total: global scales of the matrices, where there are any, if they are not to be chosen here.
        """
        if total is None or self.global_scale is None:
            self._set_global_scale()
        else:
            self.global_scale.copy_(torch.where(total > 0, total, 1.0).view(-1))
        return self._run(choose)

    def _set_global_scale(self) -> None:
        if self.global_scale is not None:
            amax = torch.maximum(self.weight.amax((1, 2)), -self.weight.amin((1, 2))).float()
            largest = self.format.max * torch.finfo(self.scale.dtype).max
            if self.format.fixed_group_size:
                self.global_scale.copy_(global_scale(amax / largest))
            else:
                self.global_scale.copy_(coarse_global_scale(amax, largest))

    def _run(self, choose: Algorithm) -> bool:
        if (
            choose in _NATIVE
            and self.importance is None
            and self.quant.granularity in ("row", "group")
            and native.quantizes(self.weight, self.format.spec)
        ):
            return self._run_native(choose)
        for pieces in self._matrices():
            if self.quant.granularity == "tensor":
                groups = TensorGroups(lambda pieces=pieces: map(self._load, pieces))
                choice = choose(groups)
                for piece in pieces:
                    self._store(piece, self._load(piece), choice)
            else:
                for piece in pieces:
                    groups = self._load(piece)
                    self._store(piece, groups, choose(groups))
        return bool(self.poison.isfinite())

    def solve(self, solver: Solver, statistics: Statistics, choose: Algorithm) -> bool:
        """`run` by a solver, for one matrix; `choose` makes the scales of each group that it asks for."""
        self._set_global_scale()
        weight, total = self.weight[0].float(), self.global_scale

        def scales_of(group: Tensor, importance: Tensor | None) -> PackedScales:
            packed = empty_packed(group.shape, self.quant, group.device)
            part = Quantization(group, self.quant, packed, importance)
            if total is not None and part.global_scale is not None:
                part.global_scale.copy_(total)
            part._run(choose)
            return packed.scale, packed.zero_point, total

        if not bool(weight.isfinite().all()):
            return False
        K = weight.shape[1]
        solution = solver(weight, statistics, Grid(self.quant, self.format, K, scales_of))
        self.weight = solution.weight.unsqueeze(0)
        self.scale.copy_(torch.cat([part.stored[0] for part in solution.scales], 1))
        if self.zero_point is not None:
            zero_points = [stored for part in solution.scales if (stored := part.stored[1]) is not None]
            self.zero_point.copy_(torch.cat(zero_points, 1))
        for pieces in self._matrices():
            for piece in pieces:
                self._store(piece, self._load(piece), self._stored_choice(piece))
        return bool(self.poison.isfinite())

    def _stored_choice(self, piece: _Piece) -> Choice:
        """The scales that are stored for a piece."""
        at, unit = self._scales_at(piece), self._unit(piece, piece.rows.stop - piece.rows.start)
        scale = self.scale[at].to(torch.float32, copy=True).flatten(0, 1).unsqueeze(-1)
        zero_point = None if self.zero_point is None else self.zero_point[at].float().view(scale.shape)
        return Choice(scale if unit is None else scale * unit, zero_point)

    def _scales_at(self, piece: _Piece) -> tuple[slice, slice]:
        """The place of the scales of a piece."""
        if self.quant.granularity == "tensor":
            return piece.matrices, slice(0, 1)
        return piece.matrices, slice(piece.rows.start // self.tile_rows, -(-piece.rows.stop // self.tile_rows))

    def _run_native(self, choose: Algorithm) -> bool:
        """`run` in C++, with the same result: all rows at once, or piece by piece where rows are strided."""
        powers = self.scale.dtype == torch.float8_e8m0fnu
        search = Search() if choose is absmax else search_for(self.format, self.quant.symmetric, powers)
        finite = True
        for piece in [_EVERYTHING] if self.weight.stride(-1) == 1 else chain(*self._matrices()):
            weight = self.weight[piece]
            finite &= native.quantize(
                weight if weight.stride(-1) == 1 else weight.contiguous(),
                self.columns,
                self.format.spec,
                self.format.max,
                self.qdata[piece],
                self.scale[piece],
                None if self.zero_point is None else self.zero_point[piece],
                None if self.global_scale is None else self.global_scale[piece.matrices],
                **search._asdict(),
                norm=choose is norm and not powers,
            )
        return finite

    def _matrices(self) -> Iterator[list[_Piece]]:
        """The pieces of each matrix; of many small matrices, several are one piece."""
        L, N, _ = self.weight.shape
        together = self.step // N if self.tile_rows == 1 and self.quant.granularity != "tensor" else 0
        if together > 1:
            yield [_Piece(slice(i, min(i + together, L)), slice(0, N)) for i in range(0, L, together)]
            return
        for i in range(L):
            yield [_Piece(slice(i, i + 1), slice(k, min(k + self.step, N))) for k in range(0, N, self.step)]

    def _load(self, piece: _Piece) -> Groups:
        """The weights of a piece as groups in the scratch buffers."""
        source = self.weight[piece]
        matrices, n, K = source.shape
        rows = -(-matrices * n // self.tile_rows) * self.tile_rows
        width = -(-K // self.columns) * self.columns
        values, work, spare = (buffer[: rows * width] for buffer in self.scratch)
        padded = (values if self.tile_rows == 1 else work).view(rows, width)
        padded[: matrices * n].view(matrices, n, width)[..., :K].copy_(source)
        padded[matrices * n :] = 0
        padded[:, K:] = 0
        shape = (rows // self.tile_rows, width // self.columns, self.tile_rows * self.columns)
        if self.tile_rows > 1:
            tiles = padded.view(shape[0], self.tile_rows, shape[1], self.columns).transpose(1, 2)
            values.view(tiles.shape).copy_(tiles)
        elif self.quant.granularity == "tensor":
            shape = (1, 1, rows * width)
        return Groups(
            values.view(shape),
            work.view(shape),
            spare.view(shape),
            format=self.format,
            symmetric=self.quant.symmetric,
            round_scale=scale_rounder(self.scale.dtype, self._unit(piece, n)),
            power_of_two_scales=self.scale.dtype == torch.float8_e8m0fnu,
            importance=self._importance_of(rows, width),
        )

    def _importance_of(self, rows: int, width: int) -> Tensor | None:
        """The importance of the weights of `rows` rows as groups, padding 0."""
        if self.importance is None:
            return None
        padded = self.importance.new_zeros(width, dtype=torch.float32)
        padded[: self.importance.numel()] = self.importance
        if self.quant.granularity == "tensor":
            return padded.repeat(rows).view(1, 1, -1)
        return padded.view(1, -1, self.columns).repeat(1, 1, self.tile_rows)

    def _unit(self, piece: _Piece, n: int) -> Tensor | None:
        """global_scale of each row of groups, [R, 1, 1]."""
        if self.global_scale is None:
            return None
        return self.global_scale[piece.matrices].repeat_interleave(n // self.tile_rows).view(-1, 1, 1)

    def _store(self, piece: _Piece, groups: Groups, choice: Choice) -> None:
        """Write the codes, scale and zero point of a piece."""
        self.poison += (groups.low * 0 + groups.high * 0).sum()
        (matrices, n, K), tile_rows = self.weight[piece].shape, self.tile_rows
        codes = groups.codes(choice)
        if tile_rows > 1:
            codes = codes.view(*codes.shape[:2], tile_rows, self.columns).transpose(1, 2)
            codes = codes.reshape(codes.shape[0] * tile_rows, -1)[:n]
        codes = codes.view(matrices, n, -1)[..., :K]
        self.qdata[piece] = self.format.pack(codes)
        at = self._scales_at(piece)
        target, unit = self.scale[at], self._unit(piece, n)
        target.copy_((choice.scale if unit is None else choice.scale / unit).view(target.shape))
        if choice.zero_point is not None and self.zero_point is not None:
            self.zero_point[at] = choice.zero_point.view(target.shape).to(torch.uint8)


def global_scale(smallest: Tensor) -> Tensor:
    """The power of two from `smallest` on: the largest scale of a weight is in the upper half of fp8's range.

    NVIDIA's recipe for nvfp4 takes `smallest` itself. A power of two rounds scales as finely, and weights that are
    served as one layer can be brought to one global scale without rounding anything again.
    """
    mantissa, exponent = torch.frexp(smallest)
    power = torch.ldexp(torch.ones_like(mantissa), torch.where(mantissa == 0.5, exponent - 1, exponent))
    return torch.where(smallest > 0, power, 1.0)


def coarse_global_scale(amax: Tensor, largest: float) -> Tensor:
    """The same power of two for most weights, so that layers that read one tensor can share a product.

    fp8 rounds as finely in each of its 14 binades, so a weight need not begin in the highest. One power serves the
    weights whose largest value is between 1/16 and 16, as nearly all have it; others are 2**8 apart. `largest` is the
    largest value under a global scale of 1.
    """
    _, exponent = torch.frexp(amax)
    top = 4 - 8 * torch.div(4 - exponent, 8, rounding_mode="floor")
    power = (top - math.floor(math.log2(largest))).clamp(min=-126)
    return torch.ldexp(torch.ones_like(amax), power)


def scale_rounder(dtype: torch.dtype, unit: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Positive fp32 scale -> the nearest that the storage dtype, times `unit`, can hold, as fp32.

    0 (a group of zeros) becomes 1; nothing else rounds to 0, and nothing overflows.
    """
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * (info.eps if dtype != torch.float8_e8m0fnu else 1.0)

    def round_scale(scale: Tensor) -> Tensor:
        relative = (scale if unit is None else scale / unit).clamp(max=info.max)
        if dtype == torch.float8_e8m0fnu:
            # amax / 6 -> 2**floor(log2(amax) - 2), the rule of the OCP specification: round up from a mantissa of 4/3.
            mantissa, exponent = torch.frexp(relative * 1.5)
            stored = torch.ldexp(torch.ones_like(mantissa), exponent - 1)
            stored = torch.where(relative.isfinite(), stored, relative)
        else:
            stored = relative.to(dtype).float()
        stored = torch.where(scale == 0, 1.0, stored.clamp(min=smallest))
        return stored if unit is None else stored * unit

    return round_scale
