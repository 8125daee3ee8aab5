"""`QuantizerConfig`: the configuration that a user writes and that `config.json` stores."""

import json
import math
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar

import torch
from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_quant._version import __version__
from hf_quant.kv_cache import KVCacheConfig
from hf_quant.patterns import check_expressions, compile_pattern
from hf_quant.resolve import SCHEME_FIELDS, dtype_name, entry_fields, resolve_scheme, unknown


AUTO = "auto"  # `weights` that are chosen for each layer
AUTO_CANDIDATES = ("int2", "int3", "nf4", "fp6_e2m3", "int8")
FORMAT_VERSION = 2  # of the checkpoint (bytes, tensor names, config fields): the newest that this version reads
ATTENTIONS = (None, "int8")
LATENCY = "latency"  # an objective of a search
LATENCY_CANDIDATES = ("int2", "int3", "int4", "nf4", "W4A8", "int8", "W8A8", None)
DEFAULT_LOSS = 0.02  # of a search for the least latency
_SEARCH_FIELDS = ("budget", "candidates", "objective")
RUNTIME_FIELDS = ("fuse_projections", "fuse_activations")  # how products are computed; not stored in checkpoints
NON_WEIGHT_FIELDS = ("kv_cache", "attention")  # quantization that needs no quantized weight
_NAME = re.compile(r"[\w.-]{1,100}(/[\w.-]{1,100})?", re.ASCII)  # a quantization method or a repository
_VERSION = re.compile(r"[\w.+!-]{1,80}", re.ASCII)


class QuantMethod(str, Enum):
    """The name under which the hosts know this plugin; diffusers reads `.value`, JSON needs a str."""

    HF_QUANT = "hf_quant"

    def __str__(self) -> str:
        return self.value


