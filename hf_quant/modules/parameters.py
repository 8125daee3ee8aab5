"""`QuantParameters`: modules that hold matrices as parameters of their own and multiply by them in their own forward.

The experts of Llama 4, DBRX, LongCat-Flash, JetMoE and others do not follow transformers' experts interface. Their
forward stays as it is. What it reads as a weight is a `MatrixProxy`: one expert's matrix, a transposed view and a
product with either are computed from the codes, by the ops that also serve `QuantExperts`, so no 16-bit copy of all
experts is made. Anything else that a forward does with a weight computes on the dequantized weight.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_quant.algorithms import PackedWeight
from hf_quant.kernels import dequantize
from hf_quant.modules._base import QuantizedModule, weight_property
from hf_quant.modules._registry import derive_class
from hf_quant.modules.packed_linear import EXCHANGES, MATMULS
from hf_quant.modules.products import autocast, linear
from hf_quant.modules.rotation import rotated_back
from hf_quant.weight_proxy import WeightProxy


class Layout(NamedTuple):
    """Layout of the matrices that a host class holds as parameters.

    Attributes:
        weights: {name of a parameter: True if it is stored [..., K, N], as in x @ weight; False if [..., N, K]}.
        count: attribute with the number of matrices that lie one below the other in a parameter of two dimensions;
            None: parameters are one matrix, or a stack of matrices in three dimensions.
        multiplies: the forward multiplies by one matrix, or by all with rows of their own, as `MatrixProxy` can.
            False: it reads them in another way, and computes on dequantized matrices.
        is_flat: a parameter of three dimensions is one matrix, whose rows or columns are two of them.
    """

    weights: Mapping[str, bool]
    count: str | None = None
    multiplies: bool = True
    is_flat: bool = False


_LAYOUTS: dict[str, Layout] = {}  # by the full name of a host class, which need not be imported


def register_parameters(host_class: str, layout: Layout) -> None:
    """Make the parameters of a class quantizable; `host_class` is its full name, "package.module.Class"."""
    _LAYOUTS[host_class] = layout


def layout_of(host_class: type[nn.Module]) -> Layout | None:
    """The layout of a host class, or of the one that it is derived from, None if none is registered."""
    names = (f"{cls.__module__}.{cls.__qualname__}" for cls in host_class.__mro__)
    return next((_LAYOUTS[name] for name in names if name in _LAYOUTS), None)


def _parts(packed: PackedWeight, first: int, last: int) -> PackedWeight:
    """The codes of some matrices of a stack, views."""
    return PackedWeight(*(None if part is None else part[first:last] for part in packed))


class QuantParameters(QuantizedModule):
    """A module with packed matrices in place of parameters of its own; its forward is the host's.

    Parameters: `qdata_<name>`, `scale_<name>`, ... of each weight. Differentiable in its inputs.
    """

    kind = "parameters"
    layout: Layout

    @classmethod
    def weight_names_of(cls, module: nn.Module) -> tuple[str, ...]:
        found = {name: module._parameters.get(name) for name in cls.layout.weights}
        dims = (2,) if cls.layout.count else (2, 3)
        return tuple(found) if all(p is not None and p.dim() in dims for p in found.values()) else ()

    @classmethod
    def derive_for(cls, host_class: type[nn.Module]) -> type[QuantizedModule]:
        layout = layout_of(host_class)
        assert layout is not None  # `register_matrices` has found it
        own: dict[str, Any] = {name: weight_property(name) for name in layout.weights}
        own |= {"layout": layout}
        if not layout.multiplies:
            own |= {"kind": "dequantized", "proxy_class": WeightProxy}
        return derive_class(host_class, QuantParameters, (QuantParameters, host_class), **own)

    @classmethod
    def stack_shape_of(cls, module: nn.Module, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of a weight as a matrix, or with its matrices as a dimension of their own, in the host's order."""
        if cls.layout.is_flat:
            return shape[0], prod(shape[1:])
        if cls.layout.count is None:
            return shape
        count = getattr(module, cls.layout.count)
        return count, shape[0] // count, shape[1]

    @classmethod
    def matrix_shape_of(cls, module: nn.Module, shape: tuple[int, ...], name: str = "weight") -> tuple[int, ...]:
        *lead, rows, columns = cls.stack_shape_of(module, shape)
        return (*lead, columns, rows) if cls.layout.weights[name] else (*lead, rows, columns)

    def to_matrix(self, name: str, weight: Tensor) -> Tensor:
        stack = weight.reshape(self.stack_shape_of(self, tuple(weight.shape)))
        return stack.transpose(-1, -2) if self.layout.weights[name] else stack

    def from_matrix(self, name: str, matrix: Tensor) -> Tensor:
        stack = matrix.transpose(-1, -2).contiguous() if self.layout.weights[name] else matrix
        return stack.reshape(self.weight_shape(name))

    def dequantize_part(self, name: str, index: int) -> Tensor:
        """One matrix of a stack, in the host's order of dimensions and its dtype."""
        K, transform = self.matrix_shape(name)[-1], self.scheme.input_transform
        matrix = dequantize(
            *_parts(self.packed(name), index, index + 1),
            format=self.scheme.weight.format,
            group_size=self.scheme.weight.columns_per_scale(K),
            K=K,
            dtype=self.compute_dtype if transform is None else torch.float32,
        )[0]
        matrix = rotated_back(matrix, transform).to(self.compute_dtype)
        return matrix.t() if self.layout.weights[name] else matrix

    def product(self, name: str, x: Tensor, *, index: int | None = None, offsets: Tensor | None = None) -> Tensor:
        """x [..., K] @ matrix.T -> [..., N], of a weight that is one matrix, or of one of a stack by its index.

        With `offsets` [E] int32 x is [M, K], and each matrix of the stack is multiplied with its rows of x.
        """
        if x.shape[-1] != self.matrix_shape(name)[-1]:
            self.refuse_width(x, name)
        if torch.is_autocast_enabled(x.device.type):
            x = autocast(x, x.device.type)
        packed, rows = self.packed(name), x
        if index is not None:
            packed, rows = _parts(packed, index, index + 1), x.reshape(-1, x.shape[-1])
            offsets = torch.full((1,), len(rows), dtype=torch.int32, device=x.device)
        y = linear(
            rows,
            packed,
            None,
            offsets,
            self.input_diagonal(x),
            activation=self.scheme.activation_on(x.device.type),
            format=self.scheme.weight.format,
            group_size=self.scheme.weight.columns_per_scale(x.shape[-1]),
        )
        return y if index is None else y.view(*x.shape[:-1], y.shape[-1])


