"""The command line: options to QuantizerConfig, help, errors on one line; models of a few layers."""

import json
import logging
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_quant import FORMATS
from hf_quant._version import __version__
from hf_quant.algorithms import ALGORITHMS, SOLVERS
from hf_quant.cli import _quantize, main
from hf_quant.cli._demo import find_asset
from hf_quant.cli._main import _quiet_hosts
from hf_quant.cli._models import copy_side_files, find_source, model_class
from hf_quant.cli._parser import ALGORITHMS_HELP, FORMATS_HELP, build_parser, config_from_args, parse_module
from hf_quant.formats import ALIASES
from hf_quant.scheme import PRESETS


COMMANDS = ("quantize", "plan", "inspect", "eval", "bench", "card", "export", "import", "demo", "doctor")


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory) -> Path:
    """A random Llama of 1 layer in bf16, with files beside its weights as real checkpoints have them."""
    path = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=96, max_position_embeddings=32, **sizes)).bfloat16().save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")
    (path / "LICENSE").write_text("mine")
    (path / "notes.txt").write_text("not needed")
    return path


def run(*arguments: object) -> int:
    return main([str(a) for a in arguments])


def error_of(capsys, *arguments: object) -> str:
    """The one line on stderr of a command that must fail with exit status 2."""
    capsys.readouterr()
    try:
        status = run(*arguments)
    except SystemExit as stop:  # argparse
        status = stop.code
    output = capsys.readouterr()
    assert status == 2
    (line,) = output.err.splitlines()
    assert line.startswith("hf-quant")
    return line


# Options.


def config(*options: str):
    return config_from_args(build_parser().parse_args(["plan", "model", *options]))


def test_every_option_reaches_the_config():
    found = config(
        *("--weights", "int4", "--activations", "int8", "--group-size", "64", "--algorithm", "absmax"),
        *("--asymmetric", "--module", "lm_head=int8", "--module", "*.down_proj=int4,group_size=32,symmetric=false"),
        *("--skip", "*.q_proj", "--module", "re:.*(?=x)v=none"),
    )
    assert (found.weights, found.activations, found.group_size) == ("int4", "int8", 64)
    assert (found.algorithm, found.symmetric, found.modules_to_not_convert) == ("absmax", False, None)
    assert found.modules == {
        "*.q_proj": None,  # first: what is to be skipped is skipped
        "lm_head": "int8",
        "*.down_proj": {"weights": "int4", "group_size": 32, "symmetric": False},
        "re:.*(?=x)v": None,
    }
    assert list(found.modules)[0] == "*.q_proj"
    assert config("--cpu-activations", "int8").cpu_activations == "int8"
    assert config("--symmetric").symmetric is True
    assert config().symmetric is None
    assert config().weights == "int8"
    assert config("--weights", "none", "--module", "lm_head=nf4").weights is None
    assert config("--weights", "fp8", "--granularity", "tensor").granularity == "tensor"


@pytest.mark.parametrize("entry", ["lm_head", "=int4", "lm_head=", "lm_head=int4,group_size", "a=none,symmetric=true"])
def test_module_entries_of_another_form_are_refused(entry):
    with pytest.raises(ValueError, match="--module"):
        parse_module(entry)


@pytest.mark.parametrize("option", ["--window", "--max-tokens"])
@pytest.mark.parametrize("value", ["0", "-5", "1.5", "all"])
def test_counts_below_one_are_refused(option, value, capsys):
    assert f"{value!r} is not a number of 1 or more" in error_of(
        capsys, "eval", "m", "--text", "t", f"{option}={value}"
    )


