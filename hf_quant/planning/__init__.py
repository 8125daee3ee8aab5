"""The plan: which module gets which scheme, on which kernel, at what size, and why the others stay in 16 bit."""

import difflib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_quant.algorithms import empty_packed, geometry
from hf_quant.config import QuantizerConfig, as_config, entry_fields, excludes, fields_of, matches, resolve_scheme
from hf_quant.kernels import dequantize, dynamic_mm, grouped_mm, weight_only_mm
from hf_quant.kernels.dispatch import Problem, explain
from hf_quant.kv_cache import KVCacheConfig, describe
from hf_quant.modules import QuantizedModule, planned_projections, quantized_class, register_experts
from hf_quant.planning._names import fold_names as fold_names
from hf_quant.planning._names import unfold_name as unfold_name
from hf_quant.planning._names import unfold_names
from hf_quant.planning._table import format_table as format_table
from hf_quant.planning._table import table
from hf_quant.scheme import LinearScheme


logger = logging.getLogger(__name__)

MIN_WEIGHTS = 4096  # smaller layers cost more in overhead and quality than they save
DEFAULT_KINDS = ("linear", "experts")


class Rules(NamedTuple):
    """What a host knows of its model: {module name: reason}.

    Attributes:
        keep: stay in 16 bit, unless `modules_to_not_convert` is given.
        weight_only: are quantized without their input.
        attention: what 8-bit attention means for the model, one line; None: it has none that could be.
    """

    keep: Mapping[str, str]
    weight_only: Mapping[str, str]
    attention: str | None = None


HOST_RULES: list[Callable[[nn.Module], Rules | None]] = []  # filled by `integrations`; None: not that host's model


@dataclass(frozen=True)
class PlanEntry:
    """One module of the plan.

    Attributes:
        name: its name in the model; "" is the model itself.
        kind: "linear", "experts", "embedding", "conv", or "other" for what has no quantized counterpart.
        shapes: {weight name: shape [..., N, K] as a matrix; of "other", as the module has it}.
        scheme: None if it stays in 16 bit.
        algorithm: how its codes are chosen.
        reason: why it stays in 16 bit, or why it is quantized although that is not the default.
        bytes_before, bytes_after: of its weights.
        shared_with: the module whose codes it shares (tied weights); its bytes count there.
    """

    name: str
    kind: str
    shapes: dict[str, tuple[int, ...]]
    dtype: torch.dtype
    scheme: LinearScheme | None
    algorithm: str | None
    reason: str | None
    bytes_before: int
    bytes_after: int
    shared_with: str | None = None

    @property
    def num_weights(self) -> int:
        return 0 if self.shared_with is not None else sum(prod(shape) for shape in self.shapes.values())

    def kernel(self, device_type: str) -> str:
        """How its product is computed on a device, e.g. "int4pack (M <= 12), blocks (any other M)"."""
        if self.scheme is None:
            return "16-bit"
        shape = next(iter(self.shapes.values()))
        quant, activation = self.scheme.weight, self.scheme.activation_on(device_type)
        problem = Problem(
            format=quant.format,
            group_size=geometry(quant, *shape[-2:])[1],
            N=shape[-2],
            K=shape[-1],
            dtype=self.dtype,
            symmetric=quant.symmetric,
            activation=activation,
            num_experts=shape[0] if len(shape) == 3 else None,
        )
        op = {"experts": grouped_mm, "embedding": dequantize, "conv": dequantize}.get(
            self.kind, weight_only_mm if activation is None else dynamic_mm
        )
        paths = []
        for path, when, reason in explain(op, device_type, problem):
            if reason is None:
                paths.append(f"{path} ({when})")
                if when == "any M":  # what follows it is never taken
                    break
        return ", ".join(paths)


