"""`QuantEmbedding`: nn.Embedding with packed rows; only the rows that are looked up are dequantized."""

from torch import Tensor, nn

from hf_quant.algorithms import geometry
from hf_quant.kernels import dequantize
from hf_quant.modules._base import QuantizedModule, register_module, weight_property


class QuantEmbedding(QuantizedModule, nn.Embedding):
    """nn.Embedding whose table is stored in the scheme's format, weight-only. Not differentiable in the table."""

    kind = "embedding"
    weight = weight_property("weight")

    def forward(self, input: Tensor) -> Tensor:
        qdata, scale, zero_point, global_scale = self.packed()
        rows = input.reshape(-1)
        per_row = scale.shape[0] == qdata.shape[0]
        values = dequantize(
            # Indexing has no float8 kernel: gather the stored integers.
            self._parameters["qdata"][rows].view(qdata.dtype),
            self._parameters["scale"][rows].view(scale.dtype) if per_row else scale,
            zero_point[rows] if per_row and zero_point is not None else zero_point,
            global_scale,
            format=self.scheme.weight.format,
            group_size=geometry(self.scheme.weight, self.num_embeddings, self.embedding_dim)[1],
            K=self.embedding_dim,
            dtype=self.compute_dtype,
        )
        return values.view(*input.shape, self.embedding_dim)


register_module(nn.Embedding, QuantEmbedding)
