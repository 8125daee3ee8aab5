"""`hf-quant autoquant`: what a model could be on this machine, as a table, a plot and a config."""

import argparse
import json
from importlib.util import find_spec

from hf_quant.auto import Frontier, check_search
from hf_quant.auto import autoquant as search_frontier
from hf_quant.cli._models import (
    check_file,
    check_not_quantized,
    check_one_model,
    find_source,
    load_model,
    meta_model,
    parse_device,
    progress_wanted,
)
from hf_quant.cli._parser import config_from_args


def autoquant(args: argparse.Namespace) -> None:
    """Print the frontier of a model; write the config that is chosen, and a plot."""
    config, source = config_from_args(args), find_source(args.model)
    check_one_model(source, "autoquant", "PIPELINE/transformer")
    check_not_quantized(source)
    for path, option in ((args.output, "--output"), (args.plot, "--plot")):
        if path is not None:
            check_file(path, option)
    if args.plot is not None and find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'hf-quant[demo]'")
    options = {"dtype": args.dtype, "trust_remote_code": args.trust_remote_code}
    check_search(meta_model(source, **options), config)
    model = load_model(source, device=str(parse_device(args.device)), **options)
    found = search_frontier(model, config, progress=progress_wanted())
    print(found)
    for path in filter(None, (args.output, args.plot)):
        path.parent.mkdir(parents=True, exist_ok=True)
    if found.config is None:
        print("\n16 bit is the fastest: there is nothing to quantize")
    elif args.output is not None:
        fields = {name: value for name in found.config.user_fields() if (value := getattr(found.config, name))}
        args.output.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        print(
            f"\n{args.output}: the config; `hf-quant quantize {args.model} OUT --config {args.output}` carries it out"
        )
    if args.plot is not None:
        _plot(found, f"{args.model}: loss and {'time' if found.seconds else 'size'}", args.plot)


def _plot(found: Frontier, title: str, path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from hf_quant.cli._plot import draw_frontier

    draw_frontier(found, title, path)
