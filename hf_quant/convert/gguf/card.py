"""The origin of a GGUF file by its metadata: base model, licence, languages."""

import shutil
from pathlib import Path
from typing import Any

import yaml  # comes with huggingface_hub
from huggingface_hub import ModelCard

from hf_quant.cards import NotOnHub, find_card
from hf_quant.cards.base import is_hub_id
from hf_quant.convert.gguf.files import Gguf


_HUB = "https://huggingface.co/"
# {field of a card: key of the metadata}
_FIELDS = {
    "license": "general.license",
    "license_name": "general.license.name",
    "license_link": "general.license.link",
    "language": "general.languages",
}
# The model that was converted comes before the one that it was made from.
_ORIGINS = ("general.source.huggingface.repository", "general.source.repo_url", "general.base_model.0.repo_url")


def original_card(file: Gguf, directory: Path, repo_id: str | None, token: str | bool | None) -> ModelCard:
    """Return the card beside a file, or of its repository on the Hub, completed by the metadata of the file."""
    try:
        card = find_card(repo_id or directory, token=token)
    except NotOnHub:
        card = None
    stated: dict[str, Any] = {} if card is None else card.data.to_dict()
    data = {**_metadata(file), **{field: value for field, value in stated.items() if value is not None}}
    return ModelCard(f"---\n{yaml.safe_dump(data)}---\n")


def _metadata(file: Gguf) -> dict[str, Any]:
    found = {field: value for field, key in _FIELDS.items() if (value := file.value(key)) is not None}
    for key in _ORIGINS:
        name = str(file.value(key, "")).removeprefix(_HUB).strip("/")
        if name.count("/") == 1 and is_hub_id(name):
            return found | {"base_model": name}
    return found


def origin_fields(data: dict[str, Any]) -> dict[str, Any]:
    """Return {key of the metadata: value} of the fields of a card; the inverse of what `original_card` reads."""
    found = {key: data[field] for field, key in _FIELDS.items() if isinstance(data.get(field), str)}
    languages = data.get("language")
    if languages:
        found["general.languages"] = [languages] if isinstance(languages, str) else list(languages)
    base = data.get("base_model")
    name = base[0] if isinstance(base, list) and base else base
    if is_hub_id(name):
        found["general.base_model.count"] = 1
        found["general.base_model.0.name"] = name.rpartition("/")[2]
        found["general.base_model.0.organization"] = name.partition("/")[0]
        found["general.base_model.0.repo_url"] = f"{_HUB}{name}"
    return found


def copy_licences(source: Path, target: Path) -> None:
    """Copy the texts of licences from one directory into another."""
    for pattern in ("LICENSE*", "NOTICE*"):
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, target / path.name)