class QuantizerConfig(QuantizationConfigMixin):
    """Configure the quantization of a model, for transformers, diffusers and `hf_quant.quantize_`.

    Args:
        weights: format ("int8", "int4", "int3", "int2", "fp8", "fp8_e5m2", "fp6", "fp6_e2m3", "nf4", "mxfp4",
            "nvfp4"), preset ("W4A16", "W8A8", ...; see `hf_quant.PRESETS`), or None: only what `modules` names.
        activations: None (16 bit), "int8" or "fp8": inputs of linear layers and experts, quantized on the fly.
        activation_scale: "dynamic": one scale per token, computed on the fly. "static": one scale per layer, of a
            calibration on texts or inputs, for kernels and engines that want it; it costs more accuracy.
        cpu_activations: "int8": on a CPU the inputs of int2, int4 and int8 layers without `activations` are quantized
            on the fly, too. Products are faster there (7 bits and a sign per value, one scale per token); other
            devices are not affected.
        granularity: the values that share a scale: "row", "group", "tensor" or "block" (128 x 128, fp8); None: the
            default of the format.
        group_size: weights per scale with granularity "group": 16, 32, 64, 96, 128, 192 or 256.
        symmetric: False stores a zero point (int4, int3, int2); None: the format's default.
        scale_dtype: dtype of stored scales: "float32", "bfloat16", "float16", "model" (that of the 16-bit weight) or,
            for groups, "float8_e4m3fn", which halves their cost (double quantization); None: the format's.
        algorithm: method that chooses scales and codes ("absmax", "mse", "norm", "hqq"; with data, see `calibration`,
            "gptq", the most accurate, and "imatrix"); None: the best data-free one for the format.
        sparsity: "2:4": of each four weights in a row the two larger ones are stored, and their places, and the others
            are zero: 5 bits a weight in 8 bits and 3 in int4, scales apart. See `hf_quant.training.prune_`. None: all.
        input_transform: "hadamard" rotates the input of each layer by a Hadamard matrix with fixed signs, in blocks of
            up to 128 columns, and stores the weight in that basis: outliers are spread before anything is rounded.
            None: where activations are quantized to int8, and with "gptq". "none": nowhere. {"block_size": n}: in
            blocks of n columns, a power of two from 32 to 1024. Layers whose input features no such block divides
            have none.
        kv_cache: format of the KV cache that `generate` uses: "int8", "fp8", "int4", "int2", or a `KVCacheConfig` or
            dict of its fields; None: 16 bit. With weights=None nothing else is quantized.
        attention: "int8": the attention scores of a diffusion model are computed from int8 codes; None: 16 bit. With
            weights=None nothing else is quantized.
        budget: with weights="auto" the most that the model may take: {"bits": 3.5} per weight of the layers to choose
            for, scales and zero points included, or {"gb": 8.0} in 10**9 bytes for the whole model; with
            {"gb": 8.0, "context": 4096} also for the KV cache of one sequence of so many tokens. Each layer gets the
            candidate with which the model is predicted to lose least, see `hf_quant.auto_plan`. {"kl": 0.02} is the
            most that the model is predicted to lose; then the model becomes as small as possible.
        candidates: with weights="auto" the formats, presets or dicts of fields to choose from; None in the list: 16
            bit. Default: int2, int3, nf4, fp6_e2m3, int8; for the least latency also int4, W4A8, W8A8 and 16 bit. The
            other fields above hold for all of them.
        objective: with weights="auto" and "latency" the model becomes as fast as possible on this machine, within a
            budget with "kl" (default: 0.02), to which a size may be added. {"latency": [1, 512]}: for calls of 1 and
            of 512 tokens alike; by default 1 token, or a call of the calibration data where a model reads no tokens.
        modules: {pattern: format, preset, dict of the fields above, or None = keep 16 bit}. A pattern is a module
            name, a glob ("*.down_proj") or a regular expression ("re:..."); exact names win, then the first match.
            An entry is complete: it inherits nothing from the fields above, and it overrides every default exclusion.
        modules_to_not_convert: names or patterns of modules that stay in 16 bit. The list replaces the default one
            (None): the output embedding, a task head, and the sensitive layers of a diffusion model. Modules that
            the model keeps in fp32 stay so in either case.
        calibration: data for an algorithm that needs it: a text file, texts, token ids, batches, a function that runs
            the model, or a file of `hf_quant.calibrate`; see there. None: a causal language model is calibrated on
            text that it writes itself. Setting of this process; the checkpoint stores a record of the data.
        quantization_device: device that computes the quantization, e.g. "cuda"; None: the device of each weight.
        fuse_projections: True: linear layers that read the same tensor share one product if no gradient is needed,
            see `hf_quant.fuse_projections_`; None: on a GPU, for inference. Runtime setting; not stored in the
            checkpoint.
        fuse_activations: False: what lies between the products of a model is computed by the host's own modules. Else,
            in models of transformers on CPUs, norms, feed-forward blocks, attention and whole layers are one native
            call each, and on GPUs norms, activation functions and rotary embeddings one launch
            each, see `hf_quant.fuse_activations_`; in diffusion models norms and activation functions are computed
            together with the quantization of their output, with None on GPUs, with True on every device. Runtime
            setting; not stored in the checkpoint.

    Raises:
        ValueError: on unknown fields, formats and combinations.
    """

    def __init__(
        self,
        /,  # a stored field may have any name, "self" too
        weights: str | None = "int8",
        activations: str | None = None,
        *,
        activation_scale: str = "dynamic",
        cpu_activations: str | None = None,
        granularity: str | None = None,
        group_size: int | None = None,
        symmetric: bool | None = None,
        scale_dtype: str | None = None,
        algorithm: str | None = None,
        sparsity: str | None = None,
        input_transform: str | dict[str, int] | None = None,
        kv_cache: str | dict[str, Any] | KVCacheConfig | None = None,
        attention: str | None = None,
        budget: dict[str, float] | None = None,
        candidates: list[str | dict[str, Any] | None] | tuple[str | dict[str, Any] | None, ...] | None = None,
        objective: str | dict[str, list[int]] | None = None,
        modules: Mapping[str, str | dict[str, Any] | None] | None = None,
        modules_to_not_convert: list[str] | tuple[str, ...] | None = None,
        calibration: Any = None,
        quantization_device: str | None = None,
        fuse_projections: bool | None = None,
        fuse_activations: bool | None = None,
        **kwargs: Any,
    ) -> None:
        # transformers declares an enum of its own methods, which has no member for a plugin's.
        self.quant_method = QuantMethod.HF_QUANT  # pyrefly: ignore[bad-assignment]
        self._read_stored(kwargs)
        self.weights = weights
        self.activations = activations
        self.activation_scale = activation_scale
        self.cpu_activations = cpu_activations
        self.granularity = granularity
        self.group_size = group_size
        self.symmetric = symmetric
        self.scale_dtype = dtype_name(scale_dtype)
        self.algorithm = algorithm
        self.sparsity = sparsity
        self.input_transform = input_transform
        # The format alone if every other field of the cache has its default.
        cache: dict[str, Any] = {} if kv_cache is None else KVCacheConfig.of(kv_cache).to_dict()
        self.kv_cache: str | dict[str, Any] | None = cache if len(cache) > 1 else cache.get("format")
        self.attention = attention
        self.budget = budget
        self.candidates = candidates if candidates is None or isinstance(candidates, str) else list(candidates)
        self.objective = objective
        if modules is not None and not isinstance(modules, dict):
            raise ValueError(f"modules is {modules!r}; needs {{pattern: format, dict of fields, or None}}")
        self.modules = {
            pattern: {n: dtype_name(v) for n, v in entry.items()} if isinstance(entry, dict) else entry
            for pattern, entry in (modules or {}).items()
        }
        # A str would be taken apart into letters that match no module.
        if modules_to_not_convert is not None and not isinstance(modules_to_not_convert, (list, tuple)):
            raise ValueError(
                f"modules_to_not_convert is {modules_to_not_convert!r}; needs a list of names or patterns"
            )
        self.modules_to_not_convert = None if modules_to_not_convert is None else list(modules_to_not_convert)
        self.calibration = calibration
        self.quantization_device = None if quantization_device is None else _device_name(quantization_device)
        self.fuse_projections = fuse_projections
        self.fuse_activations = fuse_activations
        self._check()

    def _read_stored(self, kwargs: dict[str, Any]) -> None:
        """Read the fields that only a checkpoint's config.json has; reject all others."""
        method = kwargs.pop("quant_method", "hf_quant")
        if str(method) != "hf_quant":
            raise ValueError(f"quant_method is {method!r}; this configuration class reads 'hf_quant' only")
        version = kwargs.pop("format_version", 1)
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise ValueError(f"format_version is {version!r}; needs an integer from 1 to {FORMAT_VERSION}")
        if version > FORMAT_VERSION:
            raise ValueError(
                f"the checkpoint has format_version {version}, hf_quant {__version__} reads up to {FORMAT_VERSION}: "
                "install a newer hf_quant"
            )
        self._read_version = version
        self.hf_quant_version = kwargs.pop("hf_quant_version", __version__)
        if not isinstance(self.hf_quant_version, str) or not _VERSION.fullmatch(self.hf_quant_version):
            raise ValueError(f"hf_quant_version is {self.hf_quant_version!r}; needs a version such as {__version__!r}")
        self.plan: list[dict[str, Any]] | None = kwargs.pop("plan", None)
        self.imported_from: dict[str, str | None] | None = kwargs.pop("imported_from", None)
        if self.imported_from is not None:
            _check_origin(self.imported_from)
        self.calibrated_with: dict[str, Any] | None = kwargs.pop("calibrated_with", None)
        if self.calibrated_with is not None:
            check_record(self.calibrated_with)
        self.kv_scales: dict[str, list[float]] | None = kwargs.pop("kv_scales", None)
        if self.kv_scales is not None:
            check_kv_scales(self.kv_scales)
        if kwargs:
            more = f"; and {len(kwargs) - 3} more" if len(kwargs) > 3 else ""
            known = [*self.user_fields(), "calibration"]
            raise ValueError("; ".join(unknown("field", n, known) for n in list(kwargs)[:3]) + more)

    @classmethod
    def user_fields(cls) -> list[str]:
        """Names of the arguments that a user may give, without `calibration`, which JSON cannot hold."""
        own = ("kv_cache", "attention", *_SEARCH_FIELDS, "modules", "modules_to_not_convert", "quantization_device")
        return [*SCHEME_FIELDS, *own, *RUNTIME_FIELDS]

    def _check(self) -> None:
        check_expressions((*self.modules, *(self.modules_to_not_convert or ())))
        for name in RUNTIME_FIELDS:
            if not isinstance(getattr(self, name), bool | None):
                raise ValueError(f"{name} is {getattr(self, name)!r}; needs True, False or None")
        if not isinstance(self.attention, str | None) or self.attention not in ATTENTIONS:
            raise ValueError(f"attention is {self.attention!r}; allowed: None, 'int8'")
        self._check_search()
        if self.is_auto:
            self.candidate_configs()
        elif self.weights is not None:
            scheme, _ = resolve_scheme(self.scheme_fields(), torch.bfloat16)
            # Stored before W8A8 rotated inputs, or as "none", see `_stored_transform`.
            if self.input_transform is None and scheme.input_transform is not None and self._is_rotated is False:
                self.input_transform = "none"
        else:
            given = {n: v for n, v in self.scheme_fields().items() if v is not None and v != "dynamic"}
            if given:
                raise ValueError(f"weights is None, so {given} applies to nothing; give it with `modules`")
        for pattern, entry in self.modules.items():
            if not isinstance(pattern, str):
                raise ValueError(f"modules has the pattern {pattern!r}; patterns are strings")
            compile_pattern(pattern)
            if entry is not None:
                try:
                    resolve_scheme(entry_fields(entry), torch.bfloat16)
                except ValueError as error:
                    raise ValueError(f"modules[{pattern!r}]: {error}") from None
        for pattern in self.modules_to_not_convert or ():
            if not isinstance(pattern, str):
                raise ValueError(f"modules_to_not_convert has {pattern!r}; needs a list of names or patterns")
            compile_pattern(pattern)
        if self.quantizes_no_weights and not self.has_more_than_weights:
            raise ValueError(
                "weights, kv_cache and attention are None and `modules` names no format: nothing to quantize"
            )

    def _check_search(self) -> None:
        """Raise ValueError if the budget and the candidates are not those of a search."""
        if not self.is_auto:
            given = {n: getattr(self, n) for n in _SEARCH_FIELDS if getattr(self, n) is not None}
            if given:
                raise ValueError(f"{given} is given, but weights is {self.weights!r}: give weights='auto'")
            return
        self._check_objective()
        if self.budget is None and self.is_for_latency:
            self.budget = {"kl": DEFAULT_LOSS}
        budget, sizes = self.budget, ({"bits"}, {"gb"}, {"gb", "context"})
        names = [{"kl"}, *({"kl", *size} for size in sizes)] if self.is_for_latency else [{"kl"}, *sizes]
        is_dict = isinstance(budget, dict) and set(budget) in names
        if not is_dict or not all(type(v) in (int, float) and 0 < v < math.inf for v in budget.values()):
            more = ", and a size if it is bounded, too" if self.is_for_latency else ""
            needed = "{'kl': n}" if self.is_for_latency else "{'bits': n} per weight, {'gb': n}, or {'kl': n}"
            raise ValueError(
                f"weights is 'auto', and budget {budget!r}; needs {needed}, above 0{more}; to 'gb' you may add "
                "'context', which counts the KV cache of so many tokens"
            )
        if type(budget.get("context", 1)) is not int:
            raise ValueError(f"the context of the budget is {budget['context']!r}; needs a number of tokens")
        if self.candidates is not None and (not isinstance(self.candidates, list) or len(self.candidates) < 2):
            raise ValueError(f"candidates is {self.candidates!r}; needs a list of two schemes or more")

    def _check_objective(self) -> None:
        """Raise ValueError unless the objective is None, the latency, or the latency for numbers of tokens."""
        objective: Any = self.objective
        if isinstance(objective, dict) and set(objective) == {LATENCY}:
            tokens = objective[LATENCY]
            is_known = isinstance(tokens, (list, tuple)) and bool(tokens)
            is_known = is_known and all(type(n) is int and n > 0 for n in tokens)
        else:
            is_known = objective in (None, LATENCY)
        if not is_known:
            raise ValueError(
                f"objective is {objective!r}; allowed: None, 'latency', and {{'latency': [1, 512]}} with the tokens "
                "of the calls whose time counts"
            )

    @property
    def is_for_latency(self) -> bool:
        """True if a search makes the model as fast as possible."""
        return self.objective is not None

    @property
    def latency_tokens(self) -> list[int] | None:
        """Tokens of the calls whose time counts; None: see `objective`."""
        return list(self.objective[LATENCY]) if isinstance(self.objective, dict) else None

    @property
    def is_auto(self) -> bool:
        """True if the scheme of each layer is to be chosen by a search, or was chosen by one."""
        return self.weights == AUTO

    @property
    def named_candidates(self) -> list[str | dict[str, Any] | None]:
        """The candidates as they are given, or the default ones."""
        return list(self.candidates or (LATENCY_CANDIDATES if self.is_for_latency else AUTO_CANDIDATES))

    def candidate_configs(self) -> list["QuantizerConfig | None"]:
        """The config of each candidate, None for 16 bit. Raises ValueError, which names it, if one is wrong."""
        common = {n: v for n, v in self.scheme_fields().items() if n != "weights"}
        names = ("kv_cache", "attention", "modules", "modules_to_not_convert")
        rest = {name: getattr(self, name) for name in names}
        found: list[QuantizerConfig | None] = []
        for candidate in self.named_candidates:
            if candidate is None:
                found.append(None)
                continue
            try:
                fields = {**common, **entry_fields(candidate)}
                if fields.get("weights") == AUTO:
                    raise ValueError("a search does not choose among searches; name a format, a preset or None")
                own = QuantizerConfig(fields.pop("weights", None), **fields, **rest)
            except ValueError as error:
                raise ValueError(f"candidate {candidate!r}: {error}") from None
            if own.weights is None:
                raise ValueError(f"candidate {candidate!r} names no format")
            found.append(own)
        return found

    def all_fields(self) -> list[dict[str, Any]]:
        """The fields of every scheme that the config names: the default or the candidates, and those of `modules`."""
        named = [entry_fields(entry) for entry in self.modules.values() if entry is not None]
        if self.is_auto:
            return [config.scheme_fields() for config in self.candidate_configs() if config is not None] + named
        return named if self.weights is None else [self.scheme_fields(), *named]

    @property
    def quantizes_no_weights(self) -> bool:
        """True if only the KV cache or attention is quantized."""
        return self.weights is None and not any(entry is not None for entry in self.modules.values())

    @property
    def has_more_than_weights(self) -> bool:
        """True if the KV cache or attention is quantized."""
        return any(getattr(self, name) is not None for name in NON_WEIGHT_FIELDS)

    @property
    def has_fp8_cache(self) -> bool:
        """True if the KV cache is in fp8: calibration sets the scales with which serving engines keep it."""
        return self.kv_cache is not None and KVCacheConfig.of(self.kv_cache).format == "fp8_e4m3"

    @property
    def format_version(self) -> int:
        """Format version of a checkpoint with this config: 2 if it has what readers of 1 do not know.

        That is an input transform, a static scale of activations, or a record of calibration or of a search.
        """
        own = {"input_transform": self._stored_transform, "activation_scale": self.activation_scale}
        is_new = self._is_rotated or any(map(_is_of_version_2, (own, *self.modules.values(), *self._stored_schemes)))
        is_new |= self.is_auto or self.calibrated_with is not None or self.kv_scales is not None
        return max(self._read_version, 2 if is_new else 1)

    @property
    def _is_rotated(self) -> bool | None:
        """True if a layer of the plan has an input transform; None if there is no plan."""
        return None if self.plan is None else any(map(_names_transform, self._stored_schemes))

    @property
    def _stored_schemes(self) -> list[Any]:
        """The schemes of the plan, unchecked; none without one."""
        groups = self.plan if isinstance(self.plan, list) else ()
        return [group.get("scheme") for group in groups if isinstance(group, dict)]

    @property
    def _stored_transform(self) -> str | dict[str, int] | None:
        """`input_transform`, but None for a "none" that the plan says by itself: no layer in it has one."""
        return None if self.input_transform == "none" and self._is_rotated is False else self.input_transform

    def scheme_fields(self) -> dict[str, Any]:
        """The fields that make up the default scheme."""
        return {name: getattr(self, name) for name in SCHEME_FIELDS}

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-native fields; `QuantizerConfig.from_dict(config.to_dict())` equals the config."""
        fields = {
            "quant_method": self.quant_method.value,
            "format_version": self.format_version,
            "hf_quant_version": self.hf_quant_version,
            **{name: getattr(self, name) for name in self.user_fields()},
            "plan": self.plan,
        }
        if self.imported_from is not None:
            fields["imported_from"] = self.imported_from
        if self.calibrated_with is not None:
            fields["calibrated_with"] = self.calibrated_with
        if self.kv_scales is not None:
            fields["kv_scales"] = self.kv_scales
        for name in ("input_transform", *_SEARCH_FIELDS):
            if (self._stored_transform if name == "input_transform" else fields[name]) is None:
                del fields[name]
        return json.loads(json.dumps(fields))

    def get_loading_attributes(self) -> dict[str, Any]:
        """Attributes that transformers copies to a quantized checkpoint's config if the user gives this one, too.

        From `requested` the quantizer reads what the user asked for; it refuses what the checkpoint does not have.
        """
        own = {name: getattr(self, name) for name in ("quantization_device", *RUNTIME_FIELDS)}
        return {**own, "requested": self}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QuantizerConfig) and self.to_dict() == other.to_dict()

    __hash__: ClassVar[None] = None

    def __repr__(self) -> str:
        shown = {n: getattr(self, n) for n in self.user_fields()}
        default: dict[str, Any] = {"activation_scale": "dynamic", "modules": {}}
        given = ", ".join(f"{n}={v!r}" for n, v in shown.items() if n == "weights" or v != default.get(n))
        return f"QuantizerConfig({given})"


def _names_transform(fields: Any) -> bool:
    return isinstance(fields, dict) and fields.get("input_transform") is not None


def _is_of_version_2(fields: Any) -> bool:
    """True for fields of a user, or of a scheme in the plan, that version 1 does not know."""
    if not isinstance(fields, dict):
        return False
    activation = fields.get("activation")
    is_static = isinstance(activation, dict) and activation.get("dynamic") is False
    return is_static or fields.get("activation_scale") == "static" or _names_transform(fields)


def as_config(config: QuantizerConfig | str | dict[str, Any]) -> QuantizerConfig:
    """Return a QuantizerConfig for a config, a format or preset name, or a dict of fields."""
    if isinstance(config, QuantizerConfig):
        return config
    if isinstance(config, str):
        return QuantizerConfig(config)
    if isinstance(config, dict):
        return QuantizerConfig(**config)
    raise ValueError(f"config is a {type(config).__name__}; needs a QuantizerConfig, a format name or a dict")


def check_record(record: Any) -> None:
    """Raise ValueError unless `record` says with what a checkpoint was calibrated: a few strings and numbers."""
    names = ("data", "sha256", "num_tokens", "length", "seed", "temperature")
    if (
        not isinstance(record, dict)
        or not {"data"} <= set(record) <= set(names)
        or not all(isinstance(v, (str, int, float)) and len(str(v)) <= 200 for v in record.values())
    ):
        raise ValueError(f"calibrated_with is {str(record)[:200]!r}; needs some of {', '.join(names)}")


def check_kv_scales(scales: Any) -> None:
    """Raise ValueError unless `scales` has the scale of the keys and of the values for some attention modules."""
    if not isinstance(scales, dict) or not all(
        isinstance(name, str)
        and isinstance(both, list)
        and len(both) == 2
        and all(isinstance(scale, float) and 0 < scale < math.inf for scale in both)
        for name, both in scales.items()
    ):
        raise ValueError(f"kv_scales is {str(scales)[:200]!r}; needs {{module: [scale of keys, scale of values]}}")


def _device_name(device: Any) -> str:
    """Return the name of a device. Raises ValueError if torch knows none of that name, here or on another machine."""
    try:
        return str(torch.device(device))
    except (RuntimeError, TypeError):
        raise ValueError(
            f"quantization_device is {device!r}; needs a device of torch, such as 'cuda', 'cuda:1' or 'cpu'"
        ) from None


def _check_origin(origin: Any) -> None:
    """Raise ValueError unless `origin` holds the method that quantized a checkpoint and its name on the Hub."""
    if (
        not isinstance(origin, dict)
        or set(origin) != {"method", "name"}
        or not all(isinstance(v, str) and _NAME.fullmatch(v) for v in origin.values() if v is not None)
        or origin["method"] is None
    ):
        raise ValueError(
            f"imported_from is {str(origin)[:200]!r}; needs the method that quantized it, and a name or None"
        )
