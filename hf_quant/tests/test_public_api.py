"""The public names: all there, documented, typed, lazily imported, and usable from the package alone."""

import ast
import inspect
import subprocess
import sys
import types
from pathlib import Path

import pytest

import hf_quant
from hf_quant import kv_cache


NAMES = sorted(set(hf_quant.__all__) - {"__version__"})


def test_the_list_is_short_sorted_and_complete():
    assert len(hf_quant.__all__) <= 40
    assert len(set(hf_quant.__all__)) == len(hf_quant.__all__)
    assert dir(hf_quant) == sorted(hf_quant.__all__)
    assert set(hf_quant._HOME) == set(NAMES)
    assert {
        "FORMATS",
        "LinearScheme",
        "PRESETS",
        "QuantEmbedding",
        "QuantExperts",
        "QuantLinear",
        "QuantPlan",
        "QuantizerConfig",
        "TensorQuant",
        "dequantize_",
        "load_quantized_",
        "plan",
        "quantize_",
        "save_quantized",
    } <= set(NAMES)


@pytest.mark.parametrize("package", (hf_quant, kv_cache), ids=lambda package: package.__name__)
def test_type_checkers_and_editors_see_the_same_names_from_the_same_modules(package):
    (block,) = (
        node
        for node in ast.parse(Path(package.__file__).read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    seen = {a.asname or a.name: node.module for node in block.body for a in node.names}
    assert seen == {name: f"{package.__name__}.{home}" for name, home in package._HOME.items()}
    assert set(seen) == set(package.__all__) - {"__version__"}


def test_the_typed_program_of_a_user_has_every_name():
    program = ast.parse(Path(__file__).with_name("public_types.py").read_text())
    assert set(NAMES) <= {node.id for node in ast.walk(program) if isinstance(node, ast.Name)}


@pytest.mark.parametrize("name", NAMES)
def test_every_name_resolves_and_is_documented(name):
    value = getattr(hf_quant, name)
    assert not isinstance(value, types.ModuleType), "a submodule of the same name hides it"
    if callable(value):
        assert inspect.getdoc(value)
        assert value.__module__.startswith(f"hf_quant.{hf_quant._HOME[name]}")


def public_functions() -> list:
    return [value for value in (getattr(hf_quant, name) for name in NAMES) if inspect.isfunction(value)]


@pytest.mark.parametrize("function", public_functions(), ids=lambda function: function.__name__)
def test_functions_are_typed_and_take_options_by_keyword(function):
    parameters = inspect.signature(function).parameters.values()
    assert inspect.signature(function).return_annotation is not inspect.Parameter.empty
    assert all(p.annotation is not inspect.Parameter.empty for p in parameters)
    positional = [p for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert len(positional) <= 2
    assert not [p for p in parameters if p.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)]


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="module 'hf_quant' has no attribute 'quantise_'"):
        hf_quant.quantise_  # noqa: B018
    with pytest.raises(ImportError):
        exec("from hf_quant import quantise_")


@pytest.mark.parametrize(
    "written",
    ["optim.AdamW8bit", "training.prune_", "kernels.set_prepack_limit", "integrations.peft.loftq_init_"],
)
def test_submodules_need_no_import_of_their_own(written, monkeypatch):
    for package in (hf_quant, getattr(hf_quant, "integrations", None)):
        for name in written.split("."):
            monkeypatch.delattr(package, name, raising=False)  # as if nothing had imported it
    assert callable(eval(f"hf_quant.{written}"))


def test_private_and_missing_submodules_are_no_attributes(monkeypatch):
    monkeypatch.delattr(hf_quant, "_lazy_ops", raising=False)
    for name in ("_lazy_ops", "integrations.pefd"):
        with pytest.raises(AttributeError, match="has no attribute"):
            eval(f"hf_quant.{name}")


def test_from_import_star():
    names: dict = {}
    exec("from hf_quant import *", names)
    assert set(hf_quant.__all__) <= set(names)


def test_no_submodule_has_the_name_of_a_function():
    # `import hf_quant.plan` would bind the module over the function.
    assert not {path.stem for path in Path(hf_quant.__file__).parent.iterdir()} & set(NAMES)


def test_global_state_is_left_alone():
    code = """
import warnings
warnings.simplefilter("error")
import torch, torch._dynamo, torch._inductor.config as inductor
def state():
    dynamo = torch._dynamo.config
    return (
        dynamo.cache_size_limit, dynamo.capture_scalar_outputs, inductor.coordinate_descent_tuning, inductor.freezing,
        torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark,
        torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(), torch.cuda.is_initialized(),
        torch.are_deterministic_algorithms_enabled(), torch.initial_seed(),
    )
before = state()
import sys, hf_quant
for name in hf_quant.__all__:
    getattr(hf_quant, name)
layer = hf_quant.quantize_(torch.nn.Linear(64, 64), "int4")
layer(torch.ones(1, 64)), hf_quant.dequantize_(layer)
assert state() == before, (state(), before)
assert "diffusers" not in sys.modules and "peft" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "" and result.stderr == ""
