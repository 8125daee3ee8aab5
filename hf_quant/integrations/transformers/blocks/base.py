"""`FusedBlock`: the block of one module, and the class that calls it where the host's `forward` would run.

A module gets a subclass of its class, of the same name, whose `forward` runs the native block on a CPU, or the block
of a GPU (`gpu`), where nothing watches (no gradient, hook, tracer or autocast), and the host's `forward` everywhere
else. A block is made at the first such call, from the module as it is then, by a trial: both compute the same random
input, and must agree to the rounding of the dtype. It is made again after a parameter or a layer was replaced.
"""

import inspect
import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from itertools import chain
from math import inf
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from transformers.pytorch_utils import Conv1D

from hf_quant.integrations.transformers.conv1d import QuantConv1D
from hf_quant.kernels.dispatch import is_plain
from hf_quant.kernels.native import active
from hf_quant.kernels.native.blocks import Block
from hf_quant.kernels.native.places import entries_of, place_of, unchanged
from hf_quant.kernels.native.products import serves, takes_int8
from hf_quant.kernels.prepack import era
from hf_quant.kernels.weight import Weight
from hf_quant.modules import QuantizedModule, QuantLinear
from hf_quant.modules.packed_linear import PackedLinear
from hf_quant.modules.ready import versions_of
from hf_quant.modules.rotation import signs


logger = logging.getLogger(__name__)
Classes = tuple[type[nn.Module], ...]
LINEAR: Classes = (nn.Linear, Conv1D)  # layers of a host that blocks multiply with
QUANTIZED: Classes = (QuantLinear, QuantConv1D)
MAX_ROWS = 32  # of an input; prompts are arithmetic, and their buffers large
_B = TypeVar("_B")
_MOST_WAITS = 12  # trials after which the number of calls until the next one does not double any more
_STATE = "_hf_quant_block"


class Unproven(Exception):
    """A host's module computes something else than the block that was made for it, or cannot be served."""


_SETTINGS = (bool, int, float, str, type(None))


def _settings_of(module: nn.Module) -> dict[str, Any]:
    """Settings with which a module computes: an epsilon, a scale, the number of experts; None for one that is not."""
    found = {name: value for name, value in module.__dict__.items() if type(value) in _SETTINGS and name[0] != "_"}
    found.setdefault("is_causal", None)
    del found["training"]
    return found


class Watch:
    """The parameters, layers and settings that a block was made from: it runs only while all are in their places."""

    def __init__(self, *modules: nn.Module, entries: Sequence[Any] = (), numbers: Sequence[Any] = ()) -> None:
        """Watch modules and their children, and what `unchanged` takes as further `entries` and `numbers`.

        Raises Unproven if a child has hooks: a trial would call them.
        """
        entries = list(entries)
        tensors: list[Tensor] = []
        empty: list[Any] = [nn_module._global_forward_hooks, nn_module._global_forward_pre_hooks]
        children = {id(child): child for module in modules for child in module._modules.values() if child is not None}
        for module in modules:
            entries += entries_of(module._modules)
        for child in children.values():
            entries += [child.__dict__, "forward", None]
            # Others hold counts (rotary embeddings grow), or sizes of what is watched (quantized layers).
            if (child._parameters or child._modules) and not isinstance(child, QuantizedModule):
                entries += [part for item in _settings_of(child).items() for part in (child.__dict__, *item)]
            empty += [child._forward_hooks, child._forward_pre_hooks]
        numbers = list(numbers)
        for module in {**{id(module): module for module in modules}, **children}.values():
            entries += entries_of(module._parameters)
            if isinstance(module, QuantizedModule) and module.scheme.weight.has_float_zeros:
                # What a block reads was made from their values; of inference tensors `clear_prepacked` tells changes.
                numbers += versions_of(value for value in module._parameters.values() if value is not None)
                entries += entries_of(era)
            tensors += [parameter for parameter in module._parameters.values() if parameter is not None]
        # Not by the dict of a module, whose block would keep it alive.
        self.settings = [(ref(module), _settings_of(module)) for module in modules if id(module) not in children]
        self.places = (place_of(entries, numbers, empty, tensors),)
        if not self.holds():
            raise Unproven("its layers have hooks")

    @classmethod
    def of_all(cls, watches: "list[Watch]") -> "Watch":
        """One watch in place of several: of the first, and of what are its modules' parts."""
        watch = object.__new__(cls)
        watch.settings = watches[0].settings
        watch.places = tuple(place for each in watches for place in each.places)
        return watch

    def holds(self) -> bool:
        """True if no parameter, layer or setting was replaced, and nothing watches the layers' calls."""
        for module, settings in self.settings:
            own = module().__dict__
            for name, value in settings.items():
                if own.get(name) is not value:
                    return False
        return unchanged(*self.places)


