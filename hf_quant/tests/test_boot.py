"""The start-up hook, in fresh processes: hosts get the adapter in every order of imports, and are never harmed by it.

The last tests run against the real adapters and hosts; the others against a copy of the package that consists of the
real `__init__`, `_boot` and `_version` and of adapters that only note their call, and against a host of three files.
"""

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hf_quant import _boot


PACKAGE = Path(__file__).parents[1]
ENTRY_POINT = "[torch.backends]\nhf_quant = hf_quant._boot:boot\n"
ADAPTER = """
import {host}.quantizers.auto as auto
def register():
    if "hf_quant" not in auto.AUTO_QUANTIZER_MAPPING:
        auto.AUTO_QUANTIZER_MAPPING["hf_quant"] = "the adapter"
register()
"""
TRANSFORMERS_KNOWS = "'hf_quant' in sys.modules['transformers.quantizers.auto'].__dict__['AUTO_QUANTIZER_MAPPING']"


@pytest.fixture
def stub_install(tmp_path: Path) -> Path:
    """A directory for PYTHONPATH with an installed hf-quant: real start-up files, stub adapters, the entry point."""
    package = tmp_path / "hf_quant"
    (package / "integrations").mkdir(parents=True)
    for name in ("__init__.py", "_boot.py", "_version.py"):
        shutil.copy(PACKAGE / name, package)
    (package / "integrations" / "__init__.py").write_text("import transformers.quantizers.auto\n")
    for host in ("transformers", "diffusers"):
        (package / "integrations" / host).mkdir()
        (package / "integrations" / host / "__init__.py").touch()
        (package / "integrations" / host / "quantizer.py").write_text(ADAPTER.format(host=host))
    (tmp_path / "transformers" / "quantizers").mkdir(parents=True)
    (tmp_path / "transformers" / "__init__.py").touch()
    (tmp_path / "transformers" / "quantizers" / "__init__.py").touch()
    (tmp_path / "transformers" / "quantizers" / "auto.py").write_text("import torch\nAUTO_QUANTIZER_MAPPING = {}\n")
    write_entry_point(tmp_path)
    return tmp_path


@pytest.fixture
def real_install(tmp_path: Path) -> Path:
    """The same with the real package, whether this environment has it installed or only finds it."""
    (tmp_path / "hf_quant").symlink_to(PACKAGE, target_is_directory=True)
    write_entry_point(tmp_path)
    return tmp_path


def write_entry_point(directory: Path) -> None:
    """What pip leaves of an installed distribution, as far as torch looks at it."""
    info = directory / "hf_quant-0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hf-quant\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINT)


def run(code: str, path: Path, **environment: str) -> subprocess.CompletedProcess:
    """Run `code` in a fresh interpreter that finds its packages under `path` first."""
    return subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}"],
        env={**os.environ, "PYTHONPATH": str(path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "1", **environment},
        cwd=path,
        capture_output=True,
        text=True,
        timeout=240,
    )


def assert_clean(result: subprocess.CompletedProcess) -> None:
    """The process ended well and wrote nothing to stderr that is ours."""
    assert result.returncode == 0, result.stderr
    assert "hf_quant" not in result.stderr


def test_torch_alone_gets_a_finder_and_nothing_else(stub_install):
    code = """
import torch
assert type(sys.meta_path[0]).__name__ == "_HostFinder"
assert sum(type(finder).__name__ == "_HostFinder" for finder in sys.meta_path) == 1
ours = {name for name in sys.modules if name.startswith("hf_quant")}
assert ours == {"hf_quant", "hf_quant._boot", "hf_quant._version"}
assert not {"transformers", "diffusers"} & set(sys.modules)
"""
    assert_clean(run(code, stub_install))


def test_the_package_itself_imports_no_library(stub_install):
    code = "import hf_quant\nassert not {'torch', 'triton', 'transformers', 'diffusers'} & set(sys.modules)"
    assert_clean(run(code, stub_install))


def test_switched_off_by_torchs_own_switch(stub_install):
    code = f"""
import torch, transformers.quantizers.auto
assert not {TRANSFORMERS_KNOWS} and "hf_quant" not in sys.modules
import hf_quant  # asking for it still works, although the host is loaded already
assert {TRANSFORMERS_KNOWS}
"""
    assert_clean(run(code, stub_install, TORCH_DEVICE_BACKEND_AUTOLOAD="0"))


def test_the_hosts_loader_is_left_as_it_was(stub_install):
    code = """
import inspect, torch, transformers.quantizers.auto as auto
assert type(auto).__name__ == "module" and auto.__loader__ is auto.__spec__.loader
assert "exec_module" not in vars(auto.__loader__)
assert "AUTO_QUANTIZER_MAPPING" in inspect.getsource(auto)
import importlib; importlib.reload(auto)  # makes the list anew
assert "hf_quant" in auto.AUTO_QUANTIZER_MAPPING
"""
    assert_clean(run(code, stub_install))


def test_a_broken_adapter_is_one_warning_and_not_the_hosts_problem(stub_install):
    (stub_install / "hf_quant" / "integrations" / "transformers" / "quantizer.py").write_text("def regis")
    # Warnings as errors: not even then may the host's import fail.
    code = f"""
import torch, warnings
warnings.simplefilter("error", RuntimeWarning)
import transformers.quantizers.auto
assert not {TRANSFORMERS_KNOWS}
"""
    result = run(code, stub_install)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if "hf_quant" in line]
    assert len(lines) == 1
    assert "could not register with transformers" in lines[0] and "SyntaxError" in lines[0] and "Reinstall" in lines[0]


