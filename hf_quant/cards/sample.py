"""What tells models apart that are quantized alike: a digest of the beginnings of their codes."""

import contextlib
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open


_SAMPLED = 16  # values of a tensor
_OF_EXPERTS = re.compile(r"(^|\.)experts\.")


def sample_of(tensors: dict[str, Any]) -> str:
    """A digest of the first values of codes, or of other tensors where there are no codes: {name: tensor or slice}.

    Names do not count, nor does it that a tensor has two: a checkpoint may have others than the model, and experts
    in 16 bit one by one, which are left out. "" where a tensor has no values, or not all of them, in this process.
    """
    codes = [value for name, value in tensors.items() if name.rpartition(".")[2].startswith("qdata")]
    digests = set()
    for tensor in codes or [value for name, value in tensors.items() if not _OF_EXPERTS.search(name)]:
        if getattr(tensor, "is_meta", False) or hasattr(tensor, "full_tensor"):
            return ""
        shape = tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape
        if len(shape) and 0 not in shape:
            first = tensor[(*(slice(0, 1),) * (len(shape) - 1), slice(0, _SAMPLED))].detach().cpu()
            # A copy: one value may have strides that cannot be viewed as bytes.
            first = first.clone(memory_format=torch.contiguous_format)
            digests.add(hashlib.sha256(bytes(first.view(torch.uint8).flatten().tolist())).digest())
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()[:16]


def sample_of_files(files: dict[Path, Iterable[str]]) -> str:
    """The same of a checkpoint's {file: names of its tensors}, of which hardly anything is read.

    Raises ValueError if a file is broken.
    """
    slices: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        try:
            for file, names in files.items():
                opened = stack.enter_context(safe_open(file, framework="pt"))
                slices.update({name: opened.get_slice(name) for name in names})
            return sample_of(slices)
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read: {error}") from None
