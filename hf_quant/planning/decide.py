"""`plan`: decide for each module of a model which scheme it gets, or why it stays in 16 bit."""

import difflib
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_quant.algorithms import SOLVERS
from hf_quant.config import QuantizerConfig, as_config
from hf_quant.formats import FORMATS
from hf_quant.kv_cache import KVCacheConfig, describe
from hf_quant.modules import QuantizedModule, check_model, planned_projections, quantized_class, register_experts
from hf_quant.modules.sparse24 import empty_stored
from hf_quant.patterns import excludes, matches
from hf_quant.planning.left import naming
from hf_quant.planning.records import PRODUCT_KINDS, PlanEntry, QuantPlan
from hf_quant.resolve import entry_fields, fitted, resolve_scheme
from hf_quant.scheme import LinearScheme


logger = logging.getLogger(__name__)

SMALL_MODEL = 1_000_000_000  # parameters: below, 4 bits cost a language model much
MIN_WEIGHTS = 4096  # smaller layers cost more in overhead and quality than they save
DEFAULT_KINDS = ("linear", "experts", "parameters", "dequantized", "attention")
LARGE_HEAD = 0.2  # of a quantized model: an output embedding in 16 bit of that size takes much of a token's time
_OUTPUT_EMBEDDING, _TIED = "output embedding", "tied to"  # reasons for 16 bit
_IF_NAMED = ": only if named in `modules`"  # end of the reason of all other kinds
_CALIBRATED_KINDS = ("linear", "experts")  # of whose inputs statistics are taken
# Reasons against a quantized counterpart of modules that hold large matrices.
_NO_COUNTERPART = {nn.Bilinear: "it multiplies two inputs, where codes of one matrix save nothing in time"}


class NothingToQuantize(ValueError):
    """Raised for a model in which a config quantizes nothing."""


class Rules(NamedTuple):
    """Rules of a host for one model: {module name: reason}."""

    keep: Mapping[str, str]  # modules that stay in 16 bit, unless `modules_to_not_convert` is given
    weight_only: Mapping[str, str]  # modules whose inputs are not quantized
    attention: str | None = None  # one line on 8-bit attention; None: no attention of the model can be quantized
    blocks: str | None = None  # one line on the modules that are computed in one call; None: there are none
    whole: str | None = None  # why the whole model stays in 16 bit, but for what `modules` names; None: it does not


HOST_RULES: list[Callable[[nn.Module], Rules | None]] = []  # filled by `integrations`; None: not that host's model


class _Candidate(NamedTuple):
    """A module with a quantized counterpart and floating-point weights."""

    kind: str
    module: nn.Module
    quantized: type[QuantizedModule]


