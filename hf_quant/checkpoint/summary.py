"""`inspect_checkpoint`: summarize a quantized checkpoint from its config and the headers of its files."""

import re
from bisect import bisect_left
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from hf_quant.checkpoint.folder import Folder, gguf_hint, open_folder
from hf_quant.checkpoint.header import TensorInfo, scan_folder
from hf_quant.checkpoint.packed import StoredWeight, check_info, expected_tensors, stored_weights
from hf_quant.checkpoint.store import CONFIG_NAME, config_from_fields
from hf_quant.checkpoint.untrusted import one_line
from hf_quant.config import QuantizerConfig
from hf_quant.formats import FORMATS
from hf_quant.kernels.codes import PACK
from hf_quant.kv_cache import KVCacheConfig
from hf_quant.modules import packed_key
from hf_quant.modules.sparse24 import columns_of
from hf_quant.planning import MAX_PARTS, format_table, schemes_from_list
from hf_quant.scheme import LinearScheme


@dataclass(frozen=True)
class CheckpointRow:
    """Modules of one kind in a checkpoint.

    Attributes:
        modules: names, with numbers replaced by "*".
        count: number of modules.
        shape: shapes [..., N, K] of the weights of each, joined by " + "; packed K is a multiple of 32 codes.
        scheme: scheme of the modules; None for tensors that are not quantized.
        num_weights, nbytes: totals over the modules.
    """

    modules: str
    count: int
    shape: str
    scheme: LinearScheme | None
    num_weights: int
    nbytes: int

    @property
    def bits_per_weight(self) -> float:
        """Average bits of a weight, scales and zero points included."""
        return 8 * self.nbytes / max(self.num_weights, 1)


@dataclass(frozen=True)
class CheckpointSummary:
    """Summary of a quantized checkpoint; `print` shows a table.

    Attributes:
        config: the QuantizerConfig of the checkpoint.
        rows: groups of similar modules, quantized ones first.
        num_files: number of safetensors files.
    """

    config: QuantizerConfig
    rows: tuple[CheckpointRow, ...]
    num_files: int

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(row.nbytes for row in self.rows)

    @property
    def bits_per_weight(self) -> float:
        """Average bits of a quantized weight, scales and zero points included."""
        quantized = [row for row in self.rows if row.scheme is not None]
        return 8 * sum(row.nbytes for row in quantized) / max(sum(row.num_weights for row in quantized), 1)

    def __str__(self) -> str:
        table = [("modules", "count", "shape", "scheme", "bits", "MB")]
        for row in self.rows:
            scheme = "not quantized" if row.scheme is None else str(row.scheme)
            bits, size = f"{row.bits_per_weight:.2f}", f"{row.nbytes / 1e6:.2f}"
            table.append((row.modules, str(row.count), row.shape, scheme, bits, size))
        count = sum(row.count for row in self.rows if row.scheme is not None)
        more = "" if self.config.kv_cache is None else f"; KV cache {KVCacheConfig.of(self.config.kv_cache).format}"
        more += "" if self.config.attention is None else f"; attention {self.config.attention}"
        return (
            f"{format_table(table)}\n{count} modules quantized by hf_quant {self.config.hf_quant_version} (format "
            f"version {self.config.format_version}), {self.bits_per_weight:.3f} bits per weight; "
            f"{self.nbytes / 1e6:.2f} MB in {self.num_files} file{'s' if self.num_files > 1 else ''}{more}"
        )


def inspect_checkpoint(
    source: Path | str, *, revision: str | None = None, token: str | bool | None = None
) -> CheckpointSummary:
    """Summarize a quantized checkpoint of transformers, diffusers or `save_quantized` without loading its weights.

    Args:
        source: a directory, or a repository "user/model" of the Hub, of which only the config, the index and the
            headers of the files are read, by range requests.
        revision: branch, tag or commit of the repository; None: the newest.
        token: token for a private repository; None: the token of `hf auth login` or HF_TOKEN.

    Raises ValueError if there is no quantized checkpoint, or its config and headers contradict each other.
    """
    return _inspect(open_folder(source, revision=revision, token=token))


