"""The tokens and the rows of the weight that a tile has."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


GROUP_M = gl.constexpr(8)  # tiles of tokens whose x stays in the L2 cache while all rows of the weight pass by


@gluon.jit
def _tile_at(tile, tiles_m, tiles_n):
    """(tile of tokens, tile of rows of the weight): GROUP_M tiles of tokens with all rows, then the next ones."""
    whole = GROUP_M * tiles_n
    first = tile // whole * GROUP_M
    count = gl.minimum(tiles_m - first, GROUP_M)
    inner = tile % whole
    return first + inner % count, inner // count


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _rows_of_tile(
    offsets, tile, M, BLOCK_M: gl.constexpr, EXPERTS: gl.constexpr, PADDED: gl.constexpr, WARPS: gl.constexpr
):
    """`gpu.rows.rows_of_tile`, in Gluon: (expert, first row, end of its rows) of a tile of tokens."""
    e = gl.arange(0, PADDED, gl.BlockedLayout([1], [32], [WARPS], [0]))
    ends = gl.load(offsets + e, mask=e < EXPERTS, other=0)
    begins = gl.load(offsets + e - 1, mask=(e > 0) & (e < EXPERTS), other=0)
    tiles = (gl.maximum(ends - begins, 0) + BLOCK_M - 1) // BLOCK_M
    until = gl.associative_scan(tiles, 0, _add)
    expert = gl.minimum(gl.sum((until <= tile).to(gl.int32), 0), EXPERTS)
    before = gl.sum(gl.where(e < expert, tiles, 0), 0)
    first, end = gl.load(offsets + EXPERTS - 1), M
    if expert < EXPERTS:
        first = gl.sum(gl.where(e == expert, begins, 0), 0)
        end = gl.sum(gl.where(e == expert, ends, 0), 0)
    return expert, first + (tile - before) * BLOCK_M, end
