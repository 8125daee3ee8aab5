"""The diffusers adapter: quantize on load, save, reload (`from_pretrained`, `from_single_file`, `save_pretrained`).

`from_pretrained` calls `DiffusersQuantizer` in this order: `maybe_update_loaded_keys` with the checkpoint's files,
`_process_model_before_weight_loading` on the meta model, the sizes for the device map, `update_missing_keys`,
`create_quantized_param` for each tensor that `check_if_quantized_param` claims, and
`_process_model_after_weight_loading`. Text encoders of a pipeline are transformers models: the other adapter's.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from typing import Any

import diffusers.quantizers.auto as auto
import torch
from accelerate.utils import set_module_tensor_to_device
from diffusers.quantizers import base
from torch import nn

import hf_quant.integrations.diffusers.layouts  # noqa: F401  (makes classes of the host quantizable)
from hf_quant import planning, quantize
from hf_quant._wording import first_few
from hf_quant.checkpoint import check_packed, stored_weights
from hf_quant.config import QuantizerConfig, QuantMethod
from hf_quant.integrations.diffusers.processors import (  # noqa: F401  (pickles of models look for the functions here)
    ATTENTION_WRAPPERS,
    _set_default_processors,
    _set_processors,
    set_attention,
)
from hf_quant.integrations.diffusers.refusals import (  # noqa: F401  (pickles of models look for the functions here)
    REFUSED,
    _refuse_layerwise_casting,
    _refuse_qkv_fusion,
)
from hf_quant.integrations.diffusers.rules import fitting, is_autoencoder, rules_within
from hf_quant.integrations.foreign import explain_foreign_
from hf_quant.integrations.leftovers import upload_without_leftovers
from hf_quant.integrations.loading import (
    prepare_from_checkpoint,
    prepare_from_config,
    quantize_into,
    read_keys,
    trim_memory,
    waiting_module,
)
from hf_quant.integrations.methods import (
    attach_methods,
    count_weights,
    detach_methods,
    refuse_training,
    refuse_type,
    stored_schemes,
)
from hf_quant.integrations.requested import take_requested
from hf_quant.kernels.native import use_huge_pages
from hf_quant.modules import STORED_NAMES, QuantizedModule, packed_key
from hf_quant.planning import resolved
from hf_quant.quantize import dequantize_, fuse_as_configured_, stored_config


NAME = QuantMethod.HF_QUANT.value
_CONFIG_KEYS = ("quantization_config", "_pre_quantization_dtype")  # keys that a quantizer adds to model.config
# Weights quantized between two returns of freed memory to the system. Loading a 428 MB model (bf16, random weights) as
# int8, 215 MB, peaks at +257 MB with it and at +306 MB without, in the same time.
_TRIM_BYTES = 2**25
_logger = logging.getLogger(NAME)


class DiffusersQuantizer(base.DiffusersQuantizer):
    """Quantize a diffusers model on load, parameter by parameter, or load a quantized checkpoint."""

    requires_calibration = False
    # The modules that a model keeps in fp32 stay in fp32, as without a quantizer.
    use_keep_in_fp32_modules = True
    quantization_config: QuantizerConfig

    def __init__(self, quantization_config: QuantizerConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._dtype: torch.dtype | None = None
        self._headers: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._elements = self._bytes = self._largest = 0  # see `_measure`
        self._untrimmed = 0
        self._fuse_projections: bool | None = None
        self._fuse_activations: bool | None = None

    @property
    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters train on top of the frozen codes: every forward passes the exact gradient to its input."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True

    @property
    def supports_parallel_loading(self) -> bool:
        """Threads may fill packed tensors, but must not replace weights by codes: that changes names of parameters."""
        return self.pre_quantized

    # Before the weights.

    def validate_environment(
        self,
        *args: Any,
        torch_dtype: torch.dtype | None = None,
        device_map: dict[str, Any] | str | None = None,
        **kwargs: Any,
    ) -> None:
        if torch_dtype is not None and torch_dtype.itemsize == 1:
            raise ValueError(
                f"dtype is {torch_dtype}: that is for the layers that are not quantized, which compute in 16 or 32 "
                "bits; pass torch.bfloat16, torch.float16 or torch.float32"
            )
        requested = take_requested(self.quantization_config)
        if requested is not None:  # nothing in the checkpoint depends on it: a user may choose 8-bit attention
            self.quantization_config.attention = requested.attention or self.quantization_config.attention
        # The host writes the checkpoint's tensors to disk without a call of `create_quantized_param`.
        if not self.pre_quantized and isinstance(device_map, dict) and "disk" in device_map.values():
            modules = [name or "the whole model" for name, device in device_map.items() if device == "disk"]
            raise ValueError(
                f"device_map puts {first_few(modules)} on disk, where weights cannot go while they are being "
                "quantized. Allow more memory (max_memory), or save the quantized model first and load that: packed "
                "weights can be on disk"
            )

    def update_torch_dtype(self, torch_dtype: torch.dtype | None) -> torch.dtype | None:
        self._dtype = torch_dtype
        return torch_dtype

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: list[str]) -> list[str]:
        # Read the headers of every shard before any is loaded: quantizing takes minutes, and the last shard may be
        # truncated.
        files = [file for file in checkpoint_files if self.pre_quantized or str(file).endswith(".safetensors")]
        headers = read_keys(files)
        if not self.pre_quantized:
            return loaded_keys
        self._headers = headers
        guards = {f"{stored.module}.{stored.weight}" for stored in stored_weights(self._headers)}
        # An index may list a tensor that no shard has: the host would leave it on the meta device.
        return [key for key in loaded_keys if key in headers and key not in guards]

    def _process_model_before_weight_loading(
        self,
        model: nn.Module,
        *,
        state_dict: dict[str, torch.Tensor] | None = None,
        keep_in_fp32_modules: list[str] | None = None,
        **kwargs: Any,
    ) -> nn.Module:
        if state_dict is not None:
            self.pre_quantized = False  # `from_single_file` passes True to every quantizer
        self._fuse_projections = self.quantization_config.fuse_projections
        self._fuse_activations = self.quantization_config.fuse_activations
        if self.pre_quantized:
            prepare_from_checkpoint(model, self.quantization_config, self._headers, rename=str, tied={})
            self._headers = {}
        elif self.quantization_config.plan is not None:
            raise ValueError("this QuantizerConfig holds the plan of another model; pass a new one")
        elif is_autoencoder(model) and not self.quantization_config.modules:
            _logger.warning(
                "%s stays in 16 bit: it is small, and every pixel passes through it. Name layers in `modules` to "
                "quantize these.",
                type(model).__name__,
            )
            self.quantization_config = resolved(fitting(model, self.quantization_config), {})  # attention may be left
        else:
            config = fitting(model, self.quantization_config)
            self.quantization_config = prepare_from_config(model, config, dtype=self._dtype)
        if not self.pre_quantized and self.quantization_config.kv_cache is not None:  # a pipeline's config may have it
            _logger.warning(
                "kv_cache is %r, but only models of transformers have one: not %s",
                *(self.quantization_config.kv_cache, type(model).__name__),
            )
            self.quantization_config.kv_cache = None  # of the resolved copy
        self._measure(model, keep_in_fp32_modules or [])
        return model

    def maybe_update_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        # Only `from_single_file` calls this before the model is prepared; its own errors would not name the cause.
        if not self._bytes and any(key.rpartition(".")[2].startswith("qdata") for key in state_dict):
            raise ValueError(
                "the file is quantized by hf_quant: load the directory it was saved in, by from_pretrained"
            )
        return state_dict

    # Sizes, for the device map and the allocator.

    def get_special_dtypes_update(self, model: nn.Module, torch_dtype: torch.dtype) -> dict[str, Any]:
        waiting = {name: _NoBytes() for name in _waiting_weights(model)}
        return {**super().get_special_dtypes_update(model, torch_dtype), **waiting}

    def adjust_max_memory(self, max_memory: dict[str, int | str]) -> dict[str, int | str]:
        """Reserve memory for the one weight that is being quantized, in fp32."""
        return {k: max(v - self._largest, 0) if isinstance(v, int) else v for k, v in max_memory.items()}

    def get_cuda_warm_up_factor(self) -> Fraction:
        """Return (bytes of the elements that the host counts, in the model's dtype) / (true bytes).

        The host floor-divides the number of elements by the result, so a fraction is allowed.
        """
        if not self._bytes:  # from_single_file asks before the model is prepared
            return Fraction(super().get_cuda_warm_up_factor())
        return Fraction(self._elements * (self._dtype or torch.get_default_dtype()).itemsize, self._bytes)

    def _measure(self, model: nn.Module, keep_in_fp32_modules: list[str]) -> None:
        """Count elements with the waiting weights, true bytes without them, and bytes of the largest one."""
        waiting = set(_waiting_weights(model))
        for name, tensor in model.state_dict().items():
            self._elements += tensor.numel()
            if name in waiting:
                self._largest = max(self._largest, 4 * tensor.numel())
                continue
            dtype = tensor.dtype
            if dtype.is_floating_point:
                fp32 = any(part in name.split(".") for part in keep_in_fp32_modules)
                dtype = torch.float32 if fp32 else self._dtype or dtype
            self._bytes += tensor.numel() * dtype.itemsize

    # The weights.

    def update_missing_keys(self, model: nn.Module, missing_keys: list[str], prefix: str) -> list[str]:
        computed = {
            f"{name}.{packed_key(part, weight)}"
            for name, module in _quantized_modules(model)
            for weight in module.placeholders
            for part in STORED_NAMES
        }
        missing = [key for key in missing_keys if key not in computed]
        # The host would warn and leave them on the meta device.
        if any(True for _ in _quantized_modules(model)):
            _check_none_missing(sorted(missing))
        return missing

    def check_if_quantized_param(
        self, model: nn.Module, param_value: torch.Tensor, param_name: str, state_dict: dict[str, Any], **kwargs: Any
    ) -> bool:
        if self.pre_quantized:
            return False  # the host loads packed tensors; shapes and dtypes are checked already
        return waiting_module(model, param_name) is not None or _is_float8(param_value)

    def create_quantized_param(
        self,
        model: nn.Module,
        param_value: torch.Tensor,
        param_name: str,
        target_device: torch.device | str | int,
        state_dict: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        module = waiting_module(model, param_name)
        if module is None:  # fp8: with a quantizer, from_single_file would make it fp32, whatever dtype was asked for
            set_module_tensor_to_device(model, param_name, target_device, value=param_value, dtype=self._dtype)
            return
        # `param_value` is rounded to the model's dtype already; codes are computed from the checkpoint's values.
        source = state_dict[param_name]
        if _is_float8(source):
            source = source.to(module.compute_dtype)
        leaf, device = param_name.rpartition(".")[2], self.quantization_config.quantization_device
        input_scale = module.loaded_input_scale(leaf)
        module.fill_(leaf, quantize_into(module, leaf, source.to(target_device), param_name, device))
        if input_scale is not None:
            module.set_input_scale_(leaf, input_scale.view(torch.float32))
        self._untrimmed += source.nbytes
        if self._untrimmed > _TRIM_BYTES:
            self._untrimmed = 0
            trim_memory()

    # After the weights.

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        trim_memory()
        _check_none_missing(list(_waiting_weights(model)))  # from_single_file; ignored mismatched shapes
        if not any(True for _ in _quantized_modules(model)) and self.quantization_config.attention is None:
            forget(model)
            return model
        for name, module in _quantized_modules(model):
            if self.pre_quantized and module.packed_device(module.weight_names[0]).type != "meta":
                check_packed(module, name)
        # None means no, too: with many tokens per step the cost of a kernel launch is hidden.
        fuse_as_configured_(model, bool(self._fuse_projections))
        _fuse_activations(model, self._fuse_activations)
        _attach(model, self)
        use_huge_pages(model)
        return model

    def get_state_dict_and_metadata(
        self, state_dict: dict[str, Any], safe_serialization: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        codes = next((key for key in state_dict if key.rpartition(".")[2] == "qdata"), None)
        if codes is None:
            return state_dict, {}
        if not safe_serialization:
            raise ValueError("a quantized model is saved as safetensors only; leave safe_serialization=True")
        adapted = next((key for key in state_dict if ".base_layer." in key), None)
        if adapted is not None:
            raise ValueError(
                f"{adapted.partition('.base_layer.')[0]} has adapters, with which the model could not be loaded: "
                "unload them first (unload_lora, or the pipeline's unload_lora_weights). fuse_lora before that keeps "
                "their effect; save_lora_weights saves them apart, from peft.get_peft_model_state_dict(model)"
            )
        # The guard: without hf_quant a load fails at this key by its shape, even if config.json is lost.
        return {**state_dict, f"{codes.removesuffix('qdata')}weight": torch.empty(0, dtype=torch.float32)}, {}

    def dequantize(self, model: nn.Module) -> nn.Module:
        return dequantize_(model)  # `_observe` corrects the model's records, here as after a direct call


class _NoBytes:
    """Stand-in for the dtype of a weight that takes no memory, because it is about to be quantized.

    accelerate reads a dtype's bits off the end of its name.
    """

    def __str__(self) -> str:
        return "none0"


def _quantized_modules(model: nn.Module) -> Iterator[tuple[str, QuantizedModule]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, QuantizedModule))


def _waiting_weights(model: nn.Module) -> Iterator[str]:
    """Yield the names of the 16-bit weights that are not loaded yet, and so not quantized."""
    return (f"{name}.{weight}" for name, module in _quantized_modules(model) for weight in module.placeholders)


def _check_none_missing(names: list[str]) -> None:
    """Raise ValueError if the checkpoint lacks tensors; `names` lists them."""
    if names:
        raise ValueError(
            f"the checkpoint has no fitting {first_few(names)}; is it of another model, or is a shard missing?"
        )


def _is_float8(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.itemsize == 1


def _attach(model: nn.Module, quantizer: DiffusersQuantizer) -> None:
    """Give a quantized model the attributes that the host's own loading gives it, and its config the resolved plan."""
    config = quantizer.quantization_config
    model.hf_quantizer, model.is_quantized, model.quantization_method = quantizer, True, config.quant_method
    _record(model, config)
    for name, refuse in REFUSED.items():
        if hasattr(model, name):
            setattr(model, name, refuse)
    if config.attention is not None:
        set_attention(model, config.attention)
        attach_methods(model, {name: wrap for name, wrap in ATTENTION_WRAPPERS.items() if hasattr(model, name)})
    attach_methods(model, _WRAPPERS)


def forget(model: nn.Module) -> None:
    """Undo `_attach`: the host's `dequantize` leaves the config behind, and a saved model would not load."""
    detach_methods(model, {**_WRAPPERS, **ATTENTION_WRAPPERS})
    for attribute in ("hf_quantizer", "quantization_method", *REFUSED):
        model.__dict__.pop(attribute, None)
    model.is_quantized = False
    _fuse_activations(model, False)
    if (config := stored_config(model)) is not None and config.attention is not None:
        set_attention(model, None)
    _set_config(model, {key: value for key, value in model._internal_dict.items() if key not in _CONFIG_KEYS})


def refresh_plan(model: nn.Module) -> None:
    """Write the schemes that the modules of a quantized diffusers model have now into its stored plan."""
    schemes = stored_schemes(model)
    config = resolved(model.hf_quantizer.quantization_config, schemes)
    model.hf_quantizer.quantization_config = config
    if config.plan or config.attention is not None:
        _attach(model, model.hf_quantizer)
    else:
        forget(model)


def _write_card(model: nn.Module, host: Callable, working_dir: Any, repo_id: str, *args: Any, **kwargs: Any) -> Any:
    if not kwargs.get("subfolder"):  # a folder of a repository has no card; the repository has one
        from hf_quant.cards import card_for_upload

        card_for_upload(model, working_dir, repo_id, token=kwargs.get("token"))
    return upload_without_leftovers(lambda: host(working_dir, repo_id, *args, **kwargs), working_dir, repo_id, kwargs)


def _move(model: nn.Module, host: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """Wrap `to`: the host refuses any dtype, but pipelines name the one that a model has, too."""
    device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    if dtype is None:  # `save_lora_adapter` gives dtype=None, and the host would refuse the word
        return host(*args, **{name: value for name, value in kwargs.items() if name != "dtype"})
    if dtype != model.dtype:
        default = f". Of pipelines, from_pipe casts to float32 unless it is given dtype={model.dtype}"
        raise ValueError(
            f"Casting a quantized model to {dtype} would leave its codes as they are and round the rest: load it with "
            f"dtype={dtype}, or dequantize() it first{default if dtype == torch.float32 else ''}"
        )
    options = {} if memory_format is None else {"memory_format": memory_format}
    return host(device=device, non_blocking=non_blocking, **options)


def _move_to(model: nn.Module, host: Callable[..., nn.Module], dtype: torch.dtype) -> nn.Module:
    """Wrap `bfloat16` and `double`, as `to` of these dtypes; the host refuses `half` and `float` itself."""
    return model.to(dtype)


# Both `push_to_hub` and `save_pretrained(push_to_hub=True)` end with `_upload_folder`, after the host has written its
# card.
_WRAPPERS = {
    "_upload_folder": _write_card,
    "bfloat16": partial(_move_to, dtype=torch.bfloat16),
    "double": partial(_move_to, dtype=torch.float64),
    "num_parameters": count_weights,
    "requires_grad_": refuse_training,
    "to": _move,
    "type": refuse_type,
}


def _is_own(model: nn.Module) -> bool:
    host = sys.modules.get("diffusers.models.modeling_utils")  # None: not imported, so no model of diffusers exists
    # Containers such as MultiControlNetModel have no config.
    return host is not None and isinstance(model, host.ModelMixin) and hasattr(model, "_internal_dict")


def _fuse_activations(model: nn.Module, fuses: bool | None) -> None:
    # Not at the top: see `diffusers_rules.rules`.
    from hf_quant.integrations.diffusers.fused_norms import quantizes_activations, set_fusion_

    if not set_fusion_(model, fuses) and fuses and quantizes_activations(model):
        _logger.warning("fuse_activations is True, but %s has no block that hf_quant knows", type(model).__name__)


def _observe(model: nn.Module, config: QuantizerConfig | None, given: QuantizerConfig | None) -> None:
    """Update a diffusers model's own records after `quantize_` and `dequantize_`."""
    if config is None:
        forget(model)
        return
    before, quantizer = model.__dict__.get("hf_quantizer"), DiffusersQuantizer(config, pre_quantized=False)
    fuses = given.fuse_activations
    if before is not None:  # only weights or only attention was quantized before: that config still holds
        fuses = before._fuse_activations if fuses is None else fuses
        if before.quantization_config.attention is not None and config.attention is None:
            set_attention(model, None)
    quantizer._fuse_activations = fuses
    _fuse_activations(model, fuses)
    _attach(model, quantizer)


def _record(model: nn.Module, config: QuantizerConfig) -> None:
    _set_config(model, {**model._internal_dict, "quantization_config": config})


def _set_config(model: nn.Module, values: dict[str, Any]) -> None:
    """Give a model a config of these values. An attribute that the host has set since then is kept.

    `load_ip_adapter` sets `config.encoder_hid_dim_type`, by which the forward finds the image: `config["..."]`, and so
    the file, has the value of before. `register_to_config` would go back to that value.
    """
    old = model._internal_dict
    model._internal_dict = new = type(old)(values)
    for key, value in vars(old).items():
        if key in old and value is not old[key] and values.get(key) is old[key]:
            setattr(new, key, value)


_OBSERVER = quantize.Observer(_is_own, _observe, _record)


def register() -> None:
    """Register with diffusers. Further calls do nothing."""
    auto.AUTO_QUANTIZER_MAPPING[NAME] = DiffusersQuantizer
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[NAME] = QuantizerConfig
    explain_foreign_(auto.DiffusersAutoQuantizer)
    if _OBSERVER not in quantize.OBSERVERS:
        quantize.OBSERVERS.append(_OBSERVER)
        planning.HOST_RULES.append(lambda model: rules_within(model, _is_own))


register()
