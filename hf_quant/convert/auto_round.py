"""Read AutoRound: integers packed as GPTQ or AWQ packs them, under fields of its own.

https://github.com/intel/auto-round: `packing_format` (`backend` in older releases) names the packing. Releases differ
in whether zero points are stored less one: of symmetric weights the stored value shows it, of others the name does.
"""

from typing import Any

import torch

from hf_quant.checkpoint import shorten
from hf_quant.convert.files import TensorFiles
from hf_quant.convert.foreign import Foreign
from hf_quant.convert.gptq_awq import read_awq, read_gptq


_LESS_ONE = ("auto_gptq", "gptq")  # packings of GPTQ's first version, whatever the symmetry


def read_auto_round(files: TensorFiles, fields: dict[str, Any], dtype: torch.dtype | None) -> Foreign:
    """Read the weights of an AutoRound checkpoint. Raises ValueError with the reason if one is unsupported."""
    packing = str(fields.get("packing_format") or fields.get("backend") or "")
    if fields.get("data_type", "int") != "int" or fields.get("act_bits", 16) not in (None, 16, 32):
        given = f"data_type {fields.get('data_type')!r}, act_bits {fields.get('act_bits')!r}"
        raise ValueError(f"it is an AutoRound checkpoint with {shorten(given)}; readable: integers, inputs in 16 bit")
    if "awq" in packing:
        return read_awq(files, {**fields, "version": "gemm", "zero_point": True}, dtype)
    symmetric = fields.get("sym") is not False
    if not symmetric and not any(packing.removeprefix("auto_round:").startswith(name) for name in _LESS_ONE):
        raise ValueError(
            f"it is an AutoRound checkpoint with zero points in the packing {shorten(repr(packing))}, in whose "
            "meaning releases differ; readable: 'auto_round:auto_gptq', 'auto_round:auto_awq', and symmetric weights"
        )
    version = "gptq_v2" if symmetric and _stores_the_middle(files, fields) else "gptq"
    return read_gptq(files, {**fields, "checkpoint_format": version}, dtype)


def _stores_the_middle(files: TensorFiles, fields: dict[str, Any]) -> bool:
    """Return True if the zero points of symmetric weights are stored as they are, 8 of 4 bits, and not less one."""
    key = next((key for key in files.tensors if key.endswith(".qzeros")), None)
    if key is None or files.tensors[key].dtype != torch.int32:
        return False
    middle = 0x88 if fields.get("bits") == 4 else 0x80
    return bool((files.read(key).view(torch.uint8) == middle).all())
