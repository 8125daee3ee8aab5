"""`WeightProxy`: what `module.weight` returns once the weight is stored as codes.

A tensor without storage that has the shape, dtype and device of the 16-bit weight. Models may read `weight.dtype`
(T5 and some thirty others do), PEFT may merge into `weight.data`: any read computes on the dequantized weight, any
assignment quantizes the new value with the scheme of the layer. So does a write to a view of `weight.data`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only


_VIEWS = frozenset(
    getattr(Tensor, name)
    for name in ("view", "reshape", "flatten", "t", "transpose", "permute", "squeeze", "unsqueeze", "narrow", "select")
) | {Tensor.__getitem__, Tensor.T.__get__, Tensor.mT.__get__}


class WeightView(torch.Tensor):
    """A view of `weight.data`, dequantized; a write to it quantizes the whole weight with the new values.

    PEFT's OFT merges into a convolution by `weight.data.view(N, -1).copy_(...)`.
    """

    proxy: "WeightProxy"
    whole: Tensor

    @classmethod
    def of(cls, view: Tensor, proxy: "WeightProxy", whole: Tensor) -> Tensor:
        """A view of `whole` as one of the weight behind `proxy`; a copy, as some calls return, as it is."""
        if not view._is_view():
            return view
        result = view.as_subclass(cls)
        result.proxy, result.whole = proxy, whole
        return result

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: int) -> Any:
        return self.clone().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            views = [(view, view._version) for view in (*args, *kwargs.values()) if isinstance(view, cls)]
            result = func(*args, **kwargs)
            for view, version in views:
                if view._version != version:
                    view.proxy.data = view.whole
            if func in _VIEWS and isinstance(args[0], cls):
                return cls.of(result, args[0].proxy, args[0].whole)
        return result


class WeightProxy(torch.Tensor):
    """Stand-in for a quantized weight of `module`; see the module docstring."""

    is_view = False  # True for a part of a weight, or a transposed one
    # transformers draws random values for tensors without this mark; a parent's `_init_weights` reaches into children.
    _is_hf_initialized = True

    @staticmethod
    def __new__(cls, module: torch.nn.Module, name: str, is_data: bool = False) -> "WeightProxy":
        return torch.Tensor._make_wrapper_subclass(
            cls, module.weight_shape(name), dtype=module.compute_dtype, device=module.packed_device(name)
        )

    def __init__(self, module: torch.nn.Module, name: str, is_data: bool = False) -> None:
        self.module = module
        self.name_in_module = name
        self.is_data = is_data

    def dequantize(self) -> Tensor:
        """The weight as a plain tensor in the module's compute dtype."""
        return self.module.dequantize_weight(self.name_in_module)

    def alias(self) -> "WeightProxy":
        """Another proxy of the same weight."""
        return type(self)(self.module, self.name_in_module, self.is_data)

    def __repr__(self) -> str:
        return f"WeightProxy({tuple(self.shape)}, {self.dtype}, {self.module.scheme})"

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self.dequantize()

    def __reduce_ex__(self, protocol: int) -> Any:
        return self.dequantize().__reduce_ex__(protocol)

    # `weight.data += delta` (PEFT's merge) reads `.data`, adds out of place and assigns `.data`.
    @property
    def data(self) -> Tensor:
        return self.dequantize() if self.is_view else type(self)(self.module, self.name_in_module, is_data=True)

    @data.setter
    def data(self, value: Tensor) -> None:
        if self.is_view:
            raise ValueError("this is a view of a quantized weight, which takes no values: assign to the whole weight")
        self.module.requantize_weight_(self.name_in_module, value)

    def __setitem__(self, index: Any, value: Any) -> None:
        weight = self.dequantize()  # a view of the proxy would take the values and forget them
        weight[index] = value
        self.data = weight

    def __iadd__(self, other: Tensor) -> Tensor:
        return self.dequantize() + other

    def __isub__(self, other: Tensor) -> Tensor:
        return self.dequantize() - other

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _VIEWS and isinstance(args[0], cls) and args[0].is_data:
            with torch.inference_mode(False):  # where tensors do not count what is written to them
                whole = args[0].dequantize()
                return WeightView.of(func(whole, *args[1:], **kwargs), args[0], whole)
        if func == Tensor.requires_grad.__set__ and args[1]:
            raise ValueError(
                f"this weight is stored as {args[0].module.scheme} and cannot be trained: train an adapter of its "
                "layer, or dequantize_ the model first"
            )
        if func is F.embedding and len(args) == 2 and isinstance(args[1], cls) and hasattr(args[1].module, "look_up"):
            return args[1].module.look_up(args[0])
        with torch._C.DisableTorchFunctionSubclass():  # results are plain tensors, not proxies
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0].alias()
        plain_args, plain_kwargs = tree_map_only(cls, cls.dequantize, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        written = [
            (argument, plain)
            for argument, plain, schema in zip(args, plain_args, func._schema.arguments)
            if isinstance(argument, cls) and schema.alias_info is not None and schema.alias_info.is_write
        ]
        for proxy, value in written:
            proxy.data = value
        return args[0] if written and result is written[0][1] else result
