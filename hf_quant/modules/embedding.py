"""`QuantEmbedding`: nn.Embedding with packed rows; only the rows that are looked up are dequantized."""

from torch import Tensor, nn
from torch.fx import Proxy

from hf_quant.algorithms import geometry
from hf_quant.kernels import dequantize
from hf_quant.kernels.dispatch import direct
from hf_quant.modules._base import QuantizedModule, weight_property
from hf_quant.modules._registry import register_module


_dequantize = direct(dequantize)


class QuantEmbedding(QuantizedModule, nn.Embedding):
    """nn.Embedding whose table is stored in the scheme's format, weight-only. Not differentiable in the table."""

    kind = "embedding"
    weight = weight_property("weight")

    @classmethod
    def weight_names_of(cls, module: nn.Module) -> tuple[str, ...]:
        # max_norm rescales rows of the table at every lookup, which codes cannot follow.
        return () if module.max_norm is not None else ("weight",)

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, Proxy):
            return self.call_in_graph(input)
        return self.look_up(input)

    def look_up(self, input: Tensor) -> Tensor:
        """The rows of the table with these ids [...], dequantized: [..., embedding_dim]."""
        qdata, scale, zero_point, global_scale = self.packed()
        rows_per_scale, group_size = geometry(self.scheme.weight, self.num_embeddings, self.embedding_dim)
        rows = input.reshape(-1)
        scale_rows = rows if rows_per_scale == 1 else rows // rows_per_scale
        values = _dequantize(
            # Indexing has no float8 kernel: gather the stored integers. index_select refuses negative ids, as
            # nn.Embedding does.
            self._parameters["qdata"].index_select(0, rows).view(qdata.dtype),
            self._parameters["scale"].index_select(0, scale_rows).view(scale.dtype),
            None if zero_point is None else zero_point.index_select(0, scale_rows),
            global_scale,
            format=self.scheme.weight.format,
            group_size=group_size,
            K=self.embedding_dim,
            dtype=self.compute_dtype,
        )
        return values.view(*input.shape, self.embedding_dim)


register_module(nn.Embedding, QuantEmbedding)
