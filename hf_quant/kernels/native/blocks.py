"""Blocks of a model for few rows: products and what lies between them as one call of the extension.

A `Block` is put together once from steps over buffers [M, width], all of one dtype; results are rounded to it where
ops of torch would round them. The caller keeps all tensors that the steps read alive while the block is used, and has
checked that the extension computes them (`products.serves`, `attention.unsupported_reason`).
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_quant.kernels.codes import CodeSpec
from hf_quant.kernels.native.arguments import DTYPES, bits, layout_arguments
from hf_quant.kernels.native.attention import NO_LAYOUT, appended_arguments
from hf_quant.kernels.native.extension import module
from hf_quant.kernels.native.heads import HeadRows
from hf_quant.kernels.native.products import compute_mode, prepare
from hf_quant.kernels.weight import Weight


ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu_squared", "quick_gelu", "clamped_pairs")
ACTIVATIONS += ("identity", "sigmoid")
# Of a rotary embedding: see `TurnedPairs` in kernels.h.
PAIRS = ("halves", "neighbors", "neighbors_by_pair", "halves_by_pair", "halves_of_neighbors")
_PRODUCT, _NORM, _TURN, _GATE, _ADD, _APPEND, _ATTEND, _ROUTE, _COMBINE, _WEIGH = range(10)
_SMALL, _CONVOLVE, _DELTA, _PICK, _SCAN, _HEADS = range(10, 16)
_run, _run_in_turn = getattr(module, "run_block", None), getattr(module, "run_blocks", None)
_num_threads = torch.get_num_threads
max_head_dim: Callable[[], int] = getattr(module, "max_head_dim", None)


class ExpertGroups(NamedTuple):
    """The way a router leaves experts out: those of the groups that are not the best are not chosen.

    Attributes:
        count, chosen: of the groups of consecutive experts, and of the best of them.
        summed: the score of a group is the sum of so many of the highest scores in it, 1 or 2.
        outside: the score of experts in other groups.
    """

    count: int = 1
    chosen: int = 1
    summed: int = 1
    outside: float = -math.inf


ALL_EXPERTS = ExpertGroups()


class Block:
    """Steps over buffers [M, width] of one dtype, which are named by numbers.

    Attributes:
        dtype: of all buffers but angles, which may have their own.
        held: tensors of the block's own that its steps read.
    """

    def __init__(self, dtype: torch.dtype, *arguments: int) -> None:
        """Begin a block whose first buffers, of these widths, are the arguments of its calls."""
        self.dtype, self.held = dtype, []
        self._num_arguments, self._widths, self._steps = len(arguments), list(arguments), []
        self._dtypes: dict[int, torch.dtype] = {}  # of buffers with another one
        self._block = None

    def buffer(self, width: int) -> int:
        """Add a buffer in scratch."""
        self._widths.append(width)
        return len(self._widths) - 1

    def product(
        self, x: int, to: int, w: Weight, bias: Tensor | None, *, integer: bool, by_experts: bool = False
    ) -> None:
        """Compute x @ w.T + bias; `integer` as in `products.prepared`.

        `by_experts`: x is the result of `route`, or made of it row by row; w and bias are those of the experts.
        """
        weight, held = prepare(w)
        self.held.extend(held)
        mode = compute_mode(self.dtype, integer=integer)
        self._steps.append((weight, _PRODUCT, x, -1, -1, to, *self._held(bias), mode, by_experts))

    def norm(
        self,
        x: int,
        to: int,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        *,
        plus_one: bool,
        rounds_weight: bool,
        rounds: bool,
        centers: bool,
    ) -> None:
        """RMSNorm of each part of x as wide as `weight` [width], or of its rows without one.

        `plus_one`: the weight is 1 + `weight`, rounded to its dtype if `rounds_weight`. `rounds`: x is rounded to the
        dtype before it is multiplied with it. `centers`: the mean is taken off x first (LayerNorm).
        """
        width = self._widths[x] if weight is None else len(weight)
        numbers = (width, *self._held(weight), *self._held(bias), *bits(eps), plus_one, rounds_weight, rounds, centers)
        self._steps.append((None, _NORM, x, -1, -1, to, *numbers))

    def turn(
        self, x: int, cos: int, sin: int, *, head_dim: int, pairs: str, rounds: bool, angle_dtype: torch.dtype
    ) -> None:
        """Turn the heads in x by a rotary embedding, in place; buffers cos and sin [1 or M, turned channels].

        Of "halves_by_pair" they are [1 or M, half of the turned channels]. `rounds`: both products are rounded to the
        dtype before they are added. `angle_dtype`: of cos and sin.
        """
        self._dtypes.update({cos: angle_dtype, sin: angle_dtype})
        turned = self._widths[cos] * (2 if pairs == "halves_by_pair" else 1)
        self._steps.append((None, _TURN, x, cos, sin, x, head_dim, turned, PAIRS.index(pairs), rounds))

    def gate(
        self,
        x: int,
        up: int | None,
        to: int,
        activation: str,
        *,
        width: int = 0,
        alpha: float = 0.0,
        limit: float = 0.0,
        rounds: bool = True,
    ) -> None:
        """Compute activation(x) * up, or activation(x). If up is x, its rows hold both, each of this width.

        `alpha`, `limit`: of "clamped_pairs", see `Activation` in kernels.h. `rounds`: activation(x) to the dtype.
        """
        numbers = (ACTIVATIONS.index(activation), width, *bits(alpha), *bits(limit), not rounds)
        self._steps.append((None, _GATE, x, -1 if up is None else up, -1, to, *numbers))

    def add(self, x: int | None, more: int, to: int, factor: float = 1.0) -> None:
        """Compute x + more * factor, which is rounded first; without x the product alone."""
        self._steps.append((None, _ADD, -1 if x is None else x, more, -1, to, *bits(factor)))

    def route(
        self,
        x: int,
        to: int,
        weight: Tensor,
        bias: Tensor | None,
        *,
        chosen: int,
        correction: Tensor | None,
        by_sigmoid: bool,
        normalizes: bool,
        factor: float,
        rounds: bool,
        rounds_weights: bool,
        groups: ExpertGroups = ALL_EXPERTS,
    ) -> None:
        """Choose experts for each row of x by the scores of x @ weight [E, K].T + bias, a softmax or sigmoids.

        `to` [M, chosen * K] gets the row once for each expert, sorted by experts. `correction` [E] is added to
        the scores by which experts are chosen, not to what their results are weighted by. Weights are normalized to
        a sum of 1, and multiplied by a factor. `rounds`, `rounds_weights`: logits and weights to the dtype. `groups`:
        of those of some groups only.
        """
        numbers = (*weight.shape, *self._held(weight), *self._held(bias), rounds, chosen, *self._held(correction))
        numbers += (by_sigmoid, normalizes, *bits(factor), rounds_weights, *groups[:3], *bits(groups.outside))
        self._steps.append((None, _ROUTE, x, -1, -1, to, *numbers))

    def combine(self, x: int, to: int, *, rounds: bool) -> None:
        """Add up the results x of the experts of each row, by their weights.

        `rounds`: products are rounded to the dtype before they are added.
        """
        self._steps.append((None, _COMBINE, x, -1, -1, to, rounds))

    def weigh(self, x: int, to: int, weight: Tensor) -> None:
        """Multiply `to` in place by sigmoid(x @ weight [1, K].T)."""
        self._steps.append((None, _WEIGH, x, -1, -1, to, *weight.shape, *self._held(weight), 0, 0, True))

    def pick(self, x: int, to: int, columns: slice, *, group: int, column: int = 0) -> None:
        """Copy `columns` of each `group` columns of x, one after the other, to `column` of a buffer and on."""
        if x in self._dtypes:
            self._dtypes.setdefault(to, self._dtypes[x])
        numbers = (group, columns.start, columns.stop - columns.start, column)
        self._steps.append((None, _PICK, x, -1, -1, to, *numbers))

    def multiply_heads(self, x: int, to: int, rows: HeadRows, *, sums: bool) -> None:
        """Compute `HeadRows.sums` of x, or `HeadRows.scores`. Raises ValueError, see `lasting_arguments`."""
        self.held.append(rows)
        self._steps.append((None, _HEADS, x, -1, -1, to, *rows.lasting_arguments(sums=sums)))

    def small(self, x: int, weight: Tensor, bias: Tensor | None) -> int:
        """`plain_product` in a buffer of fp32, which is returned."""
        to = self.buffer(len(weight))
        self._dtypes[to] = torch.float32
        self.plain_product(x, to, weight, bias)
        return to

    def plain_product(self, x: int, to: int, weight: Tensor, bias: Tensor | None) -> None:
        """Compute x @ weight [N, K].T + bias [N] for few rows, rounded to the dtype; sums are in fp32."""
        self._steps.append((None, _SMALL, x, -1, -1, to, *weight.shape, *self._held(weight), *self._held(bias), True))

    def convolve(
        self, x: int, to: int, state: int, weight: Tensor, bias: Tensor | None, activation: str = "identity"
    ) -> None:
        """Shift x into `state`, and compute the activation of the state's products with the weight.

        The state of a sequence is [width * taps]. The sums over taps, plus the bias, are rounded first. weight [width,
        taps] and bias [width] have the dtype.
        """
        address, _, more, _ = (*self._held(weight), *self._held(bias))
        numbers = (state, weight.shape[1], address, more, ACTIVATIONS.index(activation))
        self._steps.append((None, _CONVOLVE, x, -1, -1, to, *numbers))

    def delta(
        self,
        x: int,
        a: int,
        b: int,
        to: int,
        state: int,
        *,
        heads: tuple[int, int],
        dims: tuple[int, int],
        log_decay: Tensor,
        time_bias: Tensor,
    ) -> None:
        """Compute tokens of the gated delta rule, see `DeltaRows` in kernels.h.

        The state [heads * key_dim * value_dim] of a sequence is fp32. x holds q, k and v, one after the other.
        `heads`: of keys and of values; `dims`: of a key and of a value.
        """
        self._dtypes[state] = torch.float32
        numbers = (state, *heads, *dims, *self._held(log_decay), *self._held(time_bias), *bits(1e-6))
        self._steps.append((None, _DELTA, x, a, b, to, *numbers))

    def scan(
        self,
        x: int,
        step: int,
        inputs: int,
        to: int,
        state: int,
        *,
        head_dim: int,
        state_size: int,
        groups: int,
        first: int,
        log_decay: Tensor,
        time_bias: Tensor | None,
        skip: Tensor,
    ) -> None:
        """Compute tokens of a selective state space, see `ScanRows` in kernels.h.

        The state [heads * head_dim * state_size] of a sequence is fp32. x begins with the values of heads; `inputs`
        holds B and C of the `groups`, from column `first` on. `log_decay` [heads] or [heads, state_size], `time_bias`
        and `skip` [heads] are contiguous. `head_dim` and `state_size` are at most `max_head_dim()`, and `state_size`
        is a multiple of 16.
        """
        self._dtypes[state] = torch.float32
        numbers = (state, len(log_decay), head_dim, state_size, groups, first, log_decay.dim() == 2)
        numbers += (*self._held(log_decay), *self._held(time_bias), *self._held(skip))
        self._steps.append((None, _SCAN, x, step, inputs, to, *numbers))

    def append(self, k: int, v: int, num_heads: int) -> None:
        """Write keys and values of the new tokens of each sequence into the cache of the call."""
        self._steps.append((None, _APPEND, k, v, -1, -1, num_heads, num_heads, 0, 0, 0, 0, 0, False))

    def attend(
        self,
        q: int,
        new: tuple[int, int],
        to: int,
        num_heads: int,
        num_key_value_heads: int,
        *,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
        window: int,
    ) -> None:
        """Compute the attention of the new tokens of each sequence to the cache of the call.

        `new`: their keys and values, which are attended to as they are if the cache was empty; (-1, -1) if it never
        is. `softcap` and `window` as in `kv_attention`. `sinks` [num_heads]: one more score for each head, with no
        value.
        """
        self.held.append(sinks)
        numbers = (num_heads, num_key_value_heads, *bits(scale), *bits(softcap or 0.0))
        numbers += (0, 0) if sinks is None else (sinks.data_ptr(), DTYPES[sinks.dtype])
        self._steps.append((None, _ATTEND, q, *new, to, *numbers, window, False))

    def attend_to_latents(self, q: int, q_turned: int, to: int, num_heads: int, *, scale: float) -> None:
        """Compute `native.attention.latent_attention` to the cache of the call, which was not empty.

        Its keys are the latents, its values the part of keys that is turned.
        """
        self._steps.append((None, _ATTEND, q, q_turned, -1, to, num_heads, 1, *bits(scale), 0, 0, 0, 0, True))

    def _held(self, tensor: Tensor | None) -> tuple[int, int]:
        """(address, dtype) of a tensor that is held, zeros if there is none."""
        self.held.append(tensor)
        return (0, 0) if tensor is None else (tensor.data_ptr(), DTYPES[tensor.dtype])

    def finish(self) -> "Block":
        """Make the block ready to be called."""
        buffers = [(width, DTYPES[self._dtypes.get(i, self.dtype)]) for i, width in enumerate(self._widths)]
        self._block = module.new_block(self._num_arguments, *(number for buffer in buffers for number in buffer))
        for step in self._steps:
            module.add_step(self._block, *step)
        return self

    def __call__(self, M: int, *addresses: int, angle_stride: int = 0, sequences: int = 0) -> None:
        """Run the steps for M rows; `addresses` of the arguments, whose rows are contiguous.

        `sequences`: the rows are one token after the other of each of so many; 0: each row is of another one.
        """
        _run(self._block, None, M, _num_threads(), angle_stride, sequences or M, *addresses)

    def of_rows(self, x: Tensor, y: Tensor) -> Tensor:
        """Run a block with the arguments (x, y) for x [..., its width], and return y [..., another width]."""
        self(x.numel() // x.shape[-1], x.data_ptr(), y.data_ptr())
        return y

    def with_cache(
        self,
        sequences: int,
        tokens: int,
        angle_stride: int,
        cache: object,
        place: tuple[int, int, int],
        mask: Tensor | None,
        *addresses: int,
        is_causal: bool = True,
    ) -> None:
        """Run the steps for new `tokens` of each of so many sequences, with a prepared cache.

        `place`: the cache's first column in use, the number of its tokens with the new ones, and how many tokens lay
        before that column, or -1 if the new tokens are the first ones. mask: bool or fp32 [sequences, 1 or
        heads, tokens, all tokens]. `is_causal`: no token attends to later ones, or to those outside of the window.
        """
        settings = (sequences * tokens, _num_threads(), angle_stride, sequences, *place, *_mask_numbers(mask))
        _run(self._block, cache, *settings, is_causal, *addresses)


class Chain:
    """Blocks with the arguments (x, cos, sin, y), each with a prepared cache, on the result of the one before."""

    def __init__(self, blocks: Sequence[Block], caches: Sequence[object]) -> None:
        self._blocks, self._caches = tuple([block._block for block in blocks]), tuple(caches)

    def __call__(
        self,
        sequences: int,
        tokens: int,
        angle_stride: int,
        places: Sequence[int],
        mask: Tensor | None,
        *addresses: int,
    ) -> None:
        """Run them. `places`: as `place` of `Block.with_cache`, one after the other; all else as there.

        `addresses`: of the first x, of cos, of sin, and of the last result.
        """
        settings = (sequences * tokens, _num_threads(), angle_stride, sequences, *_mask_numbers(mask), True)
        _run_in_turn(self._blocks, self._caches, *settings, *addresses, *places)


def _mask_numbers(mask: Tensor | None) -> tuple[int, int, int, int, int]:
    if mask is None:
        return 0, 0, 0, 0, 0
    number = DTYPES[torch.int8 if mask.dtype == torch.bool else mask.dtype]
    return (mask.data_ptr(), number, *mask.stride()[:3])


def prepare_cache(
    keys: tuple[Tensor, Tensor | None, Tensor | None],
    values: tuple[Tensor, Tensor | None, Tensor | None],
    spec: CodeSpec | None,
    head_dims: tuple[int, int],
    *,
    rotates_keys: bool = False,
    rotates_values: bool = False,
    k_frame: Tensor | None = None,
    k_first: Tensor | None = None,
    starts: Tensor | None = None,
    kept: tuple[Tensor, Tensor, int] | None = None,
) -> object:
    """A layer of a cache for `Block.with_cache`: keys and values (codes, scale, offset) for all of its columns.

    Without a spec they are no codes: ([B, H, T, D], None, None). It holds addresses only. Tokens of codes, k_frame,
    k_first, starts and what is kept are contiguous, offsets lie as scales do.

    kept: keys and values [B, H, sinks + recents + 1, D] of the dtype of new ones, and how many are sinks: `Kept` of
    kernels.h. Such a cache takes one token of each sequence at a time.
    """
    k_kept, v_kept, sinks = (None, None, 0) if kept is None else kept
    recents = 0 if k_kept is None else k_kept.shape[2] - sinks - 1
    return module.prepare_cache(
        *(NO_LAYOUT if spec is None else layout_arguments(spec)),
        *(0 if part is None else part.data_ptr() for part in (k_first, starts, k_kept, v_kept)),
        sinks,
        recents,
        *appended_arguments(head_dims[0], rotates_keys, k_frame, *keys),
        *appended_arguments(head_dims[1], rotates_values, None, *values),
    )
