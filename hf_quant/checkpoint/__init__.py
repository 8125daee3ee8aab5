"""Checkpoints: what is in the files, whether it may be trusted, and saving and loading of plain modules.

Nothing here knows a host. `read_header` and `inspect_checkpoint` read the files' headers only, the latter from the
Hub, too; `check_packed` judges tensors that were loaded; `save_quantized` and `load_quantized_` are the way of modules
that no host saves.
"""

from hf_quant.checkpoint._header import TensorInfo, read_header
from hf_quant.checkpoint._inspect import CheckpointRow, CheckpointSummary, inspect_checkpoint, inspect_parts, summarize
from hf_quant.checkpoint._packed import check_packed, guard_entry
from hf_quant.checkpoint._store import config_of, load_quantized_, save_quantized


__all__ = [
    "CheckpointRow",
    "CheckpointSummary",
    "TensorInfo",
    "check_packed",
    "config_of",
    "guard_entry",
    "inspect_checkpoint",
    "inspect_parts",
    "load_quantized_",
    "read_header",
    "save_quantized",
    "summarize",
]
