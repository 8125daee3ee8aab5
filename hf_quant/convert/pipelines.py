"""Pipelines of diffusers that another library has quantized, or parts of them."""

from pathlib import Path

from hf_quant.checkpoint import Directory, local_path, open_folder
from hf_quant.config import QuantMethod
from hf_quant.convert.files import CONFIG, OWN_CONFIGS, PICKLES, download


_INDEX = "model_index.json"
# Files of components; variants, exports for other runtimes, and pickles where they are not needed stay on the Hub.
_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.spm")


def is_pipeline(source: str | Path, *, revision: str | None = None, token: str | bool | None = None) -> bool:
    """Return True for a pipeline of diffusers, on this machine or on the Hub; False also if it cannot be found."""
    path = local_path(source, revision)
    if path is not None:
        return (path / _INDEX).is_file()
    try:
        return _INDEX in open_folder(source, revision=revision, token=token).files()
    except ValueError:  # the download says why, or finds it in the cache
        return False


def local_pipeline(source: str | Path, *, revision: str | None = None, token: str | bool | None = None) -> Path:
    """Return the directory of a pipeline: the given one, or the Hub's cache of USER/NAME after a download.

    Raises ValueError if it cannot be downloaded.
    """
    path = local_path(source, revision)
    if path is not None:
        return path
    allowed = [_INDEX, "README.md", "LICENSE*", *(f"*/{pattern}" for pattern in _FILES)]
    ignored = ["*/*/*", "*.fp16.*", "*.non_ema.*"]
    path = download(str(source), allowed, ignored, revision=revision, token=token)
    pickled = [part.name for part in sorted(path.iterdir()) if is_foreign(part) and not any(part.glob(_FILES[1]))]
    if not pickled:
        return path
    allowed += [f"{name}/{PICKLES}" for name in pickled]
    return download(str(source), allowed, ignored, revision=revision, token=token)


def is_foreign(part: Path) -> bool:
    """Return True if a component is quantized by another library."""
    if any((part / name).is_file() for name in OWN_CONFIGS):
        return True
    if not (part / CONFIG).is_file():
        return False
    own = Directory(part).load_json(CONFIG).get("quantization_config")
    return isinstance(own, dict) and own.get("quant_method") != QuantMethod.HF_QUANT.value