def plan(
    model: nn.Module, config: QuantizerConfig | str | dict[str, Any], *, dtype: torch.dtype | None = None
) -> QuantPlan:
    """Plan what `quantize_(model, config)` would do. The model is not changed, and may be on the meta device.

    dtype: dtype of the 16-bit weights, if the model's own dtype is not final yet.
    Raises ValueError if the model is quantized already, a pattern matches nothing, or nothing would be quantized. A
    config without `weights` whose `modules` name what is left in 16 bit plans that of a quantized model.
    """
    check_model(model)
    config = as_config(config)
    if config.is_auto:
        raise ValueError("weights is 'auto': the schemes are chosen by running the model, see hf_quant.auto_plan")
    quantized = [name for name, module in model.named_modules() if isinstance(module, QuantizedModule)]
    if quantized and (config.weights is not None or config.quantizes_no_weights):
        raise ValueError(
            f"the model is quantized already ({quantized[0] or 'it'} is); dequantize_ it first, or name modules that "
            "are left in 16 bit: QuantizerConfig(None, modules={...})"
        )
    candidates = dict(_candidates(model))
    _check_patterns(config, candidates, quantized)
    decider = _Decider(model, config, candidates, dtype)
    entries = [decider.entry(name) for name in candidates]
    attention = decider.attention()
    is_enough = config.quantizes_no_weights and config.has_more_than_weights
    unsupported = list(_unsupported(model, candidates, dtype))
    if all(entry.scheme is None for entry in entries) and not is_enough:
        reasons = sorted({e.reason for e in entries + unsupported if e.reason is not None})
        because = "; ".join(reasons or ["it has no linear layers"])
        unnamed = [e for e in entries if (e.reason or "").endswith(_IF_NAMED)]
        remedy = f"; to quantize them, name them: {naming(unnamed)}" if unnamed else ""
        raise NothingToQuantize(f"nothing to quantize in {type(model).__name__}: {because}{remedy}")
    entries += unsupported
    planned = {id(p) for name in candidates for p in decider.weights(name).values()}
    planned |= {id(model.get_submodule(e.name)._parameters[n]) for e in entries if e.kind == "other" for n in e.shapes}
    tensors = {id(t): t for t in itertools.chain(model.parameters(), model.buffers())}
    other = sum(t.nbytes for key, t in tensors.items() if key not in planned)
    shared = {e.shared_with for e in entries}
    weights = {
        e.name: (e.scheme, e.shapes["weight"])
        for e in entries
        if e.scheme is not None and e.kind == "linear" and e.shared_with is None and e.name not in shared
    }
    fused = [] if config.fuse_projections is False else planned_projections(model, weights)
    fused_on = "every device" if config.fuse_projections else "GPUs"
    cache = None if config.kv_cache is None else describe(model, KVCacheConfig.of(config.kv_cache))
    is_asked = config.weights is None or config.modules_to_not_convert is not None  # for what stays in 16 bit
    num_weights = 0 if is_asked else sum(p.numel() for p in model.parameters())
    advice = _advice(model, entries), _advice_on_head(model, decider.output, entries, other)
    lines = (decider.lifted, "\n".join(filter(None, advice)) or None, decider.blocks(), num_weights)
    return QuantPlan(entries, other, fused, fused_on, cache, attention, *lines)


def _advice(model: nn.Module, entries: list[PlanEntry]) -> str | None:
    """Return what to take instead for a small language model in 4 bits or fewer: docs/accuracy.md measures two."""
    plain = (entry.scheme for entry in entries if entry.algorithm != "gptq")
    few = {scheme.weight.format for scheme in plain if scheme is not None}
    few = {name for name in few if FORMATS[name].bits <= 4}
    size = sum(p.numel() for p in model.parameters())
    if not few or size >= SMALL_MODEL or not getattr(model, "can_generate", lambda: False)():
        return None
    nf4 = "" if few == {"nf4"} else "; of 4 bits nf4 loses least"
    return (
        f"advice: {', '.join(sorted(few))} costs a language model of {size / 1e6:.1f}M parameters much, fp6_e2m3 "
        f"little, int8 next to nothing{nf4}; algorithm='gptq' takes off three quarters"
    )


def _advice_on_head(model: nn.Module, output: str | None, entries: list[PlanEntry], other: int) -> str | None:
    """Return how to quantize the output embedding, if that is a large part of what a new token reads."""
    head = next((entry for entry in entries if entry.name == output), None)
    if head is None or not getattr(model, "can_generate", lambda: False)() or all(e.scheme is None for e in entries):
        return None
    is_default = head.reason == _OUTPUT_EMBEDDING or (head.reason or "").startswith(_TIED)
    share = math.prod(head.shapes["weight"]) * head.dtype.itemsize / (other + sum(e.bytes_after for e in entries))
    if head.scheme is not None or not is_default or share < LARGE_HEAD:
        return None
    return (
        f"advice: {head.name} stays in 16 bit, {share:.0%} of the quantized model, and each new token reads it: "
        f"modules={{{head.name!r}: 'int8'}} costs next to nothing"
    )


def _candidates(model: nn.Module) -> Iterator[tuple[str, _Candidate]]:
    """Yield (name, candidate) for the modules that can be quantized."""
    for name, module in model.named_modules():
        register_experts(module)
        quantized = quantized_class(type(module))
        if quantized is None:
            continue
        weights = [module._parameters.get(n) for n in quantized.weight_names_of(module)]
        # Other libraries store int8 codes in subclasses of nn.Linear, too.
        if weights and all(
            w is not None and w.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64) for w in weights
        ):
            yield name, _Candidate(quantized.kind, module, quantized)


