"""Prepare a model on the meta device for loading: from a config, or from the headers of a quantized checkpoint."""

import copy
import ctypes
import logging
import os
import re
import sys
from collections.abc import Callable, Container, Iterable

import torch
from torch import nn

from hf_quant._wording import first_few
from hf_quant.algorithms import PackedWeight
from hf_quant.calibration import (
    StatisticsFile,
    is_file,
    needed,
    of_file,
    takes_data,
    with_outliers,
)
from hf_quant.checkpoint import (
    StoredWeight,
    TensorInfo,
    check_info,
    expected_tensors,
    read_header,
    shorten,
    stored_weights,
)
from hf_quant.config import QuantizerConfig
from hf_quant.modules import (
    QuantizedModule,
    convert_module_,
    packed_key,
    quantized_class,
    register_experts,
)
from hf_quant.planning import NothingToQuantize, plan, resolved, schemes_from_list
from hf_quant.quantize import apply_plan, share_codes_
from hf_quant.resolve import resolve_scheme
from hf_quant.scheme import LinearScheme


logger = logging.getLogger(__name__)


def refuse_outside(files: Iterable[str], directory: str | None) -> None:
    """Raise ValueError if an index lists files outside of the checkpoint's directory.

    `directory` may be the name of a repository: then the host has checked the names of the files in its cache.
    """
    if not directory or not os.path.isdir(directory):
        return
    root = os.path.join(os.path.abspath(directory), "")
    outside = next((file for file in files if not os.path.abspath(file).startswith(root)), None)
    if outside is not None:
        raise ValueError(
            f"the index in {directory} names {shorten(repr(os.path.relpath(outside, root)))}; a shard is a "
            ".safetensors file beside the index"
        )


def read_keys(files: Iterable[str]) -> dict[str, TensorInfo]:
    """Return {tensor name: (dtype, shape)} of safetensors files, from their headers.

    Raises ValueError on a file that is missing, truncated or of another format; a pickle is not opened.
    """
    files = list(files)
    for file in files:
        if not str(file).endswith(".safetensors"):
            raise ValueError(
                f"{file} is no safetensors file but, by its name, a pickle, which could run any code: quantized "
                "checkpoints are loaded from .safetensors only"
            )
    return {key: info for file in files for key, info in read_header(file).items()}


def prepare_from_config(
    model: nn.Module, config: QuantizerConfig, dtype: torch.dtype | None = None
) -> QuantizerConfig:
    """Plan, and turn the modules of a model on the meta device into empty quantized ones that wait for their weights.

    Returns the resolved config. Its plan is empty where a pipeline gives one config to all of its parts, and this part
    has nothing to quantize.
    """
    config = copy.copy(config)  # the mark goes from the copy: a host may load several models with one config
    is_for_all_parts = vars(config).pop("is_for_all_parts", False)
    file = _statistics_file(model, config)
    try:
        quant_plan = plan(model, config, dtype=dtype)
    except NothingToQuantize as error:
        if not is_for_all_parts:
            raise
        logger.warning("%s; it stays in 16 bit", error)
        return resolved(config, {})
    quant_plan.warn(type(model).__name__)
    if file is not None:
        static = [name for name, scheme in quant_plan.schemes.items() if scheme.is_static]
        unknown = [name for name in static if name not in file.statistics]
        if unknown:
            raise ValueError(
                f"the statistics have none for {first_few(unknown)}, whose static activation scales need them: "
                "calibrate with the config that you quantize with"
            )
        quant_plan = with_outliers(config, quant_plan, {name: file.statistics[name] for name in static})
    for name in quant_plan.quantized:
        _drop_values_(model.get_submodule(name))
    for name in apply_plan(model, quant_plan, keep_placeholder=True):
        if file is not None and name in file.statistics and needed(entry := quant_plan.entries[name]) is not None:
            module = model.get_submodule(name)
            assert isinstance(module, QuantizedModule)  # apply_plan has converted it
            module.statistics = of_file(file, entry)
    found = resolved(config, quant_plan.schemes)
    if file is not None:
        found.calibrated_with = file.record
        found.kv_scales = file.kv_scales if config.has_fp8_cache else None
    return found


def _drop_values_(module: nn.Module) -> None:
    """Move the weights that will be quantized to the meta device, where the rest of the model is.

    Constructors of hosts make some in memory: `torch.FloatTensor(3)` (XLNet) is uninitialized and on the CPU, always.
    """
    quantized = quantized_class(type(module))
    for name in () if quantized is None else quantized.weight_names_of(module):
        weight = module.get_parameter(name)
        if not weight.is_meta:
            empty = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
            module._parameters[name] = nn.Parameter(empty, requires_grad=weight.requires_grad)