@pytest.mark.parametrize(
    ("adapter", "cause"),
    [
        ("raise OSError('libfoo.so: cannot open shared object file')", "OSError: libfoo.so: cannot open"),
        ("def register(): raise KeyError('hf_quant')", "KeyError: 'hf_quant'"),
        (None, "ModuleNotFoundError: No module named 'hf_quant_stub_adapter'"),
    ],
)
def test_whatever_an_adapter_raises_is_named_in_the_warning(tmp_path, monkeypatch, caplog, adapter, cause):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "hf_quant_stub_adapter", raising=False)
    monkeypatch.setitem(_boot._ADAPTERS, "transformers.quantizers.auto", "hf_quant_stub_adapter")
    if adapter is not None:
        (tmp_path / "hf_quant_stub_adapter.py").write_text(adapter)
    with caplog.at_level("WARNING", logger="hf_quant"):
        _boot._register("transformers.quantizers.auto")
    (record,) = caplog.records
    assert record.name == "hf_quant" and cause in record.getMessage()


def test_adds_less_than_a_millisecond_to_torch(stub_install):
    code = """
import time, torch
from importlib.metadata import entry_points
assert "hf_quant" not in sys.modules
(entry_point,) = [e for e in entry_points(group="torch.backends") if e.name == "hf_quant"]
seconds = []
for _ in range(20):
    start = time.perf_counter()
    entry_point.load()()
    seconds.append(time.perf_counter() - start)
    assert "hf_quant._boot" in sys.modules
    for name in ("hf_quant", "hf_quant._boot", "hf_quant._version"):
        del sys.modules[name]
    del sys.meta_path[0]
print(min(seconds[1:]))
"""
    # With byte code, as pip installs it.
    result = run(code, stub_install, TORCH_DEVICE_BACKEND_AUTOLOAD="0", PYTHONDONTWRITEBYTECODE="")
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 1e-3


@pytest.mark.parametrize(
    "imports",
    [
        "import transformers.quantizers.auto, hf_quant",  # the host itself imports torch, half way
        "import hf_quant, transformers.quantizers.auto",
        "import torch, transformers.quantizers.auto",
    ],
)
def test_the_adapter_is_registered_in_every_order_of_imports(stub_install, imports):
    code = f"{imports}\nfrom transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as found"
    assert_clean(run(f"{code}\nassert 'hf_quant' in found", stub_install))


def test_a_plain_model_does_not_import_the_compiler(real_install):
    code = """
import torch
from hf_quant import quantize_
quantize_(torch.nn.Linear(64, 64), "W8A8")(torch.ones(2, 64))
assert not {"diffusers", "torch._dynamo"} & set(sys.modules)
"""
    assert_clean(run(code, real_install))


@pytest.mark.parametrize(
    "imports",
    [
        "import hf_quant.integrations.transformers",  # the adapter imports the host
        'import torch; torch.set_default_device("meta")\n'
        "from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_pretrained",
    ],
)
def test_transformers_gets_the_real_classes_and_diffusers_is_not_imported(real_install, imports):
    code = f"""
{imports}
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
assert AUTO_QUANTIZER_MAPPING["hf_quant"].__module__.startswith("hf_quant.integrations")
import hf_quant
assert AUTO_QUANTIZATION_CONFIG_MAPPING["hf_quant"] is hf_quant.QuantizerConfig
assert "diffusers" not in sys.modules
import hf_quant.integrations
assert hf_quant.integrations.transformers is sys.modules["hf_quant.integrations.transformers"], "not the host"
"""
    assert_clean(run(code, real_install))


def test_diffusers_gets_the_real_classes(real_install):
    pytest.importorskip("diffusers", reason="diffusers is an optional host")
    code = """
import diffusers.quantizers.auto as auto
assert auto.AUTO_QUANTIZER_MAPPING["hf_quant"].__module__.startswith("hf_quant.integrations")
import hf_quant
assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["hf_quant"] is hf_quant.QuantizerConfig
"""
    assert_clean(run(code, real_install))


@pytest.mark.parametrize(
    ("old", "name"),
    [
        ("hf_quant.graphs", "_Method"),
        ("hf_quant.integrations.conv1d", "QuantConv1D"),
        ("hf_quant.integrations.diffusers", "DiffusersQuantizer"),
        ("hf_quant.integrations.diffusers", "_write_card"),
        ("hf_quant.integrations.diffusers_attention", "_rebuild"),
        ("hf_quant.integrations.diffusers_fused", "_rebuild"),
        ("hf_quant.integrations.generation", "CacheMethod"),
        ("hf_quant.integrations.transformers", "TransformersQuantizer"),
        ("hf_quant.integrations.transformers", "_refuse_cast"),
        ("hf_quant.modules._rows", "SharedInput"),
        ("hf_quant.modules.fused", "FusedProjections"),
    ],
)
def test_pickles_find_classes_under_the_names_that_modules_had(old, name):
    found = pickle.loads(f"c{old}\n{name}\n.".encode())
    assert found.__module__ != old and getattr(sys.modules[found.__module__], name) is found
