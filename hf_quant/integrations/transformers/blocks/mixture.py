"""A mixture of experts as one native call: router, the chosen experts, and an expert that all rows share.

The trial takes what the host's module hands to its experts: rows, chosen experts and weights. The block must compute
what the experts return for these, and what the host makes of a given result of the experts.
"""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_quant.integrations.transformers.blocks.base import (
    LINEAR,
    MAX_ROWS,
    TOLERANCE,
    Classes,
    State,
    Unproven,
    Watch,
    as_part,
    check_read,
    difference,
    host_class,
    random_rows,
    rows_given,
    twin_of,
    weight_of,
)
from hf_quant.integrations.transformers.blocks.mlp import MLPBlock, activation_of, is_mlp
from hf_quant.kernels.native.blocks import ALL_EXPERTS, Block, ExpertGroups
from hf_quant.modules import QuantLinear
from hf_quant.modules.experts import QuantExperts, expert_weight_names


_ROWS = 8  # of the trial
_GROUPS = ("n_group", "num_group", "n_groups", "num_expert_group")
_CHOSEN_GROUPS = ("topk_group", "topk_groups", "num_limited_groups")
_MANY_ROWS = 48  # of a trial of the choice alone
_FACTORS = ("routed_scaling_factor", "route_scale", "routed_scale")  # names of what weights are multiplied by


def is_mixture(module: nn.Module, linear: Classes = LINEAR) -> bool:
    """True if a module has experts and a router beside them; a trial shows what it computes."""
    experts = _experts(module)
    return experts is not None and next(_routers(module, experts), None) is not None


def _experts(module: nn.Module) -> nn.Module | None:
    found = [c for c in module._modules.values() if isinstance(c, QuantExperts) or (c and expert_weight_names(c))]
    return found[0] if len(found) == 1 else None


def _routers(module: nn.Module, experts: nn.Module) -> Iterator[nn.Module]:
    """The children, or children of them, whose weight has a row for each expert."""
    children = [child for child in module._modules.values() if child is not None and child is not experts]
    for part in (part for child in children for part in (child, *child._modules.values())):
        weight = None if part is None else part._parameters.get("weight")
        if weight is not None and weight.dim() == 2 and len(weight) == experts.num_experts:
            yield part


class _Recorder(nn.Module):
    """Experts that note what they are given, and return one of the given results after the other."""

    def __init__(self, results: list[Tensor]) -> None:
        super().__init__()
        self.__dict__["results"], self.calls = results, []

    def forward(self, *args: Any) -> Tensor:
        self.calls.append(args)
        return self.results[(len(self.calls) - 1) % len(self.results)]


class _Routing(NamedTuple):
    """Settings of `Block.route`: the way a router chooses experts."""

    weight: Tensor
    bias: Tensor | None
    chosen: int
    correction: Tensor | None
    by_sigmoid: bool
    normalizes: bool
    factor: float
    rounds: bool
    rounds_weights: bool
    groups: ExpertGroups


def _corrections(own: Tensor | None) -> list[Tensor | None]:
    """A correction of scores, others, and one that leaves all scores below 0."""
    if own is None:
        return [None]
    others = [random_rows(*own.shape, dtype=own.dtype, seed=seed).to(own.device) for seed in range(4)]
    return [own, own - own.max() - 2, *others]


def _agreement(scores: Tensor, groups: ExpertGroups, chosen: Tensor) -> float:
    """The share of rows of which the best experts by `scores` [rows, E] are the chosen ones [rows, k]."""
    rows, k = chosen.shape
    by_groups = scores.view(rows, groups.count, -1)
    best = by_groups.topk(groups.summed).values.sum(-1).topk(groups.chosen).indices
    seen = torch.zeros(rows, groups.count, 1, dtype=torch.bool).scatter(1, best.unsqueeze(-1), True)
    found = by_groups.masked_fill(~seen, groups.outside).view(rows, -1).topk(k).indices
    return (found.sort().values == chosen.sort().values).all(-1).float().mean().item()


