"""`SharedProduct`: layers that read one tensor (query, key and value; gate and up) compute one product.

Storage: the codes of the siblings follow each other in one tensor, and the parameters of each are rows of it, which
count as storages of their own: hosts take tensors of one storage for tied ones and save the first of them only.
Names, bytes, `state_dict`, `weight` and assignments to it are what they were, and no memory is added.

At run time the first sibling that is called multiplies its input with the rows of all and leaves the others their
parts, for the same tensor only: the same object, unchanged since (its version counter), under the same autocast, on
the same stream, with unchanged weights. Everything else computes alone: training, inputs that need a gradient, tensors
made in `torch.inference_mode` (they count no versions), replicas of nn.DataParallel, parameters that a host has
replaced (offloading, FSDP). Each part is handed out once; a part that nobody fetches dies with the input.

Under torch.compile, where versions cannot be seen, the source of the parent's `forward` has to show that nothing
changes the tensor between the calls (`siblings`).

Parts of more than one token are strided: columns of the common product. `.view` can split their last dimension, as
models do, and join the leading ones; it cannot join the last one with others.
"""

import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hf_quant.algorithms import empty_packed
from hf_quant.formats import FORMATS
from hf_quant.kernels.dispatch import is_exporting, is_transformed, mark_static_address
from hf_quant.modules._stored import INPUT_SCALE, STORED_NAMES
from hf_quant.modules.inputs.rule import ALONE, InputRule
from hf_quant.modules.packed_linear import PackedLinear
from hf_quant.modules.products import layer_product, needs_grad
from hf_quant.scheme import BLOCK_SIZE, LinearScheme


_ALIGNMENT = 16  # bytes: where the rows of a sibling must start, as kernels load 16 bytes at once
_EQUAL = ("global_scale", INPUT_SCALE)
_MAX_MISSES = 3  # products in a row of which only one part was asked for, of siblings that are known by name only
_local = threading.local()


class _Pending:
    """The parts of one product for the siblings that have not been called yet."""

    __slots__ = ("left", "parts", "state", "x")

    def __init__(self, x: weakref.ref, state: tuple, parts: list[Tensor | None], left: int) -> None:
        self.x, self.state, self.parts, self.left = x, state, parts, left


class _Row(NamedTuple):
    """One parameter of a sibling, as it was when it became rows of the common tensor."""

    key: str
    parameter: nn.Parameter
    address: int


class _Common(NamedTuple):
    """The tensors that siblings share, read as one record: another thread may release it.

    Attributes:
        parameters: {name: [sum of N, ...]} as one QuantLinear would have them.
        bias: [sum of N], zeros for a sibling without one; None if no sibling has one.
        sizes: N of each.
        rows: of each, which parameters are rows.
    """

    parameters: dict[str, Tensor]
    bias: Tensor | None
    sizes: list[int]
    rows: list[tuple[_Row, ...]]

    def has(self, module: PackedLinear, index: int) -> bool:
        """True if the parameters of sibling `index` are still the rows that were made of them."""
        own = module._parameters
        for key, parameter, address in self.rows[index]:
            if own.get(key) is not parameter or parameter.data_ptr() != address:
                return False
        return True

    def needs_grad(self, x: Tensor) -> bool:
        return needs_grad(x, None) or (
            torch.is_grad_enabled() and any(row.parameter.requires_grad for rows in self.rows for row in rows)
        )


