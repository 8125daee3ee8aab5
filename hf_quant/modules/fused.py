"""`fuse_projections_`: layers that read one tensor (query, key and value; gate and up) become one product.

Storage: the codes of the siblings lie one behind the other in one tensor, and the parameters of each are rows of it.
Names, bytes, `state_dict`, `weight` and assignments to it are what they were, and no memory is added.

At run time the first sibling that is called multiplies its input with the rows of all and leaves the others their
parts, for the same tensor only: the same object, unchanged since (its version counter), under the same autocast, on
the same stream, with unchanged weights. Everything else computes alone, as before: training, inputs that need a
gradient, tensors made in `torch.inference_mode` (they count no versions), replicas of nn.DataParallel, parameters that
a host has replaced (offloading, FSDP). Each part is handed out once; what nobody fetches dies with the input.

Under torch.compile, where versions cannot be seen, the source of the parent's `forward` has to show that nothing
changes the tensor between the calls (`_siblings`).

Parts of more than one token are strided: columns of the common product. `.view` can split their last dimension, as
models do, and join the leading ones; it cannot join the last one with others, as it could before.
"""

import threading
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hf_quant.algorithms import empty_packed
from hf_quant.kernels.dispatch import is_transformed
from hf_quant.modules._base import PACKED_NAMES, quantized_class
from hf_quant.modules._functional import needs_grad
from hf_quant.modules._rows import SharedInput
from hf_quant.modules._siblings import find_siblings
from hf_quant.modules.linear import QuantLinear
from hf_quant.scheme import BLOCK_SIZE, LinearScheme


_ALIGNMENT = 16  # bytes: where the rows of a sibling must start, as kernels load 16 bytes at once
_MAX_MISSES = 3  # products in a row of which only one part was asked for, of siblings that are known by name only
_local = threading.local()


class _Pending:
    """What one input has left for the siblings that have not been called yet."""

    __slots__ = ("left", "parts", "state", "x")

    def __init__(self, x: weakref.ref, state: tuple, parts: list[Tensor | None], left: int) -> None:
        self.x, self.state, self.parts, self.left = x, state, parts, left


class _Row(NamedTuple):
    """One parameter of a sibling, as it was when it became rows of the common tensor."""

    key: str
    parameter: nn.Parameter
    address: int


