"""Uploads of diffusers' pipelines: with quantized parts they end with a card that says what is in them.

A model brings a method of its own along (see `methods`), but a pipeline is made without anybody being told. So its
class gets one, which is the host's for pipelines without quantized parts. `hf_quant._boot` imports this module once
diffusers has loaded its pipelines, and never before.
"""

import functools
from collections.abc import Callable
from typing import Any

import diffusers.pipelines.pipeline_utils as pipeline_utils


def register() -> None:
    """Wrap what `push_to_hub` and `save_pretrained(push_to_hub=True)` end with; may be called again."""
    cls = pipeline_utils.DiffusionPipeline
    if not hasattr(cls._upload_folder, "_knows_hf_quant"):
        cls._upload_folder = _with_card(cls._upload_folder)


def _with_card(host: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(host)
    def upload_folder(
        self: Any, working_dir: Any, repo_id: str, *args: Any, subfolder: str | None = None, **kwargs: Any
    ) -> str:
        if not subfolder:  # of a repository with a card of its own
            from hf_quant.cards import card_for_upload

            card_for_upload(self, working_dir, repo_id, token=kwargs.get("token"))
        options = {} if subfolder is None else {"subfolder": subfolder}  # which older versions do not have
        return host(self, working_dir, repo_id, *args, **options, **kwargs)

    upload_folder._knows_hf_quant = True
    return upload_folder


register()