class MatrixProxy(WeightProxy):
    """Stand-in for a weight of `QuantParameters`: the whole, the stack of its matrices, or one of them.

    Attributes:
        sizes: its shape.
        index: of the matrix in the stack; None: all.
        is_swapped: the last two dimensions are exchanged, as by `.transpose(-1, -2)`.
    """

    @staticmethod
    def __new__(
        cls,
        module: QuantParameters,
        name: str,
        is_data: bool = False,
        shape: tuple[int, ...] | None = None,
        index: int | None = None,
        is_swapped: bool = False,
    ) -> "MatrixProxy":
        shape = module.weight_shape(name) if shape is None else shape
        return torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=module.compute_dtype, device=module.packed_device(name)
        )

    def __init__(
        self,
        module: QuantParameters,
        name: str,
        is_data: bool = False,
        shape: tuple[int, ...] | None = None,
        index: int | None = None,
        is_swapped: bool = False,
    ) -> None:
        super().__init__(module, name, is_data)
        self.index, self.is_swapped = index, is_swapped
        self.is_view = is_swapped or index is not None
        # torch's own `shape` and `dim()` come back to `__torch_function__`.
        self.sizes = tuple(module.weight_shape(name) if shape is None else shape)

    def dequantize(self) -> Tensor:
        """The matrix, stack or view as a plain tensor in the module's compute dtype."""
        if self.index is not None:
            whole = self.module.dequantize_part(self.name_in_module, self.index)
        else:
            whole = self.module.dequantize_weight(self.name_in_module)
        *lead, rows, columns = self.sizes
        return whole.reshape(*lead, columns, rows).transpose(-1, -2) if self.is_swapped else whole.reshape(self.sizes)

    def alias(self) -> "MatrixProxy":
        """Another proxy of the same."""
        return type(self)(self.module, self.name_in_module, self.is_data, self.sizes, self.index, self.is_swapped)

    def part(self, index: int) -> "MatrixProxy":
        """A proxy of one matrix of a stack. Raises IndexError if there is none."""
        count = self.sizes[0]
        index = index + count if index < 0 else index
        if not 0 <= index < count:
            raise IndexError(f"index {index} is out of range for {count} matrices")
        return type(self)(self.module, self.name_in_module, False, self.sizes[1:], index, self.is_swapped)

    def swapped(self) -> "MatrixProxy":
        """A proxy with the last two dimensions exchanged."""
        *lead, rows, columns = self.sizes
        return type(self)(
            self.module, self.name_in_module, False, (*lead, columns, rows), self.index, not self.is_swapped
        )

    def stack(self, shape: tuple[int, ...]) -> "MatrixProxy | None":
        """A proxy of another shape, if that is the one of the stack of the matrices; None if not."""
        whole = self.module.stack_shape_of(self.module, self.module.weight_shape(self.name_in_module))
        given = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else tuple(shape)
        known = len(given) == len(whole) and all(a in (-1, b) for a, b in zip(given, whole))
        if self.index is not None or self.is_swapped or not known:
            return None
        return type(self)(self.module, self.name_in_module, False, whole)

    @property
    def is_columns(self) -> bool:
        """True if it is [..., K, N], to be multiplied from the left: x @ weight."""
        return self.module.layout.weights[self.name_in_module] != self.is_swapped

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], cls) and not args[0].is_data and not kwargs:
            found = _view(func, args[0], args[1:])
            if found is not None:
                return found
        rule = _PRODUCTS.get(func)
        found = None if rule is None else rule(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs) if found is None else found


