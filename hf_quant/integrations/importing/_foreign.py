"""What every reader of another library's checkpoint hands over, and how it becomes a checkpoint of ours."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import hf_quant.integrations.conv1d  # noqa: F401  (makes Conv1D known)
from hf_quant.algorithms import PackedWeight
from hf_quant.checkpoint._header import TensorInfo
from hf_quant.checkpoint._packed import check_info, check_values, expected_tensors
from hf_quant.config import QuantizerConfig, fields_of
from hf_quant.integrations._files import TensorFiles, empty_model, rewrite, write_config
from hf_quant.integrations._loading import prepare_from_checkpoint
from hf_quant.integrations._names import check_names, renamer, tied_modules
from hf_quant.modules import PACKED_NAMES, QuantizedModule, stored_dtype
from hf_quant.planning import schemes_to_list
from hf_quant.scheme import LinearScheme


class ForeignWeight(NamedTuple):
    """A quantized linear layer of another library's checkpoint.

    Attributes:
        module: its name.
        scheme: what hf_quant calls it.
        shape: (N, K).
        keys: its tensors; where the first is, ours are written.
        unpack: makes our bytes of them, scales in their true dtype.
    """

    module: str
    scheme: LinearScheme
    shape: tuple[int, int]
    keys: tuple[str, ...]
    unpack: Callable[[], PackedWeight]

    @property
    def expected(self) -> dict[str, TensorInfo]:
        """{name in the checkpoint: TensorInfo} of our tensors."""
        tensors = expected_tensors(self.scheme, {"weight": self.shape})
        return {f"{self.module}.{part}": info for part, info in tensors.items()}


class Foreign(NamedTuple):
    """What a reader found in a checkpoint: its weights, tensors to leave out, and what the user should know."""

    weights: list[ForeignWeight]
    dropped: set[str]
    notes: list[str]


def config_of(weights: list[ForeignWeight]) -> QuantizerConfig:
    """The config of what is written: the most frequent scheme, and the plan of all. Raises ValueError if hf_quant has
    no such scheme."""
    for weight in weights:
        try:
            fields_of(weight.scheme)
        except ValueError as error:
            raise ValueError(f"{weight.module}: {error}") from None
    common = Counter(weight.scheme for weight in weights).most_common(1)[0][0]
    config = QuantizerConfig(**fields_of(common))
    config.plan = schemes_to_list({weight.module: weight.scheme for weight in weights})
    return config


def write_foreign(source: Path, target: Path, fields: dict[str, Any], files: TensorFiles, found: Foreign) -> None:
    """Write the checkpoint. Raises ValueError if the model has no such layers, or a value is beyond our grids."""
    weights = {weight.keys[0]: weight for weight in found.weights}
    config = config_of(found.weights)
    consumed = {key for weight in found.weights for key in weight.keys} | found.dropped
    dtype = _check_model(source, files, found, config, consumed)
    guarded = found.weights[0]

    def convert(name: str) -> dict[str, Tensor]:
        if name in weights:
            tensors = _stored(weights[name])
            if weights[name] is guarded:  # see `checkpoint.guard_entry`
                tensors[f"{guarded.module}.weight"] = torch.empty(0, dtype=dtype)
            return tensors
        return {} if name in consumed else {name: files.read(name)}

    rewrite(files, target, convert)
    kept = {name: value for name, value in fields.items() if name != "compression_config"}
    write_config(target, {**kept, "quantization_config": config.to_dict()})


def _check_model(
    source: Path, files: TensorFiles, found: Foreign, config: QuantizerConfig, consumed: set[str]
) -> torch.dtype:
    """Raise ValueError unless the model has a linear layer of that shape for every weight; returns its dtype."""
    model = empty_model(source)
    keys = {key: info for key, info in files.tensors.items() if key not in consumed}
    for weight in found.weights:
        keys.update(weight.expected)
    rename = renamer(model)
    names = prepare_from_checkpoint(model, config, keys, rename, tied_modules(model))
    modules = dict(model.named_modules())
    lost = [
        weight.module
        for weight in found.weights
        if not isinstance(modules.get(rename(f"{weight.module}.weight").removesuffix(".weight")), QuantizedModule)
    ]
    if lost:
        fused = "; its experts are one tensor in transformers 5" if any(".experts." in name for name in lost) else ""
        raise ValueError(
            f"{source} has {len(lost)} quantized layers, {lost[0]} among them, that {type(model).__name__} of "
            f"transformers does not have{fused}: they cannot be imported"
        )
    check_names(model, keys, names)
    return model.dtype


def _stored(weight: ForeignWeight) -> dict[str, Tensor]:
    """{name: tensor} of a weight as our checkpoint stores it, checked."""
    tensors, expected = {}, weight.expected
    for part, tensor in zip(PACKED_NAMES, weight.unpack()):
        if tensor is None:
            continue
        name = f"{weight.module}.{part}"
        stored = tensor.contiguous()
        stored = stored.view(stored_dtype(stored.dtype))
        check_info(TensorInfo(stored.dtype, tuple(stored.shape)), expected[name], name)
        check_values(stored, part, weight.scheme.weight, name)
        tensors[name] = stored
    return tensors
