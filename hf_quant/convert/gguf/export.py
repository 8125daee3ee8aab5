"""Write GGUF files, which llama.cpp and Ollama run: hf_quant's codes and scales in blocks, equal to the bit."""

from collections import Counter
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

import hf_quant.integrations.transformers.conv1d  # noqa: F401  (makes Conv1D known)
from hf_quant._wording import first_few
from hf_quant.algorithms import PackedWeight
from hf_quant.cards import CARD, Export, Measurements, converted_card
from hf_quant.cards.base import check_hub_id
from hf_quant.cards.measurements import as_measurements
from hf_quant.checkpoint import check_values, find_config, stored_weights
from hf_quant.convert.compressed_tensors.experts import split_rows
from hf_quant.convert.compressed_tensors.schemes import Inexpressible
from hf_quant.convert.experts import expert_rules, match_expert
from hf_quant.convert.files import TensorFiles, empty_model, staged
from hf_quant.convert.gguf.architectures import (
    FACTORS,
    Architecture,
    architecture_of,
    factors,
    hyperparameters,
    rounds_bounds,
)
from hf_quant.convert.gguf.card import copy_licences, origin_fields
from hf_quant.convert.gguf.files import PLAIN
from hf_quant.convert.gguf.layouts import Layout
from hf_quant.convert.gguf.package import gguf_package
from hf_quant.convert.gguf.vocabulary import vocabulary
from hf_quant.convert.gguf.written import pack, type_for
from hf_quant.convert.source import Source, source_of
from hf_quant.integrations.loading import prepare_from_checkpoint
from hf_quant.integrations.transformers.names import check_names, renamer, tied_modules
from hf_quant.modules import STORED_NAMES, QuantizedModule, packed_key


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_quant.config import QuantizerConfig


ENGINES = ("llama.cpp", "Ollama")
# By gguf.LlamaFileType.
_FILE_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q4_K": 14, "Q5_K": 16, "Q6_K": 18, "TQ2_0": 37, "MXFP4": 38}
_NAMES = {dtype: kind for kind, dtype in PLAIN.items()}
_SHOWN = 10  # reasons in one error


def export_gguf(
    model: nn.Module | str | Path,
    out: str | Path,
    *,
    measurements: "Measurements | dict[str, Any] | Path | str | None" = None,
    repo_id: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
) -> tuple[str, ...]:
    """Write a quantized transformers model, or a checkpoint of one, as a GGUF file, for llama.cpp and Ollama.

    Codes and scales are put into blocks of 32 weights, never rounded: every weight is afterwards what it was. A
    checkpoint is read tensor by tensor, and no weight is decoded.

        int4, symmetric        Q4_0
        int4 with zero points  Q4_1, if the products of scales and zero points are fp16 numbers
        int8                   Q8_0
        mxfp4                  MXFP4
        not quantized          BF16, F16 or F32; vectors F32
        imports of GGUF files  Q4_1, Q4_K, Q5_K, Q6_K and TQ2_0 as they were

    The groups of int4 and int8 are of 32, 64, 96, 128, ... weights, or rows; their scales must be fp16 numbers, which
    those of 8 bits (the default of int4) and of bf16 are, unless they are tiny. Inputs must not be rotated. Models of
    llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe, gpt_oss, gemma3 and phi3 are written, with their
    tokenizers.

    Args:
        model: a quantized model of transformers, or the directory of its checkpoint, or its name on the Hub. In memory
            it has no tokenizer: save both into a directory, and give that.
        out: a directory that does not exist yet, or is empty; it appears when it is complete. In it are a file of the
            directory's name, or the name of `repo_id`, and of its type, as OUT-Q4_0.gguf, and a model card.
        measurements: of the model's quality, for the card, see `hf_quant.cards.measurements`.
        repo_id: where the export is going to be on the Hub; the card's commands name it.
        revision: of a model on the Hub.
        token: for the Hub.

    Returns:
        Properties that the file does not have, one line each, e.g. the quantized KV cache is left out.

    Raises:
        ValueError: if llama.cpp does not compute such a model, any module has no exact counterpart (the error lists
            them with reasons), or the package gguf is not installed. Nothing is written then.
    """
    out, figures = Path(out), as_measurements(measurements)
    if repo_id is not None:
        check_hub_id(repo_id, "repo_id")
    gguf_package()
    measured = Measurements(quality=figures.quality, bits_per_weight=figures.bits_per_weight)
    with source_of(model, out, revision=revision, token=token) as found:
        made = found.place / "made"
        made.mkdir()
        copy_licences(found.path, made)
        with staged(made, out, found.place) as target, TensorFiles(found.path) as files:
            try:
                plan = _plan(found, files)
            except ValueError as error:
                raise ValueError(f"{found.where} cannot be written as GGUF: {error}") from None
            name = (repo_id or str(out.resolve())).replace("\\", "/").rpartition("/")[2]
            suffix = f"-{plan.kinds[0]}"
            file = name if name.lower().endswith(suffix.lower()) else f"{name}{suffix}"
            export = Export(plan.kinds, "gguf", ENGINES, f"{file}.gguf", plan.nbytes)
            options = {"measurements": measured, "repo_id": repo_id, "token": token}
            card = converted_card(found.path, found.path, origin=found.origin, export=export, **options)
            plan.metadata |= {"general.name": name, **origin_fields(card.data.to_dict())}
            _write(plan, target / f"{file}.gguf", found.where)
            card.save(target / CARD)
    return tuple(plan.notes)