def _view(func: Callable, proxy: MatrixProxy, args: tuple[Any, ...]) -> MatrixProxy | None:
    """The proxy of a view of what `proxy` stands for, None for a call that is none of these."""
    if func == Tensor.__getitem__ and len(proxy.sizes) == 3:
        (index,) = args
        if isinstance(index, Tensor) and index.dim() == 0 and index.dtype not in (torch.bool, torch.uint8):
            index = int(index)
        return proxy.part(index) if isinstance(index, int) and not isinstance(index, bool) else None
    dims = len(proxy.sizes)
    is_transpose = func in (Tensor.transpose, torch.transpose) and {d % dims for d in args} == {dims - 2, dims - 1}
    if is_transpose or func == Tensor.mT.__get__ or (func in EXCHANGES and dims == 2):
        return proxy.swapped()
    return proxy.stack(args) if func in (Tensor.view, Tensor.reshape) else None


def _is_factor(x: Any, weight: Any, *, is_columns: bool) -> bool:
    """True if x is multiplied by a proxy that is stored in the direction in which it is read."""
    is_proxy = isinstance(weight, MatrixProxy) and not isinstance(x, MatrixProxy)
    return is_proxy and weight.is_columns == is_columns


def _linear(x: Any, weight: Any, bias: Any = None) -> Tensor | None:
    if not _is_factor(x, weight, is_columns=False) or len(weight.sizes) != 2:
        return None
    y = weight.module.product(weight.name_in_module, x, index=weight.index)
    return y if bias is None else y + bias


def _matmul(x: Any, weight: Any) -> Tensor | None:
    if not _is_factor(x, weight, is_columns=True):
        return None
    if len(weight.sizes) == 2:
        return weight.module.product(weight.name_in_module, x, index=weight.index)
    return _bmm(x, weight)


def _bmm(x: Any, weight: Any) -> Tensor | None:
    if not _is_factor(x, weight, is_columns=True) or x.dim() != 3 or x.shape[0] != weight.sizes[0]:
        return None  # other shapes are broadcast, or the host's own error
    count, rows, K = x.shape
    offsets = torch.arange(1, count + 1, dtype=torch.int32, device=x.device) * rows
    y = weight.module.product(weight.name_in_module, x.reshape(-1, K), offsets=offsets)
    return y.view(count, rows, y.shape[-1])


def _grouped(x: Any, weight: Any, *, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Tensor | None:
    if not _is_factor(x, weight, is_columns=True) or len(weight.sizes) != 3 or x.dim() != 2:
        return None
    if offs is None or bias is not None or out_dtype not in (None, x.dtype):
        return None
    return weight.module.product(weight.name_in_module, x, offsets=offs.to(torch.int32))


_PRODUCTS: dict[Callable, Callable[..., Tensor | None]] = {
    F.linear: _linear,
    **dict.fromkeys(MATMULS, _matmul),
    torch.bmm: _bmm,
    Tensor.bmm: _bmm,
    torch._grouped_mm: _grouped,  # of F.grouped_mm
}
QuantParameters.proxy_class = MatrixProxy


def register_matrices(module: nn.Module) -> bool:
    """Make the class of a module quantizable if its layout is registered; False if it is not."""
    host_class = type(module)
    if hasattr(host_class, "quantized_base") or layout_of(host_class) is None:
        return False
    return bool(QuantParameters.derive_for(host_class).weight_names_of(module))
