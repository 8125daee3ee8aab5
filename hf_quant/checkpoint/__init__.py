"""Checkpoints: read and check untrusted files, and save and load modules that no host saves.

Nothing here knows a host. `read_header` and `inspect_checkpoint` read only the headers of files, on this machine or on
the Hub; `check_packed` checks tensors that were loaded; `save_quantized` and `load_quantized_` store any quantized
module. A `Folder` is a checkpoint's directory, local or remote; every other function reads through one.
"""

from hf_quant.checkpoint.folder import (
    Directory,
    Folder,
    HubRepository,
    gguf_hint,
    local_path,
    open_folder,
    refuse_file,
)
from hf_quant.checkpoint.header import DTYPES, TensorInfo, read_header, scan_files
from hf_quant.checkpoint.mapping import freeze_, quantization_map, requantize_
from hf_quant.checkpoint.packed import (
    StoredWeight,
    check_info,
    check_packed,
    check_values,
    expected_tensors,
    guard_entry,
    stored_weights,
)
from hf_quant.checkpoint.staging import workspace
from hf_quant.checkpoint.store import CONFIG_NAME, config_of, load_quantized_, save_quantized
from hf_quant.checkpoint.summary import (
    FOREIGN_METHODS,
    CheckpointRow,
    CheckpointSummary,
    find_config,
    holds_quantized,
    inspect_checkpoint,
    inspect_parts,
    summarize,
)
from hf_quant.checkpoint.untrusted import one_line, parse_json, shorten


__all__ = [
    "CONFIG_NAME",
    "DTYPES",
    "FOREIGN_METHODS",
    "CheckpointRow",
    "CheckpointSummary",
    "Directory",
    "Folder",
    "HubRepository",
    "StoredWeight",
    "TensorInfo",
    "check_info",
    "check_packed",
    "check_values",
    "config_of",
    "expected_tensors",
    "find_config",
    "freeze_",
    "gguf_hint",
    "guard_entry",
    "holds_quantized",
    "inspect_checkpoint",
    "inspect_parts",
    "load_quantized_",
    "local_path",
    "one_line",
    "open_folder",
    "parse_json",
    "quantization_map",
    "read_header",
    "refuse_file",
    "requantize_",
    "save_quantized",
    "scan_files",
    "shorten",
    "stored_weights",
    "summarize",
    "workspace",
]
