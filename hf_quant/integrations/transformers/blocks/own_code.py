"""A layer of a decoder whose attention is code of its own, which asks no registry: GPT-J, CodeGen, Falcon, BLOOM.

No function records what such an attention computes. The trial gives the host's layer a cache that returns random
tokens before the new ones, and a mask and biases with random values: keys and values must be those that the host hands
to the cache, and the output that of a layer whose attention is torch's. The output is compared twice, first with one
token to attend to, whose values are the result of any attention. Angles are given, or come from a table of the module.
"""

import inspect
from collections.abc import Mapping
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_quant import kv_cache
from hf_quant.integrations.transformers.blocks.angles import angle_dtype, fit, turned_by
from hf_quant.integrations.transformers.blocks.attention import _NOTHING, POSITIONS, AttentionBlock, Layout
from hf_quant.integrations.transformers.blocks.base import (
    MAX_ROWS,
    TOLERANCE,
    Classes,
    State,
    Unproven,
    Watch,
    by_name,
    difference,
    host_class,
    random_rows,
)
from hf_quant.integrations.transformers.blocks.calls import are_tokens, past_of
from hf_quant.integrations.transformers.blocks.layer import LayerBlock, attention_of, error_of, has_attention
from hf_quant.integrations.transformers.blocks.trial import Trial, has_own_code, output_of, probe
from hf_quant.kernels.native.blocks import Block
from hf_quant.kernels.native.places import entries_of


_BIAS = "alibi"  # argument: what is added to the scores, [B * heads, 1 or S, tokens]
_TABLE = "embed_positions"  # buffer [positions, turned channels] of an attention: sines, then cosines
_BEFORE = 8  # tokens in the cache of a trial
_PARTS = 4  # of CodeGen's joined projection
# Of the largest value: as much do results for int8 inputs differ where roundings have changed their codes by one.
_BY_CODES = 0.025


def is_own_layer(module: nn.Module, linear: Classes) -> bool:
    """True if a module has the parts of such a layer, by their names; a trial shows what it computes."""
    return has_attention(module, linear) and has_own_code(attention_of(module))


class _Past:
    """A cache that holds random tokens, keys times a factor, and notes the new ones."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, factor: float) -> None:
        B, heads, D = shape
        self.k, self.v = (random_rows(B, heads, _BEFORE, D, dtype=dtype, seed=seed) for seed in (8, 9))
        self.k = self.k * factor

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *, kwargs: Any = None) -> tuple[Tensor, Tensor]:
        self.new = k, v
        self.all = tuple(torch.cat(pair, 2) for pair in ((self.k, k), (self.v, v)))
        return self.all

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return _BEFORE


class _Found(NamedTuple):
    """A call of a host's layer: its output, its cache, the mask and the biases that it was given."""

    output: Tensor
    past: _Past
    mask: Tensor
    bias: Tensor | None