def _statistics_file(model: nn.Module, config: QuantizerConfig) -> StatisticsFile | None:
    """The statistics by which a model is quantized while it loads. Raises ValueError if it needs data instead."""
    if not takes_data(config, config.calibration):
        if config.calibration is not None:
            raise ValueError(f"calibration is given, but {config} needs no data: leave it out")
        return None
    if not is_file(config.calibration):
        raise ValueError(
            f"a {type(model).__name__} is not calibrated while it loads: load it in 16 bit, then call "
            "hf_quant.quantize_(model, config, calibration=...), for a pipeline with a function that runs it; or give "
            "a file of hf_quant.calibrate(...).save"
        )
    return StatisticsFile.of(config.calibration)


def prepare_from_checkpoint(
    model: nn.Module,
    config: QuantizerConfig,
    keys: dict[str, TensorInfo],
    rename: Callable[[str], str],
    tied: dict[str, str],
) -> list[str]:
    """Turn the modules whose codes the checkpoint has, of a model on the meta device, into empty quantized ones.

    The checkpoint's tensors decide, not a list of exclusions: a head that a checkpoint lacks stays a plain layer.
    `rename` maps the checkpoint's parameter names to the model's; `tied` is {module: the module it shares with}.
    Returns the names of the quantized modules. Raises ValueError if stored plan, headers and model do not agree.
    """
    schemes = _Schemes(config)
    _warn_of_another_format(config, schemes.schemes)
    modules = dict(model.named_modules())
    converted: dict[str, QuantizedModule] = {}
    done: dict[str, set[str]] = {}  # the weights that the checkpoint has, by module
    for stored in stored_weights(keys):
        name = rename(f"{stored.module}.{stored.weight}".lstrip(".")).removesuffix(f".{stored.weight}")
        module = modules.get(name)
        if module is None:
            continue  # the checkpoint of a larger model: the host lists what it does not use
        scheme = schemes.find(name, stored.module)
        if name not in done:
            register_experts(module)
            if quantized_class(type(module)) is None:
                raise ValueError(f"the checkpoint has codes for {name}, which is a {type(module).__name__} here")
            _drop_values_(module)
            converted[name] = convert_module_(module, scheme, algorithm=config.algorithm, name=name)
            done[name] = set()
        _check_header(converted[name], name, stored)
        done[name].add(stored.weight)
    if not done and schemes.schemes and not any(stored_weights(keys)):
        raise ValueError(
            "config.json says that hf_quant has quantized this checkpoint, but its weights are in 16 bit, as where a "
            "model was made by from_config and saved: delete quantization_config in config.json, and quantize it anew"
        )
    for name, module in converted.items():
        for weight in module.weight_names:
            if weight not in done[name]:
                raise ValueError(f"the checkpoint lacks {name}.{packed_key('qdata', weight)}; is a shard missing?")
    held = {rename(key) for key, info in keys.items() if 0 not in info.shape}
    _check_plan(schemes, model, converted, tied, {stored.module for stored in stored_weights(keys)}, held)
    if not done and held.isdisjoint(model.state_dict()):
        raise ValueError(
            f"a {type(model).__name__} looks for weights such as {next(iter(model.state_dict()), None)}, and the "
            f"checkpoint has none of them, but {shorten(repr(min(held, default='')))}: load it with the class of the "
            "model that was saved"
        )
    for target, source in tied.items():
        if source in done and target not in done:
            share_codes_(modules[target], converted[source], name=target)
    return list(done)


class _Schemes:
    """The stored plan, looked up by names of modules that may have gained or lost the base model's prefix."""

    def __init__(self, config: QuantizerConfig) -> None:
        self.schemes = schemes_from_list(config.plan)
        self.prefixed: dict[str, list[str]] = {}  # name without its first component -> names
        self.layers: dict[str, set[LinearScheme]] = {}  # what begins with the list of layers -> schemes of that name
        for name, scheme in self.schemes.items():
            if "." in name:
                self.prefixed.setdefault(name.partition(".")[2], []).append(name)
            self.layers.setdefault(_in_layers(name), set()).add(scheme)

    def find(self, *names: str) -> LinearScheme:
        """Return the scheme by the first name that the plan has. Raises ValueError if it has none of them."""
        for name in names:
            for candidate in (name, name.partition(".")[2]):
                if candidate in self.schemes:
                    return self.schemes[candidate]
            prefixed = self.prefixed.get(name, ())
            if len(prefixed) == 1:
                return self.schemes[prefixed[0]]
        # A part of a model may be named in a third way in the checkpoint: Mllama's decoder.
        alike = self.layers.get(_in_layers(names[0]), ())
        if len(alike) == 1:
            return next(iter(alike))
        raise ValueError(f"the checkpoint has codes for {names[0]}, but its stored plan does not name that module")

    def name_of(self, module: str) -> str | None:
        """Return the name that the plan has for a module of the model, or None."""
        known_as = (module, module.partition(".")[2], *self.prefixed.get(module, ()))
        return next((name for name in known_as if name in self.schemes), None)


