"""Read checkpoint directories of transformers tensor by tensor, and write them file by file."""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, HTTPError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_quant.checkpoint import (
    Directory,
    TensorInfo,
    gguf_hint,
    local_path,
    one_line,
    open_folder,
    scan_files,
    shorten,
    workspace,
)


# Files beside the weights: tokenizers, processors, chat templates, the code of custom models, licences.
SIDE_FILES = (
    *("*.json", "*.model", "*.spm", "*.jinja", "*.tiktoken", "*.bpe", "*.py"),
    *("vocab*", "merges*", "dict.txt", "bpe.codes", "LICENSE*", "NOTICE*"),
)
CONFIG = "config.json"
PICKLES = "*.bin"
_ADAPTERS = "adapter_config.json"  # of PEFT
# Files beside config.json in which older checkpoints of other libraries describe their quantization, and its method.
OWN_CONFIGS = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "quanto_qmap.json": "quanto",
    "quantization_map.json": "quanto",
    "hf_quant_config.json": "modelopt",
}
_NOT_SIDE_FILES = (CONFIG, "*.index.json", "*weights*.json")  # a new checkpoint has its own


class TensorFiles:
    """The tensors of a checkpoint directory; each is read when it is asked for.

    Raises ValueError if a file is missing, truncated or corrupt.
    """

    def __init__(self, directory: Path) -> None:
        self.files = scan_files(directory)  # {safetensors file: {tensor name: TensorInfo}}, from the headers
        self.tensors: dict[str, TensorInfo] = {}  # of all files
        self._file_of: dict[str, Path] = {}
        for file, tensors in self.files.items():
            for name, info in tensors.items():
                self.tensors[name], self._file_of[name] = info, file
        self._open: dict[Path, Any] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def read(self, name: str) -> Tensor:
        """Read one tensor to the CPU."""
        file = self._file_of[name]
        try:
            if file not in self._open:
                self._open[file] = self._stack.enter_context(safe_open(file, framework="pt"))
            return self._open[file].get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read: {one_line(error)}") from None


def rewrite(
    source: TensorFiles, target: Path, convert: Callable[[str], dict[str, Tensor]], *, stem: str = "model"
) -> None:
    """Write a checkpoint of as many files as the source has, one after the other: no more than one is in memory.

    `convert` maps the name of a tensor to the tensors that replace it: itself, several, or none. `stem` begins the
    names of the files.
    """
    written: dict[str, str] = {}
    total, count = 0, len(source.files)
    for number, tensors in enumerate(source.files.values(), 1):
        name = f"{stem}.safetensors" if count == 1 else f"{stem}-{number:05d}-of-{count:05d}.safetensors"
        converted = {key: value for old in tensors for key, value in convert(old).items()}
        save_file(converted, target / name, metadata={"format": "pt"})
        total += sum(tensor.nbytes for tensor in converted.values())
        written.update(dict.fromkeys(converted, name))
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": written}
        (target / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def check_out(out: Path) -> None:
    """Raise ValueError if a directory to write is a file, or is not empty."""
    place = out.resolve()  # "new/../old" is old
    if place.exists() and not place.is_dir():
        raise ValueError(f"{out} is a file; OUT is a directory")
    if place.is_dir() and any(place.iterdir()):
        raise ValueError(f"{out} is not empty; give a directory that does not exist yet")


@contextlib.contextmanager
def staged(source: Path, out: Path, place: Path | None = None) -> Iterator[Path]:
    """Context manager: a directory with the side files of `source`; it becomes `out` if nothing is raised.

    `place` is the workspace of `out` (see `checkpoint.staging`) where the caller has it already.

    Raises ValueError if `out` is a file, the source, inside of it, holds anything, or is written by another process.
    """
    if out.resolve() == source.resolve():
        raise ValueError(f"OUT is the checkpoint itself ({out}); it is read while OUT is written")
    if out.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"OUT is inside of the checkpoint ({out}), and would be uploaded with it: give another place")
    check_out(out)
    with workspace(out) if place is None else contextlib.nullcontext(place) as place:
        check_out(out)  # another process may have written it since
        out = out.resolve()
        directory = place / "checkpoint"
        directory.mkdir()
        copy_side_files(source, directory)
        yield directory
        if out.is_dir():
            out.rmdir()
        directory.rename(out)


