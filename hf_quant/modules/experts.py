"""`QuantExperts`: the fused 3-D expert parameters of transformers 5 (`gate_up_proj`, `down_proj` [E, N, K]).

Any module class that follows transformers' experts interface (`@use_experts_implementation`: Mixtral, Qwen3-MoE,
gpt-oss and some sixty others) is served, recognized by its attributes; no 16-bit copy of an expert is ever made.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from hf_quant.modules._base import QuantizedModule, packed_key, weight_property
from hf_quant.modules._registry import derive_class
from hf_quant.modules.parameters import register_matrices
from hf_quant.modules.products import linear


def expert_weight_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the fused expert weights of a module, () if it does not follow the experts interface."""
    if not all(hasattr(module, name) for name in ("_apply_gate", "num_experts", "is_transposed")):
        return ()
    names = ("gate_up_proj" if getattr(module, "has_gate", True) else "up_proj", "down_proj")
    parameters = (module._parameters.get(n) for n in names)
    fused = all(p is not None and p.dim() == 3 and p.is_floating_point() for p in parameters)
    return names if fused else ()


class QuantExperts(QuantizedModule):
    """Experts of one MoE layer with packed weights; `qdata_gate_up_proj`, `scale_gate_up_proj`, ... [E, N, ...].

    forward(hidden_states [T, H], top_k_index [T, k], top_k_weights [T, k]) -> [T, H]; differentiable in hidden_states
    and top_k_weights.
    """

    kind = "experts"
    gate_up_proj = weight_property("gate_up_proj")
    up_proj = weight_property("up_proj")
    down_proj = weight_property("down_proj")

    @classmethod
    def weight_names_of(cls, module: nn.Module) -> tuple[str, ...]:
        return expert_weight_names(module)

    @classmethod
    def derive_for(cls, host_class: type[nn.Module]) -> type[QuantizedModule]:
        return derive_class(host_class, QuantExperts, (QuantExperts, host_class))

    @classmethod
    def matrix_shape_of(cls, module: nn.Module, shape: tuple[int, ...], name: str = "weight") -> tuple[int, ...]:
        return (shape[0], *shape[:0:-1]) if module.is_transposed else shape

    def to_matrix(self, name: str, weight: Tensor) -> Tensor:
        return weight.transpose(-1, -2) if self.is_transposed else weight

    def from_matrix(self, name: str, matrix: Tensor) -> Tensor:
        return matrix.transpose(-1, -2).contiguous() if self.is_transposed else matrix

    def _project(self, name: str, x: Tensor, offsets: Tensor) -> Tensor:
        scheme = self.scheme
        if x.shape[-1] != self.matrix_shape(name)[-1]:
            self.refuse_width(x, name)
        return linear(
            x,
            self.packed(name),
            self._parameters[f"{name}_bias"] if getattr(self, "has_bias", False) else None,
            offsets,
            self.input_diagonal(x),
            self.static_scale(name),
            activation=scheme.activation_on(x.device.type),
            format=scheme.weight.format,
            group_size=scheme.weight.columns_per_scale(x.shape[-1]),
        )

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if isinstance(hidden_states, Proxy):
            return self.call_in_graph(hidden_states, top_k_index, top_k_weights)
        num_experts = self._parameters[packed_key("qdata", "down_proj")].shape[0]
        return route(self, hidden_states, top_k_index, top_k_weights, num_experts, self._project)


def route(
    module: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    num_experts: int,
    project: Callable[[str, Tensor, Tensor], Tensor],
) -> Tensor:
    """The forward of an experts module, with `project(weight name, x, offsets)` for its products.

    x is sorted by expert: the rows of expert e are those from offsets[e - 1] (0 for the first) to offsets[e].
    """
    num_tokens, top_k = top_k_index.shape
    expert, order = torch.sort(top_k_index.reshape(-1))
    # An id past the last expert (expert parallelism marks other ranks' tokens so) sorts behind every offset.
    bounds = torch.arange(num_experts, device=expert.device)
    offsets = torch.searchsorted(expert, bounds, right=True, out_int32=True)
    x = hidden_states[order // top_k]
    up = project("gate_up_proj" if module.has_gate else "up_proj", x, offsets)
    y = project("down_proj", module._apply_gate(up) if module.has_gate else module.act_fn(up), offsets)
    if getattr(module, "has_post_expert_norm", False):
        y = module.post_expert_norm(y)
    y = y * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    y = y.masked_fill((expert >= num_experts).unsqueeze(-1), 0)
    # Undo the sort and sum each token's experts in a fixed order: deterministic, unlike index_add_ on a GPU.
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    return y[inverse].view(num_tokens, top_k, y.shape[-1]).sum(1).to(hidden_states.dtype)


def register_experts(module: nn.Module) -> bool:
    """Make the class of a module with experts or other matrices quantizable; False if their layout is unknown.

    Known are transformers' experts interface and the classes of `parameters.register_parameters`.
    """
    if not expert_weight_names(module):
        return register_matrices(module)
    QuantExperts.derive_for(type(module))
    return True
