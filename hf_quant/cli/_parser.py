"""The arguments of every command, and the QuantizerConfig that they describe."""

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_quant._version import __version__
from hf_quant.cli._arguments import Parser, positive, size


if TYPE_CHECKING:
    from hf_quant.config import QuantizerConfig

# Written out, because the registries import torch (2 s) and `hf-quant --help` answers at once; a test compares them.
FORMATS_HELP = (
    "int8, int4, int3, int2, fp8 (= fp8_e4m3), fp8_e5m2, fp6 (= fp6_e3m2), fp6_e2m3, nf4, mxfp4, nvfp4, or a preset "
    "such as W4A16, W8A8, W8A8_FP8"
)
ALGORITHMS_HELP = "absmax, mse, norm, hqq, gptq, imatrix"
_DESCRIPTION = "Quantize any Hugging Face model, run it fast, save it, load it back."
_EPILOG = """examples:
  hf-quant plan meta-llama/Llama-3.1-8B --weights int4
  hf-quant quantize meta-llama/Llama-3.1-8B llama-int4 --weights int4 --module lm_head=int8
  hf-quant quantize meta-llama/Llama-3.2-1B llama-auto --weights auto --bits 3.5
  hf-quant autoquant meta-llama/Llama-3.2-1B --tokens 1 512 --max-kl 0.02 --output fast.json
  hf-quant quantize meta-llama/Llama-3.2-1B llama-fast --config fast.json
  hf-quant quantize meta-llama/Llama-3.2-1B llama-nf4 --weights nf4 --algorithm gptq --calibrate wiki.txt
  hf-quant inspect llama-int4
  hf-quant inspect me/llama-int4 --revision main
  hf-quant eval llama-int4 --text wiki.txt --reference meta-llama/Llama-3.1-8B
  hf-quant bench llama-int4 --reference meta-llama/Llama-3.1-8B
  hf-quant card llama-int4 --base-model meta-llama/Llama-3.1-8B
  hf-quant export llama-w4a16 llama-served
  hf-quant import llama-gptq llama-int4
  hf-quant export llama-int4 llama-gguf --format gguf
  hf-quant demo
  hf-quant doctor
"""
# Options of `_add_scheme` that are fields of QuantizerConfig under the same name, besides --weights.
_FIELDS = (
    *("candidates", "activations", "activation_scale", "cpu_activations", "kv_cache", "attention"),
    *("granularity", "group_size", "symmetric", "scale_dtype", "algorithm", "sparsity", "input_transform"),
)
_MODULE_ENTRY = re.compile(r"(.+?)=([A-Za-z0-9_]+(?:,[a-z_]+=[A-Za-z0-9_.]+)*)")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `hf-quant`; `args.command` is (module of hf_quant.cli, function)."""
    style = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="hf-quant", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=style)
    parser.add_argument("--version", action="version", version=f"hf-quant {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of errors, and the hosts' warnings")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    add_first = (_add_quantize, _add_plan, _add_inspect, _add_eval, _add_bench)
    for add in (
        *add_first,
        _add_autoquant,
        _add_calibrate,
        _add_card,
        _add_export,
        _add_import,
        _add_demo,
        _add_doctor,
    ):
        add(commands, common)
    return parser


def _add_command(commands, common, name: str, target: tuple[str, str], help: str) -> argparse.ArgumentParser:
    description = help[0].upper() + help[1:] + "."
    parser = commands.add_parser(name, parents=[common], help=help, description=description)
    parser.set_defaults(command=target)
    return parser


def _add_quantize(commands, common) -> None:
    help = "quantize a model of transformers, or a model or pipeline of diffusers, into a directory"
    parser = _add_command(commands, common, "quantize", ("_quantize", "quantize"), help)
    _add_model(parser)
    parser.add_argument("out", metavar="OUT", type=Path, help="directory for the quantized checkpoint")
    _add_scheme(parser, default="int8")
    _add_dtype(parser)
    parser.add_argument("--device", metavar="DEVICE", help="where to compute the quantization, e.g. cuda")
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", type=size, default="5GB", help="of one file (default: 5GB)"
    )
    parser.add_argument(
        "--force", action="store_true", help="replace the checkpoint in OUT, and with --push that in the repository"
    )
    parser.add_argument(
        "--push",
        metavar="USER/NAME",
        help="upload OUT to this repository of the Hub; it is created first, and stays where quantizing fails",
    )
    parser.add_argument("--private", action="store_true", help="with --push: create the repository as a private one")


def _add_plan(commands, common) -> None:
    help = "show what would happen to every module of a model; reads no weights"
    parser = _add_command(commands, common, "plan", ("_quantize", "plan"), help)
    _add_model(parser)
    _add_scheme(parser, default="int8")
    _add_dtype(parser)


def _add_autoquant(commands, common) -> None:
    help = (
        "measure the layers of a model on this machine, and choose the fastest scheme of each for a bound on its loss"
    )
    parser = _add_command(commands, common, "autoquant", ("_autoquant", "autoquant"), help)
    _add_model(parser)
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="write the chosen config as JSON")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the frontier, e.g. as frontier.png")
    parser.add_argument("--device", metavar="DEVICE", help="to measure on (default: cuda if there is one, else cpu)")
    _add_scheme(parser, default="auto")
    _add_dtype(parser)


def _add_calibrate(commands, common) -> None:
    help = "record the inputs of a model's layers in a file, by which it is quantized while it loads"
    parser = _add_command(commands, common, "calibrate", ("_quantize", "calibrate"), help)
    _add_model(parser)
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, required=True, help="a .safetensors file of some kilobytes"
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        type=Path,
        help="text in UTF-8, or token ids as .npy (default: text that the model writes itself)",
    )
    parser.add_argument(
        "--tokens", type=positive, default=32768, metavar="N", help="of it, spread over it (default: 32768)"
    )
    parser.add_argument("--device", metavar="DEVICE", help="to run on (default: cuda if there is one, else cpu)")
    _add_scheme(parser, default="int4")
    _add_dtype(parser)


def _add_inspect(commands, common) -> None:
    help = "show what a quantized checkpoint holds, from the headers of its files"
    parser = _add_command(commands, common, "inspect", ("_measure", "inspect"), help)
    parser.add_argument(
        "checkpoint", metavar="MODEL", help="directory of a model or pipeline, or USER/NAME on the Hub"
    )
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit on the Hub (default: the newest)")


def _add_eval(commands, common) -> None:
    help = "perplexity of a causal language model on a text, and its distance to the 16-bit model"
    parser = _add_command(commands, common, "eval", ("_measure", "eval"), help)
    _add_model(parser)
    parser.add_argument("--text", metavar="FILE", type=Path, required=True, help="text in UTF-8, or token ids as .npy")
    parser.add_argument(
        "--window",
        type=positive,
        metavar="N",
        help="tokens per window (default: the model's, <= 2048, <= --max-tokens)",
    )
    parser.add_argument(
        "--max-tokens", type=positive, default=32768, metavar="N", help="read no more of the text (default: 32768)"
    )
    _add_measured(parser)


def _add_bench(commands, common) -> None:
    help = "load time, prefill and decode speed and memory of a causal language model at batch 1"
    parser = _add_command(commands, common, "bench", ("_measure", "bench"), help)
    _add_model(parser)
    parser.add_argument("--prompt-tokens", type=positive, default=128, metavar="N", help="(default: 128)")
    parser.add_argument("--new-tokens", type=positive, default=32, metavar="N", help="(default: 32)")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="the median counts (default: 5)")
    parser.add_argument("--threads", type=positive, metavar="N", help="of torch on the CPU")
    _add_measured(parser)


def _add_card(commands, common) -> None:
    help = "write the model card of a quantized checkpoint, from its config, the headers of its files and measurements"
    parser = _add_command(commands, common, "card", ("_card", "card"), help)
    parser.add_argument("checkpoint", metavar="DIR", type=Path, help="directory of a quantized model or pipeline")
    parser.add_argument(
        "--base-model", metavar="MODEL", help="what was quantized: USER/NAME, or a directory with its README.md"
    )
    parser.add_argument("--license", metavar="ID", help="of the model (default: the one in the base model's card)")
    _add_measurements(parser)
    parser.add_argument("--repo", metavar="USER/NAME", help="the repository of the card, which its snippets name")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help="(default: DIR/README.md; a card that somebody has written there keeps its text)",
    )


def _add_export(commands, common) -> None:
    help = "write a quantized checkpoint for vLLM and SGLang, or for llama.cpp and Ollama, every weight as it is"
    parser = _add_command(commands, common, "export", ("_convert", "export"), help)
    _add_conversion(parser, "directory of a quantized transformers model, or USER/NAME on the Hub")
    parser.add_argument("--repo", metavar="USER/NAME", help="where OUT is going to be on the Hub, for its model card")
    _add_measurements(parser)
    parser.add_argument(
        "--format",
        choices=("compressed-tensors", "gguf"),
        default="compressed-tensors",
        help="vLLM and SGLang read compressed-tensors, llama.cpp and Ollama gguf (default: compressed-tensors)",
    )
    parser.add_argument(
        "--reader",
        choices=("engines", "transformers"),
        help="engines compute several layers as one and restrict how these are quantized (default: engines)",
    )


def _add_import(commands, common) -> None:
    help = "make a quantized checkpoint from one of bitsandbytes, GPTQ, AWQ, GGUF and others, every weight as it is"
    parser = _add_command(commands, common, "import", ("_convert", "import_"), help)
    _add_conversion(
        parser,
        "directory of the other library's checkpoint, or USER/NAME on the Hub; FILE.gguf, or USER/NAME/FILE.gguf",
    )
    parser.add_argument(
        "--requantize",
        metavar="FORMAT",
        help="round those weights of a GGUF file again that no format holds exactly (IQ1 to IQ3), e.g. int8, or "
        "int8,group_size=32; without it they are refused",
    )


def _add_conversion(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("checkpoint", metavar="MODEL", help=help)
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to write; it does not exist yet")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a repository on the Hub")


def _add_measurements(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--measurements",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="what `eval --json` and `bench --json` have written; may be repeated",
    )


def _add_demo(commands, common) -> None:
    help = "one table on a small trained model: size, speed and quality of every format (under 2 minutes on 2 cores)"
    parser = _add_command(commands, common, "demo", ("_demo", "demo"), help)
    parser.add_argument("--model", metavar="DIR", type=Path, help="the model (default: the one in the checkout)")
    parser.add_argument(
        "--text",
        metavar="FILE",
        type=Path,
        help="text in UTF-8, or token ids as .npy (default: the model's val_ids.npy)",
    )
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("demo_output"), help="(default: demo_output)")
    parser.add_argument(
        "--tokens", type=positive, default=16384, metavar="N", help="of text to judge (default: 16384)"
    )
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="of timing (default: 5)")


def _add_doctor(commands, common) -> None:
    help = "versions, CPU, native kernels, GPUs and settings: what is active on this machine, why, and what to do"
    parser = _add_command(commands, common, "doctor", ("_doctor", "doctor"), help)
    parser.add_argument("--json", action="store_true", help="for scripts")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="directory, or USER/NAME on the Hub")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that the model brings along")


def _add_measured(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures for `hf-quant card`, too")
    parser.add_argument("--reference", metavar="MODEL", help="the 16-bit model to compare with")
    parser.add_argument("--device", metavar="DEVICE", help="to run on (default: cuda if there is one, else cpu)")
    _add_scheme(parser, default=None)
    _add_dtype(parser)


def _add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        choices=("auto", "bf16", "fp16", "fp32"),
        default="auto",
        help="of what is not quantized (default: auto, as stored)",
    )


def _add_scheme(parser: argparse.ArgumentParser, default: str | None) -> None:
    """Add the options that make a QuantizerConfig; without a default for --weights all of them are optional."""
    parser.set_defaults(default_weights=default)
    quantize_first = "" if default else "; quantizes MODEL, a 16-bit one, first"
    group = parser.add_argument_group("quantization")
    group.add_argument(
        "--weights",
        metavar="FORMAT",
        default=default,
        help=f"{FORMATS_HELP}" + (f" (default: {default})" if default else quantize_first),
    )
    budget = group.add_mutually_exclusive_group()
    budget.add_argument(
        "--bits", type=float, metavar="N", help="with --weights auto: bits per weight of the layers, scales included"
    )
    budget.add_argument("--gb", type=float, metavar="N", help="with --weights auto: size of the model, in 10**9 bytes")
    group.add_argument("--context", type=positive, metavar="N", help="with --gb: tokens whose KV cache counts, too")
    group.add_argument("--max-kl", type=float, metavar="X", help="with --weights auto: bound on the predicted loss")
    group.add_argument(
        "--tokens" if default == "auto" else "--latency",
        dest="latency",
        nargs="*",
        type=positive,
        metavar="N",
        help="with --weights auto: the fastest model on this machine, for calls of so many tokens (default: 1)",
    )
    group.add_argument(
        "--candidates",
        nargs="+",
        metavar="FORMAT",
        help="with --weights auto (default: int2 int3 nf4 int8; for the least latency also int4 W4A8 W8A8 none)",
    )
    group.add_argument(
        "--config", metavar="FILE", type=Path, help="all of these options as JSON, as `hf-quant autoquant` writes them"
    )
    group.add_argument("--activations", metavar="FORMAT", help="int8 or fp8, quantized on the fly (default: 16 bit)")
    group.add_argument(
        "--activation-scale",
        choices=("dynamic", "static"),
        help="static: one calibrated scale per layer (default: dynamic, one per token)",
    )
    group.add_argument(
        "--cpu-activations", metavar="FORMAT", help="int8: on CPUs, inputs of int4 and int8 layers (faster there)"
    )
    group.add_argument("--kv-cache", metavar="FORMAT", help="format of the cached keys and values (default: 16 bit)")
    group.add_argument("--attention", metavar="FORMAT", help="int8: scores of a diffusion model (default: 16 bit)")
    group.add_argument("--group-size", type=int, metavar="N", help="weights that share a scale, 16 to 256")
    group.add_argument("--granularity", metavar="G", help="row, group, tensor or block: what shares a scale")
    group.add_argument("--scale-dtype", metavar="DTYPE", help="of the scales, e.g. float8_e4m3fn for those of groups")
    group.add_argument(
        "--input-transform", metavar="T", help="hadamard: inputs are rotated; none (default: where they become int8)"
    )
    group.add_argument("--sparsity", metavar="S", help="2:4: two of each four weights are zero, and not stored")
    group.add_argument("--algorithm", metavar="NAME", help=f"{ALGORITHMS_HELP} (default: the best for the format)")
    group.add_argument(
        "--calibrate",
        metavar="FILE",
        help="for gptq and imatrix: text in UTF-8, token ids as .npy, or what `hf-quant calibrate` has written "
        "(default: text that the model writes itself)",
    )
    group.add_argument(
        "--calibration-tokens", type=positive, metavar="N", help="of the text, spread over it (default: 32768)"
    )
    symmetry = group.add_mutually_exclusive_group()
    symmetry.add_argument(
        "--symmetric", action="store_true", default=None, help="no zero point (default: as the format has it)"
    )
    symmetry.add_argument("--asymmetric", action="store_false", dest="symmetric", default=None, help="a zero point")
    group.add_argument(
        "--module",
        metavar="PATTERN=FORMAT",
        action="append",
        default=[],
        help="another format for the modules of that name, glob or `re:` expression, e.g. lm_head=int8, "
        "'*.down_proj=int4,group_size=64', '*.q_proj=none'; may be repeated, the first match counts",
    )
    group.add_argument(
        "--skip", metavar="PATTERN", action="append", default=[], help="leave these modules in 16 bit; may be repeated"
    )


def parse_module(entry: str) -> tuple[str, str | dict[str, Any] | None]:
    """Parse "*.down_proj=int4,group_size=64" into ("*.down_proj", {"weights": "int4", "group_size": 64}).

    Raises ValueError if the entry has another form.
    """
    match = _MODULE_ENTRY.fullmatch(entry)
    if match is None:
        raise ValueError(f"--module {entry!r}: needs PATTERN=FORMAT, or PATTERN=FORMAT,field=value,...")
    format, *fields = match[2].split(",")
    if format.lower() == "none":
        if fields:
            raise ValueError(f"--module {entry!r}: none keeps 16 bit and takes no fields")
        return match[1], None
    return match[1], parse_scheme(match[2])


def parse_scheme(text: str) -> str | dict[str, Any]:
    """Parse "int4,group_size=64" into {"weights": "int4", "group_size": 64}, and "int4" into itself."""
    format, *fields = text.split(",")
    return {"weights": format, **dict(_parse_field(field) for field in fields)} if fields else format


def _parse_field(field: str) -> tuple[str, Any]:
    name, _, value = field.partition("=")
    try:
        return name, json.loads(value.lower())
    except json.JSONDecodeError:
        return name, value


def config_from_args(args: argparse.Namespace) -> "QuantizerConfig":
    """Make the QuantizerConfig of the options of `_add_scheme`. Raises ValueError if they contradict each other."""
    from hf_quant.config import QuantizerConfig

    if args.config is not None:
        return _read_config(args)
    # `modules_to_not_convert` would replace the model's own exclusions, the output embedding among them.
    modules: dict[str, Any] = {pattern: None for pattern in args.skip}
    for entry in args.module:
        pattern, value = parse_module(entry)
        if pattern in modules:
            raise ValueError(f"{pattern!r} is given twice by --module and --skip")
        modules[pattern] = value
    weights = None if args.weights is not None and args.weights.lower() == "none" else args.weights
    fields = {name: value for name in _FIELDS if (value := getattr(args, name)) is not None}
    if "candidates" in fields:
        fields["candidates"] = [None if name.lower() == "none" else name for name in args.candidates]
    search = {"budget": _budget(args), "objective": _objective(args)}
    if weights is not None and weights.lower() == "auto" and not any(search.values()):
        raise ValueError("--weights auto needs what to search for: --bits N, --gb N, --max-kl X or --latency")
    return QuantizerConfig(weights, **fields, **search, modules=modules or None, calibration=_calibration(args))


def _read_config(args: argparse.Namespace) -> "QuantizerConfig":
    """Read the file of --config. Raises ValueError if it is no config, or if it does not stand alone."""
    from hf_quant.config import QuantizerConfig

    names = (*_FIELDS, "bits", "gb", "context", "max_kl", "latency")
    given = [name for name in names if getattr(args, name) is not None]
    given += [name for name in ("module", "skip") if getattr(args, name)]
    if given or args.weights != args.default_weights:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given or ["weights"])
        raise ValueError(f"--config holds the whole config: leave out {options}")
    try:
        fields = json.loads(args.config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--config {args.config} cannot be read as JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"--config {args.config} is a {type(fields).__name__}; needs the fields of a QuantizerConfig")
    return QuantizerConfig(**fields, calibration=_calibration(args))


def _budget(args: argparse.Namespace) -> dict[str, float] | None:
    """Return the value of `QuantizerConfig.budget` that the options give."""
    names = {"bits": "bits", "gb": "gb", "context": "context", "max_kl": "kl"}
    return {key: value for name, key in names.items() if (value := getattr(args, name)) is not None} or None


def _objective(args: argparse.Namespace) -> str | dict[str, list[int]] | None:
    """Return the value of `QuantizerConfig.objective` that the options give."""
    if args.latency is None:
        return "latency" if args.command == ("_autoquant", "autoquant") else None
    return {"latency": args.latency} if args.latency else "latency"


def _calibration(args: argparse.Namespace) -> Any:
    """Return the value of `QuantizerConfig.calibration` that the options give."""
    if args.calibration_tokens is None:
        return args.calibrate
    return {"data": args.calibrate, "num_tokens": args.calibration_tokens}


def gives_scheme(args: argparse.Namespace) -> bool:
    """Return True if any option of `_add_scheme` is given (for commands without a default for --weights)."""
    return bool(args.module or args.skip) or any(
        getattr(args, name) is not None for name in ("weights", "bits", "gb", "max_kl", "latency", "config", *_FIELDS)
    )
