"""Every scheme and architecture of diffusers: quantized on load, saved in shards, reloaded with the same bits."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_quant import PRESETS, QuantizerConfig, plan
from hf_quant.formats import FORMATS
from hf_quant.resolve import resolve_scheme
from hf_quant.scheme import LinearScheme
from hf_quant.testing import all_scheme_fields, assert_sqnr


pytest.importorskip("diffusers", reason="diffusers is an optional host")

from integration_tests.support.tiny_diffusion import (  # noqa: E402
    ARCHITECTURES,
    assert_same_bytes,
    file_tensors,
    load,
    quantized_names,
    run,
)


# {(weights, activations): (lowest, highest) SQNR of a model's output in dB}; random weights let errors grow from layer
# to layer, and a model that was not quantized at all would be beyond the upper bound.
BOUNDS = {
    ("int8", None): (30, 55),
    ("int8", "int8"): (26, 52),
    ("fp8_e4m3", None): (20, 45),
    ("fp8_e4m3", "fp8_e4m3"): (17, 42),
    ("fp8_e5m2", None): (14, 38),
    ("int4", None): (10, 32),
    ("int4", "int8"): (10, 32),
    ("int4", "fp8_e4m3"): (10, 32),
    ("nf4", None): (10, 34),
    ("int3", None): (4, 24),
    ("int2", None): (-5, 16),
    ("fp6_e3m2", None): (16, 38),
    ("fp6_e2m3", None): (19, 45),
    ("mxfp4", None): (7, 28),
    ("nvfp4", None): (9, 30),
}
# What is added to both bounds: errors grow through fewer layers than elsewhere, and through 100 of them in "sdxl".
SHIFTS = {"cogvideox": 4, "qwen_image": 3, "sdxl": -4}


def _scheme(fields: dict[str, Any]) -> LinearScheme:
    return resolve_scheme(fields, torch.bfloat16)[0]


def _cases() -> list[Any]:
    """(architecture, dtype, scheme fields): two schemes everywhere, the other named ones on two architectures each.

    Other granularities are on one each; in fp32, one of the two on each architecture.
    """
    named: dict[LinearScheme, tuple[str, dict[str, Any]]] = {}
    for name in (*PRESETS, *FORMATS):
        named.setdefault(_scheme({"weights": name}), (name, {"weights": name}))
    others = [item for item in all_scheme_fields().items() if _scheme(item[1]) not in named]
    names = list(ARCHITECTURES)
    few = [item for item in named.values() if item[0] in ("W8A8", "W4A16")]
    assert len(few) == 2
    cases = [(arch, torch.bfloat16, *item) for arch in names for item in few]
    cases += [(arch, torch.float32, *few[i % 2]) for i, arch in enumerate(names)]
    others = [item for item in named.values() if item not in few for _ in range(2)] + others
    cases += [(names[i % len(names)], torch.bfloat16, *item) for i, item in enumerate(others)]
    return [
        pytest.param(arch, dtype, fields, id=f"{arch}-{str(dtype).removeprefix('torch.')}-{label}")
        for arch, dtype, label, fields in cases
    ]


@pytest.fixture(scope="module")
def plain_output(checkpoints) -> Any:
    """Computes the output of an architecture that is not quantized, once."""
    known: dict[tuple[str, torch.dtype], Tensor] = {}

    def output(name: str, dtype: torch.dtype) -> Tensor:
        if (name, dtype) not in known:
            known[name, dtype] = run(load(checkpoints(name, dtype), name, dtype), name)
        return known[name, dtype]

    return output


@pytest.mark.parametrize(("name", "dtype", "fields"), _cases())
def test_quantize_on_load_save_reload(checkpoints, plain_output, tmp_path, name, dtype, fields):
    source, config = checkpoints(name, dtype), QuantizerConfig(**fields)
    model, info = load(source, name, dtype, quantization_config=config, output_loading_info=True)
    assert {key: value for key, value in info.items() if value} == {}
    output, scheme, shift = run(model, name), _scheme(fields), SHIFTS.get(name, 0)
    low, high = BOUNDS[scheme.weight.format, scheme.activation and scheme.activation.format]
    assert_sqnr(output, plain_output(name, dtype), at_least=low + shift, at_most=high + shift)
    expected = plan(load(source, name, dtype), config)
    assert quantized_names(model) == set(expected.quantized) != set()
    assert model.get_memory_footprint() == expected.nbytes < 0.95 * expected.nbytes_before
    assert model.dtype == dtype and not model.training
    assert config.plan is None  # the user's own object serves for other models, too

    model.save_pretrained(tmp_path / "first", max_shard_size=model.get_memory_footprint() // 3)
    assert len(list((tmp_path / "first").glob("*.safetensors"))) > 1
    again, info = load(tmp_path / "first", name, dtype, output_loading_info=True)
    assert {key: value for key, value in info.items() if value} == {}
    assert_same_bytes(again.state_dict(), model.state_dict())
    assert torch.equal(run(again, name), output)

    again.save_pretrained(tmp_path / "second")
    assert_same_bytes(file_tensors(tmp_path / "second"), file_tensors(tmp_path / "first"))
    configs = [json.loads((tmp_path / d / "config.json").read_text()) for d in ("first", "second")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
