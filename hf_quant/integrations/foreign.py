"""Checkpoints that another library has quantized: `from_pretrained` with our config refuses them, and says what to do.

Their weights are codes already. Hosts would load them with that library, pass over our config, or, where they do not
know the method, take codes for weights.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from hf_quant.checkpoint import read_header, shorten
from hf_quant.config import QuantizerConfig, QuantMethod
from hf_quant.integrations.wrapping import wrap_once
from hf_quant.modules import quantized_class


_IMPORT = (
    "`hf-quant import MODEL OUT` (hf_quant.import_checkpoint) makes a checkpoint of it that loads onto hf_quant's "
    "kernels, every weight as it is"
)
_SCALES = ("weight_scale", "weight_scale_inv", "SCB", "weight.absmax")


def explain_foreign_(host: type) -> None:
    """Let a host's merger of configs raise our error where a checkpoint has another library's and the user gives ours.

    `host` is the host's class with `merge_quantization_configs`. Further calls do nothing.
    """
    wrap_once(host, "merge_quantization_configs", _explaining)


def _explaining(merge: Callable[..., Any]) -> Callable[..., Any]:
    def merge_quantization_configs(cls: type, quantization_config: Any, quantization_config_from_args: Any) -> Any:
        if isinstance(quantization_config_from_args, QuantizerConfig):
            _refuse_method(quantization_config)
        merged = merge(cls, quantization_config, quantization_config_from_args)
        if isinstance(quantization_config_from_args, QuantizerConfig):  # diffusers passes over what was given
            vars(merged).update(quantization_config_from_args.get_loading_attributes())
        return merged

    return merge_quantization_configs


def _refuse_method(stored: Any) -> None:
    """Raise ValueError if the config of a checkpoint is of another library."""
    method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
    name = str(getattr(method, "value", method))
    if name != QuantMethod.HF_QUANT.value:
        raise ValueError(
            f"the checkpoint is quantized by {shorten(repr(name))} already, and the QuantizerConfig that was given "
            f"would round it again: leave quantization_config out, or import it: {_IMPORT}"
        )


def refuse_codes(model: nn.Module, files: Iterable[str] | None, rename: Callable[[str], str]) -> None:
    """Raise ValueError if weights to quantize are codes, by the headers of the files: their scales would be lost.

    Codes are integers, or 8-bit floats with a scale beside them.
    """
    modules = dict(model.named_modules())
    for file in files or ():
        if not str(file).endswith(".safetensors"):
            continue
        tensors = read_header(file)
        for key, info in tensors.items():
            if info.dtype.itemsize > 1:
                continue
            name = rename(key)
            module = modules.get(name.removesuffix(".weight"))
            if not name.endswith(".weight") or module is None:
                continue
            prefix = key.removesuffix("weight")
            has_scale = any(f"{prefix}{scale}" in tensors for scale in _SCALES)
            if quantized_class(type(module)) is not None and (has_scale or not info.dtype.is_floating_point):
                raise ValueError(
                    f"the checkpoint has {key} as {info}, the codes of another library, and no weights: {_IMPORT}"
                )