class FusedProjections:
    """The common product of sibling layers; each has a `SharedProduct` that names it and its own place in it.

    It holds no module: a cycle would keep the memory of a deleted model, and copies and replicas of the siblings are
    recognized by their parameters, which are not its rows.

    Attributes:
        names: of the siblings.
        is_proven: the source shows that their input is not changed between the calls; see `Siblings`.
        common: what they share; None while every sibling computes alone.
        is_left_alone: a host swaps the parameters call by call (group offloading): they are not put together again.
    """

    def __init__(self, names: tuple[str, ...], is_proven: bool) -> None:
        self.names, self.is_proven, self.is_left_alone = names, is_proven, False
        self.common: _Common | None = None
        self._device_type = "cpu"  # of the last join
        self.traced: tuple[Tensor, list[Tensor | None]] | None = None  # while torch.compile traces
        self._joined = self._misses = 0
        self._reported: dict[int, weakref.ref] = {}

    def __reduce__(self) -> tuple:
        # The copy joins anew, once the parameters of all siblings' copies are there.
        return FusedProjections, (self.names, self.is_proven)

    # Storage.

    def join_(self, modules: Sequence[PackedLinear]) -> None:
        """Make the parameters of the modules rows of common tensors; `unsupported_reason(modules)` has to be None."""
        with torch.inference_mode(False), torch.no_grad():  # tensors of inference mode count no versions
            parameters: dict[str, Tensor] = {}
            for key in STORED_NAMES:
                tensors = [m._parameters[key] for m in modules if key in m._parameters]
                if not tensors:
                    continue
                parameters[key] = torch.cat(tensors)
                for module, part in zip(modules, parameters[key].split([len(t) for t in tensors])):
                    module._parameters[key] = nn.Parameter(part, requires_grad=False)
                    module._parameters[key].data = _as_storage(part)  # it still counts the versions of them all
                if key in _EQUAL:  # in all siblings; a view counts the versions of them all
                    parameters[key] = parameters[key][:1]
            sizes = [m.out_features for m in modules]
            bias = _common_bias([m._parameters["bias"] for m in modules], sizes)
            for tensor in parameters.values():  # or inductor's CUDA graphs would copy it for every call
                mark_static_address(tensor)
        rows = [
            tuple(_Row(k, p, p.data_ptr()) for k in (*parameters, "bias") if (p := m._parameters[k]) is not None)
            for m in modules
        ]
        self.common, self.traced = _Common(parameters, bias, sizes, rows), None
        self._device_type = modules[0].packed_device().type
        self._joined, self._misses = self._joined + 1, 0
        self._reported.clear()
        for index, module in enumerate(modules):
            if group_of(module) is not self:
                module.rule = SharedProduct(self, index, module.rule)

    def release(self) -> None:
        """Let every sibling compute alone, and drop the common tensors: the siblings keep their rows."""
        self.common = self.traced = None

    def parameters_changed(self, module: PackedLinear, index: int) -> None:
        """Called after a sibling's parameters changed (copied, loaded, moved); join again when all have reported.

        Not on a CPU if they come from an accelerator: offloaded, they are copied there and back for every use.
        """
        if self.common is not None and self.common.has(module, index):
            return
        self.release()
        if self.is_left_alone:
            return
        self._reported[index] = weakref.ref(module)
        modules = [self._reported[i]() for i in range(len(self.names)) if i in self._reported]
        complete = len(modules) == len(self.names) and all(m is not None and group_of(m) is self for m in modules)
        if complete and module.packed_device().type == "cpu" != self._device_type:
            self._reported.clear()
        elif complete and unsupported_reason(modules) is None:
            self.join_(modules)

    # The product.

    def product(self, module: PackedLinear, index: int, x: Tensor) -> Tensor | None:
        """The output of sibling `index` for x, None if it has to compute alone."""
        common = self.common
        if common is None:
            return None
        if torch.compiler.is_compiling():
            return self._traced_product(module, index, x, common)
        if not common.has(module, index):
            if not getattr(module, "_is_replica", False):  # of nn.DataParallel, for one call
                self.is_left_alone = True
                self.release()
            return None
        if module.training or type(x) is not Tensor or x.is_inference() or common.needs_grad(x):
            return None
        if is_transformed():  # no part may leave the transform
            return None
        state = self._state(x, common)
        waiting = _waiting()
        pending = waiting.get(self)
        if pending is not None and pending.x() is x and pending.state == state:
            part, pending.parts[index] = pending.parts[index], None
            if part is not None:
                pending.left -= 1
                if not pending.left:
                    del waiting[self]
                    self._misses = 0
                return part
        y = layer_product(module, x, common.bias, common.parameters)
        if pending is not None:
            self._miss()
        # Not views of y to autograd: models may change an output in place.
        parts: list[Tensor | None] = list(torch.unsafe_split_with_sizes(y, common.sizes, -1))
        part, parts[index] = parts[index], None

        def forget(ref: weakref.ref) -> None:
            found = waiting.get(self)
            if found is not None and found.x is ref:
                del waiting[self]
                self._miss()

        waiting[self] = _Pending(weakref.ref(x, forget), state, parts, len(parts) - 1)
        return part

    def _miss(self) -> None:
        """Count parts that nobody fetched. After some, layers that are siblings by their names only compute alone."""
        self._misses += 1
        if self._misses == _MAX_MISSES and not self.is_proven:
            self.release()

    def _state(self, x: Tensor, common: _Common) -> tuple:
        """The facts that must not have changed between the calls of two siblings with the same x."""
        device = x.device
        kind = device.type
        return (
            self._joined,
            x._version,
            tuple([tensor._version for tensor in common.parameters.values()]),
            # A bias keeps its own counter, as an optimizer may hold it.
            None if common.bias is None else tuple([rows[-1].parameter._version for rows in common.rows]),
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
            # A part belongs to the stream that computes it; graphs are captured on streams of their own.
            torch.accelerator.current_stream(device) if kind in ("cuda", "xpu") else None,
        )

    def _traced_product(self, module: PackedLinear, index: int, x: Tensor, common: _Common) -> Tensor | None:
        """`product` as torch.compile can follow it; once all siblings have been called, `traced` is None again."""
        if not self.is_proven or module.training or is_exporting() or common.needs_grad(x):
            return None
        own = module._parameters
        is_row = True
        for row in common.rows[index]:
            if row.key in ("qdata", "bias") and own[row.key] is not row.parameter:
                is_row = False
        traced = self.traced
        if traced is not None and traced[0] is x:
            part = traced[1][index]
            traced[1][index] = None
            if all(p is None for p in traced[1]):
                self.traced = None
            if is_row and part is not None:
                return part
        if not is_row:
            return None
        bias = None
        if common.bias is not None:  # from the parameters themselves: `.data` of one may be another tensor by now
            biases = [rows[-1].parameter if rows[-1].key == "bias" else None for rows in common.rows]
            bias = torch.cat([common.bias.new_zeros(n) if b is None else b for b, n in zip(biases, common.sizes)])
        parts: list[Tensor | None] = list(layer_product(module, x, bias, common.parameters).split(common.sizes, -1))
        part, parts[index] = parts[index], None
        self.traced = (x, parts)
        return part


