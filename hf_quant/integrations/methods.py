"""Methods of one model instance, kept in its attributes: no class of a host is changed.

Each method refers to its model weakly, so that the model's memory is freed with its last reference elsewhere. The
methods are objects instead of functions, so that the model can be pickled and copied.
"""

import inspect
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_quant.modules import QuantizedModule, uncounted_weights
from hf_quant.scheme import LinearScheme


class ModelMethod:
    """A callable in the attributes of one model, under the name of the method that it replaces."""

    def __init__(self, model: nn.Module, name: str) -> None:
        # host: the earlier attribute of that name, such as accelerate's method; None: the class's method.
        self.name, self.host = name, model.__dict__.get(name)
        self.bind(model)

    def bind(self, model: nn.Module) -> None:
        """Serve `model`, which has the attributes of the earlier model: a copy, or that model made again."""
        self.model = weakref.ref(model)
        if isinstance(self.host, ModelMethod):
            self.host.bind(model)

    @property
    def __name__(self) -> str:  # accelerate's dispatch_model asks for the name of a model's `to`
        return self.name

    def __getstate__(self) -> tuple[Any, ...]:
        return self.model(), self.name, self.host

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        model, self.name, self.host = state
        self.bind(model)

    def call_host(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call the method that this one replaces."""
        if self.host is not None:
            return self.host(*args, **kwargs)
        return getattr(type(model), self.name)(model, *args, **kwargs)


Wrapper = Callable[..., Any]  # (model, host's method, *args, **kwargs) -> what the method is to return


class WrappedMethod(ModelMethod):
    """A method that calls `wrappers[name](model, host, *args, **kwargs)`.

    `from_pretrained(...).to(device)` drops the model between the look-up of this method and the call. So this object
    holds the attributes, too, and makes a dropped model again from them. When the model is freed, these methods are
    removed from its attributes, so that no reference cycle remains.
    """

    def __init__(self, model: nn.Module, name: str, wrappers: Mapping[str, Wrapper]) -> None:
        self.wrappers = wrappers
        super().__init__(model, name)

    def bind(self, model: nn.Module) -> None:
        attributes, name, host = model.__dict__, self.name, self.host
        self.model_class, self.attributes = type(model), attributes

        def forget(ref: weakref.ref[nn.Module]) -> None:  # without `self`, which would keep itself
            attributes.pop(name, None)
            if host is not None:
                attributes[name] = host

        self.model = weakref.ref(model, forget)

    def __getstate__(self) -> tuple[Any, ...]:
        return *super().__getstate__(), self.wrappers

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        *rest, self.wrappers = state
        super().__setstate__(tuple(rest))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.model()
        if model is None:
            model = object.__new__(self.model_class)
            object.__setattr__(model, "__dict__", self.attributes)
            attach_methods(model, self.wrappers)
            for method in list(self.attributes.values()):
                if isinstance(method, ModelMethod) and method.model() is None:
                    method.bind(model)
        return self.wrappers[self.name](model, partial(self.call_host, model), *args, **kwargs)


def attach_methods(model: nn.Module, wrappers: Mapping[str, Wrapper]) -> None:
    """Replace these methods of a model by calls of the wrappers, which receive the host's method."""
    for name in wrappers:
        if not isinstance(model.__dict__.get(name), WrappedMethod):
            setattr(model, name, WrappedMethod(model, name, wrappers))


def detach_methods(model: nn.Module, wrappers: Mapping[str, Wrapper]) -> None:
    """Undo `attach_methods`."""
    for name in wrappers:
        method = model.__dict__.pop(name, None)
        if isinstance(method, WrappedMethod) and method.host is not None:
            setattr(model, name, method.host)


def stored_schemes(model: nn.Module) -> dict[str, LinearScheme]:
    """Return {module name: scheme} of the codes that a model with quantized modules is saved with; else nothing.

    Beside quantized modules, others may train with int8 codes as their weights (`prepare_training_`).
    """
    found = {name: m.scheme for name, m in model.named_modules() if isinstance(m, QuantizedModule)}
    for name, module in model.named_modules() if found else ():
        stored_as: Any = getattr(module, "stored_as", None)
        if stored_as is not None:
            found[name] = stored_as[0]
    return found


def count_weights(model: nn.Module, host: Callable[..., int], *args: Any, **kwargs: Any) -> int:
    """Wrap `num_parameters`: a quantized weight counts as many weights as its 16-bit original."""
    cls: Any = type(model)
    arguments = inspect.signature(cls.num_parameters).bind(model, *args, **kwargs).arguments
    if arguments.get("only_trainable", False):
        return host(*args, **kwargs)
    return host(*args, **kwargs) + uncounted_weights(model, not arguments.get("exclude_embeddings", False))


def refuse_training(model: nn.Module, host: Callable[..., nn.Module], requires_grad: bool = True) -> nn.Module:
    """Wrap `requires_grad_`: torch's own error for codes does not say what they are."""
    if requires_grad and any(isinstance(module, QuantizedModule) for module in model.modules()):
        raise ValueError(
            "the quantized weights of this model are codes, which cannot be trained: train adapters on them (PEFT), "
            "or dequantize the model. Parameters that are not quantized can be trained: set requires_grad of those "
            "whose is_floating_point() is True"
        )
    return host(requires_grad)


def refuse_resize(model: Any, host: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """Wrap `resize_token_embeddings`: the host makes a plain layer of the head, and a longer weight of the table."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    if any(isinstance(module, QuantizedModule) for module in ends):
        raise ValueError(
            "the embedding or the output head of this model is quantized and cannot be resized: resize the 16-bit "
            "model and quantize that, keep both in 16 bit, or dequantize() first"
        )
    if any(getattr(module, "is_in_training", False) for module in ends):
        raise ValueError(
            "the embedding or the output head of this model is prepared for training and cannot be resized: resize "
            "the model before prepare_qat_ or prepare_training_, or finish_training_ first"
        )
    return host(*args, **kwargs)


def keep_prepared(model: nn.Module, is_prepared: bool) -> None:
    """Have a model whose layers train refuse what would drop one; undo it when they do not train any more."""
    (attach_methods if is_prepared else detach_methods)(model, {"resize_token_embeddings": refuse_resize})


def refuse_type(model: nn.Module, host: Callable[..., nn.Module], dst_type: torch.dtype | str) -> nn.Module:
    """Wrap `type`, which casts integers, too."""
    raise ValueError(
        f"this model is quantized: type({dst_type!r}) would cast its codes, which are then lost. Load it with another "
        "dtype, or dequantize() it first"
    )
