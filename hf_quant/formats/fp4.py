"""mxfp4 and nvfp4: e2m1 codes {0, .5, 1, 1.5, 2, 3, 4, 6} with a sign, under two kinds of scale.

mxfp4 (OCP Microscaling formats v1.0): one e8m0 power of two per 32. nvfp4: one fp8_e4m3 per 16, times one fp32
`global_scale` per tensor.
"""

import torch

from hf_quant.formats._format import Format
from hf_quant.formats._minifloat import minifloat_levels, minifloat_round, minifloat_snap
from hf_quant.kernels.codes import CodeSpec


_LEVELS = minifloat_levels(2, 1, bias=1)


def _fp4(name: str, group_size: int, scale_dtype: str) -> Format:
    return Format(
        spec=CodeSpec(name, 4, torch.int32, (4,), _LEVELS, (2, 1, 1)),
        max=max(_LEVELS),
        round=minifloat_round(max(_LEVELS), 1, bias=1, sign=8),
        snap=minifloat_snap(max(_LEVELS), 1, bias=1),
        granularity="group",
        group_size=group_size,
        granularities=("group",),
        scale_dtype=scale_dtype,
        fixed_group_size=True,
    )


MXFP4 = _fp4("mxfp4", 32, "float8_e8m0fnu")
NVFP4 = _fp4("nvfp4", 16, "float8_e4m3fn")
