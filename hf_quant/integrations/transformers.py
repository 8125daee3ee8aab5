"""The transformers adapter: quantize on load, save, reload (`from_pretrained`, `save_pretrained`), 5.17 and newer.

`HfQuantizer` is called in this order: `_process_model_before_weight_loading` on the meta model, `get_quantize_ops` for
each weight that `param_needs_quantization` names, `_process_model_after_weight_loading`. Which of its other hooks exist
differs between versions; this file uses those that all have.
"""

import re
import types
from collections.abc import Callable
from typing import Any

import torch
import transformers.quantizers.auto as auto
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.base import HfQuantizer

import hf_quant.integrations.conv1d  # noqa: F401  (makes Conv1D quantizable)
from hf_quant import quantize
from hf_quant.config import QuantizerConfig
from hf_quant.integrations._loading import (
    prepare_from_checkpoint,
    prepare_from_config,
    quantize_into,
    read_keys,
    trim_memory,
)
from hf_quant.modules import PACKED_NAMES, QuantizedModule, packed_key, restore_module_, stored_dtype
from hf_quant.quantize import dequantize_


NAME = "hf_quant"


class TransformersQuantizer(HfQuantizer):
    """Quantizes a transformers model on load, parameter by parameter, or loads a checkpoint that is quantized."""

    requires_calibration = False
    quantization_config: QuantizerConfig

    @property
    def is_trainable(self) -> bool:
        """Adapters train on top of the frozen codes: every forward passes the exact gradient to its input."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True

    def is_serializable(self) -> bool:
        return True

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        config = self.quantization_config
        if not self.pre_quantized and config.plan is not None:
            raise ValueError("this QuantizerConfig holds the plan of another model; pass a new one")

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
                raise ValueError("a quantized checkpoint is loaded from its files; `state_dict` cannot be given")
            keys = read_keys(checkpoint_files)
            rename = _renamer(model)
            prepare_from_checkpoint(model, self.quantization_config, keys, rename, _tied_modules(model))
            guards = [key for key, (_, shape) in keys.items() if 0 in shape]
            model._keys_to_ignore_on_load_unexpected = {
                *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
                *(f"^{re.escape(name)}$" for key in guards for name in (key, rename(key))),
            }
        else:
            self.quantization_config = prepare_from_config(model, self.quantization_config)
        _tie_codes(model)
        return model

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        return not self.pre_quantized and _placeholder(model, param_name) is not None

    def param_element_size(self, model: nn.Module, param_name: str, param: torch.Tensor) -> float:
        # The placeholder of a weight takes no memory: its codes are counted under their own names.
        return 0 if _placeholder(model, param_name) is not None else param.element_size()

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self.quantization_config.quantization_device)

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        trim_memory()
        for name, module in list(model.named_modules()):
            if not isinstance(module, QuantizedModule):
                continue
            if module.placeholders:
                # The checkpoint lacks this weight, so the host has initialized it: an untrained head must train.
                restore_module_(module)
                self.quantization_config = _without(self.quantization_config, name)
        model.config.quantization_config = self.quantization_config
        _attach(model)
        return model

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, torch.Tensor] | None, dict[str, str]]:
        if getattr(model, "_hf_peft_config_loaded", False):
            return None, {}  # only the adapter is saved
        key = _guard_key(model)
        # Without hf_quant a load fails at this key by its shape, where it would otherwise draw random weights.
        return (None, {}) if key is None else ({**model.state_dict(), key: torch.empty(0)}, {})

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        # config.dtype, the host's default, is a str after a reload.
        dequantize_(model, getattr(torch, dtype) if isinstance(dtype, str) else dtype)
        return model


class _Quantize(ConversionOps):
    """The host's loading operation: one 16-bit weight in, its packed tensors out."""

    def __init__(self, device: str | None) -> None:
        self.device = device

    def convert(
        self,
        input_dict: dict[str, Any],
        *,
        model: nn.Module | None = None,
        missing_keys: set[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """{parameter name: tensor} -> the same with quantized weights replaced by `qdata`, `scale`, ..."""
        converted: dict[str, Any] = {}
        for key, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            module = _placeholder(model, key)
            if module is None:
                converted[key] = value
                continue
            name, _, leaf = key.rpartition(".")
            packed = quantize_into(module, leaf, weight, key, self.device)
            module.fill_(leaf, None)
            if missing_keys is not None:
                missing_keys.discard(key)
            for part, tensor in zip(PACKED_NAMES, packed):
                if tensor is not None:
                    stored = nn.Parameter(tensor.view(stored_dtype(tensor.dtype)), requires_grad=False)
                    converted[f"{name}.{packed_key(part, leaf)}".lstrip(".")] = stored
        return converted


def _placeholder(model: nn.Module, param_name: str) -> QuantizedModule | None:
    """The quantized module in which a parameter is the placeholder of a 16-bit weight, None if it is not."""
    name, _, leaf = param_name.rpartition(".")
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return None
    return module if isinstance(module, QuantizedModule) and leaf in module.placeholders else None


def _renamer(model: nn.Module) -> Callable[[str], str]:
    """Checkpoint parameter name -> model parameter name, by the host's own renamings."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    renamings = [r for r in get_model_conversion_mapping(model) if isinstance(r, WeightRenaming)]
    state_dict = model.state_dict()

    def rename(key: str) -> str:
        return rename_source_key(key, renamings, [], model.base_model_prefix, state_dict)[0]

    return rename


def _guard_key(model: nn.Module) -> str | None:
    """The weight name, of a quantized module, under which a checkpoint holds one tensor without elements.

    It must be one that no conversion of the host touches when it restores the checkpoint's original names.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    converters = [c for c in get_model_conversion_mapping(model) if isinstance(c, WeightConverter)]
    patterns = [p for c in converters for p in c.reverse_transform().source_patterns]
    for name, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            for weight in module.weight_names:
                key = f"{name}.{weight}"
                if not any(re.search(p, key) for p in patterns):
                    return key
    return None


def _tied_modules(model: nn.Module) -> dict[str, str]:
    """{module: the module whose weight it shares} as the host declares it."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return {
        target.removesuffix(".weight"): source.removesuffix(".weight")
        for target, source in tied.items()
        if target.endswith(".weight") and source.endswith(".weight")
    }


def _tie_codes(model: nn.Module) -> None:
    """Tell the host that quantized tied modules share their codes, in place of their weight."""
    modules = dict(model.named_modules())
    for target, source in _tied_modules(model).items():
        codes = modules.get(source)
        if not isinstance(codes, QuantizedModule):
            continue
        _replace_tie(model.all_tied_weights_keys, target, source, codes)
        # `tie_weights()` expands `_tied_weights_keys` of every submodel again; a class attribute, hence the copy.
        for prefix, owner in modules.items():
            declared = getattr(owner, "_tied_weights_keys", None)
            inner = f"{prefix}." if prefix else ""
            if isinstance(declared, dict) and target.startswith(inner) and source.startswith(inner):
                declared = dict(declared)
                if _replace_tie(declared, target.removeprefix(inner), source.removeprefix(inner), codes):
                    owner._tied_weights_keys = declared


def _replace_tie(keys: dict[str, str], target: str, source: str, codes: QuantizedModule) -> bool:
    """Replace "target.weight": "source.weight" by one entry for each packed tensor; False if it is not there."""
    if keys.pop(f"{target}.weight", None) is None:
        return False
    for part in PACKED_NAMES:
        if part in codes._parameters:
            keys[f"{target}.{part}"] = f"{source}.{part}"
    return True


def _tie_weights(model: nn.Module) -> None:
    """Inverse of `_tie_codes`, after dequantizing."""
    for owner in model.modules():
        for declared in (getattr(owner, "all_tied_weights_keys", None), getattr(owner, "_tied_weights_keys", None)):
            for key in [key for key in declared or () if key.endswith(".qdata")]:
                target, source = key.removesuffix(".qdata"), declared[key].removesuffix(".qdata")
                for part in PACKED_NAMES:
                    declared.pop(f"{target}.{part}", None)
                declared[f"{target}.weight"] = f"{source}.weight"


def _without(config: QuantizerConfig, name: str) -> QuantizerConfig:
    """The resolved config less one module of its plan."""
    from hf_quant.planning import fold_names, unfold_name

    plan = []
    for group in config.plan:
        names = [n for folded in group["modules"] for n in unfold_name(folded) if n != name]
        if names:
            plan.append({"scheme": group["scheme"], "modules": fold_names(names)})
    config = QuantizerConfig.from_dict(config.to_dict())
    config.plan = plan
    return config


def _attach(model: nn.Module) -> None:
    """What the loaded model gets: a model card tag, and a `.to` that refuses another dtype."""
    if hasattr(model, "add_model_tags"):
        model.add_model_tags([NAME])
    model.to = types.MethodType(_to, model)


def _to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """`model.to(device)`; a dtype is refused."""
    dtype = kwargs.get("dtype", next((a for a in args if isinstance(a, torch.dtype)), None))
    if dtype is not None and dtype != self.dtype:
        raise ValueError(
            f"this model is quantized: casting it to {dtype} would leave its codes as they are and round the rest. "
            f"Load it with dtype={dtype}, or dequantize() it first"
        )
    return type(self).to(self, *args, **kwargs)


def _observe(model: nn.Module, config: QuantizerConfig | None) -> None:
    """Keep a transformers model's own records right after `quantize_` and `dequantize_`."""
    from transformers.modeling_utils import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return
    if config is None:
        _tie_weights(model)
        if getattr(model, "hf_quantizer", None) is not None:
            model.hf_quantizer.remove_quantization_config(model)
        model.__dict__.pop("to", None)
        return
    _tie_codes(model)
    quantizer = TransformersQuantizer(config, pre_quantized=False)
    model.hf_quantizer, model.is_quantized, model.quantization_method = quantizer, True, config.quant_method
    model.config.quantization_config = config
    _attach(model)


def register() -> None:
    """Register with transformers; may be called again."""
    if NAME not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING:
        auto.register_quantization_config(NAME)(QuantizerConfig)
    if NAME not in auto.AUTO_QUANTIZER_MAPPING:
        auto.register_quantizer(NAME)(TransformersQuantizer)
    if QuantizerConfig not in auto.LOADING_ATTRIBUTES_CONFIG_TYPES:
        auto.LOADING_ATTRIBUTES_CONFIG_TYPES += (QuantizerConfig,)
    if _observe not in quantize.OBSERVERS:
        quantize.OBSERVERS.append(_observe)


register()
