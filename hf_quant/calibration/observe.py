"""`Moments`, the running sums over the inputs of a layer, and the hooks that collect them while a model runs."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from hf_quant.algorithms import Statistics
from hf_quant.kv_cache import CACHES, cache_in, cache_name
from hf_quant.modules import expert_weight_names, rotated, route
from hf_quant.scheme import InputTransform


KINDS = ("amax", "second_moment", "hessian")
HELD_OUT = 256  # inputs of a layer that are kept out of its means
_HELD_OUT_OF_EXPERT = 32  # likewise, of each expert at least
_HELD_OUT_STRIDE = 16  # of so many inputs one is held out, until there are enough
_CHUNK = 4096  # inputs that are added up at a time


class Moments:
    """Running sums over the inputs of one weight, in fp32 on the device of the inputs.

    Attributes:
        kind: "amax", "second_moment" or "hessian": which of `Statistics` is recorded, besides amax.
        transform: the inputs are rotated by it first, as the product does it.
        num_tokens: inputs so far, without those that are held out.
    """

    def __init__(
        self, kind: str, transform: InputTransform | None, momentum: float | None = None, num_held_out: int = HELD_OUT
    ) -> None:
        self.kind, self.transform, self.momentum = kind, transform, momentum
        self.num_tokens, self.num_held_out = 0, num_held_out if kind == "hessian" else 0
        self.amax: Tensor | None = None
        self._peaks: Tensor | None = None  # [2]: sum of log(largest magnitude) of inputs other than zero; their number
        self.total: Tensor | None = None  # sum of x**2 [K], or of x x^T [K, K]
        self.held_out: list[Tensor] = []
        self._statistics: Statistics | None = None

    @torch.inference_mode(False)
    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        """Add inputs [any, K]."""
        if sum(map(len, self.held_out)) < self.num_held_out:
            held = torch.arange(len(x), device=x.device) % _HELD_OUT_STRIDE == _HELD_OUT_STRIDE - 1
            self.held_out.append(rotated(x[held].float(), self.transform))
            x = x[~held]
        for chunk in x.split(_CHUNK):
            if len(chunk):
                self._add(rotated(chunk.float(), self.transform))

    def _add(self, x: Tensor) -> None:
        self.num_tokens += len(x)
        magnitudes = x.abs()
        amax, peaks = magnitudes.amax(0), magnitudes.amax(1)
        logs = torch.stack((torch.where(peaks > 0, peaks, 1).log().sum(), (peaks > 0).sum()))
        self._peaks = logs if self._peaks is None else self._peaks + logs
        if self.amax is None:
            self.amax = amax
        elif self.momentum is None:
            self.amax = torch.maximum(self.amax, amax)
        else:
            self.amax = self.momentum * self.amax + (1 - self.momentum) * amax
        if self.kind == "second_moment":
            squares = x.square().sum(0)
            self.total = squares if self.total is None else self.total.add_(squares)
        elif self.kind == "hessian":
            if self.total is None:
                self.total = x.new_zeros(x.shape[1], x.shape[1])
            self.total.addmm_(x.t(), x)

    def clone(self) -> "Moments":
        """A copy that goes on alone."""
        copy = Moments(self.kind, self.transform, self.momentum, self.num_held_out)
        copy.num_tokens, copy.amax, copy.held_out = self.num_tokens, self.amax, list(self.held_out)
        copy._peaks = self._peaks
        copy.total = None if self.total is None else self.total.clone()
        return copy

    @property
    def nbytes(self) -> int:
        """Bytes of the sums and of what is held out."""
        return sum(t.nbytes for t in (self.amax, self.total, *self.held_out) if t is not None)

    @property
    def is_finite(self) -> bool:
        """False once an input was NaN or inf."""
        return self.amax is None or bool(self.amax.isfinite().all())

    def statistics(self) -> Statistics:
        """The means, in place of the sums: nothing is added any more. Raises ValueError if there was no input."""
        if self._statistics is None:
            mean = None if self.total is None else self.total.div_(self.num_tokens)
            self._statistics = Statistics(
                self.num_tokens,
                amax=self.amax,
                second_moment=mean if self.kind == "second_moment" else None,
                hessian=mean if self.kind == "hessian" else None,
                held_out=torch.cat(self.held_out)[: self.num_held_out] if any(map(len, self.held_out)) else None,
                token_amax=None if self._peaks is None else (self._peaks[0] / self._peaks[1].clamp(min=1)).exp(),
            )
            self.total = None
            self.held_out.clear()
        return self._statistics


class _Masks(NamedTuple):
    """Attention masks of a call: of its own tokens, and of the encoder whose states it reads."""

    own: Any
    encoder_states: Any
    of_encoder: Any


def is_encoder_decoder(model: nn.Module) -> bool:
    """True for models of transformers that read two sequences."""
    return getattr(getattr(model, "config", None), "is_encoder_decoder", False)


def named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of a module by name, those without a name in the call among them."""
    return {**dict(zip(inspect.signature(module.forward).parameters, args)), **kwargs}