class _Common(NamedTuple):
    """What siblings share, read as one: another thread may release it.

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

    def has(self, module: QuantLinear) -> bool:
        """Whether the parameters of a sibling are still the rows that were made of them."""
        own = module._parameters
        for key, parameter, address in self.rows[module.fused_index]:
            if own.get(key) is not parameter or parameter.data_ptr() != address:
                return False
        return True

    def needs_grad(self, x: Tensor) -> bool:
        return needs_grad(x, None) or (
            torch.is_grad_enabled() and any(row.parameter.requires_grad for rows in self.rows for row in rows)
        )


class FusedProjections:
    """The common product of sibling layers. Each holds it as `fused`, and its own place in it as `fused_index`.

    It holds no module: a cycle would keep the memory of a deleted model, and copies and replicas of the siblings are
    told by their parameters, which are not its rows.

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
        self._arrived: dict[int, weakref.ref] = {}

    def __reduce__(self) -> tuple:
        # The copy joins anew, once the copies of all siblings have arrived (`QuantLinear.__setstate__`).
        return FusedProjections, (self.names, self.is_proven)

    # Storage.

    def join_(self, modules: Sequence[QuantLinear]) -> None:
        """Make the parameters of the modules rows of common tensors; `why_not(modules)` has to be None."""
        with torch.inference_mode(False), torch.no_grad():  # tensors of inference mode count no versions
            parameters: dict[str, Tensor] = {}
            for key in PACKED_NAMES:
                tensors = [m._parameters[key] for m in modules if key in m._parameters]
                if not tensors:
                    continue
                parameters[key] = torch.cat(tensors)
                for module, part in zip(modules, parameters[key].split([len(t) for t in tensors])):
                    module._parameters[key] = nn.Parameter(part, requires_grad=False)
            sizes = [m.out_features for m in modules]
            bias = _common_bias([m._parameters["bias"] for m in modules], sizes)
            for tensor in parameters.values():  # or inductor's CUDA graphs would copy it for every call
                torch._dynamo.mark_static_address(tensor, guard=False)
        rows = [
            tuple(_Row(k, p, p.data_ptr()) for k in (*parameters, "bias") if (p := m._parameters[k]) is not None)
            for m in modules
        ]
        self.common, self.traced = _Common(parameters, bias, sizes, rows), None
        self._device_type = modules[0].packed_device().type
        self._joined, self._misses = self._joined + 1, 0
        self._arrived.clear()
        for index, module in enumerate(modules):
            module.fused, module.fused_index = self, index

    def release(self) -> None:
        """Have every sibling compute alone, and let go of the common tensors: the siblings keep their rows."""
        self.common = self.traced = None

    def arrived(self, module: QuantLinear) -> None:
        """Take note that a sibling's parameters may be new (copied, loaded, moved); with the last one, join again.

        Not on a CPU if they come from an accelerator: offloaded, they are copied there and back for every use.
        """
        if self.common is not None and self.common.has(module):
            return
        self.release()
        if self.is_left_alone:
            return
        self._arrived[module.fused_index] = weakref.ref(module)
        modules = [self._arrived[i]() for i in range(len(self.names)) if i in self._arrived]
        complete = len(modules) == len(self.names) and all(m is not None and m.fused is self for m in modules)
        if complete and module.packed_device().type == "cpu" != self._device_type:
            self._arrived.clear()
        elif complete and why_not(modules) is None:
            self.join_(modules)

    # The product.

    def product(self, module: QuantLinear, x: Tensor) -> Tensor | None:
        """The sibling's output for x, None if it has to compute alone."""
        common = self.common
        if common is None:
            return None
        if torch.compiler.is_compiling():
            return self._traced_product(module, x, common)
        if not common.has(module):
            if not getattr(module, "_is_replica", False):  # of nn.DataParallel, for one call
                self.is_left_alone = True
                self.release()
            return None
        if module.training or type(x) is not Tensor or x.is_inference() or common.needs_grad(x):
            return None
        if is_transformed():  # no part may leave the transform
            return None
        index, state = module.fused_index, self._state(x, common)
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
        y = module.linear(x, common.bias, common.parameters)
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
        """Parts were computed for nobody. Names may have told wrong: such layers compute alone from then on."""
        self._misses += 1
        if self._misses == _MAX_MISSES and not self.is_proven:
            self.release()

    def _state(self, x: Tensor, common: _Common) -> tuple:
        """What must not have changed between the calls of two siblings with the same x."""
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

    def _traced_product(self, module: QuantLinear, x: Tensor, common: _Common) -> Tensor | None:
        """`product` as torch.compile can follow it; once all siblings have been called, `traced` is None again."""
        if not self.is_proven or module.training or torch.compiler.is_exporting() or common.needs_grad(x):
            return None
        index, own = module.fused_index, module._parameters
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
        parts: list[Tensor | None] = list(module.linear(x, bias, common.parameters).split(common.sizes, -1))
        part, parts[index] = parts[index], None
        self.traced = (x, parts)
        return part


def _common_bias(biases: Sequence[nn.Parameter | None], sizes: Sequence[int]) -> Tensor | None:
    """[sum of N], of which the biases become rows; None if there are none."""
    first = next((b for b in biases if b is not None), None)
    if first is None:
        return None
    common = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
    for bias, part in zip(biases, common.split(list(sizes))):
        if bias is not None:
            part.copy_(bias)
            bias.data = part  # an optimizer may hold the parameter: it stays the same object
    return common


def _waiting() -> dict[FusedProjections, _Pending]:
    """What the inputs of this thread have left, by group."""
    try:
        return _local.waiting
    except AttributeError:
        _local.waiting = {}
        return _local.waiting


def fusion_key(scheme: LinearScheme, K: int) -> Hashable:
    """What siblings must have in common; `find_siblings` groups by it."""
    return scheme, K


def why_rows_differ(scheme: LinearScheme, shapes: Sequence[tuple[int, int]]) -> str | None:
    """Why weights [N, K] of one scheme cannot be rows of one, None if they can."""
    quant = scheme.weight
    if quant.granularity == "tensor":
        return "their scales are of whole tensors"
    if quant.granularity == "block" and any(N % BLOCK_SIZE for N, _ in shapes[:-1]):
        return f"their scales are of blocks of {BLOCK_SIZE} rows, which their out_features are no multiples of"
    for shape in shapes[:-1]:
        packed = empty_packed(shape, quant, "meta")
        if packed.global_scale is not None:
            return "each has a global scale of its own"
        if any(t.nbytes % _ALIGNMENT for t in packed if t is not None):
            return f"{shape[0]} rows do not end at a multiple of {_ALIGNMENT} bytes"
    return None


