"""`QuantizedModule`: the base of all quantized modules, with packed parameters that replace the 16-bit weight.

A quantized module *is* an instance of a subclass of the class it replaces: conversion swaps `__class__` and the
parameters of one object, so hooks, attributes, names and isinstance checks stay. Its packed tensors are frozen integer
parameters (buffers are not offloaded or sharded by the hosts; floating-point ones are cast by them): scales and fp8
codes are stored as an integer view of their bits, on disk too.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from hf_quant.algorithms import SOLVERS, PackedWeight, Statistics, calibrated_matrix, quantize_matrix
from hf_quant.formats import FORMATS
from hf_quant.kernels import clear_prepacked, dequantize
from hf_quant.kernels.dispatch import check_tracer
from hf_quant.modules import sparse24
from hf_quant.modules._classes import set_class_
from hf_quant.modules._registry import quantized_class
from hf_quant.modules._stored import (
    PACKED_NAMES,
    STORED_NAMES,
    StaticInput,
    packed_key,
    restored_bits,
    stored_dtype,
)
from hf_quant.modules.ready import READY, ReadyProduct
from hf_quant.modules.rotation import rotated, rotated_back, signs
from hf_quant.scheme import InputTransform, LinearScheme
from hf_quant.weight_proxy import WeightProxy


_OWN_ATTRIBUTES = (
    "scheme",
    "algorithm",
    "compute_dtype",
    "weight_names",
    "_weight_shapes",
    "_requires_grad",
    "_float_codes",
    "shares_codes",
    "_hf_quantized_needs_local_tp",
    READY,
)
_OF_16_BIT = (
    "The state dict has 16-bit weights for layers that hold codes: load it into the 16-bit model, and quantize that; "
    "a training that is to be resumed begins with a model that was saved quantized."
)


def weight_property(name: str) -> property:
    """A class property that returns the placeholder while loading, and the proxy once the weight is packed."""

    def get(self: "QuantizedModule") -> Tensor:
        placeholder = self._parameters.get(name)
        if placeholder is not None:
            return placeholder
        if name not in self.weight_names:
            if name in self.__dict__:
                return self.__dict__[name]  # what a hook of `torch.nn.utils.weight_norm` has computed
            raise AttributeError(name)  # an experts class without a gate has no gate_up_proj
        if torch.compiler.is_compiling():
            # Unused unless more than its dtype or shape is read: the compiler drops it.
            return self.dequantize_weight(name)
        return self.proxy_class(self, name)

    def put(self: "QuantizedModule", value: Any) -> None:
        self.__dict__[name] = value  # of a name that is no weight: `__setattr__` takes the others

    def drop(self: "QuantizedModule") -> None:
        raise ValueError(
            f"{name} of this {type(self).__name__} is stored as {self.scheme} and cannot be taken off the module, as "
            "PEFT does with torch's attention: adapt other layers, or keep it in 16 bit by modules={...: None}"
        )

    return property(get, put, drop)


class QuantizedModule(StaticInput, nn.Module):
    """Mixin of all quantized modules. Instances come from `convert_module_`, not from a constructor.

    Attributes:
        scheme: the LinearScheme of its weights.
        kind: "linear", "experts", "embedding", "conv", ..., as the plan names it.
        algorithm: how the codes are chosen, also when a new weight is assigned: then without data, if it needs some.
        compute_dtype: dtype of the 16-bit weight that the codes replace.
        weight_names: the host's names of the quantized weights.
        shares_codes: a tied module holds the same parameters.
        proxy_class: class of the proxy that is returned for a weight.
        statistics: of the inputs, {weight: one `Statistics` per matrix}, by which weights that are being loaded are
            quantized; each is used once.
    """

    kind: str
    weight_names: tuple[str, ...] = ("weight",)
    host_class: type[nn.Module]
    quantized_base: type["QuantizedModule"]
    scheme: LinearScheme
    algorithm: str | None
    compute_dtype: torch.dtype
    shares_codes: bool = False
    statistics: dict[str, list[Statistics]] | None = None
    proxy_class: type[WeightProxy] = WeightProxy
    _ready: Mapping[torch.dtype, ReadyProduct] = {}  # see `make_ready`
    _input_dim = -1  # of the host's weight: the one that is as long as the input is wide

    def __new__(cls, *args: Any, **kwargs: Any) -> nn.Module:
        # PEFT builds adapters by `type(base_layer)(in, out, ...)`: that is a plain layer. Without arguments, as
        # nn.DataParallel makes its replicas, it is an empty object to be filled.
        return cls.host_class(*args, **kwargs) if args or kwargs else object.__new__(cls)

    def __reduce_ex__(self, protocol: int) -> Any:
        state = {name: value for name, value in self.__dict__.items() if name != READY}
        return _rebuild, (self.host_class, self.quantized_base), state

    @classmethod
    def derive_for(cls, host_class: type[nn.Module]) -> type["QuantizedModule"]:
        """The quantized counterpart of a host class that this class serves."""
        return quantized_class(host_class)

    @classmethod
    def weight_names_of(cls, module: nn.Module) -> tuple[str, ...]:
        """Names of the weights of a host module that get quantized."""
        return ("weight",)

    # Shapes: how the host's weight maps to matrices [..., N, K].

    def weight_shape(self, name: str) -> tuple[int, ...]:
        """Shape of the weight as the host has it."""
        return self._weight_shapes[name]

    @classmethod
    def matrix_shape_of(cls, module: nn.Module, shape: tuple[int, ...], name: str = "weight") -> tuple[int, ...]:
        """Shape [..., N, K], as a matrix, of the weight `name` that has `shape` in the host module."""
        return shape

    def matrix_shape(self, name: str) -> tuple[int, ...]:
        """Shape [..., N, K] of the weight as a matrix."""
        return self.matrix_shape_of(self, self.weight_shape(name), name)

    def to_matrix(self, name: str, weight: Tensor) -> Tensor:
        """The host's weight as [..., N, K]."""
        return weight

    def from_matrix(self, name: str, matrix: Tensor) -> Tensor:
        """Inverse of `to_matrix`."""
        return matrix

    def call_in_graph(self, *inputs: Proxy) -> Proxy:
        """The call of this module as torch.fx.symbolic_trace records it: one node, as for a layer of torch.

        Raises ValueError if the host's class computes more than this layer.
        """
        if type(self).forward is not self.quantized_base.forward:
            raise ValueError(
                f"torch.fx cannot trace into a {type(self).__name__}, whose class has a forward of its own: give the "
                "tracer's is_leaf_module this module, or hf_quant.dequantize_ it"
            )
        tracer = inputs[0].tracer
        return tracer.create_proxy("call_module", tracer.path_of_module(self), inputs, {})

    # Packed tensors.

    def packed(self, name: str = "weight") -> PackedWeight:
        """The quantized weight with scales and fp8 codes in their true dtype (views, no copies)."""
        check_tracer()
        return self.typed(name, self._parameters)

    def input_diagonal(self, x: Tensor) -> Tensor | None:
        """The diagonal of the rotation of an input [..., K], None if the layer has none; see `modules.rotation`."""
        transform = self.scheme.input_transform
        return None if transform is None else signs(transform, x.shape[-1], x.device)

    def typed(self, name: str, parameters: dict[str, Tensor | None]) -> PackedWeight:
        """`packed` of the stored tensors in `parameters`: the module's own, or others of the same scheme."""
        quant = self.scheme.weight
        scale = parameters[packed_key("scale", name)]
        zero_point = parameters.get(packed_key("zero_point", name))
        global_scale = parameters.get(packed_key("global_scale", name))
        qdata = parameters[packed_key("qdata", name)]
        if global_scale is not None and global_scale.dtype.is_floating_point:
            global_scale = restored_bits(global_scale)
        if scale.dtype.is_floating_point or (global_scale is not None and global_scale.dtype.is_floating_point):
            raise ValueError(
                f"the scales of this {type(self).__name__} were cast to a floating-point dtype, but their bits are "
                "what is stored: load the model again, and cast parameters only where parameter.is_floating_point()"
            )
        if self.scheme.sparsity is not None:
            qdata = sparse24.whole_codes(qdata, quant, self.matrix_shape(name)[-1])
        elif self._float_codes is not None:
            qdata = qdata.view(self._float_codes)
        return PackedWeight(
            qdata,
            scale.view(getattr(torch, quant.scale_dtype)),
            zero_point.view(getattr(torch, quant.zero_point_dtype)) if quant.has_float_zeros else zero_point,
            None if global_scale is None else global_scale.view(torch.float32),
        )

    @property
    def placeholders(self) -> tuple[str, ...]:
        """Names of the weights that wait for a loader to fill them (see `fill_`)."""
        return tuple(n for n in self.weight_names if n in self._parameters)

    def fill_(self, name: str, packed: PackedWeight | None) -> None:
        """Drop a placeholder and, unless they are set elsewhere (None), register the packed tensors."""
        del self._parameters[name]
        if packed is not None:
            self.set_packed_(name, packed)

    @property
    def is_sharded(self) -> bool:
        """True if the codes are DTensors: tensor parallelism or FSDP has distributed them, outside of forward."""
        return hasattr(self._parameters[packed_key("qdata", self.weight_names[0])], "full_tensor")

    def packed_device(self, name: str = "weight") -> torch.device:
        return self._parameters[packed_key("qdata", name)].device

    def set_packed_(self, name: str, packed: PackedWeight) -> None:
        """Register the packed tensors (true dtypes) as frozen integer parameters.

        With them the scale of the input, unset, if the scheme stores one and it is not there yet.
        """
        for part, tensor in zip(PACKED_NAMES, packed):
            if tensor is not None:
                stored = tensor.view(stored_dtype(tensor.dtype))
                self.register_parameter(packed_key(part, name), nn.Parameter(stored, requires_grad=False))
        if self.scheme.is_static:
            self.add_input_scale_(name, packed.qdata.device)

    def quantize(self, name: str, weight: Tensor, *, fqn: str | None = None) -> PackedWeight:
        """Quantize a weight of the host's shape and basis, as the module stores it; nothing is assigned.

        Raises ValueError if its shape is not `weight_shape(name)` or it contains NaN or inf.
        """
        fqn = fqn or name
        if tuple(weight.shape) != tuple(self.weight_shape(name)):
            raise ValueError(f"{fqn} is {tuple(weight.shape)}; needs {tuple(self.weight_shape(name))}")
        matrix, statistics = self.to_matrix(name, weight), self._used_statistics(name)
        if self.algorithm not in SOLVERS or statistics is None:
            return self.quantize_rows(matrix, fqn=fqn)
        matrix = in_basis(matrix, self.scheme.input_transform)
        moved = [of.to(matrix.device) for of in statistics]
        return calibrated_matrix(matrix, self.scheme.weight, self.algorithm, moved, name=fqn)[0]

    def _used_statistics(self, name: str) -> list[Statistics] | None:
        """The statistics of a weight's inputs, which are dropped."""
        found = None if self.statistics is None else self.statistics.pop(name, None)
        if not self.statistics:
            self.__dict__.pop("statistics", None)
        return found

    def quantize_rows(self, matrix: Tensor, *, fqn: str) -> PackedWeight:
        """Quantize a matrix [..., N, K] in the host's basis, as the module stores it: a weight, or a shard of one."""
        algorithm = None if self.algorithm in SOLVERS else self.algorithm  # the inputs are not known any more
        matrix = in_basis(matrix, self.scheme.input_transform)
        quant, is_sparse = self.scheme.weight, self.scheme.sparsity is not None
        packed = quantize_matrix(sparse24.pruned(matrix) if is_sparse else matrix, quant, algorithm, name=fqn)
        if not is_sparse:
            return packed
        return packed._replace(qdata=sparse24.compressed(packed.qdata, quant, matrix.shape[-1]))

    def dequantize_weight(self, name: str = "weight", dtype: torch.dtype | None = None) -> Tensor:
        """The weight in the host's shape and basis, in `dtype` (default: compute_dtype)."""
        check_tracer()
        K, transform, dtype = self.matrix_shape(name)[-1], self.scheme.input_transform, dtype or self.compute_dtype
        parameters = self._parameters
        if self.is_sharded:  # a collective: every process must ask
            parameters = {k: p.full_tensor() if hasattr(p, "full_tensor") else p for k, p in parameters.items()}
        matrix = dequantize(
            *self.typed(name, parameters),
            format=self.scheme.weight.format,
            group_size=self.scheme.weight.columns_per_scale(K),
            K=K,
            dtype=dtype if transform is None else torch.float32,
        )
        return self.from_matrix(name, rotated_back(matrix, transform).to(dtype))

    def refuse_width(self, x: Tensor, name: str = "weight") -> None:
        """Raise ValueError for an input [..., K] of another width than the weight's K.

        A shard of the weight (tensor parallelism) takes a shard of the input: the op checks that it fits.
        """
        K = self.matrix_shape(name)[-1]
        words = self._parameters[packed_key("qdata", name)].shape[-1]
        if words == sparse24.empty_stored((1, K), self.scheme, "meta").qdata.shape[-1]:
            raise ValueError(
                f"the input is {tuple(x.shape)}, so {x.shape[-1]} wide; this {type(self).__name__} needs [..., {K}]"
            )

    def converted(self) -> None:
        """Called when the codes have replaced the weights: drop what the host keeps of these elsewhere."""

    @classmethod
    def restored(cls, module: nn.Module) -> None:
        """Called when a module has its 16-bit weights again: make what `converted` has dropped."""

    def parameters_changed(self) -> None:
        """Called when parameters may be new tensors or hold new values: copied, loaded, moved, quantized again."""
        self.__dict__.pop(READY, None)

    def leave_siblings_(self) -> None:
        """Stop sharing work with other layers, which continue without this one: it becomes the host's again."""

    @torch.no_grad()
    def requantize_weight_(self, name: str, weight: Tensor) -> None:
        """Replace the weight: quantize it with the module's scheme, in place of the old codes.

        Raises ValueError as `quantize` does, and if the codes are not this module's alone (tied, or sharded).
        """
        if self.shares_codes:
            raise ValueError(
                f"this {type(self).__name__} shares its codes with a tied module: a new weight would change both. "
                "Keep the adapter unmerged, or dequantize_ the model first"
            )
        if self.is_sharded:
            raise ValueError(f"this {type(self).__name__} is sharded: replace its weight (or merge) in one process")
        for part, tensor in zip(PACKED_NAMES, self.quantize(name, weight.to(self.packed_device(name)))):
            if tensor is not None:
                parameter = self._parameters[packed_key(part, name)]
                parameter.copy_(tensor.view(stored_dtype(tensor.dtype)))
                # Under `__torch_dispatch__` an op in place is not counted, and caches of the weight would stay.
                torch.autograd.graph.increment_version(parameter)
        self.parameters_changed()

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.weight_names:
            if isinstance(value, Tensor) and self.__dict__.get("_is_replica"):
                self._parameters[name] = value  # nn.DataParallel sets a replica's tensors as plain attributes
            else:
                super().__setattr__(name, value)
        elif isinstance(value, WeightProxy) and self._fits(name, value):
            for part in PACKED_NAMES:  # tying: share the codes
                source = value.module._parameters.get(packed_key(part, value.name_in_module))
                if source is not None:
                    self._parameters[packed_key(part, name)] = source
            if value.module is not self:
                self.shares_codes = value.module.shares_codes = True
        elif isinstance(value, Tensor) and (value.device.type == "meta" or name in self._parameters):
            # A placeholder to load into, and what a host puts in its place if the checkpoint lacks the weight.
            self._parameters[name] = nn.Parameter(value, requires_grad=False)
        elif isinstance(value, Tensor):
            self.requantize_weight_(name, value.detach())
        else:
            raise TypeError(f"cannot assign {type(value).__name__} as {name!r}; needs a tensor")

    def _fits(self, name: str, proxy: WeightProxy) -> bool:
        """True if the codes behind a proxy can serve as codes of a weight of this module."""
        shape = proxy.module.matrix_shape(proxy.name_in_module)
        return proxy.module.scheme == self.scheme and shape == self.matrix_shape(name) and not proxy.is_view

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Tensor],
        prefix: str,
        local_metadata: dict,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        for name in self.weight_names:
            key = f"{prefix}{name}"
            if key in unexpected_keys and state_dict[key].numel() == 0:  # see `checkpoint.guard_entry`
                unexpected_keys.remove(key)
            elif key in unexpected_keys and f"{prefix}{packed_key('qdata', name)}" not in state_dict:
                warnings.warn(_OF_16_BIT, stacklevel=2)  # no error: `strict=False` may be meant, and is not told here
        clear_prepacked()  # what is loaded into shards is not counted as a change of the whole
        self.parameters_changed()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.parameters_changed()

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype)).dtype
        self.parameters_changed()
        return self

    def extra_repr(self) -> str:
        host = self.host_class.extra_repr(self)
        return f"{host}, {self.scheme}" if host else str(self.scheme)


