"""`save_quantized` and `load_quantized_`: checkpoints of modules that no host saves.

A directory holds `model.safetensors` (or shards and their index) with the unchanged `state_dict` of the module, and
`hf_quant_config.json`: the fields of the `QuantizerConfig` with the plan, and under "module" what the class of the
module does not define: the dtypes of the dequantized weights, and the shared tensors.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hf_quant._wording import first_few
from hf_quant.checkpoint.folder import Directory
from hf_quant.checkpoint.header import TensorInfo, scan_files
from hf_quant.checkpoint.packed import check_info, check_values, expected_tensors, guard_entry
from hf_quant.checkpoint.staging import workspace
from hf_quant.checkpoint.untrusted import one_line, shorten
from hf_quant.config import QuantizerConfig
from hf_quant.modules import QuantizedModule, check_model, quantized_class, register_experts
from hf_quant.planning import fold_names, schemes_from_list, schemes_to_list, unfold_names
from hf_quant.quantize import OBSERVERS, convert_empty_, notify_observers
from hf_quant.resolve import fields_of
from hf_quant.scheme import LinearScheme


logger = logging.getLogger(__name__)
_Model = TypeVar("_Model", bound=nn.Module)
CONFIG_NAME = "hf_quant_config.json"
_WEIGHTS_PATTERN = "model{suffix}.safetensors"
_OWN_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
DTYPE_NAMES = ("float16", "bfloat16", "float32", "float64")


def config_of(model: nn.Module) -> QuantizerConfig:
    """Return the config of a quantized model: the most frequent scheme of its modules, and the plan of all of them.

    Raises ValueError if nothing in the model is quantized.
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedModule)}
    if not found:
        raise ValueError(f"nothing in this {type(model).__name__} is quantized: quantize_ it first")
    (scheme, algorithm), _ = Counter((m.scheme, m.algorithm) for m in found.values()).most_common(1)[0]
    config = QuantizerConfig(**fields_of(scheme), algorithm=algorithm)
    config.plan = schemes_to_list({name: module.scheme for name, module in found.items()})
    return config


def save_quantized(module: nn.Module, directory: Path | str, *, max_shard_size: int | str = "5GB") -> None:
    """Save a quantized module into a directory, in files of at most `max_shard_size` bytes (or "200MB", "5GB").

    Models of transformers and diffusers have `save_pretrained`, which saves for `from_pretrained`. Shared tensors are
    stored once. An older checkpoint in the directory is replaced when the new one is complete.
    Raises ValueError if nothing in the module is quantized, its state has what safetensors cannot hold, or another
    process is saving into the directory.
    """
    check_model(module)
    config = config_of(module)
    if any(observer.recognizes(module) for observer in OBSERVERS):
        logger.warning(
            "save_quantized saves this %s for load_quantized_ alone: its save_pretrained saves it for from_pretrained",
            type(module).__name__,
        )
    tensors, tied = _unique_tensors(module)
    guard = guard_entry(module)
    assert guard is not None  # config_of has found a quantized module
    tensors.update([guard])
    dtypes: dict[str, list[str]] = {}
    for key, part in module.named_modules():
        if isinstance(part, QuantizedModule):
            dtypes.setdefault(str(part.compute_dtype).removeprefix("torch."), []).append(key)
    details = {"dtypes": {dtype: fold_names(names) for dtype, names in dtypes.items()}, "tied": tied}
    options = {"filename_pattern": _WEIGHTS_PATTERN, "max_shard_size": max_shard_size}
    split = split_state_dict_into_shards_factory(tensors, get_storage_size=lambda tensor: tensor.nbytes, **options)
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file; needs a directory")
    directory.mkdir(parents=True, exist_ok=True)
    # Written to a second directory and then moved: the module may still read tensors from the files that are replaced.
    with workspace(directory / "checkpoint") as place:
        parts = place / "parts"
        parts.mkdir()
        for file, keys in split.filename_to_tensors.items():
            save_file({key: tensors[key] for key in keys}, parts / file, metadata={"format": "pt"})
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            _write_json(parts / f"{_WEIGHTS_PATTERN.format(suffix='')}.index.json", index)
        _write_json(parts / CONFIG_NAME, {**config.to_dict(), "module": details})
        for old in directory.iterdir():
            if _OWN_FILES.fullmatch(old.name):
                old.unlink()
        for part in parts.iterdir():
            part.replace(directory / part.name)