class MixtureBlock:
    """The native block of a mixture of experts for x of one dtype."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        experts = _experts(module)
        if not isinstance(experts, QuantExperts) or type(experts).forward is not QuantExperts.forward:
            raise Unproven("its experts are not quantized")
        self.experts, self.dtype = experts, dtype
        router = next(_routers(module, experts), None)
        shared = [child for child in module._modules.values() if child not in (experts, router) and is_mlp(child)]
        if router is None or len(shared) > 1:
            raise Unproven("it has no router, or more than one expert that all rows share")
        buffers = [part for of in (module, router) for item in of._buffers.items() for part in (of._buffers, *item)]
        self.watch = Watch(module, *module.children(), entries=buffers)
        self.up = "gate_up_proj" if experts.has_gate else "up_proj"
        self.F, self.K = experts.matrix_shape("down_proj")[-1], experts.matrix_shape(self.up)[-1]
        self.N = experts.matrix_shape("down_proj")[-2]
        is_clamped = hasattr(experts, "alpha") and hasattr(experts, "limit")  # gpt-oss
        self.clamp = {"alpha": float(experts.alpha), "limit": float(experts.limit)} if is_clamped else {}
        self.activation = "clamped_pairs" if is_clamped else activation_of(experts)
        self.shared = as_part(MLPBlock, shared[0], dtype) if shared else None
        self.shared_gate: Tensor | None = None
        self.routing = routing = self._prove(module, router)
        of_router = (routing.weight, routing.bias, self._correction(module, router))
        check_read(module, experts, *shared, *of_router, self.shared_gate)
        self.block = Block(dtype, self.K, self.N)
        self.add_to(self.block, 0, 1)
        self.block.finish()

    def _prove(self, module: nn.Module, router: nn.Module) -> _Routing:
        """Find how rows are routed, and what is made of the experts' result. Raises Unproven."""
        x = random_rows(1, _ROWS, self.K, dtype=self.dtype, seed=1)
        # Nothing of the experts, too: what is added to them might vanish in their rounding.
        results = [random_rows(_ROWS, self.N, dtype=self.dtype, seed=2), torch.zeros(_ROWS, self.N, dtype=self.dtype)]
        recorder = _Recorder(results)
        children = {n: recorder if child is self.experts else child for n, child in module._modules.items()}
        twin = twin_of(module, children)
        outputs = [host_class(module).forward(twin, x) for _ in results]
        self.returns_more = isinstance(outputs[0], tuple)
        outputs = [output[0] if self.returns_more else output for output in outputs]
        calls = recorder.calls
        if len(calls) != len(results) or any(len(call) != 3 or not torch.equal(call[0], x[0]) for call in calls):
            raise Unproven(f"{type(module).__name__} calls its experts otherwise")
        groups = self._groups(module, router)
        _, chosen, weights = calls[0]
        if weights.dtype not in (self.dtype, torch.float32):
            raise Unproven("weights of another dtype")
        self._prove_rest(module, x, results, outputs)
        expected, errors = self.experts(x[0], chosen, weights), []
        ways = list(self._ways(module, router, chosen, weights, groups))
        for way in ways:
            block, y = Block(self.dtype, self.K, self.N), torch.empty_like(expected)
            self._add_experts(block, 0, 1, way)
            block.finish()(_ROWS, x.data_ptr(), y.data_ptr())
            errors.append(difference(y, expected))
        if not min(errors) <= TOLERANCE[self.dtype]:
            name = type(module).__name__
            raise Unproven(f"{name} chooses its experts otherwise: off by {min(errors):.3g} roundings")
        return ways[errors.index(min(errors))]

    def _correction(self, module: nn.Module, router: nn.Module) -> Tensor | None:
        """The parameter or buffer of a router that is added to the scores of experts. Raises Unproven."""
        own = (router._parameters["weight"], router._parameters.get("bias"))
        tensors = [*router.parameters(), *router.buffers(), *module._parameters.values(), *module._buffers.values()]
        found = [t for t in tensors if t is not None and t.numel() == self.experts.num_experts]
        found = [t for t in found if all(t is not part for part in own)]
        if found and found[0].dtype not in TOLERANCE:
            raise Unproven("a correction of another dtype")
        return found[0] if found else None

    def _groups(self, module: nn.Module, router: nn.Module) -> ExpertGroups:
        """The groups of experts that a router chooses first, by those it chooses for many rows and other corrections.

        Raises Unproven.
        """
        parts, E = (router, module), self.experts.num_experts
        count, best = (
            next((value for part in parts for name in names if (value := getattr(part, name, None))), None)
            for names in (_GROUPS, _CHOSEN_GROUPS)
        )
        if count in (None, 1):
            return ALL_EXPERTS
        place = next((name for name, child in module._modules.items() if child is router), None)
        if best is None or place is None or E % count:
            raise Unproven("its router chooses groups of experts otherwise")
        x, correction = random_rows(1, _MANY_ROWS, self.K, dtype=self.dtype, seed=3), self._correction(module, router)
        logits = F.linear(x[0].float(), router.weight.float(), getattr(router, "bias", None))
        numbers = product((1, 2)[: E // count], (-math.inf, 0.0))
        groups = [ALL_EXPERTS, *(ExpertGroups(count, best, *more) for more in numbers)]
        ways, shares = [*product(groups, (True, False))], []
        for added in _corrections(correction):
            twin = twin_of(router, router._modules)
            for held in ("_parameters", "_buffers"):
                tensors = getattr(router, held).items()
                twin.__dict__[held] = {n: added if t is not None and t is correction else t for n, t in tensors}
            recorder = _Recorder([torch.zeros(_MANY_ROWS, self.N, dtype=self.dtype)])
            children = {n: recorder if child is self.experts else child for n, child in module._modules.items()}
            host_class(module).forward(twin_of(module, {**children, place: twin}), x)
            more = 0.0 if added is None else added.float().flatten()
            scores = [logits.softmax(-1) + more, logits.sigmoid() + more]
            shares.append([_agreement(scores[by_sigmoid], way, recorder.calls[0][1]) for way, by_sigmoid in ways])
        least = [min(found) for found in zip(*shares)]
        fitting = {way for (way, _), share in zip(ways, least) if share == max(least)}
        if correction is None:  # no score is below 0
            fitting = {way._replace(outside=-math.inf) for way in fitting}
        if max(least) < 0.9 or len(fitting) > 1:  # rows with nearly equal scores aside
            raise Unproven("its router chooses groups of experts otherwise")
        return fitting.pop()

    def _ways(
        self, module: nn.Module, router: nn.Module, chosen: Tensor, weights: Tensor, groups: ExpertGroups
    ) -> Iterator[_Routing]:
        """Ways to route that a router's parameters allow."""
        weight, bias, E = router._parameters["weight"], router._parameters.get("bias"), self.experts.num_experts
        if weight.shape != (E, self.K) or weight.dtype not in TOLERANCE or not weight.is_contiguous():
            raise Unproven("a router of another shape or dtype")
        correction = self._correction(module, router)
        correction = None if correction is None else correction.detach().flatten()
        factors = {getattr(part, name, None) for part in (router, module) for name in _FACTORS} | {1.0}
        factors = {float(factor) for factor in factors if isinstance(factor, float | int)}
        for by_sigmoid, normalizes, rounds, factor in product((False, True), (True, False), (True, False), factors):
            is_rounded = weights.dtype == self.dtype
            numbers = (by_sigmoid, normalizes, factor, rounds, is_rounded)
            yield _Routing(weight, bias, chosen.shape[-1], correction, *numbers, groups)

    def _prove_rest(self, module: nn.Module, x: Tensor, results: list[Tensor], outputs: list[Any]) -> None:
        """Find what becomes of the experts' results: nothing, or a shared expert is added. Raises Unproven."""
        children = [child for child in module._modules.values() if isinstance(child, nn.Linear) and child.bias is None]
        gates = [child.weight for child in children if not isinstance(child, QuantLinear) and child.out_features == 1]

        def error_with(gate: Tensor | None) -> float:
            self.shared_gate, errors = gate, []
            for result, output in zip(results, outputs):
                y = result.clone()
                if self.shared is not None:
                    block = Block(self.dtype, self.K, self.N, self.N)
                    self._add_shared(block, 0, 1, 2)
                    block.finish()(_ROWS, x.data_ptr(), result.data_ptr(), y.data_ptr())
                errors.append(difference(y.view(1, *y.shape), output))
            return max(errors)

        errors = [(error_with(gate), gate) for gate in ([None] if self.shared is None else [None, *gates])]
        least, self.shared_gate = min(errors, key=lambda found: found[0])
        if not least <= TOLERANCE[self.dtype]:
            raise Unproven(f"{type(module).__name__} makes something else of the result of its experts")

    def add_to(self, block: Block, x: int, to: int) -> None:
        """Add the steps to a block."""
        y = to if self.shared is None else block.buffer(self.N)
        self._add_experts(block, x, y, self.routing)
        if self.shared is not None:
            self._add_shared(block, x, y, to)

    def _add_experts(self, block: Block, x: int, to: int, routing: _Routing) -> None:
        chosen, has_gate = routing.chosen, self.experts.has_gate
        rows, up, act, y = (
            block.buffer(chosen * width) for width in (self.K, (1 + has_gate) * self.F, self.F, self.N)
        )
        block.route(x, rows, **routing._asdict())
        self._add_product(block, rows, up, self.up)
        block.gate(up, up if has_gate else None, act, self.activation, width=self.F, **self.clamp)
        self._add_product(block, act, y, "down_proj")
        block.combine(y, to, rounds=routing.rounds_weights)

    def _add_product(self, block: Block, x: int, to: int, name: str) -> None:
        parameters, bias = dict(self.experts._parameters), getattr(self.experts, "has_bias", False)
        weight, bias, integer = weight_of(self.experts, name, parameters, f"{name}_bias" if bias else None, self.dtype)
        block.held.append(parameters)
        block.product(x, to, weight, bias, integer=integer, by_experts=True)

    def _add_shared(self, block: Block, x: int, y: int, to: int) -> None:
        """Add the steps from the experts' result y to the sum with the shared expert's."""
        more = block.buffer(self.N)
        self.shared.add_to(block, x, more)
        if self.shared_gate is not None:
            block.weigh(x, more, self.shared_gate)
        block.add(y, more, to)

    def __call__(self, x: Tensor) -> Tensor:
        return self.block.of_rows(x, x.new_empty(*x.shape[:-1], self.N))


def run_mixture(module: nn.Module, state: State, *args: Any, **kwargs: Any) -> Tensor | None:
    """The output for x [B, S, K], None where the host has to compute it."""
    x = rows_given(args, kwargs, MAX_ROWS)
    if x is None or module.training or x.dim() != 3:
        return None
    block = state.block(module, x.dtype, lambda: MixtureBlock(module, x.dtype))
    return None if block is None or block.K != x.shape[-1] or block.returns_more else block(x)
