"""Read the mxfp4 of gpt-oss: experts [E, N, K] in blocks of 32 along K, with a power of two each.

Layout (https://github.com/huggingface/transformers/blob/main/src/transformers/integrations/mxfp4.py):
`<weight>_blocks` uint8 [E, N, K / 32, 16], two e2m1 codes to a byte, the first in the low half; `<weight>_scales`
uint8 [E, N, K / 32], the exponents, biased by 127. These are the bytes of hf_quant's mxfp4. The rows of gate and up
alternate, as they do in the 16-bit model.
"""

from functools import partial
from typing import Any

import torch

from hf_quant.algorithms import PackedWeight
from hf_quant.convert.files import TensorFiles
from hf_quant.convert.foreign import Foreign, ForeignWeight
from hf_quant.convert.layers import tensor_info
from hf_quant.scheme import LinearScheme, TensorQuant


_GROUP = 32
_SCHEME = LinearScheme(TensorQuant("mxfp4", "group", _GROUP, True, "float8_e8m0fnu"))


def read_mxfp4(files: TensorFiles, fields: dict[str, Any], dtype: torch.dtype | None) -> Foreign:
    """Read the experts of a gpt-oss checkpoint. Raises ValueError with the reason if one is unsupported."""
    names = [key.removesuffix("_blocks") for key in files.tensors if key.endswith("_blocks")]
    if not names:
        raise ValueError("it holds no tensor named `..._blocks`: no layer of it is quantized")
    return Foreign([_weight(files, name) for name in names], set(), [])


def _weight(files: TensorFiles, name: str) -> ForeignWeight:
    blocks = tensor_info(files, f"{name}_blocks", [torch.uint8])
    if len(blocks.shape) != 4 or blocks.shape[-1] != _GROUP // 2:
        raise ValueError(f"{name}_blocks is {blocks}; needs [experts, rows, groups, {_GROUP // 2}]")
    E, N, groups, _ = blocks.shape
    tensor_info(files, f"{name}_scales", [torch.uint8], [(E, N, groups)])
    module, _, leaf = name.rpartition(".")
    keys = (f"{name}_blocks", f"{name}_scales")
    return ForeignWeight(module, _SCHEME, (E, N, groups * _GROUP), keys, partial(_unpack, files, name), leaf)


def _unpack(files: TensorFiles, name: str) -> PackedWeight:
    qdata = files.read(f"{name}_blocks").contiguous().flatten(-2).view(torch.int32)
    return PackedWeight(qdata, files.read(f"{name}_scales").view(torch.float8_e8m0fnu), None, None)