class OwnAttention(AttentionBlock):
    """An attention of torch's, whose trial is that of its layer."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, turned: int, angle_dtype: torch.dtype) -> None:
        self._read(module, dtype, turned, angle_dtype)
        self.norms, self.scale = [], self.sizes.D**-0.5

    def layouts(self) -> list[Layout | None]:
        found, width = super().layouts(), self.widths[0] // _PARTS
        return [*found, (width, (0, 2, 1))] if len(found) > 1 and self.widths[0] % _PARTS == 0 else found

    def attention_to(
        self, module: nn.Module, q: Tensor, k: Any, v: Any, mask: Any, more: Mapping[str, Any] = _NOTHING
    ) -> Tensor:
        mask, shares = mask[..., : k.shape[2]], k.shape[1] != q.shape[1]
        return F.scaled_dot_product_attention(q, k, v, mask, scale=self.scale, enable_gqa=shares).transpose(1, 2)


class OwnLayer(LayerBlock):
    """The native block of such a layer for x, angles and masks of one dtype each, with biases or without.

    Attributes:
        mask_factor: masks are scaled, too, if it is not 1 (CodeGen).
        returns_more: its host returns weights, too.
        tables: cosines and sines [positions, turned channels], None if angles are given.
    """

    def __init__(
        self, module: nn.Module, dtype: torch.dtype, angles: Any, of_mask: torch.dtype, has_bias: bool
    ) -> None:
        buffers = attention_of(module)._buffers
        self.table, self.tables = None if isinstance(angles, tuple) else buffers.get(_TABLE), None
        self.of_mask, self.has_bias, self.mask_factor = of_mask, has_bias, 1.0
        if self.table is None:
            turned, self.of_angles = turned_by(angles), [angle_dtype(angles, dtype)]
        else:
            turned, self.of_angles = self.table.shape[-1], [dtype, self.table.dtype]
        super().__init__(module, dtype, turned, self.of_angles[0])
        self.watch = Watch.of_all([self.watch, Watch(entries=entries_of(buffers))])

    def kind_of_attention(self, module: nn.Module) -> type[AttentionBlock]:
        return OwnAttention

    def _prove(self, module: nn.Module, dtype: torch.dtype, turned: int) -> None:
        attention = self.attention
        low, high = POSITIONS if self.table is None else (POSITIONS[0], len(self.table) - 3)
        kinds = ((1, low, 1.0), (3, high, 2.0**-6))  # of small x as in `LayerBlock`
        probes = [probe(self.K, turned, at, dtype, S, angle_dtype=self.of_angles[0]) for S, at, _ in kinds]
        probes = [(x * size, *angles) for (*_, size), (x, *angles) in zip(kinds, probes)]
        found = [self._host(module, trial, sees_one=True) for trial in probes]
        ways, errors = [*product(self.of_angles, attention.turns(), attention.layouts())], []
        for way in ways:
            self._set(*way)
            pairs = [pair for trial, of in zip(probes, found) for pair in zip(self._projected(trial)[1:], of.past.new)]
            errors.append(max(difference(own, theirs) for own, theirs in pairs))
            if errors[-1] == 0.0:
                break
        self._set(*ways[errors.index(min(errors))])
        self._check("has other keys or values", module, min(errors), TOLERANCE[dtype])
        is_integer = attention.layers[-1].scheme.activation_on("cpu") is not None
        bound = max(TOLERANCE[dtype], _BY_CODES / torch.finfo(dtype).eps * is_integer)
        ways, errors, blocks, queries = self.ways(), [], [], [self._projected(trial)[0] for trial in probes]
        for self.is_parallel, self.residual_last in ways:
            blocks.append(self.make_last(dtype))
            errors.append(max(self._error(module, blocks[-1], *of) for of in zip(probes, queries, found)))
        best = errors.index(min(errors))
        (self.is_parallel, self.residual_last), self.last = ways[best], blocks[best]
        self._check("puts its parts together otherwise", module, min(errors), bound)
        # Scores of about 1: some hosts round them.
        found = [self._host(module, trial, 1 / q.float().std().item()) for trial, q in zip(probes, queries)]
        ways, errors = (1.0,) if self.of_mask == torch.bool else (1.0, attention.scale), []
        for self.mask_factor in ways:
            errors.append(max(self._error(module, self.last, *of) for of in zip(probes, queries, found)))
        self.mask_factor = ways[errors.index(min(errors))]
        self._check("computes another attention", module, min(errors), bound)

    def _check(self, what: str, module: nn.Module, error: float, bound: float) -> None:
        if not error <= bound:
            raise Unproven(f"{type(module).__name__} {what}: off by {error:.3g} roundings")

    def _set(self, of_angles: torch.dtype, turn: tuple[str, bool] | None, layout: Layout | None) -> None:
        attention, self.tables = self.attention, None
        attention.angle_dtype, attention.turn, attention.layout = of_angles, turn, layout
        if self.table is not None:
            sin, cos = self.table.to(of_angles).repeat_interleave(2, 1).chunk(2, 1)
            self.tables = cos.contiguous(), sin.contiguous()
        self.first = attention.projections_of(self.rest.add_before)

    def _host(self, module: nn.Module, trial: Trial, factor: float = 1.0, *, sees_one: bool = False) -> _Found:
        """The results of the host for a trial with keys of a size; `sees_one`: with a mask that leaves one token."""
        (B, S, _), (heads, shared, D, _), host = trial[0].shape, self.attention.sizes, host_class(module)
        past, tokens, dtype = _Past((B, shared, D), trial[0].dtype, factor), _BEFORE + S, self.of_mask
        bias = random_rows(B * heads, 1, tokens, dtype=trial[0].dtype, seed=11) / 2 if self.has_bias else None
        mask = random_rows(B, 1, S, tokens, dtype=torch.float32, seed=10) / 2
        at = torch.arange(tokens)  # of the new tokens none is seen, as their scores may be of any size
        seen = (at == 2).expand_as(mask) if sees_one else (mask > -0.25) & (at < _BEFORE)
        mask = seen if dtype == torch.bool else mask.to(dtype).masked_fill(~seen, torch.finfo(dtype).min)
        more = {_BIAS: bias} if _BIAS in inspect.signature(host.forward).parameters else {}
        output = output_of(host.forward, module, trial, past, attention_mask=mask, **more)
        self.returns_more = isinstance(output, tuple) and len(output) == 2
        return _Found(output[0] if self.returns_more else output, past, mask, bias)

    def _projected(self, trial: Trial) -> list[Tensor]:
        """Queries, keys and values [B, heads, S, D] of a trial."""
        x, *angles, position = trial
        if self.tables is not None:
            angles = self.angles(None, (position + torch.arange(x.shape[1])).expand(len(x), -1))
        return [part.transpose(1, 2) for part in self.attention.of_trial(self.first, (x, *angles, position))]

    def _error(self, module: nn.Module, last: Block, trial: Trial, q: Tensor, found: _Found) -> float:
        added = self.added(found.mask, found.bias, len(q))
        attended = self.attention.attention_to(attention_of(module), q, *found.past.all, added).contiguous()
        return error_of(last, trial[0], [], attended, found.output)

    def angles(self, given: Any, positions: Any) -> Any:
        """The angles of tokens, which are given or those of their positions [1 or B, S]."""
        return given if self.tables is None else tuple(part[positions] for part in self.tables)

    def added(self, mask: Tensor, bias: Tensor | None, B: int) -> Tensor:
        """The sum of a mask and biases, as torch's attention takes it."""
        mask = mask if self.mask_factor == 1.0 else mask * self.mask_factor
        return mask if bias is None else mask + bias.view(B, self.attention.sizes.heads, *bias.shape[1:])


