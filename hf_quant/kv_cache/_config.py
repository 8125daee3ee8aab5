"""`KVCacheConfig`: the format of a quantized cache, and its memory per token."""

from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any, NamedTuple

import torch

from hf_quant.formats import ALIASES
from hf_quant.kernels.codes import CODES
from hf_quant.kernels.kv_attention.op import CACHE_FORMATS, code_width


class Defaults(NamedTuple):
    group_size: int | None  # None: one group per head
    rotate_keys: bool
    rotate_values: bool
    sink_tokens: int
    recent_tokens: int


# Settings that keep the perplexity of a trained model, int2 with a margin: `scripts/eval_quality.py --kv-cache`.
DEFAULTS = {
    "int8": Defaults(None, True, True, 0, 0),
    "fp8_e4m3": Defaults(None, False, False, 0, 0),
    "int4": Defaults(64, True, True, 0, 0),
    "int2": Defaults(32, True, True, 4, 32),
}
PREFILL_CHUNK = 4096  # tokens
# A config may come from an untrusted checkpoint: the memory that a cache allocates beside its tokens is bounded.
_RANGES = {
    "group_size": (16, 2**16),
    "sink_tokens": (0, 2**12),
    "recent_tokens": (0, 2**12),
    "prefill_chunk_size": (1, 2**31 - 1),
}


class Layout(NamedTuple):
    """Sizes of the codes of one head's keys or values, for one token."""

    D: int
    width: int  # elements of the format's dtype
    groups: int
    numbers: int  # stored per group: 1 a scale, 2 a scale and an offset


@dataclass(frozen=True)
class KVCacheConfig:
    """Configure a quantized KV cache: keys and values are stored as codes, with a scale per group of channels.

    Args:
        format: "int8" and "fp8": 8 bits and a scale; "int4", "int2": 4 and 2 bits, a scale and an offset.
        group_size: channels of a head that share a scale. Default: int8 and fp8 the whole head, int4 64, int2 32. If
            it does not divide the head, the next larger multiple of 16 that does, or the whole head.
        rotate_keys: True rotates keys by a Hadamard matrix (queries, too, so the scores do not change), because in
            many models some channels of the keys are much larger than the others. Default: True, except for fp8, whose
            exponents represent such channels well.
        sink_tokens: number of first tokens that are also stored in 16 bit, and read there. Default: int2 4, else 0.
        recent_tokens: number of last tokens that are also stored in 16 bit, and read there. Default: int2 32, else 0.
        prefill_chunk_size: `generate` reads longer prompts in parts of this many tokens, so that the memory of the
            layers does not grow with the prompt. None: all at once.
        rotate_values: True rotates values, too, and what attention makes of them back. Default: True, except for fp8.

    The mean of each channel of the keys in the first states that come (those of the prompt) is taken off all keys, and
    channels with large keys get coarser steps than others. The key of the very first token is kept exactly.

    Raises:
        ValueError: on a format that is none of these, or a number that is out of range.
    """

    format: str
    group_size: int | None = None
    rotate_keys: bool | None = None
    sink_tokens: int | None = None
    recent_tokens: int | None = None
    prefill_chunk_size: int | None = PREFILL_CHUNK
    rotate_values: bool | None = None

    def __post_init__(self) -> None:
        name = self.format.lower() if isinstance(self.format, str) else self.format
        name = ALIASES.get(name, name) if isinstance(name, str) else name
        if not isinstance(name, str) or name not in DEFAULTS:
            raise ValueError(f"the format of a cache is {self.format!r}; allowed: {', '.join(CACHE_FORMATS)}, fp8")
        object.__setattr__(self, "format", name)
        for field, (least, most) in _RANGES.items():
            value = getattr(self, field)
            if value is not None and (type(value) is not int or not least <= value <= most):
                raise ValueError(f"{field} of a cache is {value!r}; needs an integer from {least} to {most}, or None")
        if self.group_size is not None and self.group_size % 16:
            raise ValueError(f"group_size of a cache is {self.group_size}; needs a multiple of 16, or None")
        for field in ("rotate_keys", "rotate_values"):
            if not isinstance(getattr(self, field), bool | None):
                raise ValueError(f"{field} is {getattr(self, field)!r}; needs True, False or None")

    @classmethod
    def of(cls, value: "KVCacheConfig | str | dict[str, Any]") -> "KVCacheConfig":
        """Return the config for a config, a format, or a dict of the fields above. Raises ValueError."""
        if isinstance(value, KVCacheConfig):
            return value
        if isinstance(value, str):
            return cls(value)
        known = [field.name for field in fields(cls)]
        if not isinstance(value, dict) or "format" not in value or not set(value) <= set(known):
            raise ValueError(f"kv_cache is {value!r}; needs a format, or a dict with `format` and any of {known[1:]}")
        return cls(**value)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that do not have their default, `format` first."""
        return {n: v for n, v in asdict(self).items() if n == "format" or v != getattr(KVCacheConfig, n)}

    def resolved(self) -> "KVCacheConfig":
        """Replace None by the defaults of the format; equal configs give the same object."""
        return _resolved(self)

    def layout(self, D: int) -> Layout:
        """Return the sizes for heads of D channels. Raises ValueError if their codes do not fill words of 32 bits."""
        spec = CODES[self.format]
        size = DEFAULTS[self.format].group_size if self.group_size is None else self.group_size
        if spec.is_packed and D * spec.bits % 32:
            fitting = ", ".join(n for n in CACHE_FORMATS if not CODES[n].is_packed or D * CODES[n].bits % 32 == 0)
            raise ValueError(
                f"heads of {D} channels: their {self.format} codes do not fill words of 32 bits; allowed: {fitting}"
            )
        size = D if size is None else next((g for g in range(size, D, 16) if D % g == 0), D)
        return Layout(D, code_width(spec, D), D // size, 2 if spec.is_packed else 1)

    def bytes_per_token(self, D: int) -> int:
        """Bytes per token for the keys (or values) of one head, without 16-bit tokens."""
        layout = self.layout(D)
        return layout.width * CODES[self.format].dtype.itemsize + 2 * layout.groups * layout.numbers


@cache
def _resolved(config: KVCacheConfig) -> KVCacheConfig:
    chosen = {
        name: value if getattr(config, name) is None else getattr(config, name)
        for name, value in DEFAULTS[config.format]._asdict().items()
    }
    return KVCacheConfig(config.format, **chosen, prefill_chunk_size=config.prefill_chunk_size)


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the 16-bit dtype of scales and offsets for states of a dtype; it has the range of the states."""
    return torch.float16 if dtype == torch.float16 else torch.bfloat16