def inspect_parts(
    source: Path | str, *, revision: str | None = None, token: str | bool | None = None
) -> dict[str, CheckpointSummary]:
    """Summarize the quantized components of a diffusers pipeline, {name: summary}; for a model {"": summary}.

    Arguments and errors as for `inspect_checkpoint`.
    """
    folder = open_folder(source, revision=revision, token=token)
    names = folder.files()
    if "model_index.json" not in names:
        return {"": _inspect(folder)}
    summaries = {}
    for name in names:
        part, _, file = name.rpartition("/")
        if file == "config.json" and part and _is_ours(folder.load_json(name)):
            summaries[part] = _inspect(folder.part(part))
    if not summaries:
        raise ValueError(f"{folder.name} is a pipeline without a component that hf_quant has quantized")
    return summaries


def holds_quantized(folder: Folder) -> bool:
    """True if a config in the folder says that hf_quant has quantized the model, or a part of the pipeline."""
    configs = (name for name in folder.files() if name.rpartition("/")[2] == "config.json")
    return any(_is_ours(folder.load_json(name)) for name in configs)


def _is_ours(fields: dict[str, Any]) -> bool:
    config = fields.get("quantization_config")
    return isinstance(config, dict) and config.get("quant_method") == "hf_quant"


def _inspect(folder: Folder) -> CheckpointSummary:
    names = folder.files()
    config = _find_config(folder, names)
    files = scan_folder(folder)
    tensors = {name: info for stored in files.values() for name, info in stored.items()}
    return summarize(config, tensors, num_files=len(files), by_host=CONFIG_NAME not in names, where=folder.name)


def summarize(
    config: QuantizerConfig,
    tensors: dict[str, TensorInfo],
    *,
    num_files: int = 0,
    by_host: bool = True,
    where: str = "the model",
) -> CheckpointSummary:
    """Summarize the tensors of a quantized model or of its checkpoint.

    Args:
        config: config with the plan in it.
        tensors: {name: dtype and shape}, each stored tensor once.
        num_files: number of files that hold the tensors.
        by_host: True if a host saved them, under names that may begin differently from the names in the plan.
        where: name of the checkpoint in error messages.

    Raises ValueError if the tensors contradict the config.
    """
    tensors = dict(tensors)
    schemes = _SchemeTable(schemes_from_list(config.plan), by_host=by_host)
    groups: dict[tuple[str, str, LinearScheme | None], list[tuple[int, int]]] = {}
    modules: dict[str, list[StoredWeight]] = {}
    for stored in stored_weights(tensors):
        modules.setdefault(stored.module, []).append(stored)
    for name, weights in modules.items():
        scheme = schemes.find(name)
        shapes = {stored.weight: _matrix_shape(scheme, stored) for stored in weights}
        expected = expected_tensors(scheme, shapes)
        for key, info in expected.items():
            full = f"{name}.{key}" if name else key
            check_info(tensors.pop(full, None), info, full)
        shape = " + ".join("x".join(map(str, s)) for s in shapes.values())
        size = sum(map(prod, shapes.values())), sum(info.nbytes for info in expected.values())
        groups.setdefault((_template(name) or "(model)", shape, scheme), []).append(size)
    if not groups and not config.quantizes_no_weights:
        raise ValueError(f"{where} holds no codes of hf_quant")
    for name, info in tensors.items():
        if info.nbytes:  # the guard entry has 0 bytes
            key = (_template(name), "x".join(map(str, info.shape)), None)
            groups.setdefault(key, []).append((prod(info.shape), info.nbytes))
    rows = [
        CheckpointRow(modules, len(sizes), shape, scheme, sum(n for n, _ in sizes), sum(b for _, b in sizes))
        for (modules, shape, scheme), sizes in groups.items()
    ]
    return CheckpointSummary(config, tuple(rows), num_files)


# By `quant_method`: the libraries whose checkpoints `hf-quant import` reads.
FOREIGN_METHODS = (
    *("compressed-tensors", "gptq", "awq", "auto-round", "intel/auto-round", "bitsandbytes", "torchao", "quanto"),
    *("hqq", "mxfp4", "fp8", "fbgemm_fp8", "modelopt", "modelopt_fp4", "bitnet"),
)


def find_config(source: Path | str) -> QuantizerConfig:
    """Read the QuantizerConfig of a directory or a repository of the Hub, saved by a host or by `save_quantized`."""
    folder = open_folder(source)
    return _find_config(folder, folder.files())