def test_the_package_is_the_command(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["hf-quant", "--version"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("hf_quant.cli", run_name="__main__")
    assert stop.value.code == 0 and "hf" in capsys.readouterr().out


def test_a_pattern_given_twice_is_refused():
    with pytest.raises(ValueError, match="'lm_head' is given twice"):
        config("--module", "lm_head=int8", "--skip", "lm_head")


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        run(command, "--help")
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"usage: hf-quant {command}" in text
    if command in ("quantize", "plan", "eval", "bench"):
        assert "int8, int4, int3" in text


def test_help_names_every_format_and_algorithm():
    words = FORMATS_HELP.replace(",", " ").replace("(", " ").replace(")", " ").split()
    assert {*FORMATS, *ALIASES} <= set(words)
    assert {word for word in words if word.startswith("W")} <= set(PRESETS)
    assert set(ALGORITHMS_HELP.split(", ")) == {*ALGORITHMS, *SOLVERS}


def test_version_and_help_need_no_torch():
    code = (
        "import sys\nfrom hf_quant.cli import main\n"
        "try:\n    main(['--version'])\nfinally:\n    assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"hf-quant {__version__}\n", "")


# Commands.


def test_plan_reads_no_weights(llama_dir, tmp_path, capsys):
    shutil.copy(llama_dir / "config.json", tmp_path)
    assert run("plan", tmp_path, "--weights", "int4", "--module", "lm_head=int8") == 0
    table = capsys.readouterr().out
    assert "int4 g32" in table
    assert "int8 row" in table
    assert "8 of 9 modules quantized" in table


def test_quantize_inspect_and_load(llama_dir, tmp_path, capsys):
    out = tmp_path / "new" / "out"
    assert run("quantize", llama_dir, out, "--weights", "int4", "--skip", "*.o_proj", "--dtype", "fp32") == 0
    printed = capsys.readouterr()
    assert "kept by modules['*.o_proj']" in printed.out
    assert "bits per quantized weight" in printed.out
    assert printed.err == ""
    assert {p.name for p in out.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json", "LICENSE"),
        "README.md",
    }
    assert [p.name for p in out.parent.iterdir()] == ["out"]  # nothing is left of what was staged
    stored = json.loads((out / "config.json").read_text())
    assert stored["quantization_config"]["modules"] == {"*.o_proj": None}
    model = AutoModelForCausalLM.from_pretrained(out)
    assert type(model.model.layers[0].self_attn.q_proj).__name__ == "QuantLinear"
    assert type(model.model.layers[0].self_attn.o_proj).__name__ == "Linear"
    assert model.dtype == torch.float32

    assert run("inspect", out) == 0
    table = capsys.readouterr().out
    assert "model.layers.*.mlp.up_proj" in table
    assert "6 modules quantized" in table


def test_a_model_that_its_host_saves_under_other_names(tmp_path, capsys):
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(image_size=32, patch_size=4, embed_dim=32, depths=[1, 1], num_heads=[2, 4], window_size=4)
    SwinForImageClassification(config).save_pretrained(tmp_path / "swin")
    assert run("quantize", tmp_path / "swin", tmp_path / "out", "--weights", "int4") == 0
    assert run("inspect", tmp_path / "out") == 0
    assert "intermediate.dense" in capsys.readouterr().out  # the plan, and the model, call it mlp.fc1


def test_force_replaces_the_checkpoint_and_nothing_else(llama_dir, tmp_path, capsys):
    assert run("quantize", llama_dir, tmp_path, "--max-shard-size", "20KB") == 0
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    (tmp_path / "notes.md").write_text("mine")
    assert "is not empty; --force" in error_of(capsys, "quantize", llama_dir, tmp_path)
    assert run("quantize", llama_dir, tmp_path, "--weights", "int2", "--force") == 0
    assert [p.name for p in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    assert (tmp_path / "notes.md").read_text() == "mine"
    assert run("inspect", tmp_path) == 0
    assert "int2" in capsys.readouterr().out


def test_what_cannot_be_written_is_said_before_the_work(llama_dir, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    text = ("--text", tmp_path / "ids.npy")
    for place in (tmp_path / "file" / "x", tmp_path / "file" / "x" / "y"):
        assert "cannot be written: " in error_of(capsys, "quantize", llama_dir, place)
        assert "cannot be written: " in error_of(capsys, "eval", llama_dir, *text, "--json", place)
        assert "cannot be written: " in error_of(capsys, "bench", llama_dir, "--json", place)
    if Path("/proc/self").is_dir():  # where os.access allows root all
        assert "cannot be written: " in error_of(capsys, "quantize", llama_dir, "/proc/x/out")
        assert "cannot be written: " in error_of(capsys, "bench", llama_dir, "--json", "/proc/x/y.json")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert f"{tmp_path} is not writable" in error_of(capsys, "quantize", llama_dir, tmp_path / "a" / "b")


def test_of_commands_that_write_the_same_out_one_succeeds(llama_dir, tmp_path, monkeypatch):
    """The second starts and ends while the first one loads the model."""
    others = []

    def load_model(*args, load=_quantize.load_model, **options):
        command = [sys.executable, "-m", "hf_quant.cli", "quantize", str(llama_dir), str(tmp_path / "out")]
        others.append(subprocess.run(command, capture_output=True, text=True, timeout=200))
        return load(*args, **options)

    monkeypatch.setattr(_quantize, "load_model", load_model)
    assert run("quantize", llama_dir, tmp_path / "out") == 0
    (other,) = others
    assert other.returncode == 2 and "is being written by another process" in other.stderr
    assert other.stderr.count("\n") == 1 and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_out_is_looked_at_where_it_is(llama_dir, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.md").write_text("mine")
    for name in ("full/missing/..", "full/missing/../../full", "missing/../full"):
        assert "is not empty; --force" in error_of(capsys, "quantize", llama_dir, tmp_path / name)
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "notes.md"]


def test_closed_output_is_no_error(llama_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)  # as Python starts with closed ones
    monkeypatch.setattr(sys, "stderr", None)
    assert run("quantize", llama_dir, tmp_path / "out") == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_to_be_terminated_leaves_nothing_behind(llama_dir, tmp_path, monkeypatch):
    def stop(*args, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("hf_quant.cli._quantize.load_model", stop)
    with pytest.raises(SystemExit) as stopped:
        run("quantize", llama_dir, tmp_path / "out")
    assert stopped.value.code == 143 and list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_eval_and_bench_compare_with_the_reference(llama_dir, tmp_path, capsys):
    import numpy

    numpy.save(tmp_path / "ids.npy", numpy.arange(96, dtype="uint16"))
    text, figures = ("--text", tmp_path / "ids.npy"), tmp_path / "new" / "figures.json"
    assert run("eval", llama_dir, *text, "--max-tokens", 16, "--json", figures) == 0
    assert "15 predictions in windows of 16 tokens" in capsys.readouterr().out  # no more than is read
    assert json.loads(figures.read_text())["quality"]
    assert "at most 32" in error_of(capsys, "eval", llama_dir, *text, "--window", 33)
    assert run("eval", llama_dir, "--weights", "int2", "--reference", llama_dir, *text) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "(reference)" in lines[2]
    assert f"{llama_dir} int2" in lines[3]
    assert "93 predictions in windows of 32 tokens" in lines[4]  # the model's longest window
    kl = float(lines[3].removeprefix(f"{llama_dir} int2").split()[3])
    assert 0 < kl < 1

    threads = torch.get_num_threads()
    try:
        options = ("--prompt-tokens", 4, "--new-tokens", 2, "--rounds", 1, "--threads", 1)
        assert run("bench", llama_dir, "--module", "*.up_proj=int8", "--reference", llama_dir, *options) == 0
    finally:
        torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    assert "decode tok/s" in lines[0]
    assert f"{llama_dir} quantized" in lines[3]
    assert "with 1 thread," in lines[4]


# Errors.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "{dir}/missing"], "is not a directory"),
        (["plan", "{empty}"], "is not a model directory: it has no config.json"),
        (["plan", "{llama}", "--weights", "int9"], "unknown format or preset 'int9'"),
        (["plan", "{llama}", "--weights", "int2", "--activations", "int2"], "activations is 'int2'"),
        (["plan", "{llama}", "--group-size", "48"], "group_size is 48"),
        (["plan", "{llama}", "--module", "*.dwn_proj=int4"], "matches no module"),
        (["plan", "{llama}", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["plan"], "required: MODEL; `hf-quant plan --help`"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        ([], "required: COMMAND"),
        (["quantize", "{llama}", "{llama}"], "OUT is the model itself"),
        (["quantize", "{llama}", "", "--force"], "an argument is empty, as from a variable that is not set"),
        (["quantize", "{llama}", "{dir}/o", "--private"], "--private belongs to --push"),
        (["quantize", "{llama}", "{llama}/config.json"], "is a file; OUT is a directory"),
        (["quantize", "{llama}", "{dir}/out", "--device", "cuda:99"], "--device cuda:99"),
        (["quantize", "{llama}", "{dir}/out", "--device", "nonsense"], "--device nonsense"),
        (["inspect", "{dir}/missing"], "is not a directory"),
        (
            ["eval", "{llama}", "--text", "{llama}/config.json", "--json", "{dir}"],
            "is a directory; --json takes a file",
        ),
        (["autoquant", "{llama}", "--output", "{dir}"], "is a directory; --output takes a file"),
        (["inspect", "{llama}"], "the model is not quantized"),
        (["inspect", "{empty}"], "is not the directory of a quantized model"),
        *(
            (
                [command, "{gguf}", *rest],
                "m.gguf is a file; a model is a directory, or USER/NAME on the Hub. hf-quant import",
            )
            for command, *rest in (
                ("plan",),
                ("quantize", "out"),
                ("inspect",),
                ("card",),
                ("eval", "--text", "x"),
                ("bench",),
                ("export", "out"),
            )
        ),
        *(
            ([command, "{llama-cpp}", *rest], "makes a checkpoint of a GGUF file, such as m-Q4_0.gguf there")
            for command, *rest in (("plan",), ("quantize", "{dir}/out"), ("card",), ("export", "{dir}/out"))
        ),
        (["eval", "{config}", "--text", "{llama}/LICENSE"], "holds no safetensors file; `hf-quant import` makes"),
        (["quantize", "{config}", "{dir}/out"], "holds no safetensors file; `hf-quant import` makes"),
        (["import", "{config}", "{dir}/out"], "m-Q4_0.gguf cannot be imported: "),
        (["import", "{gguf}", "out"], "m.gguf cannot be read as GGUF: "),
        (["plan", "{llama}/config.json"], "config.json is a file; a model is a directory, or USER/NAME on the Hub"),
        (["eval", "{llama}", "--text", "{dir}/none.txt"], "none.txt"),
        (["eval", "{llama}", "--text", "{llama}/LICENSE"], "has no tokenizer"),
        (["bench", "{llama}", "--threads", "0"], "--threads: '0'"),
        (["bench", "{llama}", "--new-tokens", "1"], "new_tokens=1"),
        (["bench", "{llama}", "--symmetric"], "weights is None"),
        (["card", "{llama}"], "is in 16 bit"),
        (["card", "{dir}/missing"], "is not a directory"),
        (["card", "{empty}"], "has no config.json"),
        (["card", "{llama}", "--measurements", "{dir}/none.json"], "none.json is not a file"),
        (["quantize", "{llama}", "{dir}/out", "--max-shard-size", "5"], "'5' is not a size such as 500MB or 5GB"),
        (["quantize", "{llama}", "{dir}/out", "--weightz", "int4"], "is it --weights?; `hf-quant quantize --help`"),
        (["plan", "{llama}", "--weights", "auto"], "--bits N, --gb N, --max-kl X or --latency"),
        (["demo", "--model", "{dir}/missing"], "missing"),
        (["demo", "--model", "{llama}"], "name a text by --text FILE"),
    ],
)
def test_errors_are_one_line_and_exit_status_2(arguments, message, llama_dir, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "m.gguf").touch()
    places = {"dir": tmp_path, "empty": tmp_path / "empty", "llama": llama_dir, "gguf": tmp_path / "m.gguf"}
    for name in ("llama-cpp", "config"):  # directories of a GGUF file, alone and beside a config
        places[name] = tmp_path / name
        places[name].mkdir()
        (places[name] / "m-Q4_0.gguf").touch()
    shutil.copyfile(llama_dir / "config.json", places["config"] / "config.json")
    assert message in error_of(capsys, *(a.format(**places) for a in arguments))
    assert not (tmp_path / "out").exists()


def broken(llama_dir: Path, path: Path, **fields) -> Path:
    """A copy of the model with other fields in its config.json."""
    shutil.copytree(llama_dir, path)
    stored = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**stored, **fields}))
    return path


def test_broken_models(llama_dir, tmp_path, capsys):
    strange = broken(llama_dir, tmp_path / "a", architectures=["ZebraForCausalLM"])
    assert "is a ZebraForCausalLM, which transformers" in error_of(capsys, "plan", strange)
    own = broken(llama_dir, tmp_path / "b", architectures=["Own"], auto_map={"AutoModelForCausalLM": "own.Own"})
    assert "--trust-remote-code runs it" in error_of(capsys, "plan", own)
    taken = broken(llama_dir, tmp_path / "c", quantization_config={"quant_method": "gptq", "bits": 4})
    assert "quantized already, by gptq" in error_of(capsys, "plan", taken)
    assert "quantized already, by gptq" in error_of(capsys, "quantize", taken, tmp_path / "out")
    edited = broken(llama_dir, tmp_path / "e", quantization_config="int4")
    for command in (("plan", edited), ("export", edited, tmp_path / "out"), ("import", edited, tmp_path / "out")):
        assert "quantization_config is a str; needs an object" in error_of(capsys, *command)
    (taken / "config.json").write_text("[1]")
    assert "needs an object" in error_of(capsys, "plan", taken)
    (taken / "config.json").write_text("{")
    assert "is not JSON" in error_of(capsys, "plan", taken)
    truncated = broken(llama_dir, tmp_path / "d")
    data = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(data[:-100])
    error_of(capsys, "quantize", truncated, tmp_path / "out")
    (truncated / "model.safetensors").unlink()
    assert "model.safetensors" in error_of(capsys, "quantize", truncated, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_error_inside_the_host_s_loader_names_the_weight(llama_dir, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    shutil.copytree(llama_dir, tmp_path / "nan")
    weights = load_file(tmp_path / "nan" / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(weights, tmp_path / "nan" / "model.safetensors", metadata={"format": "pt"})
    error = error_of(capsys, "quantize", tmp_path / "nan", tmp_path / "out")
    assert "model.layers.0.mlp.up_proj.weight contains NaN or inf" in error


def test_debug_shows_the_traceback(capsys):
    assert run("plan", "/nonexistent/model", "--debug") == 2
    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert error.splitlines()[-1].startswith("hf-quant: error: /nonexistent/model")


def test_ctrl_c_is_exit_status_130(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_quant.cli._measure.inspect", interrupted)
    assert run("inspect", "anything") == 130
    assert capsys.readouterr().err == "hf-quant: stopped\n"


def test_the_hosts_are_as_loud_afterwards_as_before(llama_dir):
    from transformers.utils import logging

    def state() -> tuple:
        return logging.get_logger().handlers, logging.get_logger().propagate, logging.is_progress_bar_enabled()

    before = state()
    run("plan", llama_dir)
    assert state() == before


def test_a_host_that_is_imported_during_a_command_is_quiet(monkeypatch, capsys):
    diffusers = pytest.importorskip("diffusers.utils.logging", reason="diffusers is an optional host")
    monkeypatch.setattr(diffusers, "_default_handler", None)  # as in a process that has not imported it
    monkeypatch.setattr(logging.getLogger("diffusers"), "handlers", [])
    with _quiet_hosts(verbose=False):
        diffusers.get_logger("diffusers.models").warning("noise")
    assert capsys.readouterr().err == ""


# Models.


def test_own_code_is_found_by_its_auto_class(llama_dir, tmp_path):
    fields = {"architectures": ["Own"], "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}}
    source = find_source(str(broken(llama_dir, tmp_path / "a", **fields)))
    assert model_class(source, trust_remote_code=True) is AutoModelForCausalLM


def test_side_files_of_sentence_transformers(llama_dir, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(llama_dir, model)
    for part in ("1_Pooling", "2_Dense", "unrelated"):
        (model / part).mkdir()
        (model / part / "config.json").write_text("{}")
    (model / "2_Dense" / "model.safetensors").write_bytes(b"weights")
    parts = [{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}, {"path": "../llama"}]
    (model / "modules.json").write_text(json.dumps(parts))
    copied = copy_side_files(find_source(str(model)), tmp_path / "out")
    assert set(copied) == {
        *("LICENSE", "modules.json", "tokenizer_config.json"),
        *("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"),
    }
    assert (tmp_path / "out" / "2_Dense" / "model.safetensors").read_bytes() == b"weights"


def test_the_demo_finds_the_model_of_the_checkout(tmp_path, monkeypatch):
    source, text = find_asset(None, None)
    assert Path(source.name).name == "tiny-llama-13m"
    assert text.is_file()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hf_quant.cli._demo.__file__", str(tmp_path / "hf_quant" / "cli" / "_demo.py"))
    with pytest.raises(ValueError, match="is in a checkout of the repository"):
        find_asset(None, None)