def copy_side_files(source: Path, target: Path) -> None:
    """Copy tokenizer files, licences and the like, but not what other libraries' configs say of codes."""
    for path in sorted(source.iterdir()):
        if is_side_file(path, but=OWN_CONFIGS):
            shutil.copyfile(path, target / path.name)


def is_side_file(path: Path, *, but: Iterable[str]) -> bool:
    """Return True for a tokenizer file, licence or the like that is copied along; not for names in `but`."""
    left_out = (*_NOT_SIDE_FILES, *but)
    return path.is_file() and any(map(path.match, SIDE_FILES)) and not any(map(path.match, left_out))


def local_checkpoint(
    source: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    weights: str = "*.safetensors",
) -> Path:
    """Return the directory of a checkpoint: the given one, or the Hub's cache of USER/NAME after a download.

    `weights` is the pattern of the files that hold its tensors.

    Raises ValueError if the Hub has no such model, or it cannot be reached and the cache has none of it.
    """
    path = local_path(source, revision)
    if path is not None:
        return path
    patterns = [*SIDE_FILES, weights, "README.md"]
    return download(str(source), patterns, ["*/*"], revision=revision, token=token)


def download(
    name: str, allowed: list[str], ignored: list[str], *, revision: str | None, token: str | bool | None
) -> Path:
    """Download files of USER/NAME by their patterns. Raises ValueError as `local_checkpoint`."""
    try:
        found = snapshot_download(
            name, revision=revision, token=token, allow_patterns=allowed, ignore_patterns=ignored
        )
    except (HFValidationError, HTTPError, OSError):  # the Hub's errors are long, with links and request ids
        open_folder(name, revision=revision, token=token)  # raises an error of one line
        raise ValueError(f"{name} could not be downloaded from the Hub: try again, what is here is kept") from None
    return Path(found)


def read_config(directory: Path, *, hosts: tuple[str, ...] = ("transformers",)) -> dict[str, Any]:
    """Return the fields of config.json of a checkpoint of `hosts`. Raises ValueError on adapters, or without one."""
    path = directory / CONFIG
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory; needs a checkpoint's directory with its {CONFIG}")
    if not path.is_file():
        parts = sorted(
            found.parent.name
            for found in directory.glob(f"*/{CONFIG}")
            if "diffusers" in hosts or "_class_name" not in Directory(found.parent).load_json(CONFIG)
        )
        hint = f"; it has the parts {', '.join(parts)}: name one of them" if parts else ""
        hint = hint or gguf_hint(Directory(directory).files())
        raise ValueError(f"{directory} has no {CONFIG}: it is no checkpoint of transformers{hint}")
    if (directory / _ADAPTERS).is_file():
        raise ValueError(f"{directory} has adapters ({_ADAPTERS}), which would be lost: merge or remove them first")
    fields = Directory(directory).load_json(path.name)
    config = fields.get("quantization_config")
    if config is not None and not isinstance(config, dict):
        raise ValueError(f"{path}: quantization_config is a {type(config).__name__}; needs an object")
    if "_class_name" in fields and "diffusers" not in hosts:
        name = shorten(repr(fields["_class_name"]).strip("'"))
        raise ValueError(f"{directory} holds a {name} of diffusers; needs a model of transformers")
    return fields


def write_config(target: Path, fields: dict[str, Any]) -> None:
    """Write config.json in the style of transformers."""
    (target / CONFIG).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def empty_model(directory: Path) -> "transformers.PreTrainedModel":
    """Make the 16-bit model that a checkpoint's config describes, on the meta device: every module, no weights.

    Raises ValueError if transformers does not have its class, or cannot make it of this config.
    """
    try:
        config: Any = transformers.AutoConfig.from_pretrained(directory)
        names = config.architectures
        name = names[0] if isinstance(names, list) and names else None
        cls = getattr(transformers, str(name), None)
        if cls is None or not hasattr(cls, "_from_config"):
            raise ValueError(
                f"{directory} is a {name}, which transformers {transformers.__version__} does not have: its modules "
                "are not known"
            )
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            return cls._from_config(config, dtype=config.dtype or torch.float32)
    except ValueError as error:
        raise ValueError(one_line(error)) from None
    except Exception as error:  # noqa: BLE001  (each class of the host has its own for fields that cannot be)
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise ValueError(f"transformers cannot make a model from {directory / CONFIG}: {reason}") from None
