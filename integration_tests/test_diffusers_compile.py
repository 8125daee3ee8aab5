"""torch.compile of quantized diffusion models: one graph per block class, whatever the resolution and the text."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from hf_quant import fuse_projections_, quantize_
from hf_quant.testing import assert_sqnr


pytest.importorskip("diffusers", reason="diffusers is an optional host")

from integration_tests.support.tiny_architectures import Size  # noqa: E402
from integration_tests.support.tiny_diffusion import make_model, run  # noqa: E402


# Three resolutions and lengths of the text. No two numbers of a call are equal, and none is a width of the model: the
# compiler takes equal numbers for the same one and compiles again when they part.
SIZES = (Size(3, 5, 7), Size(5, 9, 11), Size(6, 7, 13))
CHANGES = {("wan", "blocks"): {"num_layers": 2}}  # two blocks that share a graph
Graphs = tuple[int, ...]  # compiled so far, after each of SIZES


def model_of(name: str, how: str, weights: str | None, is_fused: bool = False) -> nn.Module:
    model = make_model(name, torch.bfloat16, **CHANGES.get((name, how), {}))
    if weights is not None:
        quantize_(model, weights)
    return fuse_projections_(model) if is_fused else model


def compile_(model: nn.Module, how: str, backend: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    if how == "blocks":
        model.compile_repeated_blocks(fullgraph=True, dynamic=True, backend=backend)
    else:
        model.compile(dynamic=True, backend=backend)


def graphs_of(model: nn.Module, name: str, outputs: list[Tensor] | None = None) -> Graphs:
    counters, graphs = torch._dynamo.utils.counters, []
    for size in SIZES:
        output = run(model, name, size)
        graphs.append(counters["stats"]["unique_graphs"])
        if outputs is not None:
            outputs.append(output)
    assert not counters["graph_break"]
    return tuple(graphs)


@cache
def graphs_of_plain(name: str, how: str) -> Graphs:
    """Count the compilations of the host's own model."""
    model = model_of(name, how, None)
    compile_(model, how, "eager")
    return graphs_of(model, name)


@pytest.mark.parametrize(
    ("name", "how", "backend", "weights", "is_fused"),
    [
        ("flux", "blocks", "eager", "W8A8", False),
        ("wan", "blocks", "aot_eager", "W8A8_FP8", False),
        ("wan", "blocks", "eager", "int4", True),
        ("unet", "blocks", "eager", "W8A8", True),
        ("cogvideox", "whole", "aot_eager", "int4", False),
    ],
)
def test_resolutions_compile_nothing_new(name, how, backend, weights, is_fused):
    eager = model_of(name, how, weights, is_fused)
    expected, outputs = [run(eager, name, size) for size in SIZES], []
    model = model_of(name, how, weights, is_fused)
    compile_(model, how, backend)
    graphs = graphs_of(model, name, outputs)
    assert graphs[0] > 0 and graphs == graphs[:1] * 3
    for output, exact in zip(outputs, expected):
        # Another kernel may serve a weight from its second use on.
        assert_sqnr(output, exact, at_least=40, at_most=float("inf"))
    if how == "blocks":  # the control of a whole model costs as much as the case
        assert graphs == graphs_of_plain(name, how)


def test_inductor():
    """The one test that generates code, because a case costs 20 s and more."""
    eager, model = (quantize_(make_model("wan", torch.bfloat16), "W8A8") for _ in range(2))
    outputs: list[Tensor] = []
    compile_(model, "blocks", "inductor")
    graphs = graphs_of(model, "wan", outputs)
    assert graphs == graphs[:1] * 3
    for output, size in zip(outputs, SIZES):
        assert_sqnr(output, run(eager, "wan", size), at_least=30, at_most=float("inf"))


@pytest.mark.parametrize(("weights", "backend"), [("W8A8_FP8", "aot_eager"), ("int4", "eager")])
def test_compiled_blocks(weights, backend):
    expected = run(quantize_(make_model("flux", torch.bfloat16), weights), "flux")
    model = quantize_(make_model("flux", torch.bfloat16), weights)
    model.compile_repeated_blocks(fullgraph=True, backend=backend)
    assert torch.equal(run(model, "flux"), expected)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == len(model._repeated_blocks) == 2
    run(model, "flux")
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