def run_own_layer(module: nn.Module, state: State, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, None] | None:
    """The layer's output for tokens, with no weights if it returns some; None where the host has to compute it."""
    kwargs = by_name(module, args, kwargs)
    bias, mask, past = kwargs.pop(_BIAS, None), kwargs.get("attention_mask"), past_of(kwargs)
    if not args or module.training or past is None or not are_tokens(args[0], kwargs):
        return None
    x, given, positions = args[0], kwargs.get("position_embeddings"), kwargs.get("position_ids")
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return None
    (B, S, K), of_mask, has_bias = x.shape, mask.dtype, bias is not None
    key = (x.dtype, of_mask, has_bias)
    block = state.block(module, key, lambda: OwnLayer(module, x.dtype, given, of_mask, has_bias))
    if block is None or block.K != K or (block.tables is not None and not isinstance(positions, Tensor)):
        return None
    attention, angles = block.attention, block.angles(given, positions)
    (heads, _, _, turned), of_angles = attention.sizes, attention.angle_dtype
    if turned != turned_by(angles) or (turned and not fit(*angles, B, turned, of_angles, S)):
        return None
    if bias is not None and (bias.dim() != 3 or len(bias) != B * heads or bias.shape[2] != mask.shape[3]):
        return None
    mask = block.added(mask, bias, B)
    y = attention.with_codes(block.block, x, angles, mask, past) if S == 1 and B <= MAX_ROWS else None
    if y is None and isinstance(past, kv_cache.QuantizedCache):
        return None
    y = block.in_parts(module, x, angles, mask, past) if y is None else y
    return (y, None) if block.returns_more else y