def load_quantized_(module: _Model, directory: Path | str) -> _Model:
    """Turn a 16-bit module into the quantized one that `save_quantized` stored, in place, and return it.

    The module is of the class that was saved, with any weights, or on the meta device (its tensors are then loaded to
    the CPU). Afterwards every tensor, dtype and sharing is as it was saved, bit for bit.

    Raises ValueError, with the module unchanged, if the directory is not such a checkpoint, a file is missing,
    truncated or corrupt, or its tensors do not fit the module or the stored schemes.
    """
    check_model(module)
    directory = Path(directory)
    config, dtypes, tied = _read_config(directory)
    files = scan_files(directory)
    stored = {name: info for tensors in files.values() for name, info in tensors.items()}
    targets = _targets(module, schemes_from_list(config.plan), dtypes, directory)
    slots = list(_slots(module, targets))
    _match(slots, stored, tied, targets, directory)
    tensors = _read_tensors(files, {slot.source for slot in slots}, directory)
    for slot in slots:
        if slot.target is not None:
            check_values(tensors[slot.source], slot.key, slot.target.scheme.weight, f"{directory}: {slot.source}")
    for name, part, scheme, dtype, _, weights in targets.values():
        convert_empty_(part, weights, scheme, algorithm=config.algorithm, dtype=dtype, name=name)
    parameters: dict[tuple[str, torch.device], nn.Parameter] = {}
    uses = Counter(slot.source for slot in slots)
    for slot in slots:
        tensor = tensors[slot.source].to(slot.device)
        if slot.is_buffer:
            slot.module._buffers[slot.key] = tensor
        else:  # one parameter per stored tensor restores the sharing
            parameter = nn.Parameter(tensor, requires_grad=slot.requires_grad and tensor.is_floating_point())
            slot.module._parameters[slot.key] = parameters.setdefault((slot.source, tensor.device), parameter)
            if slot.target is not None and uses[slot.source] > 1:
                assert isinstance(slot.module, QuantizedModule)  # the module of a target, which is converted
                slot.module.shares_codes = True
    notify_observers(module, config, schemes_from_list(config.plan))
    return module


class _Target(NamedTuple):
    """A module that will be converted into a quantized one."""

    name: str
    module: nn.Module
    scheme: LinearScheme
    dtype: torch.dtype
    expected: dict[str, TensorInfo]  # its packed parameters
    weights: tuple[str, ...]  # the parameters that they replace


class _Slot:
    """A parameter or buffer of the converted module, and the stored tensor that it comes from."""

    def __init__(self, module: nn.Module, key: str, old: Tensor, target: _Target | None, is_buffer: bool) -> None:
        self.module, self.key, self.target, self.is_buffer = module, key, target, is_buffer
        self.names: list[str] = []  # a module that is used twice has two names
        self.device = torch.device("cpu") if old.is_meta else old.device
        self.requires_grad = target is None and old.requires_grad
        # Unquantized tensors are loaded in the dtype in which they were saved.
        self.expected = TensorInfo(old.dtype, tuple(old.shape)) if target is None else target.expected[key]
        self.source = ""


