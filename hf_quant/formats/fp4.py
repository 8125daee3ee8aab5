"""mxfp4 and nvfp4: e2m1 codes {0, .5, 1, 1.5, 2, 3, 4, 6} with a sign, under two kinds of scale.

mxfp4 (OCP Microscaling formats v1.0): one e8m0 power of two per 32. nvfp4: one fp8_e4m3 per 16, times one fp32
`global_scale` per tensor.
"""

from hf_quant.formats.format import Format
from hf_quant.formats.minifloat import minifloat_round, minifloat_snap
from hf_quant.kernels.codes import CODES


def _fp4(name: str, group_size: int, scale_dtype: str) -> Format:
    spec = CODES[name]
    largest = max(spec.levels)
    return Format(
        spec=spec,
        max=largest,
        round=minifloat_round(largest, 1, bias=1, sign=8),
        snap=minifloat_snap(largest, 1, bias=1),
        granularity="group",
        group_size=group_size,
        granularities=("group",),
        scale_dtype=scale_dtype,
        fixed_group_size=True,
    )


MXFP4 = _fp4("mxfp4", 32, "float8_e8m0fnu")
NVFP4 = _fp4("nvfp4", 16, "float8_e4m3fn")
