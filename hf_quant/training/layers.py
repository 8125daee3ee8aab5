"""The prepared layers of each kind."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_quant.algorithms import geometry
from hf_quant.modules import route
from hf_quant.training.functions import FakeQuantize, input_as_seen
from hf_quant.training.module import QatModule
from hf_quant.training.swapped import FAMILIES


class QatLinear(QatModule):
    """A linear layer, of torch or of GPT-2, in quantization-aware training."""

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input, None)

    def product(self, input: Tensor, weight: Tensor | None) -> Tensor:
        """The layer's output for an input [..., K], with its own weight or another of the same shape."""
        if not self.qat.is_on:
            matrix = self.matrix("weight", weight)
        else:
            input = input_as_seen(input, self.qat.scheme)
            matrix = self.weight_as_stored("weight", weight).to(input.dtype)
        return F.linear(input, matrix, self.bias)


class QatEmbedding(QatModule):
    """A table in quantization-aware training; only the rows that are looked up are quantized."""

    def forward(self, input: Tensor) -> Tensor:
        options = (self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse)
        rows = F.embedding(input, self.weight, *options)
        if not self.qat.is_on:
            return rows
        self._check_optimizer("weight")
        quant, ids = self.qat.scheme.weight, input.reshape(-1)
        rows_per_scale, group_size = geometry(quant, self.num_embeddings, self.embedding_dim)
        at = ids if rows_per_scale == 1 else ids // rows_per_scale
        scale, (_, zero_point, global_scale) = self.own_scale("weight").index_select(0, at), self.stored("weight")
        if global_scale is not None:
            scale = scale * global_scale
        zero_point = None if zero_point is None else zero_point.index_select(0, at)
        flat = rows.reshape(-1, self.embedding_dim)
        return FakeQuantize.apply(flat, scale, zero_point, quant.format, group_size).view(rows.shape)


class QatExperts(QatModule):
    """Fused experts in quantization-aware training; one product for each expert."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        num_experts = self.down_proj.shape[0]

        def project(name: str, x: Tensor, offsets: Tensor) -> Tensor:
            weight = self.matrix(name)
            if self.qat.is_on:
                x = input_as_seen(x, self.qat.scheme)
                weight = self.weight_as_stored(name).to(x.dtype)
            biases = getattr(self, f"{name}_bias") if getattr(self, "has_bias", False) else [None] * num_experts
            ends = [0, *offsets.tolist()]
            parts = [x[ends[e] : ends[e + 1]] for e in range(num_experts)]
            y = [F.linear(part, weight[e], biases[e]) for e, part in enumerate(parts)]
            rest = len(x) - ends[-1]  # rows of other processes' experts
            return torch.cat([*y, y[0].new_zeros(rest, y[0].shape[-1])])

        return route(self, hidden_states, top_k_index, top_k_weights, num_experts, project)


class QatConv(QatModule):
    """A convolution in quantization-aware training."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        if self.qat.is_on:
            weight = self.weight_as_stored("weight").view(weight.shape)
        return self._conv_forward(input, weight, self.bias)


FAMILIES[QatModule.family] = {"linear": QatLinear, "embedding": QatEmbedding, "experts": QatExperts, "conv": QatConv}
