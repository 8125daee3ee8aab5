"""`Empty`: the 16-bit model that a checkpoint of transformers or diffusers describes, and its host's names."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_quant.cards import diffusers_class
from hf_quant.checkpoint import TensorInfo, one_line, shorten
from hf_quant.convert.files import empty_model
from hf_quant.integrations.transformers.names import check_names, renamer, tied_modules


_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CLASS_NAME = "_class_name"  # the field of configs of diffusers


class Empty(NamedTuple):
    """A model on the meta device, and the names of its tensors in a checkpoint."""

    model: Any  # a PreTrainedModel, or a ModelMixin of diffusers
    stem: str  # of the host's weight files
    dtype: torch.dtype
    rename: Callable[[str], str]  # names in the checkpoint -> names in the model
    tied: dict[str, str]  # {module: the module whose weight it shares}
    unused: tuple[str, ...] = ()  # regular expressions of tensors that the host passes over

    @property
    def is_diffusers(self) -> bool:
        return self.stem != "model"

    def uses(self, name: str) -> bool:
        """Return False for a tensor that the host passes over, such as those of layers for speculative decoding."""
        return not any(re.search(pattern, name) for pattern in self.unused)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a 16-bit weight by its name in the checkpoint, or None if the model has none."""
        try:
            return tuple(self.model.get_parameter(self.rename(name)).shape)
        except AttributeError:
            return None

    def check_names(self, keys: Iterable[str], names: list[str]) -> None:
        """Raise ValueError if the host would not find the codes of the modules `names` under these keys."""
        if not self.is_diffusers:
            check_names(self.model, keys, names)


def empty_host(directory: Path, fields: dict[str, Any], tensors: dict[str, TensorInfo]) -> Empty:
    """Make the model of a checkpoint with the config `fields`. Raises ValueError if its host cannot make it."""
    if CLASS_NAME in fields:
        dtype = _most_frequent(tensors)
        return Empty(_diffusers_model(fields, dtype), "diffusion_pytorch_model", dtype, str, {})
    model = empty_model(directory)
    unused = tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    return Empty(model, "model", model.dtype, renamer(model), tied_modules(model), unused)


def _most_frequent(tensors: dict[str, TensorInfo]) -> torch.dtype:
    """Return the dtype of the tensors that are no codes: configs of diffusers do not have it."""
    sizes: Counter[torch.dtype] = Counter()
    for name, info in tensors.items():
        if name.endswith((".bias", "norm.weight", ".weight")) and info.dtype in _DTYPES:
            sizes[info.dtype] += info.nbytes
    return sizes.most_common(1)[0][0] if sizes.total() else torch.bfloat16


def _diffusers_model(fields: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    import diffusers

    name = fields[CLASS_NAME]
    known = diffusers_class(name)
    if known is None:
        raise ValueError(f"it is a {shorten(repr(name))}, which is no model of diffusers {diffusers.__version__}")
    own = {key: value for key, value in fields.items() if key != "quantization_config"}
    try:
        with torch.device("meta"):
            made: nn.Module = getattr(known[1], "from_config")(own)  # noqa: B009  (its stub does not have it)
            return made.to(dtype)
    except Exception as error:  # noqa: BLE001  (each class of the host has its own for fields that cannot be)
        raise ValueError(f"diffusers cannot make a {name}: {type(error).__name__}: {one_line(error)}") from None
