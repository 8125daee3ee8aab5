"""Ahead-of-time compilation on kernels that pass and kernels that must not; without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import aot_compile
from hf_quant.kernels.gpu.launch import HAS_TRITON


pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
ROOT = Path(__file__).parents[3]


def run(*command: str) -> subprocess.CompletedProcess:
    """Python in a process where Triton compiles instead of interpreting."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    done = run(str(Path(__file__).parent / "aot_kernels.py"), str(tmp_path_factory.mktemp("aot")), "sm90")
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_what_is_wrong_is_found_in_compiled_code(results):
    found = results["found"]
    assert found["good"] == [] and results["matrix"].keys() == {"HGMMA"}
    assert "matrix" in found["small"], "16 rows run on HMMA, which sm90 has for older code"
    assert "shared" in found["large"] and "local" in found["large"]
    assert found["strided"] == ["width"]
    assert found["broken"] == ["compiles"] and "power of 2" in results["error"]


def test_units_are_specialized_as_by_the_jit(results):
    assert results["is_same"], "M is not specialized"
    assert results["is_other"], "whether 16 divides K is"


def test_lengths_share_their_kernels(results):
    by_length = results["by_length"]
    assert by_length == {"attention, None": 4, "attention, fp8_e4m3": 3, "quantize": 1, "LayerNorm, modulated": 1}


def test_a_window_that_moves_compiles_nothing(results):
    assert results["by_window"] == {"int8": 1, "int4": 1}


def test_a_second_run_compiles_only_what_failed(results):
    assert results["cached"] == 4 and results["is_kept"] and results["is_equal"]


def test_a_few_kernels_cover_every_constexpr(results):
    assert {16, 64, 128, None} == set(results["covered"]) and len(results["covered"]) <= 5


def test_every_tile_meets_every_decoder(results):
    few, once, crossed, every = results["covering"]
    assert few <= 6 <= once < 8 <= crossed <= every  # of two kernels


def test_the_report(tmp_path):
    name = "^int4 g128, llama o 4096x4096, M=64, bf16$"
    options = (
        "--ops",
        "weight_only_mm",
        "--targets",
        "sm90",
        "--cases",
        name,
        "--json",
        str(tmp_path / "report.json"),
    )
    done = run(str(ROOT / "scripts" / "aot_compile.py"), *options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "modelled us" in done.stdout and "HGMMA" in done.stdout and "0 failures" in done.stdout
    row = json.loads((tmp_path / "report.json").read_text())["rows"][0]
    assert row["registers"] > 0 and row["loop"] > 0 and row["blocks_per_multiprocessor"] > 0
    assert set(row["modelled_us"]) == {"memory", "issue", "matrix"}


def test_under_the_interpreter_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["aot_compile", "--ops", "dequantize"])
    assert aot_compile.main() == 2
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err