def _unsupported(
    model: nn.Module, candidates: dict[str, _Candidate], dtype: torch.dtype | None
) -> Iterator[PlanEntry]:
    """Yield entries of the modules whose matrices stay in 16 bit because they have no quantized counterpart."""
    seen = {id(p) for c in candidates.values() for p in c.module._parameters.values()}
    for name, module in model.named_modules():
        shapes: dict[str, tuple[int, ...]] = {}
        nbytes = 0
        for key, p in module._parameters.items():
            if p is None or id(p) in seen or not p.is_floating_point() or p.dim() < 2 or p.numel() < MIN_WEIGHTS:
                continue
            seen.add(id(p))
            shapes[key] = tuple(p.shape)
            nbytes += p.numel() * (dtype or p.dtype).itemsize
        if shapes:
            first = module.get_parameter(next(iter(shapes))).dtype
            why = next((f": {text}" for cls, text in _NO_COUNTERPART.items() if isinstance(module, cls)), "")
            reason = f"{type(module).__name__} has no quantized counterpart{why}"
            if first.itemsize == 1 and quantized_class(type(module)) is not None:
                reason = f"stored in {first} already, as by layerwise casting: quantize the model without that"
            first = dtype or first
            yield PlanEntry(name, "other", shapes, first, None, None, reason, nbytes, nbytes)


def _tied_modules(model: nn.Module, candidates: dict[str, _Candidate]) -> dict[str, str]:
    """Return {module: the module whose weight it shares}, by identity and by the declarations of transformers."""
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, candidate in candidates.items():
        weight = candidate.module._parameters.get("weight")
        if weight is not None and first.setdefault(id(weight), name) != name:
            tied[name] = first[id(weight)]
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        ends = [_end_of(tied, name.removesuffix(".weight")) for name in (target, source)]
        if ends[0] != ends[1] and all(name in candidates for name in ends):
            tied[ends[0]] = ends[1]
    return {name: _end_of(tied, name) for name in tied}


def _end_of(tied: dict[str, str], name: str) -> str:
    """The module at the end of a chain of modules that share one weight: one that is tied to no other."""
    while name in tied:
        name = tied[name]
    return name


