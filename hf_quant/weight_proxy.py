"""`WeightProxy`: what `module.weight` returns once the weight is stored as codes.

A tensor without storage that has the shape, dtype and device of the 16-bit weight. Models may read `weight.dtype`
(T5 and some thirty others do), PEFT may merge into `weight.data`: any read computes on the dequantized weight, any
assignment quantizes the new value with the scheme of the layer.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only


class WeightProxy(torch.Tensor):
    """Stand-in for a quantized weight of `module`; see the module docstring."""

    # transformers draws random values for tensors without this mark; a parent's `_init_weights` reaches into children.
    _is_hf_initialized = True

    @staticmethod
    def __new__(cls, module: torch.nn.Module, name: str) -> "WeightProxy":
        return torch.Tensor._make_wrapper_subclass(
            cls, module.weight_shape(name), dtype=module.compute_dtype, device=module.packed_device(name)
        )

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self.module = module
        self.name_in_module = name

    def dequantize(self) -> Tensor:
        """The weight as a plain tensor in the module's compute dtype."""
        return self.module.dequantize_weight(self.name_in_module)

    def __repr__(self) -> str:
        return f"WeightProxy({tuple(self.shape)}, {self.dtype}, {self.module.scheme})"

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self.dequantize()

    def __reduce_ex__(self, protocol: int) -> Any:
        return self.dequantize().__reduce_ex__(protocol)

    # `weight.data += delta` (PEFT's merge) reads `.data`, adds out of place and assigns `.data`.
    @property
    def data(self) -> "WeightProxy":
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
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
        # Code that bypasses the module's forward (nn.MultiheadAttention, custom subclasses) still meets the kernels.
        if func is F.linear:
            x, weight, bias = (*args, *(kwargs[k] for k in ("input", "weight", "bias") if k in kwargs), None)[:3]
            if isinstance(weight, cls) and not isinstance(x, cls) and hasattr(weight.module, "linear"):
                return weight.module.linear(x, bias)
        with torch._C.DisableTorchFunctionSubclass():  # results are plain tensors, not proxies
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].module, args[0].name_in_module)
        plain_args, plain_kwargs = tree_map_only(cls, cls.dequantize, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        written = [
            (argument, plain)
            for argument, plain, schema in zip(args, plain_args, func._schema.arguments)
            if isinstance(argument, cls) and schema.alias_info is not None and schema.alias_info.is_write
        ]
        for proxy, value in written:
            proxy.module.requantize_weight_(proxy.name_in_module, value)
        return args[0] if written and result is written[0][1] else result
