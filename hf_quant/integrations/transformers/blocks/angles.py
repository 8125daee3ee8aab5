"""The angles of a rotary embedding: of one new token, made for the tokens that follow, too, and as blocks read them.

A host makes cos and sin of one position by a dozen small ops, which take longer than their bytes. They depend on the
position alone, so its module is asked for many positions at once, if that gives the same bits for the first of them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_quant.integrations.transformers.blocks.base import Call, Unproven
from hf_quant.modules import QuantizedModule


# Places of a call's arguments. ROTARY: the positions but for their first row, which is of text alone in Qwen2-VL.
# THREE_TIMES: positions as those of time, height and width (Qwen3.5).
PLACES = X, POSITIONS, ROTARY, THREE_TIMES = object(), object(), object(), object()
_AHEAD = 64  # tokens
_BY_LENGTH = {"dynamic", "longrope"}  # kinds of rotary embeddings that change with the largest position


class Angles:
    """The result of a module for x and the positions of one new token of each sequence.

    `args`, `kwargs`: of the module's call, with marks of PLACES in the places of the tensors.
    """

    def __init__(self, module: nn.Module, args: list[Any], kwargs: dict[str, Any]) -> None:
        self.module, self.args, self.kwargs = module, args, kwargs
        kinds = getattr(module, "rope_type", None)
        kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
        self.looks_ahead = bool(kinds) and all(isinstance(kind, str) and kind not in _BY_LENGTH for kind in kinds)
        # (what the angles are made of, positions of the first token, angles of each token), replaced as a whole:
        # several threads may generate at once.
        self.known: tuple[tuple, list[int], list[tuple[Tensor, ...]]] = ((), [], [])

    def __call__(self, x: Tensor, positions: Tensor) -> Any:
        """Angles of the positions [1 or B, 1], or of several rows of them."""
        if not self.looks_ahead or positions.shape[-1] != 1:
            return self._call(x, positions)
        at, sources = positions.flatten().tolist(), self._sources(x)
        made_of, first, rows = self.known
        if sources == made_of and len(at) == len(first):
            step = at[0] - first[0]
            if 0 <= step < len(rows) and all([a - b == step for a, b in zip(at, first)]):
                return rows[step]
        return self._look_ahead(x, positions, at, sources)

    def _call(self, x: Tensor, positions: Tensor) -> Any:
        places = {X: x, POSITIONS: positions, ROTARY: positions[1:]}
        places[THREE_TIMES] = positions.expand(3, *positions.shape) if positions.dim() == 2 else None
        kwargs = {name: places.get(value, value) for name, value in self.kwargs.items()}
        return self.module(*[places.get(value, value) for value in self.args], **kwargs)

    def _sources(self, x: Tensor) -> tuple:
        """The things that angles depend on besides the positions. In inference mode, tensors count no changes."""
        buffers = [b for b in self.module._buffers.values() if b is not None]
        return x.dtype, *[(id(b), b.data_ptr(), None if b.is_inference() else b._version) for b in buffers]

    def _look_ahead(self, x: Tensor, positions: Tensor, at: list[int], sources: tuple) -> Any:
        found = self._call(x, positions)
        try:
            many = self._call(torch.zeros_like(x), positions + torch.arange(_AHEAD))
            rows = list(zip(*[part.transpose(0, 1).contiguous().unsqueeze(2) for part in many]))
            is_same = all([torch.equal(a, b) for a, b in zip(found, rows[0], strict=True)])
        except Exception:  # noqa: BLE001  (a table may end, a result be no tensors)
            is_same = False
        if is_same and sources == self._sources(x):
            self.known = sources, at, rows
        else:
            self.looks_ahead = False
        return found


class LearnedPositions:
    """The rows of an embedding of positions, which a host adds to that of the tokens (GPT-2, OPT)."""

    def __init__(self, call: Call, positions: Tensor) -> None:
        """Make it of a call of an embedding. Raises Unproven if that looked up something else than `positions`."""
        self.module, self.offset = call.child, getattr(call.child, "offset", 0)
        if isinstance(call.child, QuantizedModule) or not torch.equal(self(positions), call.result):
            raise Unproven(f"{type(call.child).__name__} looks up something else than the positions")

    def __call__(self, positions: Tensor) -> Tensor:
        """The rows [1 or B, 1, K] of positions [1 or B, 1]."""
        return F.embedding(positions + self.offset, self.module.weight)


def fit(cos: Tensor, sin: Tensor, B: int, turned: int, dtype: torch.dtype, S: int = 1) -> bool:
    """True if cos and sin are of S tokens [1 or B, S, turned], as the block reads them."""
    for angle in (cos, sin):
        if angle.shape != (cos.shape[0], S, turned) or angle.dtype != dtype or not angle.is_contiguous():
            return False
    return cos.shape[0] in (1, B)


def by_rows(angles: Any, B: int) -> Any:
    """Angles of S tokens [1 or B, S, turned] as a block reads them: each row of its own, or one row for all."""
    if not isinstance(angles, tuple) or angles[0].shape[1] == 1 or len(angles[0]) == B:
        return angles
    return tuple(part.expand(B, -1, -1).contiguous() for part in angles)


def addresses_of(angles: Any, turned: int) -> tuple[int, int, int]:
    """(addresses of cos and sin, elements from row to row) of angles `by_rows`."""
    if not turned:
        return 0, 0, 0
    cos, sin = angles
    return cos.data_ptr(), sin.data_ptr(), turned if cos.shape[0] > 1 or cos.shape[1] > 1 else 0


def turned_by(angles: Any) -> int:
    """The number of channels that cos and sin, or complex numbers, turn; 0 without them."""
    if is_complex(angles):
        return 2 * angles.shape[-1]
    return angles[0].shape[-1] if isinstance(angles, tuple) else 0


def is_complex(angles: Any) -> bool:
    """True if angles are complex numbers, one for each pair of channels (DeepSeek-V2, Llama 4)."""
    return isinstance(angles, Tensor) and angles.dtype == torch.complex64


def in_pairs(angles: Any) -> Any:
    """Complex angles [1 or B, S, pairs] as cos and sin [1 or B, S, 2 * pairs], all others as they are."""
    return tuple(part.repeat(1, 1, 2) for part in (angles.real, angles.imag)) if is_complex(angles) else angles


def angle_dtype(angles: Any, dtype: torch.dtype) -> torch.dtype:
    """The dtype of cos and sin in a block: that of x, `dtype`, or fp32, by which OLMo 2 turns queries and keys.

    It is complex64 of a host that takes complex numbers; the block reads them as fp32, `in_pairs`.
    """
    if is_complex(angles):
        return torch.complex64
    return torch.float32 if isinstance(angles, tuple) and angles[0].dtype == torch.float32 else dtype
