"""The sensitivity of a model's output to errors of its layers: squared gradients at their outputs.

An error dW of a weight changes the output of its layer by dW x. To second order the KL divergence from the model
grows by half the mean of (g . dW x)**2, where g is the gradient of log p(y) at that output for a label y that the
model itself draws: the Fisher information. Its diagonal is kept, and x is weighted by the squared gradient of its
token, as the inputs with large values are often those of tokens that matter little. Models without labels have the
mean of (g . dW x)**2 for a random projection of their outputs, relative to their squares.

Kim et al., "GuidedQuant", https://arxiv.org/abs/2505.07004, use such products of gradients and inputs.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from hf_quant.calibration.fp32 import fast_products
from hf_quant.calibration.observe import (
    mask_of_output,
    product_of_experts,
    replace_forward,
    rows_of_experts,
)
from hf_quant.kernels import quantize_rowwise, quantize_static
from hf_quant.kernels.codes import row_max
from hf_quant.kernels.rowwise.op import row_scale
from hf_quant.kv_cache import CACHES, cache_in
from hf_quant.modules import expert_weight_names, rotated, route
from hf_quant.scheme import InputTransform


NUM_CALLS = 16  # calls of a model, each of one sequence, to twice as many, by which sensitivities are measured
_CHUNK = 64  # tokens, the probabilities of which are held at a time
_LARGE = 2 * 10**9  # bytes of a model, from which its blocks are computed again in the backward pass


class InputRounding(NamedTuple):
    """A quantization of a layer's input, the error of which is measured.

    Attributes:
        format: "int8" or "fp8_e4m3".
        is_static: True: one scale for all tokens of a call, else one for each.
        transform: the rotation of the input before it is rounded; None: there is none.
    """

    format: str
    is_static: bool = False
    transform: InputTransform | None = None

    def errors(self, x: Tensor) -> Tensor:
        """Mean squared error [T] of each token of x [T, K]."""
        x = rotated(x, self.transform)
        if self.is_static and x.numel():
            largest = row_scale(x.abs().max(), row_max(self.format)).reshape(1)
            codes, scale = quantize_static(x, largest, format=self.format)
        else:
            codes, scale = quantize_rowwise(x, format=self.format)
        return (codes.float() * scale - x).square().mean(1)


@dataclass(frozen=True)
class Sensitivity:
    """The sensitivity of a model to errors of one weight [N, K], and to errors of its inputs.

    Attributes:
        rows: [N], what an error of one unit in each feature of the layer's output costs.
        parts: one matrix [K, K], or two of different calls: the mean of x x^T, in which each input counts by its
            squared gradient.
        shares: of the parts in the mean of both.
        rounding: {`InputRounding`: [N], what it costs by each row of the weight, if that has the norm 1}.
    """

    rows: Tensor
    parts: tuple[Tensor, ...]
    shares: tuple[float, ...]
    rounding: dict[InputRounding, Tensor]

    @cached_property
    def inputs(self) -> Tensor:
        """The mean [K, K] of the parts."""
        if len(self.parts) == 1:
            return self.parts[0]
        return self.parts[0] * self.shares[0] + self.parts[1] * self.shares[1]

    def to(self, device: torch.device) -> "Sensitivity":
        """The same on a device."""
        parts, rounding = tuple(p.to(device) for p in self.parts), {k: v.to(device) for k, v in self.rounding.items()}
        return replace(self, rows=self.rows.to(device), parts=parts, rounding=rounding)

    def rotated(self, transform: InputTransform | None) -> "Sensitivity":
        """The same for inputs that are rotated, if these are not."""
        if transform is None:
            return self
        turned = tuple(rotated(rotated(p, transform).t().contiguous(), transform) for p in self.parts)
        return replace(self, parts=turned)

    def losses(self, error: Tensor, rows: slice = slice(None), part: int | None = None) -> Tensor:
        """Predict the loss by an error dW [N, K] of the weight, by row [N]; `rows`: of these rows alone.

        The error is in the basis in which the inputs are recorded. `part`: by one part of the inputs alone.
        """
        inputs = self.inputs if part is None else self.parts[part]
        return ((error @ inputs) * error).sum(1) * self.rows[rows]

    def input_loss(self, weight: Tensor, rounding: InputRounding) -> float:
        """Predict the loss by rounding the inputs of a weight [N, K]: as if the errors of columns were independent."""
        return float((weight.float().square().sum(1) * self.rounding[rounding]).sum())


class Call(NamedTuple):
    """One call of a model, as it is recorded and run again."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Sums:
    """Running sums of one weight."""

    def __init__(self) -> None:
        self.rows: Tensor | float = 0.0
        self.parts: dict[int, tuple[Tensor, Tensor]] = {}  # {part: (sum of inputs, sum of weights)}
        self.rounding: dict[InputRounding, Tensor] = {}

    def add(self, part: int, x: Tensor, gradient: Tensor, errors: dict[InputRounding, Tensor]) -> None:
        """Add inputs [T, K] to a part, the gradients at the outputs [T, N], and errors [T] by rounding the inputs."""
        squares = gradient.float().square()
        weights = squares.mean(1)
        for rounding, error in errors.items():
            cost = squares.t() @ error
            self.rounding[rounding] = self.rounding[rounding] + cost if rounding in self.rounding else cost
        self.rows = self.rows + squares.sum(0)
        own = x.t() @ (x * weights.unsqueeze(1)), weights.sum()
        before = self.parts.get(part)
        self.parts[part] = own if before is None else (before[0].add_(own[0]), before[1] + own[1])


