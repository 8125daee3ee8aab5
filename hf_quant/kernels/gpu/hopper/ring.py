"""Rings of tiles in shared memory, which some warps fill by copies and others empty."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


# A name that later Tritons changed.
_load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def _next(slot, phase, STAGES: gl.constexpr):
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers that open when as many have arrived; to be fenced before copies signal them."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def _ring(STAGES: gl.constexpr):
    """Barriers of each place in a ring: one for "full", which copies signal, one for "empty"."""
    full, empty = _barriers(STAGES, 1), _barriers(STAGES, 1)
    hopper.fence_async_shared()
    return full, empty
