"""What every integration test gets: one thread, no network, and the small trained model."""

import os
from pathlib import Path


# Before torch and huggingface_hub are imported, which read these once; subprocesses of a test inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest  # noqa: E402


ASSET_MODEL = Path(__file__).parent / "assets" / "tiny-llama-13m"


@pytest.fixture(scope="session")
def asset_model_dir() -> Path:
    """Directory of the trained 12.6M-parameter Llama: weights, tokenizer, `eval.txt`, `val_ids.npy`."""
    return ASSET_MODEL