class SharedProduct(InputRule):
    """The rule of one of the layers that share a product.

    Attributes:
        group: the common product.
        index: the place of the layer among its siblings.
        otherwise: the rule where the layer computes alone.
    """

    def __init__(self, group: FusedProjections, index: int, otherwise: InputRule = ALONE) -> None:
        self.group, self.index, self.otherwise = group, index, otherwise

    def product(self, module: PackedLinear, x: Tensor) -> Tensor:
        y = self.group.product(module, self.index, x)
        return self.otherwise.product(module, x) if y is None else y

    def parameters_changed(self, module: PackedLinear) -> None:
        self.group.parameters_changed(module, self.index)

    def leave(self) -> None:
        self.otherwise.leave()


def group_of(module: PackedLinear) -> FusedProjections | None:
    """The product that a layer shares with its siblings, None if it computes alone."""
    return module.rule.group if isinstance(module.rule, SharedProduct) else None


def _common_bias(biases: Sequence[nn.Parameter | None], sizes: Sequence[int]) -> Tensor | None:
    """[sum of N], of which the biases become rows; None if there are none."""
    first = next((b for b in biases if b is not None), None)
    if first is None:
        return None
    common = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
    for bias, part in zip(biases, common.split(list(sizes))):
        if bias is not None:
            part.copy_(bias)
            bias.data = _as_storage(part)  # an optimizer may hold the parameter: it stays the same object
    return common


def _as_storage(rows: Tensor) -> Tensor:
    """The same memory as the rows, as a whole storage; it keeps the memory of them all."""
    start = rows.storage_offset() * rows.element_size()
    return rows.new_empty(0).set_(rows.untyped_storage()[start : start + rows.nbytes], 0, rows.shape, rows.stride())


def _waiting() -> dict[FusedProjections, _Pending]:
    """The parts that wait in this thread, by group."""
    try:
        return _local.waiting
    except AttributeError:
        _local.waiting = {}
        return _local.waiting


def rows_unsupported_reason(scheme: LinearScheme, shapes: Sequence[tuple[int, ...]]) -> str | None:
    """The reason why weights [N, K] of one scheme cannot be rows of one, None if they can."""
    quant = scheme.weight
    if quant.granularity == "tensor":
        return "their scales are of whole tensors"
    if quant.granularity == "block" and any(N % BLOCK_SIZE for N, _ in shapes[:-1]):
        return f"their scales are of blocks of {BLOCK_SIZE} rows, and out_features is not a multiple of {BLOCK_SIZE}"
    for shape in shapes[:-1]:
        packed = empty_packed(shape, quant, "meta")
        if packed.global_scale is not None and FORMATS[quant.format].fixed_group_size:
            return "each has a global scale of its own"
        if any(t.nbytes % _ALIGNMENT for t in packed[:3] if t is not None):
            return f"{shape[0]} rows do not end at a multiple of {_ALIGNMENT} bytes"
    return None


def unsupported_reason(modules: Sequence[PackedLinear]) -> str | None:
    """The reason why siblings, equal in scheme and in_features, cannot share a product; None if they can."""
    for module in modules:
        parameters = [p for p in module._parameters.values() if p is not None]
        if module.placeholders or any(p.device.type == "meta" for p in parameters):
            return "they are not loaded, or offloaded"
        if any(hasattr(p, "full_tensor") for p in parameters):
            return "they are sharded (tensor parallelism or FSDP)"
        if module.shares_codes:
            return "their codes are tied to other layers"
        if "forward" in module.__dict__:
            return "a host has hooked their forward (offloading)"
        if any(p.device.type == "cpu" and p.is_shared() for p in parameters):
            return "their memory is shared between processes"
    first = modules[0]
    for module in modules:
        if {p.device for p in module._parameters.values() if p is not None} != {first._parameters["qdata"].device}:
            return "they are on different devices"
    biases = {m._parameters["bias"].dtype for m in modules if m._parameters["bias"] is not None}
    if len({m.compute_dtype for m in modules}) > 1 or len(biases) > 1:
        return "their dtypes differ"
    for key, name in zip(_EQUAL, ("global scales", "static scales of their input")):
        if len({m._parameters[key].item() for m in modules if key in m._parameters}) > 1:
            return f"their {name} differ"
    return rows_unsupported_reason(first.scheme, [m.matrix_shape("weight") for m in modules])
