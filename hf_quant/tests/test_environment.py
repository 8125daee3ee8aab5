"""Tests meet nothing of the user's: no token, no cache of the Hub, no setting of the hosts."""

import os
from pathlib import Path

from huggingface_hub import constants


def test_nothing_of_the_user_is_met():
    assert Path(constants.HF_HOME) == Path(os.environ["HF_HOME"]) != Path.home() / ".cache" / "huggingface"
    assert constants.HF_HUB_OFFLINE and "HF_TOKEN" not in os.environ
    assert Path(constants.HF_HUB_CACHE).parent == Path(constants.HF_HOME)
