"""Tell the dtype of a transformers model that has no floating-point parameter: OLMo has norms without weights.

The host's `model.dtype` looks for the first such parameter, and ends in a StopIteration once its embeddings are codes,
too. A property is one of the class, so that of the host's class is wrapped; `saving` imports this module.
"""

from typing import Any

import torch
import transformers.modeling_utils as modeling_utils

from hf_quant.modules import QuantizedModule


_NAME = "dtype_or_compute_dtype"


def register() -> None:
    """Wrap `dtype`. Further calls do nothing."""
    host = modeling_utils.PreTrainedModel.dtype.fget
    if host.__name__ == _NAME:
        return

    def dtype_or_compute_dtype(self: Any) -> torch.dtype:
        if not any(parameter.is_floating_point() for parameter in self.parameters()):
            for module in self.modules():
                if isinstance(module, QuantizedModule):
                    return module.compute_dtype
        return host(self)

    modeling_utils.PreTrainedModel.dtype = property(dtype_or_compute_dtype, doc=host.__doc__)


register()
