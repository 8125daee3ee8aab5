"""Share of the weights of each architecture that `QuantizerConfig("int4")` quantizes by default (docs/coverage.md).

    python scripts/quantized_share.py                       # all architectures of transformers and diffusers
    python scripts/quantized_share.py llama4_text dbrx      # some, with everything that stays in 16 bit
    python scripts/quantized_share.py --readme              # write the table into docs/coverage.md

Each architecture is made from its default configuration on the meta device, without memory, and `hf_quant.plan` is
asked. An architecture of transformers is a model type, in the class with the most usual head. What the installed
libraries cannot make is counted with its reason.
"""

import argparse
import importlib
import logging
import pkgutil
import re
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

import hf_quant
from common.pages import markdown, write_section
from hf_quant.planning import format_table


SECTION = "coverage table"
TARGET = 0.95
SECONDS = 120  # for one architecture
MULTIPLIED = ("linear", "experts", "parameters", "dequantized", "attention", "other")
# Parameters without a quantized counterpart that no product reads: tables that are added, states, learned inputs.
TABLES = re.compile(r"pos|embed|token|latent|quer|probe|table|prompt|pad_|A_log|rel_|bias|scale|temperature")
# Fields without which a default configuration makes no model.
FIELDS: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 8}, "ffn_config": {"moe_num_experts": 16}},
    "autoformer": {"prediction_length": 24},
    "informer": {"prediction_length": 24},
    "time_series_transformer": {"prediction_length": 24},
}


# What a host raises for defaults of its own: the architecture is counted.
_HOSTS_ERRORS = (
    *(AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError),
    StrictDataclassError,
)


class Share(NamedTuple):
    """Counts of the weights that the plan of one architecture quantizes.

    Attributes:
        multiplied, quantized: weights of linear layers, experts and the like, and how many of them are quantized.
            Output embeddings do not count, because they are tables, too.
        total, in_codes: all parameters, and how many of them are quantized.
        left: {(kind or class, reason): number of weights} that stay in 16 bit.
    """

    name: str
    multiplied: int
    quantized: int
    total: int
    in_codes: int
    left: dict[tuple[str, str], int]

    @property
    def share(self) -> float:
        return self.quantized / self.multiplied if self.multiplied else 1.0

    @property
    def of_all(self) -> float:
        return self.in_codes / self.total if self.total else 1.0


def share_of(name: str, model: nn.Module) -> Share:
    """The share of a model, which may be on the meta device."""
    total = sum(p.numel() for p in model.parameters())
    left: Counter[tuple[str, str]] = Counter()
    try:
        entries = hf_quant.plan(model, "int4", dtype=torch.bfloat16).entries.values()
    except ValueError as error:  # it has neither linear layers nor experts, or is an autoencoder
        reason = str(error).partition("nothing to quantize in ")[2].partition(": ")[2].partition(";")[0]
        if not reason:
            raise
        sizes = Counter(type(m).__name__ for m in model.modules() for p in m.parameters(recurse=False) if p.dim() > 1)
        kind = sizes.most_common(1)[0][0] if sizes else "no matrix"
        kind = {"ParametrizationList": "weight_norm", "Linear": "linear"}.get(kind, "conv" if "Conv" in kind else kind)
        left[kind, reason] = total
        return Share(name, 0, 0, total, 0, dict(left))
    multiplied = quantized = in_codes = 0
    for e in entries:
        reason, kind = e.reason or "", type(model.get_submodule(e.name)).__name__ if e.kind == "other" else e.kind
        is_table = e.kind == "other" and all(TABLES.search(n) for n in e.shapes)
        is_output = reason == "output embedding" or reason.startswith("tied to ")
        if e.kind in MULTIPLIED and not is_table and not is_output:
            multiplied += e.num_weights
            quantized += e.num_weights if e.scheme is not None else 0
        if e.scheme is not None:
            in_codes += e.num_weights
        elif e.num_weights:
            why = "a table: no product" if is_table else "tied" if reason.startswith("tied to ") else reason
            left[kind, why.removeprefix(f"{e.kind}: ")] += e.num_weights
    return Share(name, multiplied, quantized, total, in_codes, dict(left))


def transformers_models() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Yield (model type, its maker on the meta device)."""
    import transformers
    from transformers.models.auto import configuration_auto
    from transformers.models.auto import modeling_auto as auto

    mappings = (
        auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES,
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_MAPPING_NAMES,
    )
    classes: dict[str, str] = {}
    for mapping in mappings:
        for model_type, found in mapping.items():
            classes.setdefault(model_type, found if isinstance(found, str) else found[0])

    def make(model_type: str) -> nn.Module:
        config = configuration_auto.CONFIG_MAPPING[model_type](**FIELDS.get(model_type, {}))
        return getattr(transformers, classes[model_type])._from_config(config)

    for model_type in sorted(classes):
        yield model_type, lambda model_type=model_type: make(model_type)


def diffusers_models() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Yield (class, its maker) of the models of diffusers."""
    import diffusers.models
    from diffusers import ModelMixin

    classes = {}
    for found in pkgutil.walk_packages(diffusers.models.__path__, "diffusers.models."):
        try:
            module = importlib.import_module(found.name)
        except ImportError:  # of flax and other optional libraries
            continue
        for name, value in vars(module).items():
            if isinstance(value, type) and issubclass(value, ModelMixin) and value.__module__ == found.name:
                classes[name] = value
    yield from sorted(classes.items())


