"""The table of targets: complete, modelled by what bounds a call, and measured where a GPU has been."""

import json

import pytest
import torch

import gpu_targets
from common.pages import PAGES, markdown
from gpu_targets import SECTION, rows
from gpulab.cases import LLAMA, candidate, linear_case
from gpulab.measures import bf16_linear, op_calls
from gpulab.roofline import BANDWIDTH, LAUNCH, RATES, seconds
from hf_quant.kernels.gpu.launch import HAS_TRITON


pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
META = torch.device("meta")


def test_a_call_takes_what_bounds_it():
    N, K = LLAMA[2].N, LLAMA[2].K
    plain = seconds(bf16_linear(LLAMA[2], 1, META)[0])
    assert plain == pytest.approx(LAUNCH + 2 * (N * K + N + K) / BANDWIDTH, rel=1e-6)
    case = linear_case(candidate("int4 g128"), LLAMA[2], 1, torch.bfloat16)
    ours = seconds(op_calls(case, 1, META)[0])
    assert LAUNCH + N * K * 0.5 / BANDWIDTH < ours < LAUNCH + N * K * 0.55 / BANDWIDTH
    many = linear_case(candidate("W8A8 int8"), LLAMA[2], 8192, torch.bfloat16)
    least = 2 * 8192 * N * K / RATES["8bit"]
    assert least + 2 * LAUNCH < seconds(op_calls(many, 1, META)[0]) < 1.1 * least, "a launch more, to quantize"


@pytest.fixture
def few(monkeypatch):
    """Few cells, as all of them take seconds."""
    cells = {name: (lambda *_: []) for name in gpu_targets.CELLS}
    weights = gpu_targets.CELLS["weights"]
    cells["weights"] = lambda *options: [c for c in weights(*options) if c.case.M == 1][:4]
    monkeypatch.setattr(gpu_targets, "CELLS", cells)


def test_every_target_has_a_row(few, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_targets, "RESULTS", tmp_path)
    table = rows()
    ids = {row[0] for row in table[1:]}
    wanted = [f"G{i}" for i in range(1, 12)] + [f"L{i}" for i in range(1, 5)] + ["K1"]
    assert ids >= {*wanted, *(f"D{i}" for i in range(1, 6)), "T1", "T2", "T3"}
    gate_up = next(row for row in table if row[1].startswith("int4, gate_up"))
    assert gate_up[3] and gate_up[4] and gate_up[5] == "modelled"
    assert all(row[5] == "a rival: only a GPU can tell" for row in table if row[1].endswith("tinygemm"))
    target = {"id": "G1", "what": "int4, gate_up", "versus": "bf16", "tokens": [1], "value": 1.65}
    run = {"targets": [target], "environment": {"device": "NVIDIA X"}}
    (tmp_path / "x.json").write_text(json.dumps(run))
    row = next(row for row in rows() if row[1].startswith("int4, gate_up"))
    assert row[3:] == ("1.65", "misses by 50%", "measured (NVIDIA X)")


def test_the_page_has_the_table():
    text = next(page for page in PAGES if page.name == "gpu_kernels.md").read_text()
    body = text[text.index(f"<!-- {SECTION}: begin -->") : text.index(f"<!-- {SECTION}: end -->")]
    header = markdown([("target", "what", "wanted", "found", "", "how")])
    assert header in body and body.count("\n| ") > 50


def test_what_was_measured_is_added_up_by_its_time(tmp_path, monkeypatch):
    def record(candidate: str, M: int, ms: float, bf16: float | None, **rivals: float) -> dict:
        base = {"op": "weight_only_mm", "candidate": candidate, "linear": "o", "M": M, "ms": ms, "bf16_ms": bf16}
        return {**base, "rivals_ms": rivals}

    weights = [record("int4", 8, 1.0, 1.0), record("int4", 1, 1.0, 4.0), record("int4", 1, 3.0, 4.0)]
    attention = [record("int8 cache 1x9", 1, 2.0, None, SDPA=3.0, repeated=8.0), record("alone", 1, 2.0, None)]
    sections = {"weights": {"records": weights}, "attention": {"records": attention}}
    (tmp_path / "x.json").write_text(json.dumps({"sections": sections, "environment": {"device": "NVIDIA X"}}))
    monkeypatch.setattr(gpu_targets, "RESULTS", tmp_path)
    assert gpu_targets.measured_rows()[1:] == [
        ("NVIDIA X", "int4, weights alone", "1, 8", "2.00, 1.00"),
        ("NVIDIA X", "int8 cache", "1x9", "1.50"),
    ]
