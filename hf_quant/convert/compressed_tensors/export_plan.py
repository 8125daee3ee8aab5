"""The plan of an export (layers, reasons for refusals, notes), and the writer that carries it out tensor by tensor."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

import hf_quant.integrations.transformers.conv1d  # noqa: F401  (makes Conv1D known)
from hf_quant._wording import first_few
from hf_quant.algorithms import PackedWeight
from hf_quant.cards.serving import KV_CACHE_OPTIONS
from hf_quant.checkpoint import check_values, find_config
from hf_quant.config import QuantizerConfig
from hf_quant.convert.compressed_tensors.engines import (
    LARGE_GROUP,
    aliases,
    aliases_of_experts,
    beside_the_language_model,
    head_pattern,
    is_of_expert,
    reason_against,
    reason_against_fusing,
    siblings,
)
from hf_quant.convert.compressed_tensors.experts import layer_names, split_rows
from hf_quant.convert.compressed_tensors.schemes import (
    INT,
    KV_CACHE_SCHEME,
    MXFP4,
    NVFP4,
    PACKED,
    Group,
    Inexpressible,
    group_of,
)
from hf_quant.convert.compressed_tensors.tensors import to_compressed, with_global_scale
from hf_quant.convert.files import TensorFiles, empty_model, rewrite, write_config
from hf_quant.integrations.loading import prepare_from_checkpoint, stored_weights
from hf_quant.integrations.transformers.names import check_names, renamer, tied_modules
from hf_quant.kv_cache import KVCacheConfig
from hf_quant.modules import INPUT_SCALE, STORED_NAMES, QuantExperts, QuantizedModule, packed_key
from hf_quant.scheme import BLOCK_SIZE


if TYPE_CHECKING:
    from transformers import PreTrainedModel


logger = logging.getLogger(__name__)
_SHOWN = 20  # reasons in one error
READERS = ("engines", "transformers")


class Layer(NamedTuple):
    """One linear layer of the exported checkpoint: rows of one of our weights.

    `split` is (expert, part, parts) where it is a part of fused experts.
    """

    name: str
    group: Group
    rows: int
    split: tuple[int, int, int] | None


class Weight(NamedTuple):
    """A quantized weight of our checkpoint, and the layers that it is split into."""

    module: QuantizedModule
    prefix: str  # of its parts: name in the checkpoint
    name: str  # of the 16-bit weight
    layers: list[Layer]


@dataclass
class Plan:
    """The plan of an export."""

    dtype: torch.dtype
    reader: str
    weights: dict[str, Weight] = field(default_factory=dict)  # by the key of `qdata` in the checkpoint
    dropped: set[str] = field(default_factory=set)  # keys that are written together with another key, and guards
    ignore: list[str] = field(default_factory=list)  # modules with a matrix that is not quantized
    # {name of a layer: name of its module in transformers} where the two differ.
    modules: dict[str, str] = field(default_factory=dict)
    experts: list[str] = field(default_factory=list)  # modules with 16-bit experts that are stored in one tensor
    head: str | None = None  # the output head if it is quantized
    # {prefix of an nvfp4 weight: the global scale that it is converted to}.
    global_scales: dict[str, float] = field(default_factory=dict)
    # {key in the checkpoint: the scales of the KV cache {name: value} that are written beside it}.
    kv_scales: dict[str, dict[str, float]] = field(default_factory=dict)
    engines: tuple[str, ...] = ()  # that serve the export: "vLLM", "SGLang"
    notes: list[str] = field(default_factory=list)  # properties of our checkpoint that the exported one lacks

    @property
    def layers(self) -> Iterator[Layer]:
        return (layer for weight in self.weights.values() for layer in weight.layers)

    @property
    def formats(self) -> tuple[str, ...]:
        """The storage formats, sorted."""
        return tuple(sorted({layer.group.format for layer in self.layers}))


def write_export(plan: Plan, files: TensorFiles, target: Path, fields: dict[str, Any], where: str) -> None:
    """Write the tensors and the config into a directory. `fields` are the fields of the source's config.json.

    Raises ValueError with every weight whose values cannot be written.
    """
    refused: dict[str, str] = {}

    def convert(name: str) -> dict[str, Tensor]:
        scales = {
            scale: torch.tensor([value], dtype=torch.float32) for scale, value in plan.kv_scales.get(name, {}).items()
        }
        if name in plan.dropped:
            return scales
        if name not in plan.weights:
            return {name: files.read(name), **scales}
        try:
            return {**_convert(plan.weights[name], files, plan), **scales}
        except Inexpressible as reason:  # of values, not of schemes: all of them are looked at before the end
            refused[plan.weights[name].prefix] = str(reason)
            return {}

    rewrite(files, target, convert)
    _refuse(where, refused)
    write_config(target, {**fields, "quantization_config": quantization_config(plan)})


def plan_export(source: Path, files: TensorFiles, reader: str, where: str) -> Plan:
    """Plan an export for a reader of READERS; errors call the source `where`.

    Raises ValueError with every module that cannot be written, and why.
    """
    config = find_config(source)
    if config.quantizes_no_weights:
        raise ValueError(f"{where} has no quantized weights: nothing to export")
    model = empty_model(source)
    rename = renamer(model)
    names = prepare_from_checkpoint(model, config, files.tensors, rename, tied_modules(model))
    check_names(model, files.tensors, names)
    modules, plan = dict(model.named_modules()), Plan(model.dtype, reader)
    refused: dict[str, str] = {}
    output = model.get_output_embeddings()
    for stored in stored_weights(files.tensors):
        name = rename(f"{stored.module}.{stored.weight}").removesuffix(f".{stored.weight}")
        module = modules.get(name)
        if not isinstance(module, QuantizedModule):
            raise ValueError(f"{where} holds codes for {stored.module}, which {type(model).__name__} does not have")
        try:
            layers = _layers(model, module, stored.module, stored.weight)
        except Inexpressible as reason:
            refused[stored.module] = str(reason)
            continue
        keys = {part: f"{stored.module}.{packed_key(part, stored.weight)}" for part in STORED_NAMES}
        plan.dropped |= {key for part, key in keys.items() if part != "qdata"}
        plan.weights[keys["qdata"]] = Weight(module, stored.module, stored.weight, layers)
        if name != stored.module and module.kind == "linear":
            plan.modules[stored.module] = name
        if module is output:
            plan.head = stored.module
    _refuse(where, refused)
    plan.dropped |= {key for key, info in files.tensors.items() if 0 in info.shape}
    plan.ignore = _ignored(modules, tied_modules(model), files, rename)
    plan.experts = _experts_in_16_bit(modules, files, rename)
    if reader == "engines" and config.kv_scales is not None and config.has_fp8_cache:
        plan.kv_scales = _kv_scales(config.kv_scales, files, rename)
    plan.notes += _notes(config, plan)
    if reader == "engines":
        _refuse(where, _refused_by_engines(plan, files))
        unserved = list(_unserved_by_sglang(plan))
        plan.engines = ("vLLM",) if unserved else ("vLLM", "SGLang")
        plan.notes += [*_notes_on_engines(plan), *unserved]
    else:
        for note in _limits_of_transformers(plan):
            plan.notes.append(note)
            logger.warning("%s", note)  # not only a note: the file is written for this reader
    return plan


def _layers(model: "PreTrainedModel", module: QuantizedModule, stored: str, weight: str) -> list[Layer]:
    """Return the layers that one weight is split into. Raises Inexpressible."""
    *_, N, K = module.matrix_shape(weight)
    if isinstance(module, QuantExperts):
        names = layer_names(model, module, stored, weight)
        parts = len(names[0])
        group = group_of(module.scheme, N // parts, K, module.compute_dtype)
        if module.scheme.weight.granularity == "block" and parts > 1 and N // parts % BLOCK_SIZE:
            raise Inexpressible(f"blocks of {BLOCK_SIZE} rows do not divide the {N // parts} rows of its parts")
        return [Layer(n, group, N // parts, (e, p, parts)) for e, row in enumerate(names) for p, n in enumerate(row)]
    if module.kind != "linear" or not isinstance(module, nn.Linear):
        kind = "an embedding" if module.kind == "embedding" else f"a {module.host_class.__name__}"
        raise Inexpressible(f"it is {kind}; engines read quantized linear layers only")
    return [Layer(stored, group_of(module.scheme, N, K, module.compute_dtype), N, None)]


def _ignored(
    modules: dict[str, nn.Module], tied: Iterable[str], files: TensorFiles, rename: Callable[[str], str]
) -> list[str]:
    """Return the names, in the checkpoint and in transformers, of modules with an unquantized matrix."""
    found: dict[str, None] = {}
    for key, info in files.tensors.items():
        name = rename(key).removesuffix(".weight")
        module = modules.get(name)
        if key.endswith(".weight") and len(info.shape) == 2 and not isinstance(module, nn.Embedding | QuantizedModule):
            found |= {key.removesuffix(".weight"): None, name: None}
    # A tied head has no tensor of its own, but engines look for its name.
    found.update({name: None for name in tied if isinstance(modules.get(name), nn.Linear)})
    return sorted(name for name in found if not isinstance(modules.get(name), QuantizedModule))


def _experts_in_16_bit(modules: dict[str, nn.Module], files: TensorFiles, rename: Callable[[str], str]) -> list[str]:
    """Return the names that engines have for modules whose 16-bit experts the checkpoint stores in one tensor."""
    found = set()
    for key, info in files.tensors.items():
        name, _, leaf = key.rpartition(".")
        parent, _, own = name.rpartition(".")
        if len(info.shape) != 3 or isinstance(modules.get(rename(key).rpartition(".")[0]), QuantizedModule):
            continue
        if own == "experts" and leaf != "weight":
            found.add(name)
        elif own in ("input_linear", "output_linear"):  # of the Granite family, beside the router
            found.add(f"{parent}.experts")
    return sorted(found)


def _kv_scales(
    scales: dict[str, list[float]], files: TensorFiles, rename: Callable[[str], str]
) -> dict[str, dict[str, float]]:
    """Return `Plan.kv_scales`: the scales of each attention module, beside the first of its tensors."""
    found: dict[str, dict[str, float]] = {}
    left = dict(scales)
    for key in files.tensors:
        name = rename(key)
        module = next((module for module in left if name.startswith(f"{module}.")), None)
        if module is not None and key.endswith(leaf := name[len(module) :]):
            stored, (keys, values) = key.removesuffix(leaf), left.pop(module)
            found[key] = {f"{stored}.k_scale": keys, f"{stored}.v_scale": values}
    if left:
        raise ValueError(f"kv_scales names {first_few(list(left))}, which the checkpoint has no tensors for")
    return found


def _refused_by_engines(plan: Plan, files: TensorFiles) -> dict[str, str]:
    """Return {name: reason} of layers that engines cannot load, alone or as a part of a fused layer.

    Of the `weight_global_scale` of several layers vLLM takes the largest, without adapting the others' weights
    (schemes/compressed_tensors_w4a4_nvfp4.py): where they differ by powers of two, the plan notes the one to bring
    all to. fp8 codes with one scale per tensor it rounds again.
    """
    groups: dict[str, Group | None] = {layer.name: layer.group for layer in plan.layers}
    groups.update(dict.fromkeys(plan.ignore))
    rows = {layer.name: layer.rows for layer in plan.layers}
    linear = [w for w in plan.weights.values() if w.module.kind == "linear"]
    shared = {w.prefix: _scale_of_all(w, files) for w in linear}
    inputs = {w.prefix: _input_scale(w, files) for w in linear}
    refused = {}
    for layer in plan.layers:
        is_expert, is_head = layer.split is not None, layer.name == plan.head
        reason = reason_against(layer.name, layer.group, is_expert, is_head, groups.keys())
        if reason is not None:
            refused[layer.name] = reason
    for parts, _ in siblings(groups):
        reason = reason_against_fusing(parts, groups, rows)
        if reason is None and len({inputs.get(part) for part in parts}) > 1:
            others = ", ".join(part.rpartition(".")[2] for part in parts)
            reason = f"engines compute {others} as one layer with one static scale of its input, and theirs differ"
        scales = [shared.get(part) for part in parts]
        if reason is None and len(set(scales)) > 1:
            group, known = groups[parts[0]], [scale for scale in scales if scale is not None]
            largest = max(known)
            if group is not None and group.format == NVFP4 and all(math.frexp(largest / s)[0] == 0.5 for s in known):
                plan.global_scales.update(dict.fromkeys(parts, largest))
                continue
            others = ", ".join(part.rpartition(".")[2] for part in parts)
            reason = (
                f"engines compute {others} as one layer with one scale per tensor, and theirs are different: "
                "other weights would be served. reader='transformers' writes for readers that keep them apart"
            )
        if reason is not None:
            refused[parts[0]] = reason
    return refused


def _input_scale(weight: Weight, files: TensorFiles) -> float | None:
    """Return the static scale of the input of a linear layer, None if it has none."""
    if not weight.module.scheme.is_static:
        return None
    key = f"{weight.prefix}.{INPUT_SCALE}"
    stored = files.read(key)
    check_values(stored, INPUT_SCALE, weight.module.scheme.weight, key)
    return stored.view(torch.float32).item()


def _scale_of_all(weight: Weight, files: TensorFiles) -> float | None:
    """Return the scale of a whole weight, which siblings have to share; None if it has no such scale."""
    quant, activation = weight.module.scheme.weight, weight.module.scheme.activation
    if quant.format == "nvfp4":
        key, dtype = "global_scale", torch.float32
    elif quant.format == "fp8_e4m3" and quant.granularity == "tensor" and activation is not None:
        key, dtype = "scale", getattr(torch, quant.scale_dtype)
    else:
        return None
    stored = files.read(f"{weight.prefix}.{key}")
    check_values(stored, key, quant, f"{weight.prefix}.{key}")
    return stored.view(dtype).item()


def _notes(config: QuantizerConfig, plan: Plan) -> Iterator[str]:
    if plan.kv_scales:
        yield "the KV cache has one calibrated fp8 scale per layer: hf_quant's own has one for every token and head"
    elif config.kv_cache is not None:
        option = KV_CACHE_OPTIONS.get(KVCacheConfig.of(config.kv_cache).format)
        yield (
            "the quantized KV cache is left out: compressed-tensors has one calibrated fp8 scale per layer, hf_quant "
            f"a scale for every token and head{f', as vLLM has by its option {option}' if option else ''}"
        )
    if any(weight.module.scheme.cpu_activation is not None for weight in plan.weights.values()):
        yield "int8 inputs on CPUs are left out: elsewhere the inputs of these layers are in 16 bit"


def _notes_on_engines(plan: Plan) -> Iterator[str]:
    """Yield differences between engines and hf_quant, and limits of some releases and models."""
    schemes = {weight.module.scheme for weight in plan.weights.values()}
    if plan.head is not None:
        yield f"{plan.head} is quantized: of the engines, vLLM from 0.20 on and SGLang from 0.5.19 on read such a head"
    towers = beside_the_language_model(layer.name for layer in plan.layers)
    if towers:
        yield (
            f"{len(towers)} layers beside the language model are quantized ({towers[0]}): of some models engines read "
            "these in 16 bit only"
        )
    if MXFP4 in plan.formats:
        yield "vLLM quantizes the inputs of mxfp4 layers, too, on GPUs of compute capability 10.0 and above"
    if any(scheme.activation is not None and scheme.weight.granularity == "block" for scheme in schemes):
        yield "vLLM quantizes the inputs of fp8 blocks in groups of 128 values; hf_quant has one scale per token"


def _limits_of_transformers(plan: Plan) -> Iterator[str]:
    """Yield what transformers does not load from the export, though it is written for it."""
    if any(layer.split is not None and layer.group.format == INT for layer in plan.layers) or (
        plan.experts or any(is_of_expert(name) for name in plan.ignore)
    ):
        yield "transformers 5.23 cannot load experts in int8 with quantized inputs, or in 16 bit, from it"
    if any(not weight.module.scheme.weight.symmetric for weight in plan.weights.values()):
        yield (
            "transformers 5.23 cannot load zero points (W4A16_ASYM) as codes: load it decoded, with "
            "quantization_config=CompressedTensorsConfig(dequantize=True), or quantize with symmetric=True"
        )
    if len({layer.group for layer in plan.layers}) > 1:
        yield "transformers 5.23 decodes several schemes (dequantize=True) as if all were the first: load it as codes"


def _unserved_by_sglang(plan: Plan) -> Iterator[str]:
    """Yield the reasons why SGLang does not serve on GPUs what vLLM serves."""
    weights = {weight.module.scheme.weight for weight in plan.weights.values()}
    experts = {layer.group.format for layer in plan.layers if layer.split is not None}
    if MXFP4 in plan.formats:
        yield "of the engines vLLM alone reads mxfp4"
    if INT in experts or (PACKED in experts and len(plan.formats) > 1):
        yield f"of the engines vLLM alone serves these experts ({', '.join(sorted(experts))})"
    if any(quant.format == "int8" and quant.granularity == "tensor" for quant in weights):
        yield "of the engines vLLM alone serves these weights: SGLang rounds int8 with one scale per tensor again"
    if any(quant.group_size == LARGE_GROUP for quant in weights):
        yield f"of the engines vLLM alone has a kernel for groups of {LARGE_GROUP}"


def _convert(weight: Weight, files: TensorFiles, plan: Plan) -> dict[str, Tensor]:
    """Return {name: tensor} of the layers that a weight is split into. Raises Inexpressible."""
    tensors: dict[str, Tensor] = {}
    module = weight.module
    quant = module.scheme.weight
    parameters: dict[str, Tensor | None] = {}
    for part in STORED_NAMES:
        key = packed_key(part, weight.name)
        full = f"{weight.prefix}.{key}"
        stored = files.read(full) if full in files.tensors else None
        if stored is not None:
            check_values(stored, key, quant, full)
        parameters[key] = stored
    packed: PackedWeight = module.typed(weight.name, parameters)
    if weight.prefix in plan.global_scales:
        packed = with_global_scale(packed, plan.global_scales[weight.prefix])
    K = module.matrix_shape(weight.name)[-1]
    for layer in weight.layers:
        part = packed if layer.split is None else split_rows(packed, *layer.split)
        converted = to_compressed(part, layer.group.format, quant, K, plan.dtype)
        input_scale = parameters[packed_key(INPUT_SCALE, weight.name)]
        if input_scale is not None:
            converted["input_scale"] = input_scale.view(torch.float32).clone()
        tensors.update({f"{layer.name}.{name}": tensor for name, tensor in converted.items()})
    return tensors


def quantization_config(plan: Plan) -> dict[str, Any]:
    """Return the `quantization_config` of an export: a single group names the class, several groups name their layers.

    For engines also under the names that they have for them.
    """
    names: dict[Group, list[str]] = {}
    for layer in plan.layers:
        names.setdefault(layer.group, []).append(layer.name)
    ordered = [group for group, _ in Counter({g: len(n) for g, n in names.items()}).most_common()]
    targets = {group: {"Linear"} for group in ordered}
    if len(ordered) > 1:
        targets = {g: set(names[g]) | {plan.modules[n] for n in names[g] if n in plan.modules} for g in ordered}
    ignore = set(plan.ignore)
    if plan.reader == "engines":
        taken = {layer.name for layer in plan.layers} | set(plan.modules.values()) | ignore
        ignore |= (aliases(plan.ignore) | aliases_of_experts(plan.experts)) - taken
        for group in ordered:
            if len(ordered) > 1:
                targets[group] |= aliases(names[group]) - taken
            if plan.head in names[group]:
                targets[group].add(head_pattern(plan.head))
    groups = {f"group_{i}": group.to_dict(sorted(targets[group])) for i, group in enumerate(ordered)}
    return {
        "quant_method": "compressed-tensors",
        "format": plan.formats[0] if len(plan.formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(ignore),
        "kv_cache_scheme": KV_CACHE_SCHEME if plan.kv_scales else None,
        "global_compression_ratio": None,
    }


def _refuse(where: str, reasons: dict[str, str]) -> None:
    """Raise ValueError if there are reasons, {module: reason}; equal reasons are written once, with a few modules."""
    if not reasons:
        return
    modules: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        modules.setdefault(reason, []).append(name)
    lines = [f"{first_few(names, 2)}: {reason}" for reason, names in list(modules.items())[:_SHOWN]]
    raise ValueError(
        f"{where} cannot be written in the format of compressed-tensors without changing {len(reasons)} modules; "
        f"quantize them otherwise, or leave them in 16 bit. {'; '.join(lines)}"
    )
