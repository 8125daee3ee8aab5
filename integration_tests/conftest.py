"""Environment of every integration test: one thread, no network, and the small trained model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hf_quant.tests.environment  # noqa: F401  (before torch)
from hf_quant.tests.garbage import freeze_older_objects  # noqa: F401
from hf_quant.tests.graphs import forget_graphs  # noqa: F401


ASSET_MODEL = Path(__file__).parent / "assets" / "tiny-llama-13m"


@pytest.fixture(scope="session")
def asset_model_dir() -> Path:
    """Directory of the trained 12.6M-parameter Llama: weights, tokenizer, `eval.txt`, `val_ids.npy`."""
    return ASSET_MODEL


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> Callable[..., Path]:
    """Makes the directory of a tiny diffusion model of a name and dtype (bf16 unless given), once."""
    import torch

    from integration_tests.support.tiny_diffusion import make_model

    made: dict[tuple[str, Any], Path] = {}

    def checkpoint(name: str, dtype: torch.dtype = torch.bfloat16) -> Path:
        if (name, dtype) not in made:
            model = make_model(name, dtype)
            made[name, dtype] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name, dtype], max_shard_size="300KB")
        return made[name, dtype]

    return checkpoint