class Call(NamedTuple):
    """A call of a child: the child, its arguments, its result."""

    child: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    result: Any


class Recorder(nn.Module):
    """A child of a module in a trial: it notes its calls."""

    def __init__(self, child: nn.Module, compute: Callable[..., Any], calls: list[Call]) -> None:
        super().__init__()
        self.__dict__.update(_child=child, _compute=compute, _calls=calls)  # the child is no child of this one
        own = child.__dict__  # hosts ask for the dtype of their first parameter
        self.__dict__.update((name, own[name]) for name in ("_parameters", "_buffers", "_modules", "training"))

    def __getattr__(self, name: str) -> Any:
        children = self.__dict__["_modules"]
        return children[name] if name in children else getattr(self.__dict__["_child"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = self._compute(*args, **kwargs)
        self._calls.append(Call(self._child, args, kwargs, result))
        return result


class State:
    """The blocks of one module, by dtype or by what else its calls differ in; its copies and pickles begin without.

    After a trial the next one for calls of the same kind waits for ever more of them: a host that swaps parameters
    call by call (offloading) is left alone, and a module whose hooks or adapter are gone gets its block back.
    """

    def __init__(self) -> None:
        self.found: dict[Hashable, Any] = {}
        self.trials = 0
        self._turns: dict[Hashable, tuple[int, int]] = {}  # trials for calls of a kind, and calls until the next one
        self.reason: str | None = None  # why there is none
        self._prompts: State | None = None

    def __reduce__(self) -> tuple:
        return State, ()

    @property
    def prompts(self) -> "State":
        """The state for prompts of a module whose other calls must not wait for them."""
        if self._prompts is None:
            self._prompts = State()
        return self._prompts

    def held(self, key: Hashable) -> Any:
        """The block for calls of a kind that there is, None without one, or if parts of the module were replaced."""
        found = self.found.get(key)
        if found is None or not found.watch.holds():
            return None
        self.reason = None  # an adapter or a hook may be gone again
        return found

    def block(self, module: nn.Module, key: Hashable, make: Callable[[], Any]) -> Any:
        """The block of a module for calls of a kind, None if it has none: `make` makes it, or raises Unproven."""
        found = self.held(key)
        if found is not None:
            return found
        trials, waits = self._turns.get(key, (0, 0))
        if waits:
            self._turns[key] = trials, waits - 1
            return None
        self.trials += 1
        trials, waits = trials + 1, 2 ** min(trials + 1, _MOST_WAITS)
        try:
            parts = _Parts(module)
            with torch.inference_mode(False), torch.no_grad(), _random_numbers_kept(module):
                found = make()
            if not found.watch.holds() or _Parts(module).places != parts.places:
                raise Unproven("its parts were replaced during its trial")
        except Exception as error:  # noqa: BLE001  (a host's own code runs in the trial)
            self.reason, self._turns[key] = str(error) or type(error).__name__, (trials, waits)
            logger.debug("%s is computed as by its host: %s", type(module).__name__, self.reason)
            return None
        self.reason, self.found[key], self._turns[key] = None, found, (trials, waits - 2)
        return found


class _Parts:
    """The modules and parameters in a module, held while a block is made of them: another thread may replace some."""

    def __init__(self, module: nn.Module) -> None:
        parameters = list(module.parameters())
        self.held = [*module.modules(), *parameters]
        # The same as long as no part was replaced, and its data is where it was.
        self.places = [*map(id, self.held), *(p.data_ptr() for p in parameters if is_plain(p.data))]


def is_served(x: Any) -> bool:
    """True if a native block may compute with x in place of a host's ops: nothing records or changes what they do."""
    return (
        isinstance(x, Tensor)
        and x.is_cpu
        and active() is not None
        and is_plain(x)
        and x.is_contiguous()
        and not torch.is_autocast_enabled("cpu")
    )


def rows_given(args: tuple, kwargs: dict[str, Any], most: float = inf) -> Tensor | None:
    """The x [..., K] of a call with nothing else; None if it is of more than `most` rows, or no block serves it."""
    if len(args) != 1 or kwargs or not is_served(args[0]):
        return None
    x = args[0]
    return x if x.dtype in TOLERANCE and 0 < x.numel() <= most * x.shape[-1] else None


def new_result(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor for a result on the CPU, which may leave inference mode, as those of a host do."""
    if not torch.is_inference_mode_enabled():
        return torch.empty(shape, dtype=dtype, device="cpu")
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device="cpu")


@cache
def block_class(
    host: type[nn.Module], run: Callable[..., Any], run_on_gpu: Callable[..., Any] | None = None
) -> type[nn.Module]:
    """A subclass of a host's class whose `forward` is `run(module, state, *args, **kwargs)`, unless that is None.

    Then `run_on_gpu` is asked likewise, if there is one.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = self.__dict__.get(_STATE)  # None: a module that a user made of the class of a fused one
        is_tried = state is not None and not torch.compiler.is_compiling() and not torch.is_grad_enabled()
        found = run(self, state, *args, **kwargs) if is_tried else None
        if found is None and is_tried and run_on_gpu is not None:
            found = run_on_gpu(self, state, *args, **kwargs)
        return host.forward(self, *args, **kwargs) if found is None else found

    def reduce(self: nn.Module, protocol: int) -> tuple:
        return _rebuild, (host, run, run_on_gpu), self.__dict__

    forward.__wrapped__ = host.forward  # its signature
    names = {"forward": forward, "__reduce_ex__": reduce, "_hf_quant_block_of": host, "__module__": host.__module__}
    return type(host.__name__, (host,), names)


# Pickles of whole models hold the names of this function, of the functions `run`, and of their files.
def _rebuild(
    host: type[nn.Module], run: Callable[..., Any], run_on_gpu: Callable[..., Any] | None = None
) -> nn.Module:
    return object.__new__(block_class(host, run, run_on_gpu))


def fuse_(module: nn.Module, run: Callable[..., Any], run_on_gpu: Callable[..., Any] | None = None) -> None:
    """Let a module run its block where it can; `run` and `run_on_gpu` as in `block_class`."""
    module.__class__ = block_class(type(module), run, run_on_gpu)
    module.__dict__[_STATE] = State()


def unfuse_(module: nn.Module) -> None:
    """Undo `fuse_`, and give a module that was made of such a class the class of the host."""
    module.__dict__.pop(_STATE, None)
    if "_hf_quant_block_of" in vars(type(module)):
        module.__class__ = type(module)._hf_quant_block_of


def host_class(module: nn.Module) -> type[nn.Module]:
    """The class of the host, of a module that may have a block."""
    return getattr(type(module), "_hf_quant_block_of", type(module))


def is_fused(module: nn.Module) -> bool:
    """True if `fuse_` was called with the module."""
    return _STATE in module.__dict__


def state_of(module: nn.Module) -> State | None:
    """The state of a fused module."""
    return module.__dict__.get(_STATE)


def as_part(make: Callable[..., _B], module: nn.Module, dtype: torch.dtype, *args: Any) -> _B:
    """Make the block of a part of a module for x of one dtype: the part runs it by itself, too, without a trial."""
    block, state = make(module, dtype, *args), state_of(module)
    if state is not None:
        state.found[dtype], state.reason = block, None
    return block


def reason_of(module: nn.Module) -> str | None:
    """The reason why a fused module is computed by its host, None if it is not, or has not been tried."""
    return module.__dict__[_STATE].reason


def add_product(
    block: Block, x: int, to: int, layer: nn.Module, rows: slice | None = None, *, has_bias: bool = True
) -> None:
    """Add the product of a quantized layer, or of a part of its outputs, to a block; its bias if `has_bias`.

    Raises Unproven.
    """
    if not isinstance(layer, QUANTIZED) or not _is_product(layer, block.dtype):
        raise Unproven(f"{type(layer).__name__} is no quantized linear layer")
    parameters = dict(layer._parameters)
    weight, bias, integer = weight_of(layer, "weight", parameters, "bias" if has_bias else None, block.dtype)
    if rows is not None:
        if weight.scale.shape[-2] != weight.N:
            raise Unproven("a part of a weight whose rows share scales")
        parts = [part if part is None else part[rows] for part in weight[:3]]
        weight = weight._replace(**dict(zip(("qdata", "scale", "zero_point"), parts)))
        bias = None if bias is None else bias[rows]
    block.held.append(parameters)
    block.product(x, to, weight, bias, integer=integer)


def _is_product(layer: nn.Module, dtype: torch.dtype) -> bool:
    """True if a layer computes its product, by a trial where it has a forward of its own (Falcon)."""
    if type(layer).forward is PackedLinear.forward:
        return True
    x = random_rows(2, width_of(layer), dtype=dtype)
    return difference(PackedLinear.forward(layer, x), layer(x)) <= TOLERANCE[dtype]


def width_of(layer: nn.Module) -> int:
    """K, the width of the inputs of a quantized linear layer."""
    return layer.matrix_shape("weight")[1]


def outputs_of(layer: nn.Module) -> int:
    """N, the width of the outputs of a quantized linear layer."""
    return layer.matrix_shape("weight")[0]


def weight_of(
    layer: QuantizedModule, name: str, parameters: dict[str, Tensor | None], bias_name: str | None, dtype: torch.dtype
) -> tuple[Weight, Tensor | None, bool]:
    """A layer's weight, its bias, and whether its products are sums of integers. Raises Unproven.

    `parameters`: those of the layer, read once, as another thread may replace them; held for as long as the weight.
    """
    scheme, K, bias = layer.scheme, layer.matrix_shape(name)[-1], parameters[bias_name] if bias_name else None
    packed, activation = layer.typed(name, parameters), scheme.activation_on("cpu")
    if scheme.sparsity is not None or any(p is not None and not is_plain(p.data) for p in parameters.values()):
        raise Unproven("a sparse or sharded weight")
    if not packed.qdata.is_cpu:
        raise Unproven("a weight on another device")
    diagonal = None if scheme.input_transform is None else signs(scheme.input_transform, K, packed.qdata.device)
    group_size = scheme.weight.columns_per_scale(K)
    scale = layer.static_scale(name, parameters)
    weight = Weight(*packed, scheme.weight.format, group_size, K, diagonal, scale)
    integer = activation == "int8" and takes_int8(weight.spec)
    if activation is not None and not integer:
        raise Unproven(f"{activation} inputs of {scheme.weight.format}")
    if weight.has_float_zeros and integer:
        raise Unproven("int8 inputs of floating-point zero points")
    if weight.contiguous() is not weight or not serves(weight, dtype, int8=integer):
        raise Unproven("a weight that the native kernels do not multiply")
    if bias is not None and not (bias.is_contiguous() and bias.dtype in (dtype, torch.float32)):
        raise Unproven("a bias of another dtype")
    return weight, bias, integer


@cache
def _names_of(host: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(host.forward).parameters)[1:]


def by_name(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a module's call by name, but for the first one, as its host's `forward` names them."""
    if len(args) < 2:
        return kwargs
    names = _names_of(host_class(module))
    return {**dict(zip(names[1:], args[1:])), **kwargs}


def twin_of(module: nn.Module, children: dict[str, nn.Module | None]) -> nn.Module:
    """A module of the host's class with the state of `module`, but for its blocks, and other children."""
    twin = object.__new__(host_class(module))
    twin.__dict__.update(module.__dict__)
    twin.__dict__.pop(_STATE, None)  # a block that holds a twin would hold itself, and the memory of a deleted model
    twin.__dict__["_modules"] = children
    return twin


def is_same(a: Any, b: Any) -> bool:
    """True if both are the same tensor, or views of one memory that look the same."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return False
    steps = all(size == 1 or a.stride(i) == b.stride(i) for i, size in enumerate(a.shape) if i < b.dim())
    return (a.data_ptr(), a.shape, a.dtype) == (b.data_ptr(), b.shape, b.dtype) and steps


def check_read(module: nn.Module, *read: nn.Module | Tensor | None) -> None:
    """Raise Unproven if a module has parameters beside those of the parts, and the tensors, that its block reads.

    A trial does not see them while they change nothing, as a new adapter or a factor of 1; training changes them.
    """
    parts = [part for part in read if part is not None]
    known = {id(p) for part in parts for p in ((part,) if isinstance(part, Tensor) else part.parameters())}
    if any(id(parameter) not in known for parameter in module.parameters()):
        raise Unproven(f"{type(module).__name__} has parameters that its block does not read")


def _random_numbers_kept(module: nn.Module) -> AbstractContextManager[None]:
    """Keep the random numbers of the CPU and of a module's device as they are: a host may draw some in a trial."""
    device = next((tensor.device for tensor in chain(module.parameters(), module.buffers())), torch.device("cpu"))
    if device.type not in ("cuda", "xpu"):
        return torch.random.fork_rng([])
    return torch.random.fork_rng([device], device_type=device.type)


def random_rows(*shape: int, dtype: torch.dtype, seed: int = 0, device: torch.device | str | None = None) -> Tensor:
    """Normally distributed values for a trial, without a change of the process's random numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float32).to(device, dtype)


def difference(ours: Tensor, host: Any) -> float:
    """The largest difference of two results, in units of the dtype's rounding of the host's largest value.

    Infinite if the host's is no tensor of that shape and dtype.
    """
    if not isinstance(host, Tensor) or host.shape != ours.shape or host.dtype != ours.dtype:
        return float("inf")
    largest = host.float().abs().max().item()
    found = (ours.float() - host.float()).abs().max().item()
    found = found / max(largest * torch.finfo(ours.dtype).eps, 1e-30)
    return found if found == found else float("inf")


TOLERANCE = {torch.bfloat16: 2.0, torch.float16: 4.0, torch.float32: 64.0}  # units of `difference`
