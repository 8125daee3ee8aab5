"""Quantizing on load takes little more memory than the quantized model, however large the 16-bit model is."""

import sys

import pytest

from scripts.bench_load import LIMITS, measure, write_model


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="anonymous memory is read from /proc")


def test_anonymous_memory_while_loading(tmp_path):
    """The model is a sharded Llama of 107 MB: in a smaller one imports would outweigh weights."""
    size = write_model(tmp_path / "model", hidden=1024, layers=4, max_shard_size="25MB")
    load = measure(tmp_path / "model", "int4")
    assert load.footprint < 0.6 * size
    assert 0.9 * (load.footprint - 0.1 * size) < load.peak < LIMITS["int4"] * size
    # What is quantized already is mapped from its file.
    assert measure(tmp_path / "model-int4", None).peak < 0.1 * size