class QuantPlan:
    """{module name: PlanEntry} of a model; `print(plan)` is a table.

    Attributes:
        entries: every module that could be quantized, in model order, then those that hold other matrices.
        bytes_other: of all other parameters and buffers.
        fused: names of linear layers that read the same tensor and share one product, see `fuse_projections_`.
        fused_on: where they do: "every device", or "GPUs".
        kv_cache: what `generate` keeps of keys and values, one line; None: 16 bit.
        attention: what of attention is in 8 bit, one line; None: nothing.
        lifted: {module that is quantized because `modules_to_not_convert` is given: why it would not be without}.
    """

    def __init__(
        self,
        entries: Iterable[PlanEntry],
        bytes_other: int,
        fused: Iterable[tuple[str, ...]] = (),
        fused_on: str = "GPUs",
        kv_cache: str | None = None,
        attention: str | None = None,
        lifted: dict[str, str] | None = None,
    ) -> None:
        self.entries = {entry.name: entry for entry in entries}
        self.bytes_other, self.lifted = bytes_other, dict(lifted or {})
        self.fused, self.fused_on, self.kv_cache, self.attention = list(fused), fused_on, kv_cache, attention

    @property
    def quantized(self) -> dict[str, PlanEntry]:
        """The entries that get quantized."""
        return {name: entry for name, entry in self.entries.items() if entry.scheme is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of the whole quantized model."""
        return self.bytes_other + sum(e.bytes_after for e in self.entries.values())

    @property
    def nbytes_before(self) -> int:
        """Bytes of the whole model before."""
        return self.bytes_other + sum(e.bytes_before for e in self.entries.values())

    @property
    def bits_per_weight(self) -> float:
        """Average over the quantized weights, scales and zero points included."""
        entries = self.quantized.values()
        return 8 * sum(e.bytes_after for e in entries) / max(sum(e.num_weights for e in entries), 1)

    @property
    def schemes(self) -> dict[str, LinearScheme]:
        """{module name: scheme} of the modules that are quantized."""
        return {name: entry.scheme for name, entry in self.quantized.items()}

    def warn(self, model_class: str) -> None:
        """Log what somebody who does not print the plan may not expect: most of the model stays in 16 bit, or less of
        it than without `modules_to_not_convert`."""
        if self.lifted:
            names = ", ".join(f"{name} ({reason})" for name, reason in list(self.lifted.items())[:3])
            more = f" and {len(self.lifted) - 3} more" if len(self.lifted) > 3 else ""
            logger.warning(
                "modules_to_not_convert replaces the model's own exclusions, so that %s%s of this %s are quantized, "
                "too: add them to the list to keep them in 16 bit",
                *(names, more, model_class),
            )
        kinds: dict[str, int] = {}
        for entry in self.entries.values():
            if entry.kind == "other":
                kinds[entry.reason] = kinds.get(entry.reason, 0) + entry.bytes_before
        left = sum(kinds.values())
        if 2 * left > self.nbytes_before:
            logger.warning(
                "%.0f %% of this %s stays in 16 bit: %s. print(hf_quant.plan(model, config)) lists every module",
                *(100 * left / self.nbytes_before, model_class, "; ".join(kinds)),
            )

    def to_list(self) -> list[dict[str, Any]]:
        """What config.json stores; see `schemes_to_list`."""
        return schemes_to_list(self.schemes)

    def __str__(self) -> str:
        return table(self)

    __repr__ = __str__


def schemes_to_list(schemes: dict[str, LinearScheme]) -> list[dict[str, Any]]:
    """{module name: scheme} -> JSON: the schemes, each with its modules, numbers folded ("layers.{0-31}.mlp")."""
    groups: dict[LinearScheme, list[str]] = {}
    for name, scheme in schemes.items():
        groups.setdefault(scheme, []).append(name)
    return [{"scheme": scheme.to_dict(), "modules": fold_names(names)} for scheme, names in groups.items()]


def schemes_from_list(stored: Any) -> dict[str, LinearScheme]:
    """Inverse of `schemes_to_list`: {module name: scheme}. Raises ValueError on anything else."""
    schemes = {}
    if not isinstance(stored, list):
        given = "has no plan" if stored is None else f"has a plan that is a {type(stored).__name__}, not a list"
        raise ValueError(f"the checkpoint's quantization_config {given}: restore the config that was saved with it")
    for group in stored:
        if not isinstance(group, dict) or not isinstance(group.get("modules"), list):
            raise ValueError(f"the stored plan has {group!r}; needs {{scheme, modules}}")
    for group, names in zip(stored, unfold_names(group["modules"] for group in stored)):
        scheme = LinearScheme.from_dict(group.get("scheme"))
        fields_of(scheme)  # raises if it is none of this version's
        schemes.update(dict.fromkeys(names, scheme))
    return schemes


def plan(model: nn.Module, config: QuantizerConfig | str | dict, *, dtype: torch.dtype | None = None) -> QuantPlan:
    """What `quantize_(model, config)` would do; nothing is changed, and the model may be on the meta device.

    `dtype` is that of the 16-bit weights if the model's own is not yet final.
    Raises ValueError if the model is quantized already, a pattern matches nothing, or nothing would be quantized.
    """
    config = as_config(config)
    quantized = next((n for n, m in model.named_modules() if isinstance(m, QuantizedModule)), None)
    if quantized is not None:
        raise ValueError(f"the model is quantized already ({quantized or 'it'} is); dequantize_ it first")
    candidates = dict(_candidates(model))
    _check_patterns(config, candidates)
    tied = _tied_modules(model, candidates)
    context = _Context(model, config, candidates, tied, dtype)
    entries = [context.entry(name) for name in candidates]
    attention = context.attention()
    is_enough = config.quantizes_no_weights and config.has_more_than_weights
    if all(entry.scheme is None for entry in entries) and not is_enough:
        reasons = sorted({entry.reason for entry in entries}) or ["it has no linear layers"]
        raise ValueError(f"nothing to quantize in {type(model).__name__}: {'; '.join(reasons)}")
    entries += _unsupported(model, candidates, dtype)
    counted = {id(p) for name in candidates for p in candidates[name][1]._parameters.values() if p is not None}
    counted |= {id(model.get_submodule(e.name)._parameters[n]) for e in entries if e.kind == "other" for n in e.shapes}
    tensors = {id(t): t for t in itertools.chain(model.parameters(), model.buffers())}
    biases = (
        p.nbytes
        for name in candidates
        for key, p in candidates[name][1]._parameters.items()
        if p is not None and key not in context.weights(name)
    )
    other = sum(t.nbytes for key, t in tensors.items() if key not in counted) + sum(biases)
    shared = {e.shared_with for e in entries}
    weights = {
        e.name: (e.scheme, e.shapes["weight"])
        for e in entries
        if e.scheme is not None and e.kind == "linear" and e.shared_with is None and e.name not in shared
    }
    fused = [] if config.fuse_projections is False else planned_projections(model, weights)
    fused_on = "every device" if config.fuse_projections else "GPUs"
    cache = None if config.kv_cache is None else describe(model, KVCacheConfig.of(config.kv_cache))
    return QuantPlan(entries, other, fused, fused_on, cache, attention, context.lifted)


def _candidates(model: nn.Module) -> Iterator[tuple[str, tuple[str, nn.Module]]]:
    """(name, (kind, module)) of every module that has a quantized counterpart and a floating-point weight."""
    for name, module in model.named_modules():
        if register_experts(module):
            kind = "experts"
        else:
            quantized = quantized_class(type(module))
            if quantized is None:
                continue
            kind = quantized.kind
        weights = [module._parameters.get(n) for n in quantized_class(type(module)).weight_names_of(module)]
        # int8 codes of other libraries live in subclasses of nn.Linear, too.
        if weights and all(
            w is not None and w.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64) for w in weights
        ):
            yield name, (kind, module)


def _unsupported(
    model: nn.Module, candidates: dict[str, tuple[str, nn.Module]], dtype: torch.dtype | None
) -> Iterator[PlanEntry]:
    """Entries of the modules whose matrices stay in 16 bit because nothing here can hold them: said, not hidden."""
    seen = {id(p) for _, module in candidates.values() for p in module._parameters.values()}
    for name, module in model.named_modules():
        shapes, nbytes = {}, 0
        for key, p in module._parameters.items():
            if p is None or id(p) in seen or not p.is_floating_point() or p.dim() < 2 or p.numel() < MIN_WEIGHTS:
                continue
            seen.add(id(p))
            shapes[key] = tuple(p.shape)
            nbytes += p.numel() * (dtype or p.dtype).itemsize
        if shapes:
            reason = f"{type(module).__name__} has no quantized counterpart"
            first = dtype or module._parameters[next(iter(shapes))].dtype
            yield PlanEntry(name, "other", shapes, first, None, None, reason, nbytes, nbytes)


def _tied_modules(model: nn.Module, candidates: dict[str, tuple[str, nn.Module]]) -> dict[str, str]:
    """{module: the module whose weight it shares}, by identity and by what transformers declares."""
    tied, first = {}, {}
    for name, (_, module) in candidates.items():
        weight = module._parameters.get("weight")
        if weight is not None and first.setdefault(id(weight), name) != name:
            tied[name] = first[id(weight)]
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        target, source = target.removesuffix(".weight"), source.removesuffix(".weight")
        if target in candidates and source in candidates and target != source and tied.get(source) != target:
            tied[target] = source
    return tied


class _Context:
    """Decides module by module."""

    def __init__(self, model, config, candidates, tied, dtype) -> None:
        self.config, self.candidates, self.tied, self.dtype = config, candidates, tied, dtype
        self.model_class = type(model).__name__
        self.lifted: dict[str, str] = {}
        self.modules = {name for name, _ in model.named_modules()}
        output = getattr(model, "get_output_embeddings", lambda: None)()
        self.output = next((n for n, (_, m) in candidates.items() if m is output), None)
        # transformers' models with a head hold the rest under `base_model_prefix`.
        prefix = getattr(model, "base_model_prefix", "")
        body = getattr(model, prefix, None) if prefix else None
        self.body = f"{prefix}." if isinstance(body, nn.Module) and body is not model else None
        self.keep_fp32 = _fp32_patterns(model, dtype)
        self.rules = next((found for rules in HOST_RULES if (found := rules(model)) is not None), Rules({}, {}))
        self.partners: dict[str, list[str]] = {}
        for target, source in tied.items():
            self.partners.setdefault(source, [source]).append(target)

    def attention(self) -> str | None:
        """What of the model's attention is in 8 bit; raises ValueError if that is asked for in vain."""
        if self.config.attention is not None and self.rules.attention is None:
            raise ValueError(
                f"attention is {self.config.attention!r}, but a {self.model_class} is no diffusion model whose "
                "attention could be in 8 bit: leave it out (in language models kv_cache quantizes keys and values)"
            )
        return None if self.config.attention is None else self.rules.attention

    def weights(self, name: str) -> dict[str, nn.Parameter]:
        module = self.candidates[name][1]
        return {n: module._parameters[n] for n in quantized_class(type(module)).weight_names_of(module)}

    def explicit(self, name: str) -> tuple[str, Any] | None:
        """(pattern, value) of the entry of `modules` that names the module."""
        modules = self.config.modules
        if name in modules:
            return name, modules[name]
        return next(((p, v) for p, v in modules.items() if matches(p, name)), None)

    def decide(self, name: str) -> tuple[dict[str, Any] | None, str | None]:
        """(scheme fields or None, reason) of one module, or of a tied group: all of it shares one decision."""
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
            return None, f"tied to {next(n for n in group if n != name)}; name it in `modules` to quantize both"
        return self.default(name)

    def default(self, name: str) -> tuple[dict[str, Any] | None, str | None]:
        kind, _ = self.candidates[name]
        config = self.config
        if config.weights is None:
            return None, "weights is None"
        if kind not in DEFAULT_KINDS:
            return None, f"{kind}: only if named in `modules`"
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
        """The reason why the model's own list, which `modules_to_not_convert` replaces, keeps a module in 16 bit."""
        if name == self.output:
            return "output embedding"
        if self.body is not None and not name.startswith(self.body):
            return "task head"
        return self.rules.keep.get(name)

    def is_adapter(self, name: str) -> bool:
        """A layer beside a `base_layer` or inside of one's sibling: what PEFT adds, and trains in 16 bit."""
        parts = name.split(".")
        wrappers = (".".join(parts[:i]) for i in range(len(parts)))
        return any(f"{w}.base_layer" in self.candidates and name != f"{w}.base_layer" for w in wrappers)

    def is_router(self, name: str) -> bool:
        """A linear layer called gate or router, or inside of one, beside `experts`.

        A wrong expert costs more than its bytes save.
        """
        parts = name.split(".")
        for i, part in enumerate(parts):
            if ("gate" in part or "router" in part) and "proj" not in part:
                experts = ".".join([*parts[:i], "experts"])
                if experts in self.modules:
                    return True
        return False

    def entry(self, name: str) -> PlanEntry:
        kind, module = self.candidates[name]
        fields, reason = self.decide(name)
        weights = self.weights(name)
        dtype = self.dtype or next(iter(weights.values())).dtype
        quantized = quantized_class(type(module))
        shapes = {n: quantized.matrix_shape_of(module, tuple(w.shape)) for n, w in weights.items()}
        scheme = algorithm = None
        source = self.tied.get(name)
        if fields is not None:
            scheme, algorithm = resolve_scheme(fields, dtype)
            group = self.partners.get(source or name, [name])
            weight_only = self.explicit(name) is None and name in self.rules.weight_only
            if (
                weight_only
                or kind in ("embedding", "conv")
                or any(self.candidates[n][0] == "embedding" for n in group)
            ):
                scheme = LinearScheme(scheme.weight)
        before = 0 if source else sum(w.numel() for w in weights.values()) * dtype.itemsize
        after = before
        if scheme is not None and source is None:
            packed = (empty_packed(shape, scheme.weight, "meta") for shape in shapes.values())
            after = sum(t.nbytes for p in packed for t in p if t is not None)
        return PlanEntry(name, kind, shapes, dtype, scheme, algorithm, reason, before, after, source)


def _fp32_patterns(model: nn.Module, dtype: torch.dtype | None) -> list[str]:
    """Modules that the model keeps in fp32; transformers does so only for fp16 unless it calls them strict."""
    dtype = dtype or next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    strict = list(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    loose = list(getattr(model, "_keep_in_fp32_modules", None) or ())
    # diffusers, which has no strict list, means any dtype.
    return strict + (loose if dtype == torch.float16 or not hasattr(model, "_keep_in_fp32_modules_strict") else [])


def _check_patterns(config: QuantizerConfig, candidates: dict[str, Any]) -> None:
    for pattern in config.modules:
        if not any(pattern == name or matches(pattern, name) for name in candidates):
            close = difflib.get_close_matches(pattern.strip("*."), list(candidates), n=3, cutoff=0.3)
            leaves = sorted({f"*.{name.rpartition('.')[2]}" for name in candidates})
            hint = f"close to it: {', '.join(close)}" if close else f"the model has {', '.join(leaves)}"
            raise ValueError(f"modules[{pattern!r}] matches no module that can be quantized; {hint}")
    # A warning only: a pipeline applies one list to several models, each of which has some of the names.
    for pattern in config.modules_to_not_convert or ():
        if not any(excludes(pattern, name) for name in candidates):
            logger.warning("modules_to_not_convert has %r, which no module that can be quantized matches", pattern)