class _Entry(NamedTuple):
    """A tensor of the file."""

    name: str
    kind: str
    shape: tuple[int, ...]  # of its values
    read: Callable[[], Tensor]  # its bytes or floating-point numbers. Raises Inexpressible

    @property
    def nbytes(self) -> int:
        gguf = gguf_package()
        size, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.kind]]
        return torch.Size(self.shape).numel() // size * nbytes


@dataclass
class _Plan:
    """The contents of a GGUF file."""

    architecture: Architecture
    metadata: dict[str, Any]
    entries: list[_Entry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The types of quantized weights, that of most weights first."""
        sizes: Counter[str] = Counter()
        for entry in self.entries:
            if entry.kind not in PLAIN:
                sizes[entry.kind] += torch.Size(entry.shape).numel()
        return tuple(kind for kind, _ in sizes.most_common())

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries)


def _plan(found: Source, files: TensorFiles) -> _Plan:
    """Plan a file. Raises ValueError with every module that cannot be written, and why."""
    config = find_config(found.path)
    if config.quantizes_no_weights:
        raise ValueError("it has no quantized weights")
    model = empty_model(found.path)
    architecture = architecture_of(model.config)
    values = hyperparameters(architecture, model.config)
    layouts = architecture.layouts(model)
    metadata = {f"{architecture.name}.{key}": value for key, value in values.items()}
    plan = _Plan(architecture, metadata | vocabulary(found.path, model.config.vocab_size))
    tied, rename = tied_modules(model), renamer(model)
    check_names(model, files.tensors, prepare_from_checkpoint(model, config, files.tensors, rename, tied))
    entries: dict[str, list[_Entry]] = {}
    refused: dict[str, str] = {}
    for name, found_entries in _quantized(model, files, layouts, rename):
        if isinstance(found_entries, str):
            refused[name] = found_entries
        else:
            entries[name] = found_entries
    _refuse(refused)
    for name, numbers in _numbers(files, model, layouts.keys() - entries.keys(), rename).items():
        entries[name] = list(_plain_entries(numbers, layouts[name]))
    missing = [name for name in layouts if name not in entries and name.removesuffix(".weight") not in tied]
    if missing:
        raise ValueError(f"it lacks {missing[0]}; is a shard missing?")
    plan.entries = [entry for name in layouts for entry in entries.get(name, ())]
    divisors = factors(model.config)
    if divisors is not None:
        plan.entries.append(_Entry(FACTORS, "F32", tuple(divisors.shape), lambda: divisors))
    plan.notes += _notes(config, plan, model)
    return plan


def _quantized(
    model: "PreTrainedModel", files: TensorFiles, layouts: dict[str, Layout], rename: Callable[[str], str]
) -> Iterator[tuple[str, list[_Entry] | str]]:
    """Yield (parameter, its entries, or the reason why it has none) of quantized weights."""
    modules = dict(model.named_modules())
    for stored in stored_weights(files.tensors):
        name = rename(f"{stored.module}.{stored.weight}")
        module = modules.get(name.removesuffix(f".{stored.weight}"))
        if not isinstance(module, QuantizedModule) or name not in layouts:
            raise ValueError(f"it holds codes for {stored.module}, which {type(model).__name__} does not have")
        *experts, N, K = module.matrix_shape(stored.weight)
        layout, entries = layouts[name], list[_Entry]()
        try:
            for part, own in enumerate(layout.parts):
                read = partial(_blocks, files, stored.module, module, stored.weight, layout.rows(part, N))
                kind = type_for(module.scheme, K, read)
                entries.append(_Entry(own, kind, (*experts, N // len(layout.parts), K), partial(read, kind)))
        except Inexpressible as reason:
            yield name, str(reason)
        else:
            yield name, entries


def _blocks(
    files: TensorFiles, prefix: str, module: QuantizedModule, weight: str, chosen: Tensor, kind: str
) -> Tensor:
    """Read rows of a quantized weight, or of each expert of one, as rows of blocks. Raises Inexpressible."""
    parameters: dict[str, Tensor | None] = {}
    quant, (*experts, _, K) = module.scheme.weight, module.matrix_shape(weight)
    for part in STORED_NAMES:
        key = packed_key(part, weight)
        full = f"{prefix}.{key}"
        if full in files.tensors:
            parameters[key] = stored = files.read(full)
            check_values(stored, key, quant, full)
    packed: PackedWeight = module.typed(weight, parameters)
    if not experts:
        return pack(kind, packed, quant, K, chosen)
    matrices = (split_rows(packed, expert, 0, 1) for expert in range(experts[0]))
    return torch.stack([pack(kind, matrix, quant, K, chosen) for matrix in matrices])


class _Numbers(NamedTuple):
    """A parameter that is not quantized."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def _numbers(
    files: TensorFiles, model: "PreTrainedModel", names: Set[str], rename: Callable[[str], str]
) -> dict[str, _Numbers]:
    """Return {name of a parameter: its numbers}; transformers saves each expert for itself if it is not quantized.

    Raises ValueError if a tensor has another dtype, or an expert is missing.
    """
    found: dict[str, _Numbers] = {}
    rules = expert_rules(model)
    experts: dict[str, dict[tuple[int, int], str]] = {}
    for key, info in files.tensors.items():
        name, place = rename(key), match_expert(rules, key.removesuffix(".weight"))
        fused = None if name in names or place is None else rename(place[0])
        if 0 in info.shape or (name not in names and fused not in names):
            continue
        if info.dtype not in _NAMES:
            raise ValueError(f"{key} is {info}; needs one of {', '.join(PLAIN)}")
        if fused is None:
            found[name] = _Numbers(info.dtype, info.shape, partial(files.read, key))
        elif place is not None:
            experts.setdefault(fused, {})[place[1:]] = key
    for name, keys in experts.items():
        shape = tuple(model.get_parameter(name).shape)
        count, parts = shape[0], max(part for _, part in keys) + 1
        if set(keys) != {(e, p) for e in range(count) for p in range(parts)}:
            raise ValueError(f"it holds {len(keys)} of the {count * parts} layers of {name}; is a shard missing?")
        rows = [[keys[e, p] for p in range(parts)] for e in range(count)]
        found[name] = _Numbers(files.tensors[rows[0][0]].dtype, shape, partial(_fused, files, rows))
    return found


