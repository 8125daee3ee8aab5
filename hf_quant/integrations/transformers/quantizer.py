"""The transformers adapter: quantize on load, save, reload (`from_pretrained`, `save_pretrained`), 5.17 and newer.

The host calls `HfQuantizer` in this order: `_process_model_before_weight_loading` on the meta model,
`get_quantize_ops` for each weight that `param_needs_quantization` selects, `_process_model_after_weight_loading`. The
other hooks differ between versions; this file uses only hooks that all supported versions have.
"""

import copy
import logging
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers.quantizers.auto as auto
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.distributed.utils import is_dtensor
from transformers.quantizers.base import HfQuantizer
from transformers.utils.logging import is_progress_bar_enabled

import hf_quant.integrations.transformers.layouts  # noqa: F401  (makes classes of the host quantizable)
from hf_quant import quantize
from hf_quant._wording import first_few
from hf_quant.algorithms import PackedWeight
from hf_quant.auto import check_search
from hf_quant.calibration import TOKENIZERS, check_writer, is_file, needs_data, takes_data
from hf_quant.checkpoint import check_packed, guard_entry
from hf_quant.config import RUNTIME_FIELDS, QuantizerConfig, QuantMethod
from hf_quant.integrations.foreign import explain_foreign_, refuse_codes
from hf_quant.integrations.leftovers import upload_without_leftovers
from hf_quant.integrations.loading import (
    prepare_from_checkpoint,
    prepare_from_config,
    read_keys,
    refuse_outside,
    trim_memory,
    waiting_module,
)
from hf_quant.integrations.methods import (
    Wrapper,
    attach_methods,
    count_weights,
    detach_methods,
    keep_prepared,
    refuse_resize,
    refuse_training,
    refuse_type,
)
from hf_quant.integrations.requested import take_requested
from hf_quant.integrations.transformers import generation
from hf_quant.integrations.transformers.blocks import block_rules, fuse_blocks_as_configured_, unfuse_blocks_
from hf_quant.integrations.transformers.names import (
    check_names,
    keep_layout,
    renamer,
    tie_codes,
    tie_weights,
    tied_modules,
    untie_codes,
)
from hf_quant.integrations.transformers.parallel import (
    guard_gathered_state,
    prepare_parallel,
    quantize_shard,
    refuse_fsdp,
    refuse_fsdp_of_integers,
    refuse_parallel,
)
from hf_quant.kernels.native import use_huge_pages
from hf_quant.kv_cache import register_attention
from hf_quant.modules import PACKED_NAMES, STORED_NAMES, QuantizedModule, packed_key, restore_module_, stored_dtype
from hf_quant.planning import HOST_RULES, plan, resolved, schemes_from_list
from hf_quant.quantize import dequantize_, fuse_as_configured_, quantize_


NAME = QuantMethod.HF_QUANT.value
logger = logging.getLogger(NAME)


