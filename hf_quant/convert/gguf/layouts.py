"""Layouts: the tensors of a GGUF file that hold a parameter of transformers, and the order of its rows in them."""

from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """The place of a parameter in a file: each of its tensors has an equal share of the rows, of every expert.

    A matrix is [N, K], its bias [N]; those of experts are [E, N, K] and [E, N].
    """

    parts: tuple[str, ...]  # names of tensors
    axis: int = 0  # of the rows: 1 for experts
    order: Tensor | None = None  # rows, as transformers counts them, in the order of the parts
    offset: float = 0.0  # that the file holds beside the weight
    is_transposed: bool = False  # transformers has [E, K, N]; codes are [E, N, K] in both

    def shape_of_part(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the values of each part, for a parameter of a shape."""
        shape = (*shape[:-2], shape[-1], shape[-2]) if self.is_transposed else shape
        rows = shape[self.axis] // len(self.parts) if shape else 0
        return (*shape[: self.axis], rows, *shape[self.axis + 1 :])

    def rows(self, part: int, count: int) -> Tensor:
        """Return the rows of a part, as transformers counts all `count` of them."""
        order = torch.arange(count) if self.order is None else self.order
        return order.chunk(len(self.parts))[part]

    def split(self, values: Tensor, part: int) -> Tensor:
        """Return a part of a parameter's values as the file has them."""
        values = values.transpose(-1, -2) if self.is_transposed else values
        values = values + self.offset if self.offset else values
        if self.order is None and len(self.parts) == 1:
            return values
        return values.index_select(self.axis, self.rows(part, values.shape[self.axis]))

    def join(self, parts: list[Tensor]) -> Tensor:
        """Return tensors that have the rows of the parts, such as blocks or codes, in transformers' order."""
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, self.axis)
        return joined if self.order is None else joined.index_select(self.axis, self.order.argsort())

    def values(self, parts: list[Tensor]) -> Tensor:
        """Return the parameter of the values of its parts; the inverse of `split`."""
        joined = self.join(parts)
        joined = joined - self.offset if self.offset else joined
        return joined.transpose(-1, -2).contiguous() if self.is_transposed else joined
