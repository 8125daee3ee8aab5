"""Methods of one model that something comes before: of the instance, so that no class of a host is touched."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn


def attach_methods(model: nn.Module, before: Mapping[str, Callable[..., None]]) -> None:
    """Have these methods of a model call `before[name](model, *args, **kwargs)` first, which may raise."""
    for name in before:
        if not isinstance(model.__dict__.get(name), _Method):
            setattr(model, name, _Method(model, name, before))


def detach_methods(model: nn.Module, before: Mapping[str, Callable[..., None]]) -> None:
    """Inverse of `attach_methods`."""
    for name in before:
        method = model.__dict__.pop(name, None)
        if isinstance(method, _Method) and method.host is not None:
            setattr(model, name, method.host)


class _Method:
    """A method of one model that first calls another function.

    An object where a function would do: the model that holds it can be pickled and copied. It refers to the model
    weakly, so that its memory is free as soon as nobody else holds it; but `from_pretrained(...).to(device)` drops the
    model between the look-up of its method and the call. So the attributes are held, too, and a model that has
    vanished is made of them again. Its end takes the methods out of the attributes: no cycle is left.
    """

    def __init__(self, model: nn.Module, name: str, before: Mapping[str, Callable[..., None]]) -> None:
        # accelerate's method, of a model that it has spread over devices
        self.__setstate__((model, name, model.__dict__.get(name), before))

    def __getstate__(self) -> tuple:
        return self.model(), self.name, self.host, self.before

    def __setstate__(self, state: tuple) -> None:
        model, name, host, before = state
        attributes = model.__dict__
        self.name, self.host, self.before = name, host, before
        self.model_class, self.attributes = type(model), attributes

        def forget(ref: weakref.ref) -> None:  # without `self`, which would keep itself
            attributes.pop(name, None)
            if host is not None:
                attributes[name] = host

        self.model = weakref.ref(model, forget)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.model()
        if model is None:
            model = object.__new__(self.model_class)
            object.__setattr__(model, "__dict__", self.attributes)
            attach_methods(model, self.before)
        self.before[self.name](model, *args, **kwargs)
        if self.host is not None:
            return self.host(*args, **kwargs)
        return getattr(type(model), self.name)(model, *args, **kwargs)