def _in_layers(name: str) -> str:
    """The end of a name from its first list of layers on: "layers.0.mlp.up_proj"; the whole name if it has none."""
    found = re.search(r"[^.]+\.\d+\..*", name)
    return name if found is None else found[0]


def _warn_of_another_format(config: QuantizerConfig, schemes: dict[str, LinearScheme]) -> None:
    """Log a warning if nothing in the stored plan, which counts, has the format that the stored config names."""
    if config.weights is None or config.is_auto or config.modules:
        return
    named = resolve_scheme(config.scheme_fields(), torch.bfloat16)[0].weight.format
    held = sorted({scheme.weight.format for scheme in schemes.values()})
    if held and named not in held:
        logger.warning(
            "the checkpoint's quantization_config has weights=%r, but its plan, which says what is stored, has %s: "
            "the fields of a checkpoint cannot be edited; quantize the 16-bit model to get another format",
            *(config.weights, ", ".join(held)),
        )


def _check_header(module: QuantizedModule, name: str, stored: StoredWeight) -> None:
    """Raise ValueError if the parts of a stored weight do not fit the module's scheme and shape."""
    if stored.weight not in module.weight_names:
        raise ValueError(f"the checkpoint has codes for {name}.{stored.weight}, which its module does not have")
    expected = expected_tensors(module.scheme, {stored.weight: module.matrix_shape(stored.weight)})
    for part, found in stored.parts.items():
        if part not in expected:
            raise ValueError(f"the checkpoint has {name}.{part}, which its scheme ({module.scheme}) does not use")
        check_info(found, expected[part], f"{name}.{part} in the checkpoint")
    for part in expected.keys() - stored.parts.keys():
        raise ValueError(f"the checkpoint lacks {name}.{part}; is a shard missing?")


def _check_plan(
    schemes: _Schemes,
    model: nn.Module,
    converted: Container[str | None],
    tied: dict[str, str],
    stored: Container[str],
    held: Container[str],
) -> None:
    """Raise ValueError if a module that the stored plan names, and this model has, did not get codes.

    `stored` are the modules with codes in the checkpoint, `held` its tensors, by their names in the model.
    """
    for name, module in model.named_modules():
        if isinstance(module, QuantizedModule) or tied.get(name) in converted:
            continue
        register_experts(module)
        quantized = quantized_class(type(module))
        planned = None if quantized is None else schemes.name_of(name)
        if quantized is None or planned is None:
            continue
        if planned != name and all(f"{name}.{weight}" in held for weight in quantized.weight_names_of(module)):
            continue  # in 16 bit, and of another part than the module of the plan: two encoders have the same layers
        if planned in stored:
            raise ValueError(
                f"the checkpoint has the codes of {name} as {planned}, where a {type(model).__name__} does not look "
                "for them: load it with the class of the model that was saved"
            )
        raise ValueError(
            f"the stored plan names {planned}, but the checkpoint has no codes for it; is a shard missing?"
        )


def waiting_module(model: nn.Module, param_name: str) -> QuantizedModule | None:
    """Return the quantized module in which a parameter is the placeholder of a 16-bit weight, or None."""
    name, _, leaf = param_name.rpartition(".")
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return None
    return module if isinstance(module, QuantizedModule) and leaf in module.placeholders else None


def quantize_into(
    module: QuantizedModule, weight_name: str, weight: torch.Tensor, fqn: str, device: torch.device | str | None
) -> PackedWeight:
    """Quantize a loaded weight, computed on `device` if given; the codes are on the device of the weight."""
    source = weight if device is None else weight.to(device)
    return module.quantize(weight_name, source, fqn=fqn).to(weight.device)


def trim_memory() -> None:
    """Give freed heap pages back to the system: glibc keeps the temporaries of loading otherwise (1 GB seen)."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # glibc, not musl
            libc.malloc_trim(0)
