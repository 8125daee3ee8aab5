"""A fixture for every file of tests: a search for garbage looks at the objects of that file alone."""

import atexit
import gc

import pytest

from hf_quant.tests.graphs import forget


atexit.register(gc.unfreeze)  # else libraries report their types as leaked


@pytest.fixture(autouse=True, scope="module")
def freeze_older_objects() -> None:
    """Let the collector forget what tests of other files have left: modules, and 12,000 collected tests.

    The hosts search for garbage when they train, compile or load, which took 0.2 to 1 s each. What is compiled, or
    garbage already, goes first: the collector would not free it later.
    """
    forget()
    gc.collect()
    gc.freeze()