class TransformersQuantizer(HfQuantizer):
    """Quantize a transformers model on load, parameter by parameter, or load a quantized checkpoint."""

    requires_calibration = False
    quantization_config: QuantizerConfig
    given_state: dict[str, torch.Tensor] | None = None  # the `state_dict` of a call of `save_pretrained`, meanwhile

    def __init__(self, quantization_config: QuantizerConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        # Errors of single weights: the host would swallow an exception and only print its traceback.
        self.errors: list[str] = []
        self.shapes: dict[str, torch.Size] = {}  # {parameter of the model: its shape by the config}
        self.stored: set[str] = set()  # names of the parameters in the checkpoint
        self.calibrates = False  # the model is loaded in 16 bit, calibrated, and quantized then
        if quantization_config.kv_cache is not None:
            register_attention()  # attn_implementation="hf_quant" may be asked for

    @property
    def is_trainable(self) -> bool:
        """Adapters train on top of the frozen codes: every forward passes the exact gradient to its input."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True

    def is_serializable(self) -> bool:
        return True

    def validate_environment(self, *args: Any, weights_only: bool = True, **kwargs: Any) -> None:
        # The host may unpickle a file before any hook runs: it reads the dtype there if the config names none.
        if self.pre_quantized and not weights_only:
            raise ValueError(
                "weights_only=False lets a pickle run any code, and quantized checkpoints are loaded from "
                ".safetensors only: leave it out"
            )
        requested = take_requested(self.quantization_config)
        if requested is not None:  # nothing in the checkpoint depends on the cache: a user may choose another one
            self.quantization_config.kv_cache = requested.kv_cache or self.quantization_config.kv_cache

    def update_tp_plan(self, config: Any) -> Any:
        return config  # 5.17 only; the plan is edited once the modules are known

    def update_ep_plan(self, config: Any) -> Any:
        return config

    def update_parallel_plan(self, model: nn.Module, plan: dict[str, str]) -> None:
        pass  # newer versions only; likewise

    def update_weight_conversions(self, weight_conversions: list, model: nn.Module | None = None) -> list:
        return list(weight_conversions)  # the names of the codes match no conversion pattern

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> nn.Module:
        if self.pre_quantized:
            if not checkpoint_files:
                raise ValueError(
                    "a quantized checkpoint is loaded from its files: give its directory in place of `state_dict`"
                )
            refuse_fsdp_of_integers(model)
            self._prepare_from_files(model, checkpoint_files)
        else:
            refuse_fsdp(model)
            refuse_codes(model, checkpoint_files, renamer(model))
            if self.quantization_config.plan is not None:
                raise ValueError("this QuantizerConfig holds the plan of another model; pass a new one")
            config = self.quantization_config
            self.calibrates = takes_data(config, config.calibration) and not is_file(config.calibration)
            if self.calibrates:
                self._prepare_calibration(model)
                return model
            self.quantization_config = prepare_from_config(model, self._without_attention(model))
            self.quantization_config.__dict__.update({name: getattr(config, name) for name in RUNTIME_FIELDS})
        tie_codes(model)
        prepare_parallel(model)
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        return model

    def _prepare_from_files(self, model: nn.Module, files: list[str]) -> None:
        """Convert the model, on the meta device, to that of a checkpoint. Raises ValueError if it does not fit."""
        refuse_outside(files, model.config.name_or_path)
        keys = read_keys(files)
        rename = renamer(model)
        names = prepare_from_checkpoint(model, self.quantization_config, keys, rename, tied_modules(model))
        check_names(model, keys, names)
        untie_codes(model)
        renamed = {key: rename(key) for key in keys}
        self.stored = set(renamed.values())
        parameters = dict(model.named_parameters())
        for key, info in keys.items():
            parameter = parameters.get(renamed[key])
            if parameter is not None and parameter.is_floating_point() and not info.dtype.is_floating_point:
                raise ValueError(f"the checkpoint has {key} as {info}, which the model computes with")
        # Only guards of quantized modules: an untrusted checkpoint may have thousands of empty tensors, and the host
        # matches every key with every pattern.
        quantized = {name for name, module in model.named_modules() if isinstance(module, QuantizedModule)}
        guards = [k for k, info in keys.items() if 0 in info.shape and renamed[k].rpartition(".")[0] in quantized]
        model._keys_to_ignore_on_load_unexpected = {
            *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
            *(f"^{re.escape(name)}$" for key in guards for name in (key, renamed[key])),
        }

    def _prepare_calibration(self, model: nn.Module) -> None:
        """Raise ValueError now, not after minutes of loading, if the model cannot be calibrated once it is loaded."""
        config = self.quantization_config = self._without_attention(model)
        if config.is_auto:
            check_search(model, config)
        else:
            plan(model, config)
        refuse_parallel(model)
        if config.calibration is None and needs_data(config):
            check_writer(model)
        logger.info("%s is loaded in 16 bit, calibrated, and quantized then", type(model).__name__)

    def _without_attention(self, model: nn.Module) -> QuantizerConfig:
        """Return the config without `attention`: a pipeline's config may ask for 8-bit attention of its denoiser."""
        config = self.quantization_config
        if config.attention is None:
            return config
        logger.warning(
            "attention is %r, but only diffusion models have it: not %s", config.attention, type(model).__name__
        )
        changed = copy.copy(config)
        changed.attention = None
        return changed

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        return not self.pre_quantized and waiting_module(model, param_name) is not None

    def param_element_size(self, model: nn.Module, param_name: str, param: torch.Tensor) -> float:
        # The placeholder of a weight takes no memory: the codes are counted under their own names.
        return 0 if waiting_module(model, param_name) is not None else param.element_size()

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self)

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        trim_memory()
        if self.errors:
            raise ValueError(first_few(self.errors, separator="; "))
        if self.calibrates:
            quantize_(model, self.quantization_config, progress=is_progress_bar_enabled())
            self.quantization_config = model.config.quantization_config
            return model
        if self.pre_quantized:
            _refuse_missing(model, self.stored)
            self.stored = set()
        elif not self.quantization_config.plan and not self.quantization_config.has_more_than_weights:
            self.remove_quantization_config(model)  # a part of a pipeline that has nothing to quantize
            return model
        for name, parameter in model.named_parameters():
            expected = self.shapes.pop(name, parameter.shape)
            if parameter.shape != expected:  # with any quantizer, older versions load tensors of a wrong shape
                raise ValueError(f"{name} is {tuple(parameter.shape)}; the model's config needs {tuple(expected)}")
        for name, module in list(model.named_modules()):
            if not isinstance(module, QuantizedModule):
                continue
            if module.placeholders:
                # The checkpoint lacks this weight, so the host has initialized it: an untrained head must train.
                restore_module_(module)
                schemes = schemes_from_list(self.quantization_config.plan)
                schemes.pop(name, None)
                self.quantization_config = resolved(self.quantization_config, schemes)
            elif self.pre_quantized:
                stored = [p for p in module._parameters.values() if p is not None]
                if not any(p.is_meta or is_dtensor(p) for p in stored):  # neither offloaded nor sharded
                    check_packed(module, name)
        fuse_as_configured_(model, self.quantization_config.fuse_projections)
        fuse_blocks_as_configured_(model, self.quantization_config)
        for name in ("quantization_device", *RUNTIME_FIELDS):  # settings of this load, not of the checkpoint
            setattr(self.quantization_config, name, None)
        model.config.quantization_config = self.quantization_config
        _attach(model)
        if not self.pre_quantized or model.can_generate():  # a headless model makes no cache
            generation.attach(model)
        use_huge_pages(model)
        return model

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, torch.Tensor] | None, dict[str, str]]:
        # Whatever is returned takes the place of a state that the caller of `save_pretrained` gives.
        entry = None if getattr(model, "_hf_peft_config_loaded", False) else guard_entry(model)
        if entry is None:  # only the adapter is saved, or nothing is quantized
            return self.given_state, {}
        # The guard: without hf_quant a load fails at this key by its shape, instead of drawing random weights.
        guard, empty = entry
        keep_layout(model, guard)
        guard_gathered_state(model)
        state = model.state_dict() if self.given_state is None else self.given_state
        return {**state, guard: empty}, {}

    def dequantize(self, model: nn.Module, dtype: torch.dtype | str | None = None) -> nn.Module:
        # The host's method would take None for config.dtype: some weights of a model may have another one.
        quantized = (module for module in model.modules() if isinstance(module, QuantizedModule))
        if any(p.is_meta for module in quantized for p in module.parameters(recurse=False)):
            raise ValueError(
                "parts of this model are offloaded and cannot be dequantized there: load it without device_map, and "
                "dequantize that"
            )
        dequantize_(model, getattr(torch, dtype) if isinstance(dtype, str) else dtype)
        self.remove_quantization_config(model)
        return model