def _unique_tensors(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return ({name: contiguous tensor}, {name: name under which its tensor is stored}) for a module's state."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    names: dict[int, str] = {}
    storages: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}; only tensors can be stored")
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device: load the module before saving it")
        if id(tensor) in names:
            tied[name] = names[id(tensor)]
            continue
        names[id(tensor)] = name
        tensor, storage = tensor.detach().contiguous(), tensor.untyped_storage().data_ptr()
        # safetensors refuses tensors that overlap in memory.
        tensors[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return tensors, tied


def _read_config(directory: Path) -> tuple[QuantizerConfig, dict[str, torch.dtype], dict[str, str]]:
    """Read (config, {module name: dtype of its dequantized weight}, {tensor name: name of the tensor it shares})."""
    path = directory / CONFIG_NAME
    if not path.is_file():
        hosts = (directory / "config.json").is_file()
        hint = "it has a config.json: load it with from_pretrained" if hosts else "save_quantized writes one"
        raise ValueError(f"{directory} is not a directory with a {CONFIG_NAME}; {hint}")
    fields = Directory(directory).load_json(CONFIG_NAME)
    details = fields.pop("module", None)
    try:
        config = config_from_fields(fields)
        dtypes, tied = _read_details(details)
    except ValueError as error:
        raise ValueError(f"{path}: {one_line(error)}") from None
    return config, dtypes, tied


def config_from_fields(fields: dict[str, Any]) -> QuantizerConfig:
    """Return the config that a checkpoint stores, with its plan. Raises ValueError if it is no config of hf_quant."""
    if "quant_method" not in fields:
        raise ValueError("no quant_method is named")
    config = QuantizerConfig(**fields)
    schemes_from_list(config.plan)
    return config


def _read_details(details: Any) -> tuple[dict[str, torch.dtype], dict[str, str]]:
    dtypes, tied = (details.get("dtypes"), details.get("tied")) if isinstance(details, dict) else (None, None)
    if not isinstance(dtypes, dict) or not isinstance(tied, dict):
        raise ValueError('"module" needs the tables "dtypes" and "tied"')
    if not all(isinstance(source, str) for source in tied.values()):
        raise ValueError('"tied" maps names of tensors to names of tensors')
    resolved = {}
    for dtype, names in dtypes.items():
        if dtype not in DTYPE_NAMES or not isinstance(names, list):
            raise ValueError(
                f'"dtypes" has {dtype!r}: {names!r}; needs lists of modules under {", ".join(DTYPE_NAMES)}'
            )
    for dtype, names in zip(dtypes, unfold_names(dtypes.values())):
        resolved.update(dict.fromkeys(names, getattr(torch, dtype)))
    return resolved, tied


def _targets(
    model: nn.Module, schemes: dict[str, LinearScheme], dtypes: dict[str, torch.dtype], directory: Path
) -> dict[int, _Target]:
    """Return {id(module): _Target} for the modules that the plan names."""
    modules = dict(model.named_modules(remove_duplicate=False))
    quantized = next((n for n, m in modules.items() if isinstance(m, QuantizedModule)), None)
    if quantized is not None:
        raise ValueError(f"the module is quantized already ({quantized or 'it'} is): load into a 16-bit one")
    targets = {}
    for name, scheme in schemes.items():
        if name not in modules or name not in dtypes:
            lacking = type(model).__name__ if name not in modules else f"{CONFIG_NAME}'s table of dtypes"
            raise ValueError(f"{directory} holds a quantized {shorten(repr(name))}, which {lacking} does not have")
        module = modules[name]
        shapes = matrix_shapes(module)
        if not shapes:
            raise ValueError(
                f"{directory} holds a quantized {shorten(repr(name))}, but {type(module).__name__} has no weight"
            )
        expected = expected_tensors(scheme, shapes)
        targets[id(module)] = _Target(name, module, scheme, dtypes[name], expected, tuple(shapes))
    return targets


def matrix_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return {weight name: shape [..., N, K] as a matrix} of a module; empty unless it can be quantized."""
    register_experts(module)
    counterpart = quantized_class(type(module))
    if counterpart is None:
        return {}
    shapes = {}
    for name in counterpart.weight_names_of(module):
        weight = module._parameters.get(name)
        if weight is None:
            return {}
        shapes[name] = counterpart.matrix_shape_of(module, tuple(weight.shape), name)
    return shapes


def _slots(model: nn.Module, targets: dict[int, _Target]) -> Iterator[_Slot]:
    """Yield the parameters and persistent buffers of the converted module, each with its names."""
    slots: dict[tuple[int, str], _Slot] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        target = targets.get(id(module))
        tensors = [(key, p, None, False) for key, p in module._parameters.items() if p is not None]
        if target is not None:
            tensors = [entry for entry in tensors if entry[0] not in target.weights]
            weight = module.get_parameter(target.weights[0])
            tensors += [(key, weight, target, False) for key in target.expected]
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                tensors.append((key, buffer, None, True))
            elif buffer is not None and buffer.is_meta:
                raise ValueError(
                    f"{prefix}.{key} is a buffer that no checkpoint holds, and it is on the meta device: construct "
                    "the module on a real device, or give it this buffer first"
                )
        for key, old, packed, is_buffer in tensors:
            slot = slots.setdefault((id(module), key), _Slot(module, key, old, packed, is_buffer))
            slot.names.append(f"{prefix}.{key}" if prefix else key)
    yield from slots.values()


def _match(
    slots: list[_Slot],
    stored: dict[str, TensorInfo],
    tied: dict[str, str],
    targets: dict[int, _Target],
    directory: Path,
) -> None:
    """Set the source of each slot. Raises ValueError on tensors that are missing, unexpected, or of another shape."""
    missing = []
    for slot in slots:
        sources = (name if name in stored else tied.get(name) for name in slot.names)
        slot.source = next((source for source in sources if source in stored), "")
        if not slot.source:
            missing.append(slot.names[0])
            continue
        found = stored[slot.source]
        if slot.target is None and found.dtype.is_floating_point == slot.expected.dtype.is_floating_point:
            found = TensorInfo(slot.expected.dtype, found.shape)
        check_info(found, slot.expected, f"{directory}: {slot.source}")
    if missing:
        raise ValueError(f"{directory} lacks {first_few(missing)}")
    guards = {f"{t.name}.{weight}" if t.name else weight for t in targets.values() for weight in t.weights}
    used = {slot.source for slot in slots}
    unexpected = [name for name in stored if name not in used and not (name in guards and not stored[name].nbytes)]
    if unexpected:
        raise ValueError(f"{directory} holds tensors that the module does not have: {first_few(unexpected)}")


def _read_tensors(files: dict[Path, dict[str, TensorInfo]], names: set[str], directory: Path) -> dict[str, Tensor]:
    tensors = {}
    for path, stored in files.items():
        try:
            with safe_open(path, framework="pt") as file:
                tensors.update((name, file.get_tensor(name)) for name in stored if name in names)
        except SafetensorError as error:
            raise ValueError(f"{directory}: {path.name} cannot be read: {one_line(error)}") from None
    return tensors


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
