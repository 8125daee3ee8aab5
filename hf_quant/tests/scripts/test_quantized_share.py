"""`scripts/quantized_share.py` counts what plans quantize, on a handful of architectures."""

import signal

import pytest
import torch
import transformers
from torch import nn

import quantized_share
from common import pages
from quantized_share import Share, measure, report, share_of


def made(name: str) -> Share:
    makers = dict(quantized_share.transformers_models())
    found = measure(name, makers[name])
    assert isinstance(found, Share), found
    return found


@pytest.fixture(autouse=True)
def alarm():
    before = signal.signal(signal.SIGALRM, quantized_share._stop)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", ["llama4_text", "dbrx", "jetmoe", "longcat_flash", "siglip_vision_model", "xlnet"])
def test_architectures_of_the_page_are_covered(name):
    found = made(name)
    assert found.share >= quantized_share.TARGET and found.total > 50_000_000
    assert found.in_codes <= found.total and sum(found.left.values()) + found.in_codes <= found.total


def test_what_stays_is_counted_with_its_reason():
    found = made("wav2vec2")
    assert found.left["weight_norm", "only if named in `modules`"] == 768 * 48 * 128
    assert found.left["conv", "only if named in `modules`"] > 1_000_000
    assert found.share == found.quantized / found.multiplied > 0.95


def test_the_output_embedding_and_tables_do_not_count_as_layers():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(64, 64), nn.Linear(64, 1000)
            self.pos_embed, self.other = nn.Parameter(torch.ones(64, 64)), nn.ParameterDict({"w": torch.ones(64, 64)})

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    found = share_of("model", Model())
    assert (found.multiplied, found.quantized, found.in_codes) == (2 * 4096, 4096, 4096)
    assert found.left["linear", "output embedding"] == 64000
    assert found.left["Model", "a table: no product"] == found.left["ParameterDict", _none("ParameterDict")] == 4096


def _none(name: str) -> str:
    return f"{name} has no quantized counterpart"


def test_models_of_convolutions_only_are_counted_apart():
    found = share_of("model", nn.Sequential(nn.Conv2d(64, 64, 3), nn.ReLU()))
    assert (found.multiplied, found.share, found.of_all) == (0, 1.0, 0.0)
    assert list(found.left) == [("conv", "conv: only if named in `modules`")]


def test_an_architecture_that_cannot_be_made_is_a_reason_and_a_defect_of_ours_is_not(monkeypatch):
    def fails() -> nn.Module:
        raise KeyError("full_attention")

    assert measure("model", fails) == "no model from the default configuration (KeyError)"
    monkeypatch.setattr(quantized_share.hf_quant, "plan", lambda *_, **__: {}["ours"])
    with pytest.raises(KeyError):
        measure("model", lambda: nn.Linear(8, 8))


def test_the_report_lists_architectures_below_the_target_only():
    below = Share("Below", 100, 50, 200, 50, {("linear", "task head"): 50, ("conv", "only if named"): 100})
    full, alone = Share("Full", 100, 99, 100, 99, {}), Share("Alone", 0, 0, 10, 0, {("conv", "only if named"): 10})
    text = report({"transformers": {"Below": below, "Full": full, "Alone": alone, "Gone": "no model (KeyError)"}})
    assert f"| transformers {transformers.__version__} | 4 | 1 | 1 | 1 | 1 |" in text
    assert "| `Below` | 50.0 % | 25.0 % | 25.0% linear: task head |" in text and "`Full`" not in text
    assert "In 2 architectures" in text and "2 by conv" in text and "no model: 1" in text


def test_the_page_has_the_table():
    text = pages.page_with(quantized_share.SECTION).read_text()
    assert text.count("| transformers ") == text.count("| diffusers ") == 1
