"""Make checkpoints of hf_quant from GGUF files, the files of llama.cpp and Ollama."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HFValidationError, HTTPError
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_quant._wording import first_few
from hf_quant.algorithms import PackedWeight, quantize_matrix
from hf_quant.cards import CARD, converted_card, hub_id
from hf_quant.cards.base import is_directory
from hf_quant.checkpoint import expected_tensors, local_path, one_line, workspace
from hf_quant.convert.compressed_tensors.schemes import Inexpressible
from hf_quant.convert.files import PICKLES, check_out, empty_model, read_config, staged, write_config
from hf_quant.convert.foreign import Foreign, ForeignWeight, write_foreign
from hf_quant.convert.gguf.architectures import (
    ARCHITECTURES,
    FACTORS,
    Architecture,
    complete_,
    config_fields,
    rounds_bounds,
)
from hf_quant.convert.gguf.blocks import OTHERWISE, TYPES, Type, unpack
from hf_quant.convert.gguf.card import copy_licences, original_card
from hf_quant.convert.gguf.codes import common_quant, joined
from hf_quant.convert.gguf.files import PLAIN, Gguf, GgufTensors
from hf_quant.convert.gguf.vocabulary import save_tokenizer
from hf_quant.convert.hosts import empty_host
from hf_quant.resolve import entry_fields, resolve_scheme
from hf_quant.scheme import LinearScheme, TensorQuant


if TYPE_CHECKING:
    from transformers import PreTrainedModel


SUFFIX = ".gguf"
_HALVES = (torch.bfloat16, torch.float16)


def gguf_of(source: str | Path) -> Path | str | None:
    """Return the GGUF file that a source names, or that is the only one of a directory; None if it is no GGUF.

    USER/NAME/FILE.gguf names a file on the Hub. Raises ValueError if a directory has several.
    """
    if str(source).endswith(SUFFIX):
        return source
    if not is_directory(source) or not is_gguf_folder(Path(source)):
        return None
    found = sorted(Path(source).glob(f"*{SUFFIX}"))
    if len(found) > 1:
        raise ValueError(f"{source} holds {first_few([path.name for path in found])}: name one of them")
    return found[0]


def is_gguf_folder(folder: Path) -> bool:
    """Return True for a directory with GGUF files, but without a config, or without weights that it would describe."""
    has_weights = any(any(folder.glob(kind)) for kind in ("*.safetensors", PICKLES))
    return not (has_weights and (folder / "config.json").is_file()) and any(folder.glob(f"*{SUFFIX}"))


def import_gguf(
    source: str | Path,
    out: Path,
    *,
    requantize: str | dict[str, Any] | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
) -> tuple[str, ...]:
    """Make a checkpoint from a GGUF file; arguments and errors as for `import_checkpoint`."""
    where, fields = str(source), None if requantize is None else entry_fields(requantize)
    path = _download(source, revision, token)
    check_out(out)
    with workspace(out) as place:
        made = place / "made"  # the files beside the weights
        made.mkdir()
        try:
            file = Gguf(path)
            found = _architecture(file)
            plain = _prepare(file, found, made)
            host = empty_host(made, {}, {})
            foreign = _weights(plain, host.model, fields)
        except ValueError as error:
            raise ValueError(f"{where} cannot be imported: {one_line(error)}") from None
        foreign.notes.extend(save_tokenizer(file, made))
        original_card(file, path.parent, hub_id(_repository(where)), token).save(made / CARD)
        copy_licences(path.parent, made)
        with staged(made, out, place) as target:
            origin = {"method": "gguf", "name": hub_id(_repository(where))}
            write_foreign(target, read_config(made), plain, foreign, host, where=where, origin=origin)
            converted_card(target, made, token=token).save(target / CARD)
    return tuple(foreign.notes)


def _repository(where: str) -> str:
    """Return USER/NAME of USER/NAME/FILE.gguf, unless it is a path on this machine."""
    return where if Path(where).exists() else "/".join(where.split("/")[:2])


def _download(source: str | Path, revision: str | None, token: str | bool | None) -> Path:
    """Return the path of a file on this machine, or of the Hub's cache. Raises ValueError if there is none."""
    is_here = isinstance(source, Path) or Path(source).exists() or Path(source).is_absolute()
    if is_here or str(source).count("/") < 2:
        if revision is not None:
            local_path(Path(source).parent, revision)  # raises
        return Path(source)
    user, name, file = str(source).split("/", 2)
    try:
        return Path(hf_hub_download(f"{user}/{name}", file, revision=revision, token=token))
    except (HFValidationError, HTTPError, OSError) as error:
        raise ValueError(
            f"{source} is no file, and could not be downloaded from the Hub as {file} of {user}/{name}: "
            f"{type(error).__name__}"
        ) from None


def _architecture(file: Gguf) -> Architecture:
    has_experts = bool(file.value(f"{file.architecture}.expert_count"))
    found = [known for known in ARCHITECTURES if known.name == file.architecture]
    if not found:
        known = ", ".join(dict.fromkeys(known.name for known in ARCHITECTURES))
        raise ValueError(f"it is a {file.architecture} model; readable: {known}")
    return next((known for known in found if known.has_experts == has_experts), found[0])


