"""Count the weights of a model whose layers store codes."""

import math

from torch import nn

from hf_quant.modules._base import QuantizedModule
from hf_quant.modules._stored import STORED_NAMES, packed_key


def uncounted_weights(model: nn.Module, with_embeddings: bool = True) -> int:
    """Subtract the number of elements of the packed tensors from the number of weights that are stored in them.

    A count of parameters plus this difference is the count of the 16-bit model. Codes that modules share are counted
    once, as hosts count parameters. `with_embeddings=False` leaves out embeddings, as the host does then.
    """
    difference, seen = 0, set()
    for module in model.modules():
        for name in getattr(module, "weight_names", ()) if isinstance(module, QuantizedModule) else ():
            parts = [p for part in STORED_NAMES if (p := module._parameters.get(packed_key(part, name))) is not None]
            if id(parts[0]) in seen:
                continue
            seen.add(id(parts[0]))
            difference -= sum(p.numel() for p in parts)
            if with_embeddings or module.kind != "embedding":
                difference += math.prod(module.weight_shape(name))
    return difference
