"""`hf-quant doctor`: with and without native kernels, GPUs, packages, the hook and a tuned table."""

import importlib.metadata
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from hf_quant.cli import _doctor, main
from hf_quant.kernels import native, prepack
from hf_quant.kernels.gpu import launch
from hf_quant.kernels.gpu.launch import Target


RUN = "from hf_quant.cli import main\nassert main(['doctor', *sys.argv[1:]]) == 0\n"
WITHOUT_EXTENSION = "sys.modules['hf_quant.kernels.native._native'] = None\n"
NO_HOST = "assert not {'transformers', 'diffusers', 'huggingface_hub'} & {*sys.modules}\n"


def lines_of(text: str) -> dict[str, str]:
    """{label: value} of the indented lines."""
    return {line[2:].split("  ")[0]: line[2:].partition("  ")[2].strip() for line in text.splitlines() if "  " in line}


def doctor(capsys, *options: str) -> str:
    assert main(["doctor", *options]) == 0
    return capsys.readouterr().out


def section(text: str, title: str) -> dict[str, str]:
    (block,) = (block for block in text.split("\n\n") if block.startswith(f"{title}\n"))
    return lines_of(block)


def of_new_process(code: str, *options: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", "import sys\n" + code, *options],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def test_native_kernels_are_on(capsys, monkeypatch):
    monkeypatch.delenv("HF_QUANT_NATIVE", raising=False)
    extension = types.SimpleNamespace(
        instruction_sets=lambda: ("avx512", "avx2", "portable"), has_bf16_dot=lambda: True
    )
    monkeypatch.setattr(native.extension, "module", extension)
    monkeypatch.setattr(native.extension, "_active", "avx512")
    monkeypatch.setattr(native.extension, "_openmp", lambda: 1234)
    monkeypatch.setattr(native, "page_size", lambda: 2 << 20)
    found = json.loads(doctor(capsys, "--json"))["native"]
    assert (found["active"], found["available"]) == ("avx512", ["avx512", "avx2", "portable"])
    assert found["has_bf16_dot"] and found["shares_threads_of_torch"]
    assert found["why_not"] is found["to_do"] is found["environment"] is None
    text = doctor(capsys)
    assert section(text, "native CPU kernels") == {
        "in use": "avx512, with bf16 dot products",
        "others": "avx2, portable",
        "huge pages": "2 MiB, for weights",
        "threads": "those of torch's OpenMP pool",
    }
    assert "that the native kernels do not take" in section(text, "settings")["prepack limit"]
    monkeypatch.setenv("HF_QUANT_NATIVE", "portable")
    monkeypatch.setattr(native.extension, "_active", "portable")
    monkeypatch.setattr(native.extension, "_openmp", lambda: None)
    monkeypatch.setattr(native, "page_size", lambda: 0)
    extension.has_bf16_dot = lambda: False
    assert section(doctor(capsys), "native CPU kernels") == {
        "in use": "portable, chosen by HF_QUANT_NATIVE",
        "others": "avx512, avx2",
        "huge pages": "none: turned off, or not on this system",
        "threads": "their own: no OpenMP runtime of torch was found",
    }


@pytest.mark.skipif(native.extension.module is None, reason="the extension is not built")
def test_native_kernels_are_off():
    lines = section(of_new_process(RUN + NO_HOST, HF_QUANT_NATIVE="off"), "native CPU kernels")
    assert lines == {
        "in use": "none: the native kernels are turned off",
        "available": ", ".join(native.instruction_sets()),
        "to do": "unset HF_QUANT_NATIVE",
    }


@pytest.mark.parametrize("choice", ["", "off"])
def test_the_extension_is_not_built(choice):
    environment = {"HF_QUANT_NATIVE": choice} if choice else {}
    text = of_new_process(WITHOUT_EXTENSION + RUN, CXX="no-such-compiler", **environment)
    lines = section(text, "native CPU kernels")
    assert lines["in use"].startswith("none: the extension is not built (")
    assert lines["available"] == "none"
    assert "no-such-compiler is not on the PATH" in lines["to do"] and "from source again" in lines["to do"]
    assert section(text, "settings")["prepack limit"].endswith("copies of weights on the CPU")


def test_how_to_build_names_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", f"{sys.executable} -pthread")
    monkeypatch.setattr(_doctor.sysconfig, "get_path", lambda name: str(tmp_path))
    assert "Python.h is missing" in _doctor._how_to_build() and "PATH" not in _doctor._how_to_build()
    (tmp_path / "Python.h").touch()
    assert _doctor._how_to_build().endswith(f"{sys.executable} and Python's headers are there")


# Everything else.


def test_a_torch_that_is_too_old_is_not_imported(capsys, monkeypatch):
    versions = {"torch": "2.9.1+cu128", "transformers": "5.17.0", "accelerate": "1.9", "safetensors": "0.6.2"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    needs = ["torch>=2.11", "transformers>=5.17", "accelerate>=1.10", "safetensors>=0.6"]
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: [*needs, 'peft>=0.19; extra == "peft"'])
    text = doctor(capsys)
    packages = section(text, "packages")
    assert packages["torch"] == "2.9.1+cu128: older than 2.11, the oldest that is supported"
    assert packages["transformers"] == "5.17.0"
    assert packages["accelerate"] == "1.9: older than 1.10, the oldest that is supported"
    assert packages["safetensors"] == "0.6.2"
    assert packages["peft"] == packages["diffusers"] == "not installed (optional)"
    for title, label in (("native CPU kernels", "in use"), ("GPUs", "devices"), ("machine", "threads of torch")):
        assert section(text, title)[label] == "not examined without a supported torch"
    assert list(section(text, "settings")) == ["start-up hook"]
    found = json.loads(doctor(capsys, "--json"))
    assert found["native"] is found["gpu"] is found["settings"] is None
    del versions["torch"]
    assert section(doctor(capsys), "packages")["torch"] == "not installed, but required"


def test_versions_and_minimums_are_those_of_the_installed_package(capsys):
    found = json.loads(doctor(capsys, "--json"))
    torch_found = found["packages"]["torch"]
    assert torch.__version__.startswith(torch_found["version"]) and torch_found["problem"] is None
    assert torch_found["minimum"] and torch_found["required"] and not found["packages"]["peft"]["required"]
    assert Path(found["hf_quant"]["path"]) == Path(_doctor.__file__).parents[1]
    assert found["machine"]["threads"] == torch.get_num_threads()
    assert found["hook"] == {"installed": True, "active": True}
    assert found["settings"]["prepack_limit"] == prepack._limit


@pytest.mark.parametrize(("older", "newer"), [("2.9", "2.11"), ("1.10", "1.10.1"), ("5.17rc1", "5.18"), ("", "0.1")])
def test_versions_are_compared_as_numbers(older, newer):
    assert _doctor._release(older) < _doctor._release(newer)
    assert _doctor._release("2.11.0+cpu") == _doctor._release("2.11") == _doctor._release("2.11.dev1")


def test_gpus_and_their_tables(capsys, monkeypatch):
    h200 = types.SimpleNamespace(name="NVIDIA H200", total_memory=150e9, major=9, minor=0)
    mi300 = types.SimpleNamespace(name="AMD MI300X", total_memory=206e9, major=9, minor=4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: (h200, mi300)[i])
    targets = (Target("sm90", 132, 232448), Target("gfx942", 304, 65536))
    monkeypatch.setattr(launch, "target_of", lambda device: targets[device.index])
    monkeypatch.setattr(launch, "unavailable_reason", lambda kind: None)
    assert section(doctor(capsys), "GPUs") == {
        "cuda:0": "NVIDIA H200, 150.0 GB, compute capability 9.0; table sm90",
        "cuda:1": "AMD MI300X, 206.0 GB, gfx942; table gfx942",
    }
    monkeypatch.setattr(launch, "unavailable_reason", lambda kind: "triton is not installed")
    assert section(doctor(capsys), "GPUs")["cuda:0"].endswith("9.0; no Triton kernels: triton is not installed")
    assert json.loads(doctor(capsys, "--json"))["gpu"]["devices"][0]["table"] is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert section(doctor(capsys), "GPUs")["devices"].startswith("none: ")


def test_the_tuned_table(capsys, monkeypatch, tmp_path):
    path = tmp_path / "tuned.json"
    monkeypatch.setenv("HF_QUANT_TUNED", str(path))
    line = lambda: section(doctor(capsys), "settings")["tuned table"]  # noqa: E731
    assert line() == f"none at {path}"
    path.write_text(json.dumps({"sm90": {"weight_only_mm": [[1]], "grouped_mm": [[1]]}}))
    assert line() == f"{path} (sm90: weight_only_mm, grouped_mm)"
    path.write_text("[")
    assert "is no table of tuned configs" in line()


def test_the_hook_and_the_limit(capsys, monkeypatch):
    settings = lambda: section(doctor(capsys), "settings")  # noqa: E731
    assert settings()["start-up hook"].startswith("installed: ")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert settings()["start-up hook"].startswith("turned off by TORCH_DEVICE_BACKEND_AUTOLOAD=0: ")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    assert settings()["start-up hook"].startswith("not installed: ")
    monkeypatch.setattr(prepack, "_limit", None)
    assert settings()["prepack limit"].startswith("no limit, ")
    monkeypatch.setattr(prepack, "_limit", 2_500_000_000)
    assert settings()["prepack limit"].startswith("2.50 GB, ")


def test_more_threads_than_cores(capsys, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4096)
    assert section(doctor(capsys), "machine")["threads of torch"].startswith("4096, more than there are cores")