def _prepare(file: Gguf, found: Architecture, made: Path) -> GgufTensors:
    """Write the config, and return the file's tensors by their names in transformers."""
    config = _config(file, found)
    _write_config(made, config)
    model = empty_model(made)
    tied, shapes = model.all_tied_weights_keys or {}, {n: tuple(t.shape) for n, t in model.state_dict().items()}
    layouts = {n: layout for n, layout in found.layouts(model).items() if file.tensors.keys() >= set(layout.parts)}
    missing = [name for name in shapes if name not in layouts and name not in tied]
    if missing:
        raise ValueError(f"it lacks {len(missing)} tensors of a {type(model).__name__}, {missing[0]} among them")
    unknown = sorted(file.tensors.keys() - {own for layout in layouts.values() for own in layout.parts} - {FACTORS})
    if unknown:
        raise ValueError(f"it holds {first_few(unknown)}, which {type(model).__name__} of transformers does not have")
    for name, layout in layouts.items():
        needed = layout.shape_of_part(shapes[name])
        for own in layout.parts:
            shape = file.shape(own)
            if shape != needed and (file.kind(own) not in PLAIN or (1, *shape) != needed):  # llama.cpp drops a 1
                wanted = f"{type(model).__name__} needs {list(needed)} by its metadata"
                raise ValueError(f"{own} is {list(shape)}; {wanted}")
    plain = GgufTensors(file, layouts, shapes)
    config.dtype = _dtype(plain)
    _write_config(made, config)
    return plain


def _write_config(made: Path, config: Any) -> None:
    fields = config.to_diff_dict()
    fields.pop("_name_or_path", None)  # of this machine
    write_config(made, fields)


def _config(file: Gguf, found: Architecture) -> Any:
    """Return the config that transformers makes of the metadata, or of fields that it does not read, completed."""
    fields = {} if found.is_read_by_host else config_fields(found, file.values(""), file.tensors)
    try:
        if found.is_read_by_host:
            config = transformers.AutoConfig.from_pretrained(file.path.parent, gguf_file=file.path.name)
        else:
            config = transformers.AutoConfig.for_model(found.model_types[0], **fields)
    except Exception as error:  # noqa: BLE001  (the host has a different one for each field that cannot be)
        raise ValueError(f"transformers cannot read its metadata: {type(error).__name__}: {one_line(error)}") from None
    if config.model_type not in found.model_types:
        raise ValueError(f"transformers makes a {config.model_type} model of a {found.name} file")
    divisors = file.read(FACTORS) if FACTORS in file.tensors else None
    complete_(config, found, file.values(f"{found.name}."), file.tensors, divisors)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    return config


def _dtype(plain: GgufTensors) -> torch.dtype:
    """Return the dtype of 16 bits in which every number of the file that is not in blocks is exact, else fp32."""
    left = list(_HALVES)
    for name, info in plain.tensors.items():
        if info.dtype.is_floating_point:
            values = plain.read(name)
            left = [dtype for dtype in left if torch.equal(values.to(dtype).to(values.dtype), values)]
    return left[0] if left else torch.float32


class _Weight(NamedTuple):
    """A weight in blocks: the types of its parts that have an exact form, and what those have that have none."""

    name: str  # of the parameter
    shape: tuple[int, ...]  # [..., N, K]
    types: tuple[Type, ...]
    refused: dict[str, str]  # {tensor of the file: reason}

    @property
    def place(self) -> tuple[str, str]:
        """The module, and the name of the weight in it."""
        module, _, leaf = self.name.rpartition(".")
        return module, leaf