class _Decider:
    """Decide module by module which scheme it gets."""

    def __init__(
        self, model: nn.Module, config: QuantizerConfig, candidates: dict[str, _Candidate], dtype: torch.dtype | None
    ) -> None:
        self.config, self.candidates, self.dtype = config, candidates, dtype
        self.tied = _tied_modules(model, candidates)
        self.model_class = type(model).__name__
        self.lifted: dict[str, str] = {}
        self.modules = {name for name, _ in model.named_modules()}
        stacks = (name for name, c in candidates.items() if c.kind == "parameters")  # of JetMoE: input_linear, ...
        self.expert_parents = {name.rpartition(".")[0] for name in stacks}
        output = getattr(model, "get_output_embeddings", lambda: None)()
        self.output = next((n for n, c in candidates.items() if c.module is output), None)
        # Models of transformers with a head hold everything else under `base_model_prefix`.
        prefix = getattr(model, "base_model_prefix", "")
        body = getattr(model, prefix, None) if prefix else None
        # By its name, as models of PEFT hold it deeper.
        self.body = next((f"{n}." for n, m in model.named_modules() if m is body and n), None)
        self.outer_blocks = () if self.body is None else tuple(_blocks(model, self.body))
        self.keep_fp32 = _fp32_patterns(model, dtype)
        self.rules = next((found for rules in HOST_RULES if (found := rules(model)) is not None), Rules({}, {}))
        self.partners: dict[str, list[str]] = {}
        for target, source in self.tied.items():
            self.partners.setdefault(source, [source]).append(target)

    def attention(self) -> str | None:
        """Return one line on 8-bit attention, or None. Raises ValueError if the model has no attention to quantize."""
        if self.config.attention is not None and self.rules.attention is None:
            raise ValueError(
                f"attention is {self.config.attention!r}, but a {self.model_class} is no diffusion model whose "
                "attention could be in 8 bit: leave it out (in language models kv_cache quantizes keys and values)"
            )
        return None if self.config.attention is None else self.rules.attention

    def blocks(self) -> str | None:
        """Return one line on the modules that are computed in one call, or None."""
        return None if self.config.fuse_activations is False else self.rules.blocks

    def weights(self, name: str) -> dict[str, nn.Parameter]:
        _, module, quantized = self.candidates[name]
        return {n: module.get_parameter(n) for n in quantized.weight_names_of(module)}

    def explicit(self, name: str) -> tuple[str, Any] | None:
        """Return (pattern, value) of the entry of `modules` that names the module, or None."""
        modules = self.config.modules
        if name in modules:
            return name, modules[name]
        return next(((p, v) for p, v in modules.items() if matches(p, name)), None)

    def decide(self, name: str) -> tuple[dict[str, Any] | None, str | None]:
        """Return (scheme fields or None, reason) for one module. Modules with tied weights share one decision."""
        source = self.tied.get(name, name)
        group = self.partners.get(source, [name])
        entries = {n: e for n in group if (e := self.explicit(n)) is not None}
        if entries:
            values = [value for _, value in entries.values()]
            if any(value != values[0] for value in values):
                raise ValueError(
                    f"{' and '.join(entries)} share one weight, but `modules` gives them {values}: give one value"
                )
            pattern, value = next(iter(entries.values()))
            named = f"modules[{pattern!r}]"
            return (None, f"kept by {named}") if value is None else (entry_fields(value), f"named by {named}")
        if len(group) > 1:
            return None, f"{_TIED} {next(n for n in group if n != name)}; name it in `modules` to quantize both"
        return self.default(name)

    def default(self, name: str) -> tuple[dict[str, Any] | None, str | None]:
        kind, config = self.candidates[name].kind, self.config
        if config.weights is None:
            return None, "weights is None"
        if kind not in DEFAULT_KINDS:
            return None, f"{kind}{_IF_NAMED}"
        if self.rules.whole is not None:
            return None, self.rules.whole
        own = self.own_exclusion(name)
        if config.modules_to_not_convert is not None:
            pattern = next((p for p in config.modules_to_not_convert if excludes(p, name)), None)
            if pattern is not None:
                return None, f"modules_to_not_convert has {pattern!r}"
        elif own is not None:
            return None, own
        if any(excludes(p, name) for p in self.keep_fp32):
            return None, "kept in fp32 by the model"
        if self.is_adapter(name):
            return None, "trainable adapter"
        if self.is_router(name):
            return None, "MoE router"
        count = sum(w.numel() for w in self.weights(name).values())
        if count < MIN_WEIGHTS:
            return None, f"fewer than {MIN_WEIGHTS} weights"
        if own is not None:
            self.lifted[name] = own
        fields = config.scheme_fields()
        if name in self.rules.weight_only and resolve_scheme(fields, torch.bfloat16)[0].activation is not None:
            return fields, self.rules.weight_only[name]
        return fields, None

    def own_exclusion(self, name: str) -> str | None:
        """Return the reason of the default exclusions, which `modules_to_not_convert` replaces, or None."""
        if name == self.output:
            return _OUTPUT_EMBEDDING
        if self.body is not None and not name.startswith((self.body, *self.outer_blocks)):
            return "task head"
        return self.rules.keep.get(name)

    def is_adapter(self, name: str) -> bool:
        """True for a layer that PEFT adds beside a `base_layer`, and trains in 16 bit."""
        parts = name.split(".")
        wrappers = (".".join(parts[:i]) for i in range(len(parts)))
        return any(f"{w}.base_layer" in self.candidates and name != f"{w}.base_layer" for w in wrappers)

    def is_router(self, name: str) -> bool:
        """True for a linear layer called gate or router, or inside such a module, beside experts.

        A wrong choice of experts costs more quality than the quantization of the router saves bytes.
        """
        parts = name.split(".")
        for i, part in enumerate(parts):
            if ("gate" in part or "router" in part) and "proj" not in part:
                parent = ".".join(parts[:i])
                if f"{parent}.experts".lstrip(".") in self.modules or parent in self.expert_parents:
                    return True
        return False

    def entry(self, name: str) -> PlanEntry:
        kind, module, quantized = self.candidates[name]
        fields, reason = self.decide(name)
        weights = self.weights(name)
        dtype = self.dtype or next(iter(weights.values())).dtype
        shapes = {n: quantized.matrix_shape_of(module, tuple(w.shape), n) for n, w in weights.items()}
        scheme = algorithm = None
        source = self.tied.get(name)
        if fields is not None:
            scheme, algorithm = resolve_scheme(fields, dtype)
            group = self.partners.get(source or name, [name])
            weight_only = self.explicit(name) is None and name in self.rules.weight_only
            looked_up = any(self.candidates[n].kind == "embedding" for n in (name, *group))
            if weight_only or kind not in PRODUCT_KINDS or looked_up:
                asked = weight_only and fields.get("input_transform") is not None
                scheme = LinearScheme(scheme.weight, input_transform=scheme.input_transform if asked else None)
            if kind == "parameters":  # no calibration sees their inputs, and a product takes one matrix of a stack
                dynamic = scheme.activation and replace(scheme.activation, granularity="row", dynamic=True)
                scheme = replace(scheme, activation=dynamic, sparsity=None)
            try:
                scheme, unfit = fitted(scheme, fields, [shape[-1] for shape in shapes.values()])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            reason = reason or unfit
            if scheme.sparsity is not None and any(shape[-1] % 4 for shape in shapes.values()):
                scheme, reason = replace(scheme, sparsity=None), reason or "not sparse: inputs are no multiple of 4"
            if algorithm in SOLVERS and (kind not in _CALIBRATED_KINDS or looked_up):
                reason, algorithm = reason or f"{algorithm} needs inputs of a linear layer: default algorithm", None
        before = 0 if source else sum(w.numel() for w in weights.values()) * dtype.itemsize
        after = before
        if scheme is not None and source is None:
            packed = (empty_stored(shape, scheme, "meta") for shape in shapes.values())
            after = sum(t.nbytes for p in packed for t in p if t is not None) + 4 * len(shapes) * scheme.is_static
        return PlanEntry(name, kind, shapes, dtype, scheme, algorithm, reason, before, after, source)


