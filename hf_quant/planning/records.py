"""Records of a plan: `PlanEntry` for a module, `QuantPlan` for the model, and their form in config.json."""

import copy
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from hf_quant._wording import first_few
from hf_quant.algorithms import geometry
from hf_quant.config import QuantizerConfig
from hf_quant.kernels import dequantize, dynamic_mm, grouped_mm, weight_only_mm
from hf_quant.kernels.dispatch import Problem, explain
from hf_quant.planning.left import left_in_16_bit
from hf_quant.planning.names import fold_names, unfold_names
from hf_quant.planning.table import table
from hf_quant.resolve import fields_of
from hf_quant.scheme import LinearScheme


logger = logging.getLogger(__name__)

_WRAPPERS = re.compile(r"\.(base_layer|_checkpoint_wrapped_module)(?=\.|$)")
PRODUCT_KINDS = ("linear", "experts", "parameters")  # multiplied by an op; other kinds are dequantized


@dataclass(frozen=True)
class PlanEntry:
    """One module of the plan.

    Attributes:
        name: its name in the model; "" is the model itself.
        kind: "linear", "experts", "parameters" (matrices that a module multiplies by in its own forward),
            "dequantized" (those that it reads in another way), "attention" (of torch), "embedding", "conv",
            "conv_transpose", "weight_norm", "recurrent", or "other" for a module without a quantized counterpart.
        shapes: {weight name: shape [..., N, K] as a matrix; for "other" the shape of the parameter}.
        scheme: scheme of the module; None: it stays in 16 bit.
        algorithm: algorithm that chooses the codes.
        reason: reason for 16 bit, or for a quantization that is not the default.
        bytes_before, bytes_after: bytes of the weights.
        shared_with: module whose codes are shared (tied weights); the bytes are counted there.
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
        """Name the kernels that compute the product on a device, e.g. "int4pack (M <= 40), blocks (any other M)"."""
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
        product = weight_only_mm if activation is None else dynamic_mm
        product = grouped_mm if problem.num_experts is not None else product
        op = product if self.kind in PRODUCT_KINDS else dequantize
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
        entries: every module that could be quantized, in model order, then the modules with other matrices.
        bytes_other: bytes of all other parameters and buffers.
        fused: names of linear layers that read the same tensor and share one product, see `fuse_projections_`.
        fused_on: devices on which they share it: "every device", or "GPUs".
        kv_cache: one line on the quantized KV cache of `generate`; None: 16 bit.
        attention: one line on 8-bit attention; None: 16 bit.
        blocks: one line on the modules between the products that are computed in one call; None: there are none.
        lifted: {module that is quantized only because `modules_to_not_convert` is given: reason of its exclusion}.
        advice: a line on a scheme with more bits, one on the output embedding; None: there is neither.
        num_weights: number of weights in the model; 0: the user has chosen what stays in 16 bit, see `left`.
        scores: {module: predicted loss of the model by its quantization}, after a search.
        is_kl: True if the scores add up to the KL divergence per token from the 16-bit model, False if to the relative
            squared error of its output; None: they predict nothing.
        seconds: {call: its predicted seconds on this machine}, after a search for the least latency.
        record: of the data of a search, see `QuantizerConfig.calibrated_with`.
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
        advice: str | None = None,
        blocks: str | None = None,
        num_weights: int = 0,
    ) -> None:
        self.entries = {entry.name: entry for entry in entries}
        self.bytes_other, self.lifted = bytes_other, dict(lifted or {})
        self.fused, self.fused_on, self.kv_cache, self.attention = list(fused), fused_on, kv_cache, attention
        self.advice, self.blocks, self.num_weights = advice, blocks, num_weights
        self.scores: dict[str, float] = {}
        self.is_kl: bool | None = None
        self.seconds: dict[str, float] = {}
        self.record: dict[str, Any] | None = None

    @property
    def quantized(self) -> dict[str, PlanEntry]:
        """Entries that are quantized."""
        return {name: entry for name, entry in self.entries.items() if entry.scheme is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of the whole quantized model."""
        return self.bytes_other + sum(e.bytes_after for e in self.entries.values())

    @property
    def nbytes_before(self) -> int:
        """Bytes of the whole model before quantization."""
        return self.bytes_other + sum(e.bytes_before for e in self.entries.values())

    @property
    def left(self) -> str | None:
        """One line on what stays in 16 bit, if that is most of the model and the user has not asked for it."""
        return left_in_16_bit(self.entries.values(), self.num_weights) if self.num_weights else None

    @property
    def loss(self) -> float:
        """The predicted loss of the model, after a search; 0 without one."""
        return sum(self.scores.values())

    @property
    def bits_per_weight(self) -> float:
        """Average bits of a quantized weight, scales and zero points included."""
        entries = self.quantized.values()
        return 8 * sum(e.bytes_after for e in entries) / max(sum(e.num_weights for e in entries), 1)

    @property
    def schemes(self) -> dict[str, LinearScheme]:
        """{module name: scheme} of the modules that are quantized."""
        return {name: entry.scheme for name, entry in self.entries.items() if entry.scheme is not None}

    def with_entries(
        self, entries: Mapping[str, PlanEntry], scores: dict[str, float], is_kl: bool | None
    ) -> "QuantPlan":
        """The plan, but with these entries in place of its own, and the scores by which a search has chosen them."""
        changed = copy.copy(self)
        changed.entries = {name: entries.get(name, entry) for name, entry in self.entries.items()}
        changed.scores, changed.is_kl = dict(scores), is_kl
        schemes = changed.schemes
        changed.fused = [names for names in self.fused if len({schemes.get(name) for name in names}) == 1]
        return changed

    def with_dynamic_inputs(self, names: Iterable[str], reason: str) -> "QuantPlan":
        """The plan, but the inputs of these layers have a scale per token in place of a static one."""
        changed = copy.copy(self)
        changed.entries = dict(self.entries)
        for name in names:
            entry = self.entries[name]
            assert entry.scheme is not None and entry.scheme.activation is not None  # it is static
            activation = replace(entry.scheme.activation, granularity="row", dynamic=True)
            changed.entries[name] = replace(
                entry,
                scheme=replace(entry.scheme, activation=activation),
                reason=entry.reason or reason,
                bytes_after=entry.bytes_after - 4 * len(entry.shapes),  # its static scales
            )
        return changed

    def warn(self, model_class: str) -> None:
        """Log a warning if most of the model stays in 16 bit, or `modules_to_not_convert` lifts default exclusions."""
        if self.lifted:
            names = first_few([f"{name} ({reason})" for name, reason in self.lifted.items()])
            logger.warning(
                "modules_to_not_convert replaces the model's own exclusions, so that %s of this %s are quantized, "
                "too: add them to the list to keep them in 16 bit",
                *(names, model_class),
            )
        if self.left is not None:
            logger.warning("%s: %s. print(hf_quant.plan(model, config)) lists every module", model_class, self.left)

    def to_list(self) -> list[dict[str, Any]]:
        """Return the plan as config.json stores it; see `schemes_to_list`."""
        return schemes_to_list(self.schemes)

    def __str__(self) -> str:
        return table(self)

    __repr__ = __str__