class CallRecorder:
    """A hook that keeps calls of a model, row by row of their batches, spread evenly over all.

    Calls that go on from a filled KV cache are left out.

    Attributes:
        calls: NUM_CALLS to twice as many, or all.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.calls: list[Call] = []
        self._stride, self._number = 1, 0

    def attach(self) -> None:
        """Begin to record."""
        self._handle = self.model.register_forward_pre_hook(self._record, with_kwargs=True)

    def detach(self) -> None:
        """Stop recording."""
        self._handle.remove()

    def _record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = cache_in(kwargs)
        if cache is not None and cache.get_seq_length():
            return
        for call in _rows(Call(args, {n: v for n, v in kwargs.items() if n not in CACHES})):
            if self._number % self._stride == 0:
                self.calls.append(call)
            self._number += 1
            if len(self.calls) == 2 * NUM_CALLS:
                del self.calls[1::2]
                self._stride *= 2


@torch.no_grad()
def record_calls(model: nn.Module, runs: Iterator[Callable[[nn.Module], Any]]) -> list[Call]:
    """Calls of the model, in evaluation mode, while the data runs; see `CallRecorder`."""
    recorder, is_training = CallRecorder(model), model.training
    model.eval()
    recorder.attach()
    try:
        with fast_products():
            for run in runs:
                run(model)
    finally:
        recorder.detach()
        model.train(is_training)
    return recorder.calls


def _rows(call: Call) -> Iterator[Call]:
    """The call for each row of its batch, if all of its tensors have as many rows; else the call itself."""
    values = [*call.args, *call.kwargs.values()]
    counts = {len(v) if v.dim() else 0 for v in values if isinstance(v, Tensor)}
    is_flat = all(isinstance(v, Tensor | bool | int | float | str | None) for v in values)
    if len(counts) != 1 or counts == {0} or not is_flat:
        yield call
        return
    for i in range(counts.pop()):
        yield Call(
            tuple(v[i : i + 1] if isinstance(v, Tensor) else v for v in call.args),
            {n: v[i : i + 1] if isinstance(v, Tensor) else v for n, v in call.kwargs.items()},
        )


class GradientObserver:
    """Hooks on the layers of a model that add up `Sensitivity` while it runs forward and backward.

    Args:
        model: the 16-bit model.
        transforms: {module name: the rotation of its input, or None} of the layers to observe.
        roundings: {module name: quantizations of its input to measure}.
    """

    def __init__(
        self,
        model: nn.Module,
        transforms: dict[str, InputTransform | None],
        roundings: Mapping[str, Collection[InputRounding]],
    ) -> None:
        self.model, self.transforms, self.roundings = model, transforms, roundings
        self.part = 0  # to which inputs are added
        self._reached: set[str] = set()  # layers that got a gradient
        self._skipped: set[str] = set()
        self._sums: dict[str, dict[str, list[_Sums]]] = {}
        self._undo: list[Callable[[], Any]] = []

    def __enter__(self) -> "GradientObserver":
        for name in self.transforms:
            module = self.model.get_submodule(name)
            weights = expert_weight_names(module)
            if weights:
                count = module.get_parameter(weights[0]).shape[0]
                self._sums[name] = {weight: [_Sums() for _ in range(count)] for weight in weights}
                self._undo.append(replace_forward(module, partial(self._see_experts, name, module, count)))
            else:
                self._sums[name] = {"weight": [_Sums()]}
                self._undo.append(module.register_forward_hook(partial(self._see, name), with_kwargs=True).remove)
        return self

    def __exit__(self, *exception: Any) -> None:
        while self._undo:
            self._undo.pop()()

    def results(self, scale: float) -> dict[str, dict[str, list[Sensitivity | None]]]:
        """{module: {weight: one `Sensitivity` per matrix, or None}}, with `scale` on what errors cost."""
        return {
            name: {weight: [_sensitivity(sums, scale) for sums in of] for weight, of in weights.items()}
            for name, weights in self._sums.items()
        }

    @contextmanager
    def skip_reached(self) -> Iterator[None]:
        """Leave out the layers that have got a gradient before."""
        self._skipped = set(self._reached)
        try:
            yield
        finally:
            self._reached, self._skipped = self._skipped, set()

    def _see(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Any:
        x = args[0] if args else kwargs.get("input", kwargs.get("x"))
        return self._watch(output, lambda gradient: self._add(name, "weight", 0, x.detach(), gradient))

    def _see_experts(
        self, name: str, module: nn.Module, count: int, hidden_states: Tensor, index: Tensor, weights: Tensor
    ) -> Tensor:
        def project(weight: str, x: Tensor, offsets: Tensor) -> Tensor:
            def see(gradient: Tensor) -> None:
                pairs = zip(rows_of_experts(x.detach(), offsets), rows_of_experts(gradient, offsets))
                for (expert, rows), (_, gradients) in pairs:
                    self._add(name, weight, expert, rows, gradients)

            return self._watch(product_of_experts(module, weight, x, offsets), see)

        return route(module, hidden_states, index, weights, count, project)

    def _watch(self, output: Tensor, see: Callable[[Tensor], None]) -> Tensor:
        """The output of a layer, the gradient of which is given to `see`."""
        if torch.is_grad_enabled():
            if not output.requires_grad:
                output = output.detach().requires_grad_().clone()  # which the model may change in place
            output.register_hook(see)
        return output

    @torch.no_grad()
    def _add(self, name: str, weight: str, number: int, x: Tensor, gradient: Tensor) -> None:
        if name in self._skipped:
            return
        self._reached.add(name)
        x = x.flatten(0, -2).float()
        errors = {rounding: rounding.errors(x) for rounding in self.roundings.get(name, ())}
        turned = rotated(x, self.transforms[name])
        self._sums[name][weight][number].add(self.part, turned, gradient.flatten(0, -2), errors)


def _sensitivity(sums: _Sums, scale: float) -> Sensitivity | None:
    if not isinstance(sums.rows, Tensor):
        return None  # an expert that was given no token
    tiny = torch.finfo(torch.float32).tiny
    parts = tuple(inputs / weights.clamp(min=tiny) for inputs, weights in sums.parts.values())
    shares = torch.stack([weights for _, weights in sums.parts.values()]).clamp(min=tiny)
    rounding = {key: cost * scale for key, cost in sums.rounding.items()}
    return Sensitivity(sums.rows * scale, parts, tuple((shares / shares.sum()).tolist()), rounding)


class Sensitivities(NamedTuple):
    """The sensitivity of a model to errors of its layers.

    Attributes:
        layers: {module: {weight: one `Sensitivity` per matrix, None for an expert that was given no token}}.
        is_kl: True if the scores add up to the KL divergence per token, False if to the relative squared error of the
            model's output.
    """

    layers: dict[str, dict[str, list[Sensitivity | None]]]
    is_kl: bool


@torch.inference_mode(False)
def sensitivities(
    model: Any,
    calls: Sequence[Call],
    transforms: dict[str, InputTransform | None],
    roundings: Mapping[str, Collection[InputRounding]] | None = None,
    *,
    num_parts: int = 1,
    seed: int = 0,
) -> Sensitivities:
    """Run calls of the model forward and backward, and add up the sensitivities of the layers in `transforms`.

    `roundings` are quantizations of their inputs to measure, too, see `GradientObserver`. With 2 parts every second
    call adds to the other one: what is fitted to one part is judged by the other. The parameters get no gradients.
    Models above 2 GB recompute their blocks, as far as the host can do it: the memory is then that of one block, and
    of the inputs of all. Raises ValueError if an output is no tensor.
    """
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    count, is_kl = 0, False
    observer = GradientObserver(model, transforms, roundings or {})
    with _without_parameter_gradients(model), observer, torch.enable_grad(), fast_products():
        for number_of_call, call in enumerate(calls):
            observer.part = number_of_call % num_parts
            kwargs = {n: v for n, v in call.kwargs.items() if n != "logits_to_keep"}
            args, kwargs = tree_map_only(Tensor, _saved_for_backward, (call.args, kwargs))
            output = model(*args, **kwargs)
            logits = getattr(output, "logits", None)
            is_kl = False
            if isinstance(logits, Tensor) and logits.dim() > 1 and logits.shape[-1] in _numbers_of_classes(model):
                is_kl = True
                mask = mask_of_output(model, args, kwargs)
                gradient, number = _gradient_of_drawn_labels(logits.detach(), mask, generator)
                logits.backward(gradient)
            else:
                number = 1
                first, *others = _projections(output, generator)
                first.backward(retain_graph=bool(others))
                for other in others:  # for layers that the first output does not depend on, such as a pooler
                    with observer.skip_reached():
                        other.backward()
            count += number
    return Sensitivities(observer.results((0.5 if is_kl else 1.0) / max(count, 1)), is_kl)


def check_logits(logits: Tensor) -> None:
    """Raise ValueError if logits, or probabilities, are such that no token can be drawn; some may be -inf."""
    if bool((logits.isnan() | logits.isposinf()).any()):
        raise ValueError(
            "the logits of the model contain NaN or inf before anything is quantized: load it in bfloat16 or fp32 if "
            "it is in float16, else repair its weights"
        )


def _saved_for_backward(x: Tensor) -> Tensor:
    """A tensor that autograd may save: of one that was made in inference mode a copy."""
    return x.clone() if x.is_inference() else x


def _numbers_of_classes(model: Any) -> tuple[int, ...]:
    config = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    return tuple(n for n in (getattr(text, "vocab_size", None), getattr(config, "num_labels", None)) if n)


def _gradient_of_drawn_labels(logits: Tensor, mask: Any, generator: torch.Generator) -> tuple[Tensor, int]:
    """The gradient of the sum of -log p(y) over labels y that are drawn from the logits [..., classes].

    Padding has none. Returns the gradient, and the number of labels. Raises ValueError if logits are NaN or inf.
    """
    gradient = torch.zeros_like(logits)
    is_read = torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device)
    if isinstance(mask, Tensor) and mask.shape == logits.shape[:-1]:
        is_read = mask.to(logits.device).bool()
    positions = is_read.flatten().nonzero().squeeze(1)
    flat, out = logits.flatten(0, -2), gradient.view(-1, logits.shape[-1])
    for chunk in positions.split(_CHUNK):
        p = flat[chunk].float().softmax(-1)
        check_logits(p)
        label = torch.multinomial(p, 1, generator=generator)
        out[chunk] = p.scatter_add_(1, label, torch.full_like(label, -1, dtype=p.dtype)).to(out.dtype)
    return gradient, len(positions)


def _projections(output: Any, generator: torch.Generator) -> list[Tensor]:
    """A random projection of the first tensor of an output, and the sum of those of the others, if there are any.

    Each is relative to the norm of its tensor. A tensor of zeros, such as the contrastive loss of one pair, counts
    only if there is no other.
    """
    values = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else [output]
    tensors = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
    found = []
    for value in [value for value in tensors if value.detach().any()] or tensors:
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float32, device=value.device)
        norm = value.detach().float().norm()
        found.append((value.float() * noise).sum() / (norm if norm else 1.0))
    if not found:
        raise ValueError(f"the model returns a {type(output).__name__} without a tensor that depends on its layers")
    return found if len(found) < 2 else [found[0], torch.stack(found[1:]).sum()]


@contextmanager
def _without_parameter_gradients(model: Any) -> Iterator[None]:
    """In evaluation mode no parameter requires a gradient; large models recompute their blocks."""
    # A parameter that was made in inference mode could not be given its gradient back outside of it.
    required = [p for p in model.parameters() if p.requires_grad and not p.is_inference()]
    is_training = model.training
    model.eval()
    for parameter in required:
        parameter.requires_grad_(False)
    undo = _recompute_blocks(model) if sum(p.nbytes for p in model.parameters()) > _LARGE else None
    try:
        yield
    finally:
        if undo is not None:
            undo()
        for parameter in required:
            parameter.requires_grad_()
        model.train(is_training)


def _recompute_blocks(model: Any) -> Callable[[], None] | None:
    """Turn on the host's gradient checkpointing; returns a function that turns it off, or None if there is none."""
    if not getattr(
        model, "supports_gradient_checkpointing", getattr(model, "_supports_gradient_checkpointing", False)
    ):
        return None
    undo: list[Callable[[], Any]] = []
    if hasattr(model, "gradient_checkpointing_enable"):  # transformers, whose blocks look at `training`
        # transformers 5.23 has given both methods another name.
        names = [getattr(model, f"{kind}_checkpointing_enable", None) for kind in ("activation", "gradient")]
        next(filter(None, names))({"use_reentrant": True})
        if not getattr(model, "_require_grads_hooks", None):  # the hooks of a second call would take their place
            model.enable_input_require_grads()
        undo += [
            getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable),
            model.disable_input_require_grads,
        ]
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.training = True
    elif hasattr(model, "enable_gradient_checkpointing"):  # diffusers
        model.enable_gradient_checkpointing(partial(checkpoint, use_reentrant=True))
        undo.append(model.disable_gradient_checkpointing)

    def disable() -> None:
        while undo:
            undo.pop()()

    return disable
