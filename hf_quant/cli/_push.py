"""`hf-quant quantize --push`: the repository is created and checked first, and filled when OUT is complete."""

import inspect
import shutil
from fnmatch import fnmatch
from glob import escape
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import HFValidationError, HTTPError, OfflineModeIsEnabled, RemoteEntryNotFoundError

from hf_quant.cards import CARD, is_untouched, merge_cards, read_card
from hf_quant.checkpoint import HubRepository, holds_quantized


WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")


class Target(NamedTuple):
    """A repository of the Hub that may be written."""

    repo_id: str  # USER/NAME
    url: str  # of its page
    weights: tuple[str, ...]  # files


def prepare(repository: str, *, private: bool, force: bool) -> Target:
    """Create the repository if it does not exist. It stays, empty, if nothing is pushed to it afterwards.

    Raises ValueError if it cannot be written, is public where a private one is wanted, or (without `force`) holds
    weights that hf_quant has not quantized.
    """
    api = HfApi()
    try:
        # Not False: organizations have a default of their own.
        url = api.create_repo(repository, private=private or None, exist_ok=True)
        if "write" in inspect.signature(api.auth_check).parameters:  # not in older versions
            api.auth_check(url.repo_id, write=True)
        info = api.model_info(url.repo_id)
    except HFValidationError:
        raise ValueError(f"--push is {repository!r}; needs the name of a repository of the Hub, USER/NAME") from None
    except OfflineModeIsEnabled:
        raise ValueError(f"--push {repository}: HF_HUB_OFFLINE is set; unset it, or leave --push out") from None
    except (HTTPError, OSError) as error:
        raise ValueError(f"--push {repository}: {_reason(error)}") from None
    if private and not info.private:
        raise ValueError(f"--private, but {url.repo_id} is there already and public: make it private on the Hub first")
    files = [sibling.rfilename for sibling in info.siblings or ()]
    weights = tuple(name for name in files if any(fnmatch(name, pattern) for pattern in WEIGHT_FILES))
    foreign = weights or [name for name in files if name.endswith((".bin", ".gguf", ".pt"))]
    if foreign and not force and not holds_quantized(HubRepository(url.repo_id)):
        raise ValueError(
            f"{url.repo_id} holds weights that hf_quant has not quantized ({foreign[0]}): give another name, or "
            "--force to put the quantized ones in their place"
        )
    return Target(url.repo_id, str(url), weights)


def push(out: Path, target: Target) -> None:
    """Upload OUT. In its folders, weights that OUT does not have are deleted: hosts might load them instead.

    Raises ValueError if it fails: OUT is complete.
    """
    inside = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    folders = {name.rpartition("/")[0] for name in inside}
    stale = [escape(n) for n in target.weights if n not in inside and n.rpartition("/")[0] in folders]
    try:
        _keep_card_of(target.repo_id, out)
        HfApi().upload_folder(
            repo_id=target.repo_id,
            folder_path=out,
            commit_message="Quantized by hf-quant",
            delete_patterns=stale or None,
        )
    except (HTTPError, OSError, RuntimeError) as error:
        raise ValueError(
            f"{out} is complete, but was not uploaded: {_reason(error)}. `hf upload {target.repo_id} {out}` tries it "
            "again"
        ) from None
    print(f"uploaded to {target.url}")


def _keep_card_of(repository: str, out: Path) -> None:
    """Copy a card that somebody has written in the repository to OUT, with its metadata completed."""
    try:  # not `find_card`: a directory of the same name may exist here, OUT itself
        path = Path(hf_hub_download(repository, CARD))
    except RemoteEntryNotFoundError:
        return
    existing = read_card(path)
    if existing is None:
        shutil.copyfile(path, out / CARD)
        return
    made = read_card(out / CARD) if (out / CARD).is_file() else None
    if made is not None and is_untouched(existing) and not is_untouched(made):  # a person has written the card in OUT
        return
    (existing if made is None else merge_cards(existing, made)).save(out / CARD)


def _reason(error: Exception) -> str:
    """Return the Hub's error message without links and request numbers."""
    response = getattr(error, "response", None)
    status = None if response is None else response.status_code
    if status == 401:
        return "log in with `hf auth login`, or set HF_TOKEN"
    message = None if response is None else response.headers.get("X-Error-Message")
    text = " ".join((message or str(error) or type(error).__name__).split())
    return (f"the Hub answers with status {status}: {text}" if status else f"the Hub cannot be reached: {text}")[:300]