def _find_config(folder: Folder, names: list[str]) -> QuantizerConfig:
    """Read the QuantizerConfig of a folder, saved by a host or by `save_quantized`."""
    found = next((name for name in (CONFIG_NAME, "config.json") if name in names), None)
    if found is None:
        parts = sorted(name.rpartition("/")[0] for name in names if name.endswith("/config.json"))
        hint = f"; it has the parts {', '.join(parts[:20])}: name one of them" if parts else ""
        hint = gguf_hint(names) or hint
        raise ValueError(f"{folder.name} is not the directory of a quantized model: no config.json{hint}")
    fields, where = folder.load_json(found), f"{folder.name}/{found}"
    if found == CONFIG_NAME:
        fields.pop("module", None)
    else:
        fields = fields.get("quantization_config")
        if not isinstance(fields, dict):
            raise ValueError(f"{where} has no quantization_config: the model is not quantized")
        method = fields.get("quant_method")
        if method in FOREIGN_METHODS:
            raise ValueError(f"{folder.name} is quantized by {method}: `hf-quant import` reads it")
    try:
        return config_from_fields(fields)
    except ValueError as error:
        raise ValueError(f"{where}: {one_line(error)}") from None


class _SchemeTable:
    """Look up schemes by module name; a host may have saved the module under a name with another beginning."""

    def __init__(self, schemes: dict[str, LinearScheme], *, by_host: bool) -> None:
        self.schemes, self.by_host = schemes, by_host
        # Reversed names with the same ending are neighbours in the sorted list: "c.b.a.", "c.b.x.".
        self.names = sorted(map(_backwards, schemes))
        self.sorted_schemes = [schemes[_backwards(name[:-1])[:-1]] for name in self.names]
        self.change = list(range(1, len(self.names) + 1))  # for each name, the next index with another scheme
        for i in reversed(range(len(self.names) - 1)):
            if self.sorted_schemes[i] == self.sorted_schemes[i + 1]:
                self.change[i] = self.change[i + 1]

    def find(self, name: str) -> LinearScheme:
        """Return the scheme of a module. Raises ValueError if the plan does not define it."""
        if name in self.schemes:
            return self.schemes[name]
        parts = name.split(".")
        for i in range(max(len(parts) - MAX_PARTS, 0), len(parts)):  # no plan has longer names
            ending = _backwards(".".join(parts[i:]))
            begin, end = bisect_left(self.names, ending), bisect_left(self.names, f"{ending}\U0010ffff")
            if begin < end and self.change[begin] >= end:
                return self.sorted_schemes[begin]
            if begin < end:
                break
        else:
            # transformers saves some models under entirely different, older names. A plan with one scheme needs no
            # names.
            if self.by_host and self.names and self.change[0] == len(self.names):
                return self.sorted_schemes[0]
        raise ValueError(f"{name!r} is quantized, but the stored plan does not name it")


def _backwards(name: str) -> str:
    """Reverse the parts of a name: "a.b.c" -> "c.b.a."."""
    return ".".join([*reversed(name.split(".")), ""])


def _matrix_shape(scheme: LinearScheme, stored: StoredWeight) -> tuple[int, ...]:
    """Derive the shape [..., N, K] of a weight from `qdata`; for packed codes K is rounded up to a multiple of 32."""
    quant, key = scheme.weight, packed_key("qdata", stored.weight)
    qdata, scale = stored.parts[key], stored.parts.get(packed_key("scale", stored.weight))
    format, where = FORMATS[quant.format], f"{stored.module}.{key}"
    if len(qdata.shape) < 2 or scale is None:
        raise ValueError(f"{where} is {qdata}; needs a matrix of {format.name} codes, with a scale beside it")
    *lead, N, width = qdata.shape
    if scheme.sparsity is not None:
        return *lead, N, columns_of(quant, width)
    if not format.spec.is_packed:
        return *lead, N, width
    if width % format.bits:
        raise ValueError(f"{where} is {qdata}; rows of {format.name} codes are multiples of {format.bits} words")
    K = width // format.bits * PACK
    # With groups of 16 (nvfp4), K rounded up to 32 may need one scale more than there is.
    groups = scale.shape[-1] if scale.shape else 0
    return *lead, N, min(K, groups * quant.group_size) if quant.group_size else K


def _template(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
