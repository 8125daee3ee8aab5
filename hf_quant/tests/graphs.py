"""A fixture for every test: none meets the compiled graphs of another."""

import sys

import pytest


def forget() -> None:
    """Forget what `torch.compile` has made in this process, and its counters."""
    if "torch._dynamo" in sys.modules:
        import torch

        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()


@pytest.fixture(autouse=True)
def forget_graphs() -> None:
    """Forget what `torch.compile` made in earlier tests of the process, and its counters.

    torch allows 8 graphs of a code object, and all modules of a class share theirs: with those of other tests, the
    ninth graph raises where `fullgraph=True`.
    """
    forget()
