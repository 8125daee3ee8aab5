"""Remove what an earlier save or upload has left: hosts keep a whole file beside new shards, or an old index.

transformers would then load the older weights without a word, and so would diffusers from the Hub; in a directory it
would look for shards that are gone.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


_logger = logging.getLogger("hf_quant")
_INDEX = re.compile(r"(?P<stem>[^.]+)\.safetensors\.index(?P<variant>\..+)?\.json")
_SHARD = re.compile(r".*-\d{5}-of-\d{5}\.safetensors")


@contextmanager
def without_leftovers(weights: str, given: Mapping[str, Any]) -> Iterator[None]:
    """Context manager of a save: of a whole file and an index of shards the one goes that the save has not written.

    weights: the host's name of a whole file, "model.safetensors"; its index has two more endings.
    given: the arguments of the host's `save_pretrained`.
    """
    directory, variant = given.get("save_directory"), given.get("variant")
    if directory is None or not given.get("is_main_process", True):
        yield
        return
    whole = Path(directory) / (weights if variant is None else f".{variant}.".join(weights.rsplit(".", 1)))
    index = _index_of(whole)
    before = [_written(file) for file in (whole, index)]
    yield
    is_new = [written != earlier for written, earlier in zip(map(_written, (whole, index)), before)]
    if is_new == [True, False]:
        index.unlink(missing_ok=True)
    elif is_new == [False, True]:
        whole.unlink(missing_ok=True)


def _written(file: Path) -> tuple[int, int] | None:
    """A number that changes when a file is written again; None: there is no such file."""
    if not file.is_file():
        return None
    status = file.stat()
    return status.st_ino, status.st_mtime_ns


def upload_without_leftovers(
    upload: Callable[[], Any], directory: Path | str, repo_id: str, given: Mapping[str, Any], *, folders: str = ""
) -> Any:
    """Upload a directory by `upload`; then delete, in its repository, an index beside a whole file, or the reverse.

    In the directory itself the older one of such a pair is deleted before.
    given: the other arguments of the host's method: `token`, `revision`, `subfolder`.
    folders: "*/" for a pipeline, whose parts lie in folders.
    Returns what `upload` returns. A deletion that fails is a warning: the upload is complete.
    """
    replaced = set()
    for path in sorted(Path(directory).glob(f"{folders}*.safetensors*")):
        other = _counterpart(path)
        if other is None or not path.is_file():
            continue
        if _written_at(other) > _written_at(path):
            path.unlink()
            continue
        other.unlink(missing_ok=True)
        replaced.add("/".join(filter(None, (given.get("subfolder"), other.relative_to(directory).as_posix()))))
    done = upload()
    if replaced:
        revision = getattr(done, "pr_revision", None) or given.get("revision")
        _delete(repo_id, replaced, revision=revision, token=given.get("token"))
    return done


def _counterpart(file: Path) -> Path | None:
    """The index of a whole file, the whole file of an index; None for a shard, and for what is neither."""
    if index := _INDEX.fullmatch(file.name):
        return file.with_name(f"{index['stem']}{index['variant'] or ''}.safetensors")
    is_whole = file.suffix == ".safetensors" and not _SHARD.fullmatch(file.name)
    return _index_of(file) if is_whole else None


def _index_of(whole: Path) -> Path:
    """The index of a whole file: "model.safetensors.index.fp16.json" of "model.fp16.safetensors"."""
    stem, *variant = whole.name.removesuffix(".safetensors").split(".", 1)
    return whole.with_name(".".join([stem, "safetensors.index", *variant, "json"]))


def _written_at(file: Path) -> int:
    return file.stat().st_mtime_ns if file.is_file() else 0


def _delete(repo_id: str, files: set[str], *, revision: str | None, token: str | bool | None) -> None:
    """Delete those of the files that a repository has."""
    from huggingface_hub import CommitOperationDelete, HfApi
    from huggingface_hub.errors import HTTPError

    api = HfApi(token=token)
    try:
        held = sorted(files.intersection(api.list_repo_files(repo_id, revision=revision)))
        if held:
            deletions = [CommitOperationDelete(path_in_repo=file) for file in held]
            message = "Delete weights that were replaced"
            api.create_commit(repo_id, operations=deletions, commit_message=message, revision=revision)
    except (HTTPError, OSError) as error:
        _logger.warning(
            "%s may still have %s of an earlier upload, which hosts load instead of what was uploaded now: delete it "
            "(%s)",
            *(repo_id, ", ".join(sorted(files)), error),
        )
