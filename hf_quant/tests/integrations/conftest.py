"""Fixtures of the tests of native blocks."""

import pytest

from hf_quant.integrations.transformers.blocks import decoder


@pytest.fixture
def parts(monkeypatch):
    """The number of layers of each native call that computes several."""
    counts, real = [], decoder.Chain.__call__
    monkeypatch.setattr(
        decoder.Chain, "__call__", lambda self, *given: (counts.append(len(self._blocks)), real(self, *given))[1]
    )
    return counts
