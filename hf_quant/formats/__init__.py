"""Number formats: the value grid (encode, decode) and the byte layout (pack, unpack).

A new format is one file here and one line in `FORMATS`; it then works everywhere by dequantizing, before any kernel
knows it.
"""

from hf_quant.formats.format import Format
from hf_quant.formats.fp4 import MXFP4, NVFP4
from hf_quant.formats.fp6 import FP6_E2M3, FP6_E3M2
from hf_quant.formats.fp8 import FP8_E4M3, FP8_E5M2
from hf_quant.formats.integer import INT2, INT3, INT4, INT8
from hf_quant.formats.nf4 import NF4


FORMATS: dict[str, Format] = {
    f.name: f for f in (INT8, INT4, INT3, INT2, FP8_E4M3, FP8_E5M2, FP6_E3M2, FP6_E2M3, NF4, MXFP4, NVFP4)
}
ALIASES = {"fp8": "fp8_e4m3", "fp6": "fp6_e3m2"}

__all__ = ["ALIASES", "FORMATS", "Format"]
