"""The base model, which was quantized: its name on the Hub, and the metadata in its card."""

import re
from pathlib import Path
from typing import Any, TypeGuard

import yaml  # comes with huggingface_hub
from huggingface_hub import ModelCard, constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id


CARD = "README.md"
MAX_CARD_BYTES = 1_500_000  # PyYAML reads 40 kB a second
# A snapshot in the cache of huggingface_hub: models--org--name/snapshots/<commit>/...
_SNAPSHOT = re.compile(r"(?:^|[/\\])models--([^/\\]+)[/\\]snapshots[/\\][0-9a-f]{40}(?:[/\\]|$)")
_LANGUAGE = re.compile(r"[A-Za-z][A-Za-z0-9-]{1,30}")
_WORD = re.compile(r"[A-Za-z0-9][\w.+-]{0,99}")


def hub_id(name: object) -> str | None:
    """Return the Hub name in a model's origin: a name "user/model", or a path in the Hub's cache.

    Return None for every other path: directories of one machine mean nothing on another. A path of two parts that does
    not exist here looks like a name; `find_card` then asks the Hub if it can be reached.
    """
    if not isinstance(name, str):
        return None
    snapshot = _SNAPSHOT.search(name)
    if snapshot is not None:
        name = snapshot[1].replace("--", "/")
        return name if is_hub_id(name) else None
    return name if name.count("/") == 1 and is_hub_id(name) and not Path(name).exists() else None


def is_hub_id(name: object) -> TypeGuard[str]:
    """Return True if a value has the form of a repository's name."""
    if not isinstance(name, str) or name.startswith((".", "~")) or len(name) > 200:
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def check_hub_id(name: object, what: str) -> str:
    """Return the name. Raises ValueError if it is not the name of a repository."""
    if not isinstance(name, str) or not is_hub_id(name):
        raise ValueError(f"{what} is {name!r}; needs the name of a repository of the Hub, USER/NAME")
    return name


class NotOnHub(ValueError):
    """The Hub has no repository of this name, or does not show it."""


def find_card(name: str | Path, *, token: str | bool | None = None) -> ModelCard | None:
    """Return the card in a directory or repository of the Hub; None if there is none, or it cannot be read.

    Raises NotOnHub if the Hub says that it has no such repository.
    """
    if is_directory(name):
        path = Path(name) / CARD
        return read_card(path) if path.is_file() else None
    if not is_hub_id(str(name)):
        return None
    try:
        if not constants.HF_HUB_OFFLINE:
            size = get_hf_file_metadata(hf_hub_url(str(name), CARD), token=token).size
            if size is not None and size > MAX_CARD_BYTES:  # before any of it is fetched
                return None
        path = Path(hf_hub_download(str(name), CARD, token=token))
    except GatedRepoError:
        return None
    except RepositoryNotFoundError as error:
        raise NotOnHub(str(error)) from None
    except (EntryNotFoundError, HTTPError, OSError, UnicodeError):  # no card, offline, or forbidden
        return None
    return read_card(path)


def read_card(path: Path) -> ModelCard | None:
    """Return the card in a file; None if its metadata cannot be read, or cannot be written again."""
    if path.stat().st_size > MAX_CARD_BYTES:
        return None
    try:
        card = ModelCard.load(path, ignore_metadata_errors=True)
        str(card)
    # Untrusted YAML can raise each of these.
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError, yaml.YAMLError):
        return None
    return card


def is_directory(path: str | Path) -> bool:
    """Return True if the string is an existing directory; False also for impossible paths, as in a config."""
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):
        return False


def describes_quantized(card: ModelCard) -> bool:
    """Return True if a card is about a model that hf_quant has quantized."""
    tags = card.data.get("tags")
    return card.data.get("base_model_relation") == "quantized" and isinstance(tags, list) and "hf_quant" in tags


def base_models(card: ModelCard) -> list[str]:
    """Return the base models that a card names."""
    found = card.data.get("base_model")
    return [name for name in (found if isinstance(found, list) else [found]) if is_hub_id(name)]


def inherited(card: ModelCard, base: str | None) -> dict[str, Any]:
    """Return the metadata that a quantized model takes from the card of its base: licence, language, task."""
    data = card.data
    found: dict[str, Any] = {}
    licence = data.get("license")
    licences = licence if isinstance(licence, list) else [licence]
    if licence and all(isinstance(name, str) and _WORD.fullmatch(name) for name in licences):
        found["license"] = licence
        for field in ("license_name", "license_link"):
            value = data.get(field)
            if isinstance(value, str) and value.isprintable() and 0 < len(value) <= 300:
                found[field] = value
        link = found.get("license_link")
        if link is not None and "://" not in link and base is not None:  # of a file beside the base's card
            found["license_link"] = f"https://huggingface.co/{base}/blob/main/{link.removeprefix('./')}"
    languages = data.get("language")
    listed = languages if isinstance(languages, list) else [languages]
    if languages and all(isinstance(name, str) and _LANGUAGE.fullmatch(name) for name in listed):
        found["language"] = languages
    task = data.get("pipeline_tag")
    if isinstance(task, str) and _WORD.fullmatch(task):
        found["pipeline_tag"] = task
    return found
