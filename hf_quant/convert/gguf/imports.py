"""Make checkpoints of hf_quant from GGUF files, the files of llama.cpp and Ollama."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from hf_quant.convert.gguf.architectures import ARCHITECTURES, FACTORS, Architecture, complete_
from hf_quant.convert.gguf.blocks import OTHERWISE, TYPES, Type, unpack
from hf_quant.convert.gguf.card import copy_licences, original_card
from hf_quant.convert.gguf.files import PLAIN, Gguf, GgufTensors
from hf_quant.convert.gguf.vocabulary import save_tokenizer
from hf_quant.convert.hosts import empty_host
from hf_quant.resolve import entry_fields, resolve_scheme
from hf_quant.scheme import LinearScheme


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
            names, plain = _prepare(file, found, made)
            host = empty_host(made, {}, {})
            foreign = _weights(file, plain, names, host.model, fields)
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
    for found in ARCHITECTURES:
        if found.name == file.architecture:
            return found
    known = ", ".join(found.name for found in ARCHITECTURES)
    raise ValueError(f"it is a {file.architecture} model; readable: {known}")


def _prepare(file: Gguf, found: Architecture, made: Path) -> tuple[dict[str, str], GgufTensors]:
    """Write the config, and return {name in transformers: name in the file} and the file's tensors by these names."""
    config = _config(file, found)
    _write_config(made, config)
    model = empty_model(made)
    tied = model.all_tied_weights_keys or {}
    names = {name: own for name, own in found.names(model, config.num_hidden_layers).items() if own in file.tensors}
    missing = [name for name in model.state_dict() if name not in names and name not in tied]
    if missing:
        raise ValueError(f"it lacks {len(missing)} tensors of a {type(model).__name__}, {missing[0]} among them")
    unknown = sorted(file.tensors.keys() - set(names.values()) - {FACTORS})
    if unknown:
        raise ValueError(f"it holds {first_few(unknown)}, which {type(model).__name__} of transformers does not have")
    for name, own in names.items():
        shape, needed = file.shape(own), tuple(model.state_dict()[name].shape)
        if shape != needed:
            raise ValueError(f"{own} is {list(shape)}; {type(model).__name__} needs {list(needed)} by its metadata")
    orders = {
        name: order
        for name, own in names.items()
        if (order := found.order(name, config, file.shape(own)[0])) is not None
    }
    offsets = dict.fromkeys(filter(found.shifts, names), found.offset)
    plain = GgufTensors(file, names, orders, offsets)
    config.dtype = _dtype(file, names, plain)
    _write_config(made, config)
    return names, plain


def _write_config(made: Path, config: Any) -> None:
    fields = config.to_diff_dict()
    fields.pop("_name_or_path", None)  # of this machine
    write_config(made, fields)


def _config(file: Gguf, found: Architecture) -> Any:
    """Return the config that transformers makes of the metadata, completed."""
    try:
        config = transformers.AutoConfig.from_pretrained(file.path.parent, gguf_file=file.path.name)
    except Exception as error:  # noqa: BLE001  (the host has a different one for each field that cannot be)
        raise ValueError(f"transformers cannot read its metadata: {type(error).__name__}: {one_line(error)}") from None
    if config.model_type not in found.model_types:
        raise ValueError(f"transformers makes a {config.model_type} model of a {found.name} file")
    divisors = file.read(FACTORS) if FACTORS in file.tensors else None
    complete_(config, found, file.values(f"{found.name}."), file.tensors, divisors)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    return config


def _dtype(file: Gguf, names: dict[str, str], plain: GgufTensors) -> torch.dtype:
    """Return the dtype of 16 bits in which every number of the file that is not in blocks is exact, else fp32."""
    left = list(_HALVES)
    for name, own in names.items():
        if file.kind(own) in PLAIN:
            values = plain.read(name)
            left = [dtype for dtype in left if torch.equal(values.to(dtype).to(values.dtype), values)]
    return left[0] if left else torch.float32


def _weights(
    file: Gguf, plain: GgufTensors, names: dict[str, str], model: "PreTrainedModel", fields: dict[str, Any] | None
) -> Foreign:
    """Return the quantized weights. Raises ValueError with each type that has no exact form, if `fields` is None."""
    weights: list[ForeignWeight] = []
    refused: dict[str, list[str]] = {}
    larger: dict[str, int] = {}
    for name, own in names.items():
        kind = file.kind(own)
        if kind in PLAIN:
            continue
        if len(file.shape(own)) != 2:
            raise ValueError(f"{own} is {kind} of the shape {list(file.shape(own))}; only matrices are in blocks")
        module, (N, K) = name.removesuffix(".weight"), file.shape(own)
        known = _type_of(kind, plain, name, K)
        if known is not None:
            scheme = LinearScheme(known.quant)
            if 8 * known.nbytes / known.size < _bits(scheme) - 0.1:
                larger[kind] = larger.get(kind, 0) + 1
            weights.append(ForeignWeight(module, scheme, (N, K), (name,), partial(_exact, plain, name, known, K)))
        elif fields is not None:
            scheme, algorithm = resolve_scheme(fields, model.dtype)
            if scheme != LinearScheme(scheme.weight):
                raise ValueError(f"requantize gives {scheme}; needs a scheme of weights alone, in their own basis")
            weights.append(
                ForeignWeight(module, scheme, (N, K), (name,), partial(_rounded, plain, name, scheme, algorithm))
            )
        if known is None:
            reason = f"no format of hf_quant holds {kind} exactly, which has a grid of its own"
            refused.setdefault(reason, []).append(own)
    if refused and fields is None:
        reasons = "; ".join(f"{first_few(found, 2)}: {reason}" for reason, found in refused.items())
        raise ValueError(
            f"{reasons}. Nothing is rounded again unless you ask for it: requantize='int8' "
            "(--requantize int8) decodes these weights and quantizes them"
        )
    if not weights and not refused:
        raise ValueError("none of its tensors is quantized: quantize it by from_pretrained(..., gguf_file=...)")
    why = "no format of its bits holds them exactly"
    notes = [f"weights of {kind} take more bytes than in the file: {why} ({n})" for kind, n in larger.items()]
    notes += [f"weights were rounded again to {fields}: {why} ({len(found)})" for why, found in refused.items()]
    if model.dtype == torch.float32:
        notes.append(
            "the model's dtype is float32, in which all of the file's numbers are exact: dtype= of "
            "from_pretrained takes another one"
        )
    return Foreign(weights, set(), notes)


def _bits(scheme: LinearScheme) -> float:
    """Return the bits that a weight takes, with its share of the scales."""
    return 8 * sum(info.nbytes for info in expected_tensors(scheme, {"weight": (1, 256)}).values()) / 256


def _type_of(kind: str, plain: GgufTensors, name: str, K: int) -> Type | None:
    """Return the form of a tensor of a type, None if it has no exact one."""
    if kind in OTHERWISE:  # it depends on the values
        try:
            unpack(TYPES[kind], plain.read(name), K)
        except Inexpressible:
            return OTHERWISE[kind]
    return TYPES.get(kind)


def _exact(plain: GgufTensors, name: str, known: Type, K: int) -> PackedWeight:
    """Read a weight whose type has an exact form."""
    try:
        return unpack(known, plain.read(name), K)
    except Inexpressible as reason:
        raise ValueError(f"{name}: {reason}") from None


def _rounded(plain: GgufTensors, name: str, scheme: LinearScheme, algorithm: str | None) -> PackedWeight:
    """Decode a weight, and quantize it again."""
    return quantize_matrix(plain.decode(name), scheme.weight, algorithm, name=name)
