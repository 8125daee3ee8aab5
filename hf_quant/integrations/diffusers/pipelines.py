"""Casts of a diffusers pipeline with quantized parts, and the end of each upload of one: card, and files it replaces.

A quantized model carries its own methods (see `methods`), but no hook runs when a pipeline is made. So the class of
pipelines is wrapped; without quantized parts the host's methods run alone. `hf_quant._boot` imports this module after
diffusers has loaded its pipelines, and never before.
"""

from collections.abc import Callable
from typing import Any

import diffusers.pipelines.pipeline_utils as pipeline_utils
import torch
from torch import nn

from hf_quant.integrations.leftovers import upload_without_leftovers
from hf_quant.integrations.methods import WrappedMethod
from hf_quant.integrations.wrapping import wrap_once
from hf_quant.modules import QuantizedModule


def register() -> None:
    """Wrap `to`, and the end of `push_to_hub` and `save_pretrained(push_to_hub=True)`. Further calls do nothing."""
    wrap_once(pipeline_utils.DiffusionPipeline, "to", _checked)
    wrap_once(pipeline_utils.DiffusionPipeline, "_upload_folder", _with_card)


def _checked(host: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `to`: a dtype that a quantized part refuses is refused before any other part is cast to it."""

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = next((value for value in (*args, kwargs.get("dtype")) if isinstance(value, torch.dtype)), None)
        for part in self.components.values() if dtype is not None else ():
            if isinstance(part, nn.Module) and isinstance(vars(part).get("to"), WrappedMethod) and part.dtype != dtype:
                part.to(dtype)  # raises
        return host(self, *args, **kwargs)

    return to


def _with_card(host: Callable[..., str]) -> Callable[..., str]:
    def upload_folder(
        self: Any, working_dir: Any, repo_id: str, *args: Any, subfolder: str | None = None, **kwargs: Any
    ) -> str:
        if not subfolder:  # a folder of a repository has no card; the repository has one
            from hf_quant.cards import card_for_upload

            card_for_upload(self, working_dir, repo_id, token=kwargs.get("token"))
        if subfolder is not None:  # older versions do not have this argument
            kwargs["subfolder"] = subfolder
        parts = (part for part in self.components.values() if isinstance(part, nn.Module))
        if not any(isinstance(module, QuantizedModule) for part in parts for module in part.modules()):
            return host(self, working_dir, repo_id, *args, **kwargs)
        return upload_without_leftovers(
            lambda: host(self, working_dir, repo_id, *args, **kwargs), working_dir, repo_id, kwargs, folders="*/"
        )

    return upload_folder


register()
