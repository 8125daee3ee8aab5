"""Save a transformers model with the plan of the quantized modules that it has at that moment.

A model that is quantized as a whole carries its quantizer, whose hooks the host calls. No hook runs when a user
quantizes a part of a model, saves a part of a quantized one, or exchanges a layer. So `save_pretrained` of the host's
class is wrapped; without quantized modules the host's method runs alone. `hf_quant._boot` imports this module after
transformers has loaded that class, and never before.
"""

import inspect
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import transformers.modeling_utils as modeling_utils
from transformers.utils import SAFE_WEIGHTS_NAME

import hf_quant.integrations.transformers.dtypes  # noqa: F401  (wraps a property of the same class)
import hf_quant.integrations.transformers.parts  # noqa: F401  (wraps the reader of configs)
from hf_quant.checkpoint import config_of
from hf_quant.integrations.leftovers import without_leftovers
from hf_quant.integrations.methods import stored_schemes
from hf_quant.integrations.transformers.names import tie_codes, tie_weights, tied_modules
from hf_quant.integrations.transformers.quantizer import TransformersQuantizer
from hf_quant.integrations.wrapping import wrap_once
from hf_quant.modules import QuantizedModule
from hf_quant.planning import resolved, updated
from hf_quant.quantize import dequantize_, stored_config


_CONFIG = "quantization_config"


def register() -> None:
    """Wrap `save_pretrained`. Further calls do nothing."""
    wrap_once(modeling_utils.PreTrainedModel, "save_pretrained", _with_plan)


def _with_plan(host: Callable[..., Any]) -> Callable[..., Any]:
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**inspect.signature(host).bind(self, *args, **kwargs).arguments, **kwargs}
        with _recorded(self), _given(self, given.get("state_dict")), _replacing(self, given):
            return host(self, *args, **kwargs)

    return save_pretrained


@contextmanager
def _recorded(model: Any) -> Iterator[None]:
    """Let the config of a model, and none of the models inside it, hold the plan of the model's quantized modules.

    A model without a quantizer, such as a part of a quantized one, has one meanwhile.
    """
    schemes = stored_schemes(model)
    quantizer = getattr(model, "hf_quantizer", None)
    if isinstance(quantizer, TransformersQuantizer):  # an embedding of codes may have been exchanged
        tie_weights(model)
        tie_codes(model)
    if not schemes or not isinstance(quantizer, TransformersQuantizer | None):
        if isinstance(quantizer, TransformersQuantizer):
            _without_plan(model, quantizer)
        yield
        return
    _check_tied(model, schemes)
    known = stored_config(model)
    config = updated(known or config_of(model), schemes)
    others = {id(m.config): m.config for m in model.modules() if isinstance(m, modeling_utils.PreTrainedModel)}
    if quantizer is None:
        model.hf_quantizer = TransformersQuantizer(config, pre_quantized=False)
    else:
        del others[id(model.config)]  # it keeps the plan
        quantizer.quantization_config = config
    removed = [(other, vars(other).pop(_CONFIG)) for other in others.values() if _CONFIG in vars(other)]
    model.config.quantization_config = config
    try:
        yield
    finally:
        if quantizer is None:
            del model.hf_quantizer, model.config.quantization_config
        for other, before in removed:
            other.quantization_config = before


def _without_plan(model: Any, quantizer: TransformersQuantizer) -> None:
    """Correct the records of a model whose quantized modules were dequantized or exchanged one by one, all of them."""
    known = stored_config(model)
    if known is None or not known.plan or any(getattr(module, "is_in_training", False) for module in model.modules()):
        return
    if known.has_more_than_weights:
        quantizer.quantization_config = model.config.quantization_config = resolved(known, {})
    else:
        dequantize_(model)


@contextmanager
def _given(model: Any, state: Any) -> Iterator[None]:
    """Let the quantizer of a model know the state that is to be saved: the host would save the model's own."""
    quantizer = getattr(model, "hf_quantizer", None)
    if state is None or not isinstance(quantizer, TransformersQuantizer):
        yield
        return
    quantizer.given_state = state
    try:
        yield
    finally:
        quantizer.given_state = None


def _replacing(model: Any, given: dict[str, Any]) -> AbstractContextManager[None]:
    """Have a save of a quantized model replace an earlier checkpoint; `given` are the arguments of the save."""
    is_quantized = any(isinstance(module, QuantizedModule) for module in model.modules())
    return without_leftovers(SAFE_WEIGHTS_NAME, given) if is_quantized else nullcontext()


def _check_tied(model: Any, quantized: Container[str]) -> None:
    """Raise ValueError if one of two modules that loading ties is quantized, and the other is not."""
    if not getattr(model.config.get_text_config(decoder=True), "tie_word_embeddings", True):
        return
    modules = dict(model.named_modules(remove_duplicate=False))  # a module may have several names
    codes = {id(module) for name, module in modules.items() if name in quantized}
    for pair in tied_modules(model).items():
        held = [modules.get(f"{name}.base_layer", modules.get(name)) for name in pair]  # in an adapter
        if (id(held[0]) in codes) != (id(held[1]) in codes):
            raise ValueError(
                f"loading would tie {' and '.join(pair)}, of which one alone is quantized: quantize both, by "
                "hf_quant.quantize_(model, ...) of the whole model, or set config.tie_word_embeddings to False"
            )


register()
