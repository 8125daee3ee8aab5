"""The benchmark of launches: every kernel is launched under a driver that does nothing, by both ways alike."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import bench_launch
from hf_quant.kernels.gpu.launch import HAS_TRITON


ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_every_kernel_is_launched_as_by_tritons_jit():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["HF_QUANT_UNTRIED_KERNELS"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])
    command = [sys.executable, str(ROOT / "scripts" / "bench_launch.py"), "--rounds", "1", "--limit", "0.001"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr[-2000:]
    kernels = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("_")]
    paths = [*(ROOT / "hf_quant" / "kernels").rglob("gpu*.py"), *(ROOT / "hf_quant" / "kernels").rglob("*kernel.py")]
    sources = "".join(path.read_text() for path in paths)
    wanted = {
        line.split("(")[0][4:] for line in sources.splitlines() if line.startswith("def _") and "_kernel(" in line
    }
    assert set(kernels) == wanted and f"{len(wanted)} of {len(wanted)} kernels take more" in done.stdout


def test_under_the_interpreter_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_launch"])
    monkeypatch.setattr(bench_launch, "check_environment", lambda: "TRITON_INTERPRET is set")
    assert bench_launch.main() == 2
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err