class _Quantize(ConversionOps):
    """The host's loading operation: one 16-bit weight in, its packed tensors out."""

    def __init__(self, quantizer: TransformersQuantizer) -> None:
        self.quantizer = quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        *,
        model: nn.Module | None = None,
        missing_keys: set[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Replace the quantized weights in {parameter name: tensor} by `qdata`, `scale`, ..."""
        converted: dict[str, Any] = {}
        for key, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            module = waiting_module(model, key)
            if module is None:
                converted[key] = value
                continue
            name, _, leaf = key.rpartition(".")
            input_scale = module.loaded_input_scale(leaf)
            packed = self._quantize(module, leaf, weight, key)
            module.fill_(leaf, None)
            if missing_keys is not None:
                missing_keys.discard(key)
            input_scale = None if input_scale is None else input_scale.to(packed.qdata.device)
            for part, tensor in zip(STORED_NAMES, (*packed, input_scale)):
                if tensor is not None:
                    stored = nn.Parameter(tensor.view(stored_dtype(tensor.dtype)), requires_grad=False)
                    converted[f"{name}.{packed_key(part, leaf)}".lstrip(".")] = stored
        return converted

    def _quantize(self, module: QuantizedModule, name: str, weight: torch.Tensor, fqn: str) -> PackedWeight:
        """Return the packed weight; on failure zeros, and the error is raised after everything is loaded."""
        errors = self.quantizer.errors
        try:
            if not errors:
                device = self.quantizer.quantization_config.quantization_device
                return quantize_shard(module, name, weight, fqn, device)
        except ValueError as error:
            errors.append(str(error))
        empty = (module._parameters.get(packed_key(part, name)) for part in PACKED_NAMES)
        local = (getattr(t, "_local_tensor", t) for t in empty)  # of a DTensor, this rank's share
        return PackedWeight(
            *(t if t is None else torch.zeros(t.shape, dtype=t.dtype, device=weight.device) for t in local)
        )


def _refuse_missing(model: nn.Module, stored: set[str]) -> None:
    """Raise ValueError if the host has drawn random values for weights that the checkpoint lacks.

    Only the class that was saved is checked: another class may have more weights, such as a new head. The host marks
    the loaded parameters; spreading a model over devices removes the marks.
    """
    architectures = model.config.architectures
    if not isinstance(architectures, list) or type(model).__name__ not in architectures:
        return
    lacking = [name for name, p in model.named_parameters() if not getattr(p, "_is_hf_initialized", False)]
    ignored = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    lacking = [n for n in lacking if n not in stored and not any(re.search(pattern, n) for pattern in ignored)]
    if lacking and not hasattr(model, "hf_device_map"):
        raise ValueError(f"the checkpoint lacks {first_few(lacking)}; is a shard missing?")


def _attach(model: nn.Module) -> None:
    """Give a model its tag, and methods that write its card, count its weights, and refuse unsupported calls."""
    if hasattr(model, "add_model_tags"):
        model.add_model_tags([NAME])
    attach_methods(model, _WRAPPERS)


def _write_card(model: nn.Module, host: Callable, working_dir: str, repo_id: str, *args: Any, **kwargs: Any) -> Any:
    from hf_quant.cards import card_for_upload

    card_for_upload(model, working_dir, repo_id, revision=kwargs.get("revision"), token=kwargs.get("token"))
    return upload_without_leftovers(lambda: host(working_dir, repo_id, *args, **kwargs), working_dir, repo_id, kwargs)


def _refuse_cast(model: nn.Module, host: Callable, *args: Any, **kwargs: Any) -> nn.Module:
    _check_dtype(model, torch._C._nn._parse_to(*args, **kwargs)[1])
    return host(*args, **kwargs)


def _refuse_dtype(model: nn.Module, host: Callable, dtype: torch.dtype) -> nn.Module:
    _check_dtype(model, dtype)
    return host()


def _check_dtype(model: nn.Module, dtype: torch.dtype | None) -> None:
    if dtype is None or dtype == model.dtype:
        return
    error = (
        f"this model is quantized: casting it to {dtype} would leave its codes as they are and round the rest. "
        f"Load it with dtype={dtype}, or dequantize() it first"
    )
    if "diffusers" in sys.modules and dtype == torch.float32:  # the model may be a text encoder
        error += f". Of pipelines, from_pipe casts to float32 unless it is given dtype={model.dtype}"
    raise ValueError(error)


_refuse_resize = refuse_resize  # its name in pickles of whole models
# The host refuses `half` and `float` itself, and ends an upload with `_upload_modified_files`, after writing its card.
_WRAPPERS: dict[str, Wrapper] = {
    "to": _refuse_cast,
    "bfloat16": partial(_refuse_dtype, dtype=torch.bfloat16),
    "double": partial(_refuse_dtype, dtype=torch.float64),
    "type": refuse_type,
    "num_parameters": count_weights,
    "requires_grad_": refuse_training,
    "resize_token_embeddings": _refuse_resize,
    "_upload_modified_files": _write_card,
}


def _is_own(model: nn.Module) -> bool:
    from transformers.modeling_utils import PreTrainedModel

    return isinstance(model, PreTrainedModel)


def _record(model: nn.Module, config: QuantizerConfig) -> None:
    model.config.quantization_config = config


def _observe(model: nn.Module, config: QuantizerConfig | None, given: QuantizerConfig | None) -> None:
    """Update a transformers model's own records after `quantize_` and `dequantize_`."""
    if config is None:
        unfuse_blocks_(model)
        tie_weights(model)
        if getattr(model, "hf_quantizer", None) is not None:
            model.hf_quantizer.remove_quantization_config(model)
        if NAME in (getattr(model, "model_tags", None) or ()):
            model.model_tags.remove(NAME)
        detach_methods(model, _WRAPPERS)
        generation.detach(model)
        return
    tie_codes(model)
    quantizer = TransformersQuantizer(config, pre_quantized=False)
    model.hf_quantizer, model.is_quantized, model.quantization_method = quantizer, True, config.quant_method
    _record(model, config)
    _attach(model)
    generation.attach(model)
    fuse_blocks_as_configured_(model, given)


def _tokenizer_of(model: nn.Module) -> Any:
    """The tokenizer beside the checkpoint that a model was loaded from, None if there is none."""
    name = model.config.name_or_path if _is_own(model) else ""
    if not name:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        return None


_OBSERVER = quantize.Observer(_is_own, _observe, _record, keep_prepared, has_cache=True)


def register() -> None:
    """Register with transformers. Further calls do nothing."""
    if NAME not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING:
        auto.register_quantization_config(NAME)(QuantizerConfig)
    if NAME not in auto.AUTO_QUANTIZER_MAPPING:
        auto.register_quantizer(NAME)(TransformersQuantizer)
    if QuantizerConfig not in auto.LOADING_ATTRIBUTES_CONFIG_TYPES:
        auto.LOADING_ATTRIBUTES_CONFIG_TYPES += (QuantizerConfig,)
    explain_foreign_(auto.AutoHfQuantizer)
    if _OBSERVER not in quantize.OBSERVERS:
        quantize.OBSERVERS.append(_OBSERVER)
        HOST_RULES.append(lambda model: block_rules(model) if _is_own(model) else None)
        TOKENIZERS.append(_tokenizer_of)


register()