def mask_of_output(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The attention mask of the tokens of a model's output in a call: of two sequences that of the second."""
    has_two = "decoder_attention_mask" in inspect.signature(module.forward).parameters
    return named_arguments(module, args, kwargs).get("decoder_attention_mask" if has_two else "attention_mask")


def _is_of_tokens(mask: Any) -> bool:
    return isinstance(mask, Tensor) and mask.dim() == 2


def _tokens_that_are_read(x: Tensor, mask: Any) -> Tensor | None:
    """True for the tokens of x [B, S, K] or [B * S, K] that the mask [B, S] names; None: it is not the mask of x."""
    if not _is_of_tokens(mask):
        return None
    if mask.shape != x.shape[:-1]:
        mask = mask.flatten()  # experts, and the MLPs of some models, read the tokens of all sequences in one row
    return mask.to(x.device).bool() if mask.shape == x.shape[:-1] else None


def _unpadded(x: Tensor, mask: Any) -> Tensor:
    """The inputs [any, K] of x [..., K] that the attention mask of a model, if it has one, does not call padding."""
    is_read = _tokens_that_are_read(x, mask)
    if is_read is not None:
        return x.detach()[is_read]
    return x.detach().flatten(0, -2) if x.dim() > 1 else x.detach().unsqueeze(0)


class Observer:
    """Hooks on the layers of a model, while it runs, which add their inputs to `moments`.

    Layers that read the same tensor share their sums.

    Args:
        model: the 16-bit model.
        wanted: {module name: (kind, transform)} of the layers to observe.
        moments: {module name: {weight name: one `Moments` per matrix}}, to be filled.
    """

    def __init__(
        self,
        model: nn.Module,
        wanted: dict[str, tuple[str, InputTransform | None]],
        moments: dict[str, dict[str, Sequence[Moments]]],
        momentum: float | None = None,
    ) -> None:
        self.model, self.wanted, self.moments, self.momentum = model, wanted, moments, momentum
        self._calls: list[_Masks] = []  # of the model, and of the models in it that run
        # The last input, its version, its sums, and the layers that have read it.
        self._last: tuple[Tensor, int, Moments, set[str]] | None = None
        self._undo: list[Callable[[], Any]] = []

    def attach(self) -> None:
        """Begin to observe."""
        modules = dict(self.model.named_modules())
        for part in modules.values():
            if part is self.model or hasattr(part, "main_input_name"):  # a model of transformers
                self._undo.append(part.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                self._undo.append(part.register_forward_hook(self._leave).remove)
        for name in self.wanted:
            module = modules[name]
            if expert_weight_names(module):
                self._watch_experts(name, module)
            else:
                hook = partial(self._see, name)
                self._undo.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def detach(self) -> None:
        """Stop observing; the model is as it was."""
        while self._undo:
            self._undo.pop()()
        self._last = None
        self._calls.clear()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is self.model:
            self._calls.clear()  # a call that failed has not left
        mask = mask_of_output(module, args, kwargs)
        if mask is not None and not _is_of_tokens(mask):  # made of the mask of the model around this one
            mask = self._calls[-1].own if self._calls else None
        given = named_arguments(module, args, kwargs)
        self._calls.append(_Masks(mask, given.get("encoder_hidden_states"), given.get("encoder_attention_mask")))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._calls:
            self._calls.pop()

    def _mask_of(self, x: Tensor) -> Any:
        if not self._calls:
            return None
        call = self._calls[-1]
        return call.of_encoder if x is call.encoder_states else call.own

    def _see(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.get("input", kwargs.get("x"))
        kind, transform = self.wanted[name]
        version = 0 if x.is_inference() else x._version
        own, last = self.moments.get(name), self._last
        moments = None if own is None else own["weight"][0]
        if last is not None and last[0] is x and last[1] == version:
            shared, readers = last[2:]
            if moments in (None, shared) and (shared.kind, shared.transform) == (kind, transform):
                self.moments[name] = {"weight": [shared]}
                readers.add(name)
                return
        if moments is None:
            moments = Moments(kind, transform, self.momentum)
        elif last is not None and last[2] is moments and name not in last[3]:
            # It reads another tensor than the layers whose sums it has shared. Their last input stays in its own.
            moments = moments.clone()
        self.moments[name] = {"weight": [moments]}
        self._last = (x, version, moments, {name})
        moments.add(_unpadded(x, self._mask_of(x)))

    def _watch_experts(self, name: str, module: nn.Module) -> None:
        names = expert_weight_names(module)
        kind, transform = self.wanted[name]
        num_experts = module.get_parameter(names[0]).shape[0]
        held_out = max(_HELD_OUT_OF_EXPERT, HELD_OUT // num_experts)
        for weight in names if name not in self.moments else ():
            moments = [Moments(kind, transform, self.momentum, held_out) for _ in range(num_experts)]
            self.moments.setdefault(name, {})[weight] = moments

        def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            project = partial(self._project, name, module)
            read = _tokens_that_are_read(hidden_states, self._mask_of(hidden_states))
            if read is not None:
                route(module, hidden_states[read], top_k_index[read], top_k_weights[read], num_experts, project)
                project = partial(product_of_experts, module)
            return route(module, hidden_states, top_k_index, top_k_weights, num_experts, project)

        self._undo.append(replace_forward(module, forward))

    def _project(self, name: str, module: nn.Module, weight: str, x: Tensor, offsets: Tensor) -> Tensor:
        for expert, rows in rows_of_experts(x.detach(), offsets):
            self.moments[name][weight][expert].add(rows)
        return product_of_experts(module, weight, x, offsets)


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Give one module another forward; the function that is returned takes it back."""
    own = vars(module).get("forward")
    vars(module)["forward"] = forward

    def undo() -> None:
        del vars(module)["forward"]
        if own is not None:
            vars(module)["forward"] = own

    return undo


def rows_of_experts(x: Tensor, offsets: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (expert, its rows of x) for the experts that have any."""
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            yield expert, x[start:end]
        start = end


def product_of_experts(module: Any, weight: str, x: Tensor, offsets: Tensor) -> Tensor:
    """The 16-bit product of experts, each with its own rows of x [T, K]: [T, N]."""
    matrices = module.get_parameter(weight)
    bias = module._parameters[f"{weight}_bias"] if getattr(module, "has_bias", False) else None
    parts = []
    for expert, rows in rows_of_experts(x, offsets):
        matrix = matrices[expert] if module.is_transposed else matrices[expert].t()
        parts.append(rows @ matrix if bias is None else rows @ matrix + bias[expert])
    rest = len(x) - sum(map(len, parts))  # of experts that are not here
    return torch.cat([*parts, x.new_zeros(rest, matrices.shape[-1 if module.is_transposed else -2])])


class PassingCache(DynamicCache):
    """A KV cache that keeps no keys and values: a model that is observed needs none."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states


class CacheObserver:
    """Hooks on a model of transformers, while it runs, which add to `moments` what it adds to its KV cache.

    Args:
        model: the model; it is given a cache that keeps nothing where it gets none.
        moments: {attention module: `Moments` of its keys and of its values}, to be filled.
    """

    def __init__(self, model: Any, moments: dict[str, tuple[Moments, Moments]], momentum: float | None = None) -> None:
        self.model, self.moments, self.momentum = model, moments, momentum
        self._attention = ""  # the module with a number among the layers that was called last
        self._mask: Any = None  # the attention mask that the model was called with
        self._undo: list[Callable[[], Any]] = []

    def attach(self) -> None:
        """Begin to observe."""
        self._undo.append(self.model.register_forward_pre_hook(self._open, with_kwargs=True).remove)
        for name, module in self.model.named_modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                self._undo.append(module.register_forward_pre_hook(partial(self._enter, name)).remove)

    def detach(self) -> None:
        """Stop observing; the model, and the caches that it was given, are as they were."""
        while self._undo:
            self._undo.pop()()

    def _open(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._mask = kwargs.get("attention_mask")
        cache = cache_in(kwargs)
        if cache is None:
            cache = PassingCache(config=self.model.config.get_text_config(decoder=True))
        if "update" not in vars(cache):
            vars(cache)["update"] = partial(self._see, cache.update)
            self._undo.append(partial(vars(cache).pop, "update"))
        others = {name: value for name, value in kwargs.items() if name not in CACHES}
        return args, {**others, cache_name(module.forward): cache}

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._attention = name

    def _see(
        self, update: Callable[..., Any], key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Add keys and values [B, H, S, D] to the moments, and to the cache."""
        own = self.moments.get(self._attention)
        if own is None:
            own = (Moments("amax", None, self.momentum), Moments("amax", None, self.momentum))
            self.moments[self._attention] = own
        for moments, states in zip(own, (key_states, value_states)):
            moments.add(_unpadded(states.transpose(1, 2).flatten(2), self._mask))
        return update(key_states, value_states, *args, **kwargs)