def in_basis(matrix: Tensor, transform: InputTransform | None) -> Tensor:
    """A matrix [..., N, K] in the host's basis, rotated as its inputs are; itself without a transform."""
    if transform is not None and matrix.itemsize == 2 and matrix.dim() == 2:
        matrix = matrix.float()  # rounded once, not twice; of experts it would be a copy of twice their size
    return rotated(matrix, transform)


# Pickles of whole models hold the names of this function and of this file: both stay as they are.
def _rebuild(host_class: type[nn.Module], base: type[QuantizedModule]) -> QuantizedModule:
    """Unpickle: an instance of the quantized counterpart, which another process may not have derived yet."""
    module = host_class.__new__(host_class)
    module.__class__ = base.derive_for(host_class)
    return module


# Tensors that are made in inference mode cannot be used in training, even as constants.
@torch.inference_mode(False)
@torch.no_grad()
def convert_module_(
    module: nn.Module,
    scheme: LinearScheme,
    *,
    algorithm: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    name: str = "",
    keep_placeholder: bool = False,
    packed: Mapping[str, PackedWeight] | None = None,
) -> QuantizedModule:
    """Turn a module into its quantized counterpart, in place; its weights on the meta device give empty codes.

    `device` is where the quantization is computed; the codes go where the weight was. `keep_placeholder` leaves the
    meta weight beside the empty codes for a loader to fill. `packed` holds the codes of weights that are quantized
    already, by name. Raises ValueError, with the module unchanged, if a weight cannot be quantized.
    """
    host_class = type(module)
    quantized = quantized_class(host_class)
    weights = {} if quantized is None else {n: module._parameters[n] for n in quantized.weight_names_of(module)}
    if not weights:
        raise ValueError(f"{name or 'module'} is a {host_class.__name__}, which has no quantized counterpart")
    first = next(iter(weights.values()))
    state = dict(module.__dict__)
    set_class_(module, quantized)
    module.__dict__.update(
        scheme=scheme,
        algorithm=algorithm,
        compute_dtype=dtype or first.dtype,
        weight_names=tuple(weights),
        _weight_shapes={n: tuple(w.shape) for n, w in weights.items()},
        _requires_grad={n: w.requires_grad for n, w in weights.items()},
        _float_codes=_float_codes(scheme),
        _hf_quantized_needs_local_tp=True,
    )
    try:
        packed = dict(packed or {})
        for n, weight in weights.items():
            if n in packed:
                continue
            if weight.device.type == "meta":
                packed[n] = sparse24.empty_stored(module.matrix_shape(n), scheme, "meta")
            else:
                source = weight.detach() if device is None else weight.detach().to(device)
                fqn = f"{name}.{n}" if name else n
                packed[n] = module.quantize(n, source, fqn=fqn).to(weight.device)
    except BaseException:  # out of memory and Ctrl-C, too, must leave a module that works
        set_class_(module, host_class)
        module.__dict__.clear()
        module.__dict__.update(state)
        raise
    for n in weights:
        if not (keep_placeholder and weights[n].device.type == "meta"):
            del module._parameters[n]
        module.set_packed_(n, packed[n])
    module.converted()
    return module


@torch.inference_mode(False)
@torch.no_grad()
def restore_module_(module: QuantizedModule, dtype: torch.dtype | None = None) -> nn.Module:
    """Undo `convert_module_`, in place: the host's class with dequantized weights, trainable if they were before.

    A weight that still has its placeholder (a loader has filled that instead of the codes) is taken as it is.
    """
    weights = {
        n: module._parameters[n].data if n in module.placeholders else module.dequantize_weight(n, dtype)
        for n in module.weight_names
    }
    for n in module.weight_names:
        for part in STORED_NAMES:
            module._parameters.pop(packed_key(part, n), None)
    module.leave_siblings_()
    quantized = type(module)
    set_class_(module, module.host_class)
    requires_grad = module._requires_grad
    for attribute in _OWN_ATTRIBUTES:
        module.__dict__.pop(attribute, None)
    for n, weight in weights.items():
        module.register_parameter(n, nn.Parameter(weight, requires_grad=requires_grad[n]))
    quantized.restored(module)
    return module


def _float_codes(scheme: LinearScheme) -> torch.dtype | None:
    dtype = FORMATS[scheme.weight.format].spec.dtype
    return dtype if dtype.is_floating_point else None
