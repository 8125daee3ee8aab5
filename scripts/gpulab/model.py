"""Hardware figures of the targets, occupancy, and the modelled time of a kernel; used by aot_compile.py.

A modelled time is the largest of three: bytes over bandwidth, warp instructions over the issue rate, operations on
matrix units over their rate. It has no latency, no launch and no tail in it: a lower bound to compare variants by.
"""

import math
from typing import NamedTuple

from gpulab.machine_code import Resources, Summary


class Chip(NamedTuple):
    """A GPU of a target, by its data sheet (dense rates, boost clock); limits of a multiprocessor by the CUDA guide.

    Attributes:
        name: the product that the figures are of.
        multiprocessors: as in `hf_quant.kernels.gpu.launch.TARGETS`.
        clock: GHz.
        bandwidth: of device memory, TB/s.
        rates: TFLOP/s or TOP/s by kind of operand: "16bit", "int8", "fp8".
        issue: warp instructions per clock of a multiprocessor (AMD: waves of 64, at 16 lanes of each of 4 units).
        registers: 32-bit registers a lane column can hold for all its warps: 65536 a multiprocessor on NVIDIA.
        shared_memory: bytes a multiprocessor.
        reserved: bytes of shared memory that each block costs besides its own.
        max_warps: resident at once on a multiprocessor.
        max_blocks: likewise.
    """

    name: str
    multiprocessors: int
    clock: float
    bandwidth: float
    rates: dict[str, float]
    issue: int
    registers: int
    shared_memory: int
    reserved: int
    max_warps: int
    max_blocks: int


def _rates(bits16: float, int8: float, fp8: float) -> dict[str, float]:
    return {"16bit": bits16, "int8": int8, "fp8": fp8}


_K, _NV = 1024, 65536
CHIPS = {
    "sm75": Chip("Quadro RTX 8000", 72, 1.77, 0.672, _rates(131, 261, 131), 4, _NV, 64 * _K, 0, 32, 16),
    "sm80": Chip("A100 80GB", 108, 1.41, 2.04, _rates(312, 624, 312), 4, _NV, 164 * _K, _K, 64, 32),
    "sm86": Chip("RTX A6000", 84, 1.80, 0.768, _rates(155, 310, 155), 4, _NV, 100 * _K, _K, 48, 16),
    "sm89": Chip("L40S", 142, 2.52, 0.864, _rates(362, 733, 733), 4, _NV, 100 * _K, _K, 48, 24),
    "sm90": Chip("H200", 132, 1.98, 4.8, _rates(989, 1979, 1979), 4, _NV, 228 * _K, _K, 64, 32),
    "sm100": Chip("B200", 148, 1.97, 8.0, _rates(2250, 4500, 4500), 4, _NV, 228 * _K, _K, 64, 32),
    "sm120": Chip("RTX 5090", 170, 2.41, 1.79, _rates(210, 838, 419), 4, _NV, 100 * _K, _K, 48, 24),
    "gfx942": Chip("MI300X", 304, 2.10, 5.3, _rates(1307, 2615, 2615), 1, 512, 64 * _K, 0, 32, 32),
}


def occupancy(target: str, num_warps: int, resources: Resources, shared: int) -> int:
    """Blocks of a kernel that a multiprocessor holds at once, by registers, shared memory and warps."""
    chip = CHIPS[target]
    if target.startswith("gfx"):  # 512 vector registers a lane on each of 4 units, handed out in eights
        waves = min(chip.registers // max(-(-resources.registers // 8) * 8, 8), chip.max_warps // 4) * 4
        by_registers = waves // num_warps
    else:  # a warp takes registers in multiples of 256
        warp_registers = -(-resources.registers * 32 // 256) * 256
        by_registers = chip.registers // max(warp_registers * num_warps, 1)
    by_shared = chip.shared_memory // max(shared + chip.reserved, 1)
    return min(by_registers, by_shared, chip.max_warps // num_warps, chip.max_blocks)


class Work(NamedTuple):
    """Work of one launch: bytes, operations, blocks and steps.

    Attributes:
        num_bytes: read and written once.
        num_ops: multiplications and additions of the tiles that are computed, padding included.
        kind: of the operands on matrix units: "16bit", "int8", "fp8"; None if they are not used.
        blocks: of the grid.
        steps: turns of the main loop, summed over all blocks; None if that is not known.
    """

    num_bytes: int
    num_ops: float
    kind: str | None
    blocks: int
    steps: int | None


def modelled(target: str, summary: Summary, num_warps: int, work: Work) -> dict[str, float]:
    """Seconds: {"memory", "issue", "matrix"}; "issue" is left out if the number of steps is unknown."""
    chip = CHIPS[target]
    times = {"memory": work.num_bytes / (chip.bandwidth * 1e12)}
    if work.kind is not None:
        times["matrix"] = work.num_ops / (chip.rates[work.kind] * 1e12)
    if work.steps is not None or not summary.loop:
        once = work.blocks * (summary.instructions - summary.loop)
        issued = num_warps * (once + (work.steps or 0) * summary.loop)
        busy = min(work.blocks, chip.multiprocessors)  # blocks are shared out evenly, hence the rounding
        share = math.ceil(work.blocks / busy) * busy / work.blocks
        times["issue"] = issued * share / (busy * chip.issue * chip.clock * 1e9)
    return times
