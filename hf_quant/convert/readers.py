"""The libraries whose checkpoints can be imported: how each is recognized, and the reader of its tensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hf_quant.checkpoint import Directory, shorten
from hf_quant.config import QuantMethod
from hf_quant.convert.auto_round import read_auto_round
from hf_quant.convert.bitnet import read_bitnet
from hf_quant.convert.bitsandbytes import read_bitsandbytes
from hf_quant.convert.compressed_tensors.imports import read_compressed_tensors
from hf_quant.convert.files import OWN_CONFIGS, TensorFiles
from hf_quant.convert.foreign import Foreign
from hf_quant.convert.fp8 import read_fp8
from hf_quant.convert.gptq_awq import read_awq, read_gptq
from hf_quant.convert.hosts import Empty
from hf_quant.convert.hqq import read_hqq
from hf_quant.convert.modelopt import read_modelopt
from hf_quant.convert.mxfp4 import read_mxfp4
from hf_quant.convert.quanto import read_quanto
from hf_quant.convert.torchao.pickles import PickledFiles
from hf_quant.convert.torchao.tensors import read_torchao


Reader = Callable[[TensorFiles, dict[str, Any], torch.dtype | None], Foreign]

# By the `quant_method` of config.json.
READERS: dict[str, Reader] = {
    "gptq": read_gptq,
    "awq": read_awq,
    "compressed-tensors": read_compressed_tensors,
    "bitsandbytes": read_bitsandbytes,
    "mxfp4": read_mxfp4,
    "fp8": read_fp8,
    "fbgemm_fp8": read_fp8,
    "torchao": read_torchao,
    "hqq": read_hqq,
    "auto-round": read_auto_round,
    "intel/auto-round": read_auto_round,
    "modelopt": read_modelopt,
    "modelopt_fp4": read_modelopt,
}
# Of libraries whose tensors do not tell all: where a row of quanto's groups ends, which layers BitNet rounds.
READERS_BY_HOST: dict[str, Callable[[TensorFiles, dict[str, Any], Empty], Foreign]] = {
    "quanto": read_quanto,
    "bitnet": read_bitnet,
}
METHODS = (*READERS, *READERS_BY_HOST)


def read(method: str, files: TensorFiles, fields: dict[str, Any], host: Empty, dtype: torch.dtype | None) -> Foreign:
    """Read the weights of a checkpoint of `method`. Raises ValueError with the reason if one is unsupported."""
    if method in READERS_BY_HOST:
        return READERS_BY_HOST[method](files, fields, host)
    return READERS[method](files, fields, dtype)


def is_pickled(source: Path, method: str) -> bool:
    """Return True if a checkpoint has to be in pickled files: those of torchao alone are read."""
    return method == "torchao" and not any(source.glob("*.safetensors"))


def opened(source: Path, method: str) -> TensorFiles:
    """Open the tensors of a checkpoint. Raises ValueError if a file is missing or damaged."""
    return PickledFiles(source) if is_pickled(source, method) else TensorFiles(source)


def detect(source: Path, fields: dict[str, Any], where: str) -> tuple[str, dict[str, Any]]:
    """Return (method, its fields) of a quantized checkpoint. Raises ValueError if the method is unsupported."""
    own = fields.get("quantization_config") or fields.get("compression_config")
    method = None
    if isinstance(own, dict):
        method = str(own.get("quant_method") or _unnamed(own))
    else:
        for file, known in OWN_CONFIGS.items():
            if (source / file).is_file():
                method, own = known, Directory(source).load_json(file)
                break
    if method is None or not isinstance(own, dict):
        raise ValueError(f"{where} is not quantized: `hf-quant quantize` makes a checkpoint of it")
    if method == QuantMethod.HF_QUANT:
        raise ValueError(f"{where} is a checkpoint of hf_quant already")
    if method not in METHODS:
        raise ValueError(f"{where} is quantized by {shorten(repr(method))}; can be imported: {', '.join(METHODS)}")
    return method, own


def _unnamed(own: dict[str, Any]) -> str:
    """Return the method of a quantization_config without its name, as the first releases of the libraries wrote it."""
    if "config_groups" in own:
        return "compressed-tensors"
    return "bitsandbytes" if own.get("load_in_8bit") or own.get("load_in_4bit") else "gptq"