def _blocks(model: nn.Module, body: str) -> Iterator[str]:
    """Yield the prefixes of repeated blocks outside of the body: a decoder (of ViT-MAE, ...) is no task head.

    A block is an element of a list with more linear layers than the small networks in the heads of detectors have,
    or with several beside a convolution (ConvNeXt, in the decoder of WavTokenizer).
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not f"{name}.".startswith(body):
            for index, block in enumerate(module):
                parts = [] if block is None else list(block.modules())
                linears = sum(isinstance(part, nn.Linear) for part in parts)
                if linears > 3 or (linears > 1 and any(isinstance(part, nn.Conv1d | nn.Conv2d) for part in parts)):
                    yield f"{name}.{index}."


def _fp32_patterns(model: nn.Module, dtype: torch.dtype | None) -> list[str]:
    """Return the patterns of modules that stay in fp32; transformers applies its loose ones to fp16 models only."""
    dtype = dtype or next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    strict = list(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    loose = list(getattr(model, "_keep_in_fp32_modules", None) or ())
    # diffusers has no strict list: its list applies to every dtype.
    return strict + (loose if dtype == torch.float16 or not hasattr(model, "_keep_in_fp32_modules_strict") else [])


def _check_patterns(config: QuantizerConfig, candidates: dict[str, Any], quantized: list[str]) -> None:
    for pattern in config.modules:
        if not any(pattern == name or matches(pattern, name) for name in candidates):
            known = next((name for name in quantized if pattern == name or matches(pattern, name)), None)
            hint = _hint(pattern, candidates) if known is None else f"{known} is quantized already"
            raise ValueError(f"modules[{pattern!r}] matches no module that can be quantized; {hint}")
    # Only a warning, because a pipeline applies one list to several models, and each has some of the names.
    for pattern in config.modules_to_not_convert or ():
        if not any(excludes(pattern, name) for name in candidates):
            logger.warning(
                "modules_to_not_convert has %r, which no module that can be quantized matches; %s",
                *(pattern, _hint(pattern, candidates)),
            )


def _hint(pattern: str, candidates: dict[str, Any]) -> str:
    """Name what a pattern without a match may have meant: the pattern behind other names, or names that are close."""
    for other in () if pattern.startswith("re:") or not pattern else (f"*.{pattern}", f"{pattern}.*"):
        if any(matches(other, name) for name in candidates):
            return f"{other!r} would match"
    close = difflib.get_close_matches(pattern.strip("*."), list(candidates), n=3)
    leaves = sorted({f"*.{name.rpartition('.')[2]}" for name in candidates})
    return f"close to it: {', '.join(close)}" if close else f"the model has {', '.join(leaves)}"
