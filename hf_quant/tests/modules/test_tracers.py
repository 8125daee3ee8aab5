"""Tracers of torch: torch.export and AOTInductor in a new process, torch.fx; those that cannot record codes say so."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
import torch.onnx
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import hf_quant.integrations.transformers.conv1d  # noqa: F401  (makes Conv1D quantizable)
from hf_quant import quantize_
from hf_quant.testing import assert_close
from hf_quant.tests.modules.test_experts import experts


class Model(nn.Module):
    """One layer of each kind but experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, 64)
        self.conv = nn.Conv1d(64, 64, 3, padding=1)
        self.up, self.down = Conv1D(96, 64), nn.Linear(96, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.conv(x.mT).mT
        return self.down(F.silu(self.up(x)))


IDS = torch.arange(24).view(2, 12)
FIELDS = {"weights": "int4", "modules": {"embedding": "int8", "conv": "int8", "down": "W8A8"}}


def quantized() -> Model:
    torch.manual_seed(0)
    return quantize_(Model(), FIELDS).eval()


def in_a_new_process(code: str, *arguments: object) -> None:
    """Run code that must not fail; without an import of hf_quant, which the start-up hook of torch stands for."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, torch\n{code}", *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_saved_program_loads_in_a_new_process(tmp_path):
    model = quantized()
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(model, (IDS,), dynamic_shapes=({1: length},))
    torch.export.save(program, tmp_path / "program.pt2")
    torch.save([(ids, model(ids)) for ids in (IDS, IDS[:, :5])], tmp_path / "expected.pt")
    in_a_new_process(
        "assert 'hf_quant.kernels' not in sys.modules\n"
        "program = torch.export.load(sys.argv[1]).module()\n"
        "assert 'hf_quant.formats' not in sys.modules\n"
        "for ids, expected in torch.load(sys.argv[2]):\n    assert torch.equal(program(ids), expected)",
        tmp_path / "program.pt2",
        tmp_path / "expected.pt",
    )
    loaded = torch.export.load(tmp_path / "program.pt2").module()  # here the ops are registered before
    assert all(torch.equal(loaded(ids), model(ids)) for ids in (IDS, IDS[:, :5]))


def test_a_compiled_package_loads_in_a_new_process(tmp_path):
    torch.manual_seed(0)
    model, x = quantize_(nn.Sequential(nn.Linear(64, 64)), "int4").eval(), torch.randn(3, 64)
    package = str(tmp_path / "package.pt2")
    torch._inductor.aoti_compile_and_package(torch.export.export(model, (x,)), package_path=package)
    torch.save((x, model(x)), tmp_path / "expected.pt")
    in_a_new_process(
        "package = torch._inductor.aoti_load_package(sys.argv[1])\n"
        "x, expected = torch.load(sys.argv[2])\nassert torch.equal(package(x), expected)",
        package,
        tmp_path / "expected.pt",
    )


def test_symbolic_trace_records_a_call_of_each_layer():
    model = quantized()
    traced = torch.fx.symbolic_trace(model)
    called = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert called == ["embedding", "conv", "up", "down"]
    assert torch.equal(traced(IDS), model(IDS)) and traced.down.qdata is model.down.qdata
    again = torch.fx.symbolic_trace(traced)
    assert torch.equal(again(IDS[:, :3]), model(IDS[:, :3]))


def test_symbolic_trace_of_experts():
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts, _ = experts("mixtral")

        def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            return self.experts(2 * x, chosen, weights)

    model, x, chosen = Routed(), torch.randn(5, 64), torch.randint(0, 4, (5, 2))
    traced = torch.fx.symbolic_trace(model)
    assert_close(traced(x, chosen, torch.ones(5, 2)), model(x, chosen, torch.ones(5, 2)), rms=1e-7)


class Doubled(nn.Linear):
    """A host's layer that computes more than its base."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_a_layer_with_a_forward_of_its_own_is_refused():
    model = quantize_(nn.Sequential(Doubled(64, 64)), "int4")
    with pytest.raises(ValueError, match="whose class has a forward of its own: give the tracer's is_leaf_module"):
        torch.fx.symbolic_trace(model)


@pytest.mark.parametrize("fields", ["int4", "W8A8"])
@pytest.mark.parametrize("is_warm", [False, True])
def test_tracers_without_ops_for_codes_say_what_to_do(fields, is_warm, tmp_path):
    """Also after a call has made the product ready, which a tracer would take for a constant."""
    model, x = quantize_(nn.Sequential(nn.Linear(64, 64)), fields).eval(), torch.randn(3, 64)
    if is_warm:
        model(x)
    what = r"cannot record quantized layers: use torch.export, or give them the 16-bit model, hf_quant.dequantize_"
    with pytest.raises(ValueError, match=what):
        torch.jit.trace(model, (x,))
    with pytest.raises(ValueError, match=what):
        torch.onnx.export(model, (x,), str(tmp_path / "model.onnx"), dynamo=False)
    for layer in (quantized().embedding, quantized().conv):
        with pytest.raises(ValueError, match=what):
            torch.jit.trace(layer, (IDS if isinstance(layer, nn.Embedding) else torch.randn(2, 64, 9),))
    assert model(x).shape == (3, 64)


def test_the_exporter_to_onnx_meets_the_same_words(monkeypatch):
    """`dynamo=True` traces by torch.export, and needs a package that is not installed here."""
    model, x = quantize_(nn.Sequential(nn.Linear(64, 64)), "int4").eval(), torch.randn(3, 64)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    with pytest.raises(ValueError, match="cannot record quantized layers"):
        torch.export.export(model, (x,), strict=False)