def schemes_to_list(schemes: dict[str, LinearScheme]) -> list[dict[str, Any]]:
    """Convert {module name: scheme} to JSON: a list of schemes with the folded names of their modules."""
    groups: dict[LinearScheme, list[str]] = {}
    for name, scheme in schemes.items():
        groups.setdefault(scheme, []).append(name)
    return [{"scheme": scheme.to_dict(), "modules": fold_names(names)} for scheme, names in groups.items()]


def schemes_from_list(stored: Any) -> dict[str, LinearScheme]:
    """Invert `schemes_to_list`: return {module name: scheme}. Raises ValueError on anything else."""
    schemes: dict[str, LinearScheme] = {}
    if not isinstance(stored, list):
        given = "has no plan" if stored is None else f"has a plan that is a {type(stored).__name__}, not a list"
        raise ValueError(f"the checkpoint's quantization_config {given}: restore the config that was saved with it")
    for group in stored:
        if not isinstance(group, dict) or not isinstance(group.get("modules"), list):
            raise ValueError(f"the stored plan has {group!r}; needs {{scheme, modules}}")
    for group, names in zip(stored, unfold_names(group["modules"] for group in stored)):
        scheme = LinearScheme.from_dict(group.get("scheme"))
        fields_of(scheme)  # raises if this version does not support it
        schemes.update(dict.fromkeys(names, scheme))
    return schemes


def resolved(config: QuantizerConfig, schemes: dict[str, LinearScheme]) -> QuantizerConfig:
    """Return a copy of the config with the plan in it, which a checkpoint stores: loading then decides nothing again.

    Names are without the wrappers of PEFT and of activation checkpointing, as a model is saved.
    """
    config = copy.copy(config)
    config.calibration = None  # of this process, and maybe large
    config = copy.deepcopy(config)
    config.fuse_projections = config.fuse_activations = None  # of this process
    config.plan = schemes_to_list({_WRAPPERS.sub("", name): scheme for name, scheme in schemes.items()})
    return config


def updated(config: QuantizerConfig, schemes: dict[str, LinearScheme]) -> QuantizerConfig:
    """Return the config itself if its plan has these schemes, with the modules in its own order; else `resolved`."""
    found = resolved(config, schemes)
    is_same = config.plan is not None and schemes_from_list(config.plan) == schemes_from_list(found.plan)
    return config if is_same else found