def _weights(plain: GgufTensors, model: "PreTrainedModel", fields: dict[str, Any] | None) -> Foreign:
    """Return the quantized weights. Raises ValueError with each type that has no exact form, if `fields` is None."""
    modules: dict[str, list[_Weight]] = {}
    for name, info in plain.tensors.items():
        if not info.dtype.is_floating_point:
            weight = _weight(plain, name)
            modules.setdefault(weight.place[0], []).append(weight)
    if not modules:
        raise ValueError("none of its tensors is quantized: quantize it by from_pretrained(..., gguf_file=...)")
    weights: list[ForeignWeight] = []
    refused: dict[str, list[str]] = {}
    larger: Counter[str] = Counter()
    for module, found in modules.items():
        _check_siblings(plain, module, found)
        own = {tensor: reason for weight in found for tensor, reason in weight.refused.items()}
        try:
            quant = common_quant({known.quant for weight in found for known in weight.types}) if not own else None
        except Inexpressible as reason:  # one module has one scheme
            quant, own = None, dict.fromkeys((t for w in found for t in plain.layouts[w.name].parts), str(reason))
        for tensor, reason in own.items():
            refused.setdefault(reason, []).append(tensor)
        if quant is not None:
            scheme = LinearScheme(quant)
            larger.update(kind for weight in found for kind in _larger(plain, weight, _bits(scheme)))
            readers: list[Any] = [partial(_exact, plain, weight, quant) for weight in found]
        elif fields is not None:
            scheme, algorithm = resolve_scheme(fields, model.dtype)
            if scheme != LinearScheme(scheme.weight):
                raise ValueError(f"requantize gives {scheme}; needs a scheme of weights alone, in their own basis")
            readers = [partial(_rounded, plain, weight.name, scheme, algorithm) for weight in found]
        else:
            continue
        for weight, reader in zip(found, readers):
            module, leaf = weight.place
            weights.append(ForeignWeight(module, scheme, weight.shape, (weight.name,), reader, leaf))
    if refused and fields is None:
        reasons = "; ".join(f"{first_few(found, 2)}: {reason}" for reason, found in refused.items())
        raise ValueError(
            f"{reasons}. Nothing is rounded again unless you ask for it: requantize='int8' "
            "(--requantize int8) decodes these weights and quantizes them"
        )
    why = "no format of its bits holds them exactly"
    notes = [f"weights of {kind} take more bytes than in the file: {why} ({n})" for kind, n in larger.items()]
    notes += [f"weights were rounded again to {fields}: {why} ({len(found)})" for why, found in refused.items()]
    if rounds_bounds(model.config):
        notes.append("llama.cpp rounds the bounds of yarn, and the original does not: frequencies between them differ")
    if model.dtype == torch.float32:
        notes.append(
            "the model's dtype is float32, in which all of the file's numbers are exact: dtype= of "
            "from_pretrained takes another one"
        )
    return Foreign(weights, set(), notes)


def _check_siblings(plain: GgufTensors, module: str, found: list[_Weight]) -> None:
    """Raise ValueError if experts have a weight that is not in blocks beside the ones that are."""
    for name, info in plain.tensors.items():
        if len(info.shape) == 3 and info.dtype.is_floating_point and name.startswith(f"{module}."):
            raise ValueError(
                f"{plain.layouts[name].parts[0]} is {plain.kinds(name)[0]}, but {found[0].name} is in blocks: the "
                "weights of one module of experts are all in blocks or none; quantize the file again with all of them"
            )


def _weight(plain: GgufTensors, name: str) -> _Weight:
    """Describe a weight in blocks. Raises ValueError if it is no matrix, or only a part of it is in blocks."""
    layout, kinds, shape = plain.layouts[name], plain.kinds(name), plain.tensors[name].shape
    shape = (*shape[:-2], shape[-1], shape[-2]) if layout.is_transposed else shape
    if len(shape) < 2:
        raise ValueError(f"{layout.parts[0]} is {kinds[0]} of the shape {list(shape)}; only matrices are in blocks")
    types: list[Type] = []
    refused: dict[str, str] = {}
    for part, (own, kind) in enumerate(zip(layout.parts, kinds)):
        if kind in PLAIN:
            raise ValueError(
                f"{own} is {kind}, but {', '.join(layout.parts)} are one weight in transformers: all or none in blocks"
            )
        known = _type_of(kind, plain.blocks(name, part) if kind in OTHERWISE else None, shape[-1])
        if known is None:
            refused[own] = f"no format of hf_quant holds {kind} exactly, which has a grid of its own"
        else:
            types.append(known)
    return _Weight(name, shape, tuple(types), refused)


def _larger(plain: GgufTensors, weight: _Weight, bits: float) -> list[str]:
    """Return the types of parts that take more than in the file with `bits` for a weight."""
    kinds = zip(plain.kinds(weight.name), weight.types)
    return [kind for kind, known in kinds if 8 * known.nbytes / known.size < bits - 0.1]


def _bits(scheme: LinearScheme) -> float:
    """Return the bits that a weight takes, with its share of the scales."""
    return 8 * sum(info.nbytes for info in expected_tensors(scheme, {"weight": (1, 256)}).values()) / 256


def _type_of(kind: str, blocks: torch.Tensor | None, K: int) -> Type | None:
    """Return the form of blocks of a type, None if it has no exact one. Blocks are given if it depends on values."""
    if blocks is not None:
        try:
            unpack(TYPES[kind], blocks, K)
        except Inexpressible:
            return OTHERWISE[kind]
    return TYPES.get(kind)


def _exact(plain: GgufTensors, weight: _Weight, quant: TensorQuant) -> PackedWeight:
    """Read a weight whose types have an exact form."""
    layout = plain.layouts[weight.name]
    parts: list[PackedWeight] = []
    for part, known in enumerate(weight.types):
        try:
            parts.append(unpack(known, plain.blocks(weight.name, part), weight.shape[-1], quant))
        except Inexpressible as reason:
            raise ValueError(f"{layout.parts[part]}: {reason}") from None
    return joined(parts, layout.join)


def _rounded(plain: GgufTensors, name: str, scheme: LinearScheme, algorithm: str | None) -> PackedWeight:
    """Decode a weight, and quantize it again."""
    return quantize_matrix(plain.decode(name), scheme.weight, algorithm, name=name)