def _fused(files: TensorFiles, rows: list[list[str]]) -> Tensor:
    """Read the layers of each expert as one tensor [E, N, K]."""
    return torch.stack([torch.cat([files.read(key) for key in row]) for row in rows])


def _plain_entries(numbers: _Numbers, layout: Layout) -> Iterator[_Entry]:
    """Yield the entries of a parameter that is not quantized; vectors and routers are in fp32."""
    shape = layout.shape_of_part(numbers.shape)
    shape = shape[1:] if len(shape) == 2 and shape[0] == 1 else shape  # llama.cpp drops a 1
    for part, own in enumerate(layout.parts):
        is_fp32 = len(shape) == 1 or own.endswith(".bias") or "_gate_inp" in own
        kind = "F32" if is_fp32 else _NAMES[numbers.dtype]
        yield _Entry(own, kind, shape, partial(_part, numbers, layout, part, PLAIN[kind]))


def _part(numbers: _Numbers, layout: Layout, part: int, dtype: torch.dtype) -> Tensor:
    """Read a part of a parameter in a dtype in which it is exact."""
    return layout.split(numbers.read().to(dtype), part)


def _write(plan: _Plan, path: Path, where: str) -> None:
    """Write a file. Raises ValueError with every weight whose values cannot be written."""
    gguf = gguf_package()
    writer = gguf.GGUFWriter(path, plan.architecture.name)
    for key, value in plan.metadata.items():
        _add(writer, key, value)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(_FILE_TYPES[plan.kinds[0]])
    for entry in plan.entries:
        kind = gguf.GGMLQuantizationType[entry.kind]
        writer.add_tensor_info(entry.name, entry.shape, None, entry.nbytes, kind)
    refused = {}
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for entry in plan.entries:
            try:
                data = entry.read().contiguous()
            except Inexpressible as reason:  # of values, not of schemes: all of them are looked at before the end
                refused[entry.name] = str(reason)
                continue
            if not refused:
                writer.write_tensor_data(data.view(-1).view(torch.uint8).numpy())
    finally:
        writer.close()
    try:
        _refuse(refused)
    except ValueError as error:
        raise ValueError(f"{where} cannot be written as GGUF: {error}") from None