def why_not(modules: Sequence[QuantLinear]) -> str | None:
    """Why these siblings, equal in scheme and in_features, cannot share a product; None if they can."""
    for module in modules:
        parameters = [p for p in module._parameters.values() if p is not None]
        if module.placeholders or any(p.device.type == "meta" for p in parameters):
            return "they are not loaded, or offloaded"
        if any(hasattr(p, "full_tensor") for p in parameters):
            return "they are sharded (tensor parallelism or FSDP)"
        if module.shares_codes:
            return "their codes are tied to those of other layers"
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
    return why_rows_differ(first.scheme, [m.matrix_shape("weight") for m in modules])


def planned_projections(
    model: nn.Module, weights: Mapping[str, tuple[LinearScheme, tuple[int, int]]]
) -> list[tuple[str, ...]]:
    """Names of the layers that `fuse_projections_` will put together, once they are quantized.

    `weights` is {module name: (scheme, shape [N, K])} of those that get quantized and are not tied.
    """
    linears = {
        name: fusion_key(scheme, shape[1])
        for name, (scheme, shape) in weights.items()
        if getattr(quantized_class(type(model.get_submodule(name))), "forward", None) is QuantLinear.forward
    }
    found = (names for names, _ in find_siblings(model, linears))
    return [n for n in found if why_rows_differ(weights[n[0]][0], [weights[name][1] for name in n]) is None]


def fuse_projections_(model: nn.Module) -> nn.Module:
    """Let quantized layers that read the same tensor share one product, in place, and return the model.

    Query, key and value projections, gate and up projections and their like are then one launch instead of two or
    three wherever no gradient is needed; training computes as before. No name, byte or amount of memory changes;
    results may differ in the last bits. `unfuse_projections_` is the way back. A model that transformers loads onto a
    GPU is fused already (`QuantizerConfig(fuse_projections=None)`).

    Raises ValueError, with the reasons, if no layers can be fused.
    """
    num_groups, reasons = fuse_where_possible(model)
    if not num_groups:
        why = "; ".join(reasons) or "no two of its quantized linear layers read the same tensor"
        raise ValueError(f"nothing to fuse in this {type(model).__name__}: {why}")
    return model


def fuse_where_possible(model: nn.Module, *, only_on: Sequence[str] | None = None) -> tuple[int, list[str]]:
    """`fuse_projections_` without the error: (groups that share a product now, why others do not).

    `only_on` are the types of the devices, e.g. "cuda", on which layers are fused; None: all.
    """
    linears = {
        name: fusion_key(module.scheme, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, QuantLinear)
        and type(module).forward is QuantLinear.forward
        and (only_on is None or module.packed_device().type in only_on)
    }
    num_groups, reasons = 0, set()
    for names, is_proven in find_siblings(model, linears):
        modules = [model.get_submodule(name) for name in names]
        reason = None if _are_fused(modules) else why_not(modules)
        if reason is not None:
            reasons.add(reason)
            continue
        num_groups += 1
        if not _are_fused(modules):
            _separate(modules)
            FusedProjections(tuple(_leaf(name) for name in names), is_proven).join_(modules)
    return num_groups, sorted(reasons)


def share_inputs_(model: nn.Module) -> None:
    """Let layers with quantized activations that provably read one tensor quantize it once under torch.compile."""
    linears = {
        name: (module.scheme.activation, module.scheme.cpu_activation, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, QuantLinear) and (module.scheme.activation or module.scheme.cpu_activation) is not None
    }
    for names, is_proven in find_siblings(model, linears):
        if is_proven:
            shared = SharedInput(len(names))
            for index, name in enumerate(names):
                module = model.get_submodule(name)
                module.shared, module.shared_index = shared, index


def _are_fused(modules: Sequence[QuantLinear]) -> bool:
    fused = modules[0].fused
    if fused is None or fused.common is None or len(fused.names) != len(modules):
        return False
    return all(m.fused is fused and fused.common.has(m) for m in modules)


def _leaf(name: str) -> str:
    """ "q_proj" of "layers.0.self_attn.q_proj.base_layer"."""
    return name.replace(".base_layer", "").rpartition(".")[2]


def unfuse_projections_(model: nn.Module) -> nn.Module:
    """Inverse of `fuse_projections_`, in place: every layer has tensors of its own again and computes alone."""
    _separate([module for module in model.modules() if isinstance(module, QuantLinear)])
    return model


@torch.no_grad()
def _separate(modules: Sequence[QuantLinear]) -> None:
    for module in modules:
        fused = module.fused
        if fused is None:
            continue
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.untyped_storage().nbytes() > parameter.nbytes:
                if key == "bias":
                    parameter.data = parameter.data.clone()
                else:
                    module._parameters[key] = nn.Parameter(parameter.clone(), requires_grad=False)
        del module.fused, module.fused_index
        fused.release()  # siblings that are not among the modules compute alone, too
