"""Quantizing on load takes little more memory than the quantized model, however large the 16-bit model is."""

import sys

import pytest

from scripts.bench_load import LIMITS, measure, write_model


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="anonymous memory is read from /proc")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """(directory, size in bytes) of a sharded 107 MB Llama: in a smaller one imports would outweigh weights."""
    directory = tmp_path_factory.mktemp("load") / "model"
    return directory, write_model(directory, hidden=1024, layers=4, max_shard_size="25MB")


@pytest.mark.parametrize("weights", LIMITS)
def test_anonymous_memory_while_loading(weights, checkpoint):
    directory, size = checkpoint
    load = measure(directory, weights)
    assert load.footprint < 0.6 * size
    assert 0.9 * (load.footprint - 0.1 * size) < load.peak < LIMITS[weights] * size
    # What is quantized already is mapped from its file.
    assert measure(directory.with_name(f"model-{weights}"), None).peak < 0.1 * size