def _add(writer: Any, key: str, value: Any) -> None:
    """Add a value of the metadata."""
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(key, value)


def _refuse(reasons: dict[str, str]) -> None:
    """Raise ValueError if there are reasons, {module: reason}; equal reasons are written once, with a few modules."""
    if not reasons:
        return
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name.removesuffix(".weight"))
    lines = [f"{first_few(found, 2)}: {reason}" for reason, found in list(names.items())[:_SHOWN]]
    raise ValueError(
        f"{len(reasons)} weights would change. {'; '.join(lines)}. A checkpoint that can be written: "
        "QuantizerConfig('int4', group_size=32, scale_dtype='float16'), or 'int8' in place of 'int4', or 'mxfp4'"
    )


def _notes(config: "QuantizerConfig", plan: _Plan, model: "PreTrainedModel") -> Iterator[str]:
    if "tokenizer.ggml.model" not in plan.metadata:
        plan.metadata["tokenizer.ggml.model"] = "none"
        yield "there are no files of a tokenizer beside the weights: the file has no vocabulary"
    if config.kv_cache is not None:
        yield "the quantized KV cache is left out: llama.cpp has its own (--cache-type-k, --cache-type-v)"
    schemes = {module.scheme for module in model.modules() if isinstance(module, QuantizedModule)}
    if any(scheme.activation is not None or scheme.cpu_activation is not None for scheme in schemes):
        yield "the scheme of inputs is left out: on CPUs llama.cpp quantizes inputs to 8 bits by its own rule"
    if rounds_bounds(model.config):
        yield "llama.cpp rounds the bounds of yarn, which this model does not: frequencies between them differ"
    window = getattr(model.config, "sliding_window", None)
    if plan.architecture.name in ("llama", "phi3") and window:
        yield f"llama.cpp attends to all tokens; this model attends to {window}, which differs in longer texts"
