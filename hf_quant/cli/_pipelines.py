"""Pipelines of diffusers: several models in one directory, each with its own plan."""

from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from hf_quant.auto import PIPELINE_PARTS
from hf_quant.cli._models import (
    Source,
    check_not_quantized,
    diffusers_dtype,
    find_file,
    find_source,
    meta_model,
    progress_wanted,
)
from hf_quant.cli._terminal import print_plan
from hf_quant.config import QuantizerConfig
from hf_quant.patterns import matches
from hf_quant.planning import plan


if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def components(source: Source) -> tuple[dict[str, Source], list[str]]:
    """Return the models of a pipeline that are quantized by default, and the names of the others."""
    found, others = {}, []
    for name, entry in source.fields.items():
        path = find_file(source.name, f"{name}/config.json") if isinstance(entry, list) else None
        if path is None:  # a tokenizer or a scheduler
            continue
        if name.startswith(PIPELINE_PARTS):
            found[name] = find_source(str(path.parent))
        else:
            others.append(name)
    return found, others


def plan_pipeline(source: Source, config: QuantizerConfig, *, dtype: str) -> dict[str, QuantizerConfig]:
    """Print the plan of each component, and return {component: its config}.

    An entry of `modules` counts in those components where it matches a module. Raises ValueError if it does in none,
    or nothing can be quantized.
    """
    configs: dict[str, QuantizerConfig] = {}
    unmatched, refusals = set(config.modules), []
    parts, others = components(source)
    for name, part in parts.items():
        check_not_quantized(part)
        model = meta_model(part, dtype=dtype)
        names = [n for n, _ in model.named_modules()]
        modules = {p: value for p, value in config.modules.items() if any(matches(p, n) for n in names)}
        unmatched -= set(modules)
        fields = {field: getattr(config, field) for field in config.user_fields()}
        if isinstance(model, PreTrainedModel):
            fields["attention"] = None  # attention formats are for denoisers only
        try:
            own = QuantizerConfig(**{**fields, "modules": modules})
            own_plan = plan(model, own)
        except ValueError as error:
            refusals.append(f"{name}: {error}")
            continue
        print(name)
        print_plan(own_plan)
        print()
        configs[name] = own
    if unmatched:
        raise ValueError(
            f"no component has a module that matches {', '.join(map(repr, sorted(unmatched)))}: modules have their "
            "names within the component ('proj_out', not 'transformer.proj_out'). To quantize one component alone, "
            "give its directory"
        )
    if not configs:
        raise ValueError(f"nothing to quantize in {source.name}: {'; '.join(refusals) or 'no component is known'}")
    for refusal in refusals:
        print(f"left in 16 bit: {refusal}")
    if others:
        print(
            f"left in 16 bit: {', '.join(others)}: neither denoisers nor text encoders; to quantize such a model, "
            "too, give its directory"
        )
    return configs


def load_pipeline(source: Source, configs: dict[str, QuantizerConfig], *, dtype: str) -> "DiffusionPipeline":
    """Load a pipeline with the components of `configs` quantized while loading, each in its stored dtype."""
    from diffusers import DiffusionPipeline, PipelineQuantizationConfig
    from diffusers.utils import logging

    if not progress_wanted():
        logging.disable_progress_bar()
    root = Path(source.name) if Path(source.name).is_dir() else Path(DiffusionPipeline.download(source.name))
    dtypes = {path.parent.name: diffusers_dtype(path.parent, dtype) for path in root.glob("*/config.json")}
    mapping = PipelineQuantizationConfig(quant_mapping=dict(configs))
    # Components that were saved as None have to be passed as None.
    absent = {name: None for name, entry in source.fields.items() if isinstance(entry, list) and entry[0] is None}
    return DiffusionPipeline.from_pretrained(root, quantization_config=mapping, torch_dtype=dtypes, **absent)