def measure(name: str, make: Callable[[], nn.Module]) -> Share | str:
    """The share of an architecture, or the reason why it cannot be made."""
    try:
        signal.alarm(SECONDS)
        with torch.device("meta"):
            model = make()
    except TimeoutError:
        return f"takes more than {SECONDS} s"
    except ImportError:
        return "needs a library that is not installed"
    except _HOSTS_ERRORS as error:
        return f"no model from the default configuration ({type(error).__name__})"
    finally:
        signal.alarm(0)
    return share_of(name, model)


def percent(share: float) -> str:
    """A share in percent, rounded down: what is below the target does not seem to reach it."""
    return f"{int(1000 * share) / 10} %"


def reasons(found: Share, kinds: Callable[[str], bool], most: int = 2) -> str:
    """The largest groups of what stays in 16 bit, with their shares of all weights."""
    groups = sorted(((n, k, why) for (k, why), n in found.left.items() if kinds(k)), reverse=True)
    shown = [group for group in groups[:most] if group[0] >= 0.0005 * found.total]
    return "; ".join(f"{n / max(found.total, 1):.1%} {kind}: {why}" for n, kind, why in shown or groups[:1])


def is_multiplied(kind: str) -> bool:
    """True for the kinds of layers, and the classes without a counterpart, that the target is about."""
    return kind not in ("conv", "conv_transpose", "weight_norm", "recurrent", "embedding")


def report(libraries: dict[str, dict[str, Share | str]]) -> str:
    """The section of the page: counts for each library, and the architectures below the target."""
    no_layers = "convolutions, tables, autoencoders"
    counts = [["library", "architectures", "95 % or more", "below", no_layers, "not made here"]]
    below = [["architecture", "of linear and expert weights", "of all weights", "what stays in 16 bit"]]
    mostly: Counter[str] = Counter()
    lacking: Counter[str] = Counter()
    for library, found in libraries.items():
        shares = [s for s in found.values() if isinstance(s, Share)]
        full = [s for s in shares if s.multiplied and s.share >= TARGET]
        under = sorted((s for s in shares if s.share < TARGET), key=lambda s: s.share)
        only = [s for s in shares if not s.multiplied]
        lacking.update(reason.partition(" (")[0] for reason in found.values() if isinstance(reason, str))
        numbers = (len(found), len(full), len(under), len(only), len(found) - len(shares))
        counts.append([f"{library} {version(library)}", *map(str, numbers)])
        below += [[f"`{s.name}`", percent(s.share), percent(s.of_all), reasons(s, is_multiplied)] for s in under]
        for s in shares:
            if s.of_all < 0.5:
                mostly[max(s.left, key=lambda group: s.left[group])[0]] += 1
    kinds = ", ".join(f"{n} by {kind}" for kind, n in mostly.most_common(3))
    why = "; ".join(f"{reason}: {n}" for reason, n in lacking.most_common())
    return (
        f"{markdown(counts)}\n\n{markdown(below)}\n\n"
        f'`python scripts/quantized_share.py`: the plan of `QuantizerConfig("int4")` for models of the default '
        f"configurations, on the meta device. In {mostly.total()} architectures more than half of all weights stay in "
        f"16 bit, most often because of one kind of modules: {kinds}. Not made here: {why}."
    )


def _stop(*_: Any) -> None:
    raise TimeoutError


def main() -> None:
    """Ask the plans, print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="ARCHITECTURE", help="model types or classes (default: all)")
    parser.add_argument("--readme", action="store_true", help="write the table into docs/coverage.md")
    args = parser.parse_args()
    if args.readme and args.names:
        parser.error("--readme writes the table of all architectures: leave the names out")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGALRM, _stop)
    libraries = {"transformers": dict(transformers_models()), "diffusers": dict(diffusers_models())}
    unknown = set(args.names) - {name for makers in libraries.values() for name in makers}
    if unknown:
        parser.error(f"neither library has {', '.join(sorted(unknown))}")
    found = {
        library: {name: measure(name, make) for name, make in makers.items() if not args.names or name in args.names}
        for library, makers in libraries.items()
    }
    if args.readme:
        write_section(SECTION, report(found))
        return
    rows = [("architecture", "linear, experts", "all", "what stays in 16 bit")]
    for name, share in (pair for shares in found.values() for pair in shares.items()):
        if isinstance(share, str):
            rows.append((name, "", "", share))
        elif args.names or share.share < TARGET:
            rows.append((name, percent(share.share), percent(share.of_all), reasons(share, lambda _: True, most=9)))
    print(format_table(rows))
    shares = [s for of in found.values() for s in of.values() if isinstance(s, Share)]
    print(f"{len(shares)} made, {sum(s.share >= TARGET for s in shares)} of them with {TARGET:.0%} or more")


if __name__ == "__main__":
    sys.exit(main())
