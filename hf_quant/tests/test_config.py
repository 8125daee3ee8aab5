"""`QuantizerConfig`: every field, every error, and what is stored."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from hf_quant import FORMATS, PRESETS, QuantizerConfig
from hf_quant.algorithms import ALGORITHMS, SOLVERS
from hf_quant.cli import _parser
from hf_quant.config import FORMAT_VERSION, as_config
from hf_quant.formats import ALIASES
from hf_quant.kv_cache._config import DEFAULTS
from hf_quant.patterns import excludes, matches
from hf_quant.resolve import entry_fields, fields_of, resolve_scheme
from hf_quant.scheme import LinearScheme, TensorQuant
from hf_quant.testing import all_scheme_fields


CONFIGS = {
    "default": QuantizerConfig(),
    "fields": QuantizerConfig(
        "int4", "int8", group_size=64, symmetric=False, scale_dtype="float16", algorithm="absmax"
    ),
    "preset": QuantizerConfig("w8a8_fp8"),
    "modules": QuantizerConfig(
        "int4",
        modules={
            "lm_head": "int8",
            "*.down_proj": {"weights": "int4", "group_size": 64},
            "re:.*layers\\.0\\..*": None,
        },
        modules_to_not_convert=["lm_head", "*.gate"],
        quantization_device="cuda",
        fuse_projections=False,
    ),
    "modules only": QuantizerConfig(None, modules={"embed": "int8"}),
}


def scheme(dtype: torch.dtype = torch.bfloat16, **fields) -> LinearScheme:
    return resolve_scheme(fields, dtype)[0]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_to_dict_is_json_and_from_dict_gives_the_config_back(config):
    fields = config.to_dict()
    assert json.loads(json.dumps(fields)) == fields
    assert type(fields["quant_method"]) is str and fields["quant_method"] == "hf_quant"
    again = QuantizerConfig.from_dict(fields)
    assert again == config and again.to_dict() == fields
    again.weights = "int3"
    assert again != config


def test_the_resolved_plan_and_the_writers_version_survive_the_round_trip():
    plan = [{"scheme": scheme(weights="int4").to_dict(), "modules": ["layers.{0-3}.mlp"]}]
    fields = {**QuantizerConfig("int4").to_dict(), "plan": plan, "hf_quant_version": "0.0.1"}
    assert QuantizerConfig.from_dict(fields).to_dict() == fields


def test_the_hosts_find_what_they_look_for():
    config = QuantizerConfig()
    assert config.quant_method == "hf_quant" and config.quant_method.value == "hf_quant"
    assert str(config.quant_method) == "hf_quant" and f"{config.quant_method}" == "hf_quant"
    own = {"quantization_device": None, "fuse_projections": None, "fuse_activations": None}
    assert config.get_loading_attributes() == {**own, "requested": config}


def test_repr_shows_what_was_given():
    assert repr(QuantizerConfig("int4", modules={"a": None})) == "QuantizerConfig(weights='int4', modules={'a': None})"
    assert repr(QuantizerConfig(None, kv_cache="int8")) == "QuantizerConfig(weights=None, kv_cache='int8')"


RECORD = {"data": "text.txt", "sha256": "0" * 64, "num_tokens": 8192, "length": 512}


def test_with_what_a_checkpoint_was_calibrated():
    assert "calibrated_with" not in QuantizerConfig("int4").to_dict()
    config = QuantizerConfig("int4", algorithm="gptq", calibrated_with=RECORD)
    assert QuantizerConfig.from_dict(config.to_dict()) == config and config.calibrated_with == RECORD
    assert "calibration" not in config.to_dict()


@pytest.mark.parametrize(
    "record", [[], {}, {"num_tokens": 1}, {**RECORD, "more": 1}, {"data": ["a"]}, {"data": "a" * 201}]
)
def test_what_is_no_record_of_calibration(record):
    with pytest.raises(ValueError, match="calibrated_with is .*; needs some of data, sha256"):
        QuantizerConfig("int4", calibrated_with=record)


def test_where_a_checkpoint_was_imported_from():
    assert "imported_from" not in QuantizerConfig("int4").to_dict()
    for name in (None, "me/model-gptq"):
        fields = {**QuantizerConfig("int4").to_dict(), "imported_from": {"method": "gptq", "name": name}}
        assert QuantizerConfig.from_dict(fields).to_dict() == fields


@pytest.mark.parametrize(
    "origin", ["gptq", {}, {"method": "gptq"}, {"method": None, "name": "a/b"}, {"method": "x", "name": "a/b|c"}, [1]]
)
def test_what_cannot_be_imported_from(origin):
    with pytest.raises(ValueError, match="imported_from is .*; needs the method that quantized it"):
        QuantizerConfig("int4", imported_from=origin)


@pytest.mark.parametrize("fields", all_scheme_fields().values(), ids=all_scheme_fields())
def test_every_format_with_each_granularity_and_symmetry_resolves(fields):
    weight = scheme(**fields).weight
    given = fields["weights"], fields["granularity"], fields["symmetric"]
    assert (weight.format, weight.granularity, weight.symmetric) == given
    assert (weight.group_size is not None) == (fields["granularity"] == "group")


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_resolve_in_any_case(preset):
    assert scheme(weights=preset) == scheme(weights=preset.lower()) == scheme(**PRESETS[preset])
    assert QuantizerConfig(preset.title()).weights == preset.title()  # stored as the user wrote it


@pytest.mark.parametrize(("alias", "name"), [("fp8", "fp8_e4m3"), ("fp6", "fp6_e3m2"), ("INT4", "int4")])
def test_aliases(alias, name):
    assert scheme(weights=alias) == scheme(weights=name)


def test_defaults_of_the_formats():
    found = {name: str(scheme(weights=name)) for name in FORMATS}
    assert found == {
        "int8": "int8 row",
        "int4": "int4 g32",
        "int3": "int3 g16",
        "int2": "int2 g16",
        "fp8_e4m3": "fp8_e4m3 row",
        "fp8_e5m2": "fp8_e5m2 row",
        "fp6_e3m2": "fp6_e3m2 row",
        "fp6_e2m3": "fp6_e2m3 g32",
        "nf4": "nf4 g32",
        "mxfp4": "mxfp4 g32",
        "nvfp4": "nvfp4 g16",
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_of_scales(dtype):
    model = "float32" if dtype == torch.float64 else str(dtype).removeprefix("torch.")
    for weights in ("int4", "int3", "int2", "nf4"):  # groups have 8 bits, rows the model's dtype
        assert scheme(dtype, weights=weights).weight.scale_dtype == "float8_e4m3fn"
        assert scheme(dtype, weights=weights, scale_dtype="model").weight.scale_dtype == model
        assert scheme(dtype, weights=weights, granularity="row").weight.scale_dtype == model
    assert scheme(dtype, weights="int8", group_size=64).weight.scale_dtype == model
    assert scheme(dtype, weights="W4A16").weight.scale_dtype == model
    assert scheme(dtype, weights="int8").weight.scale_dtype == model
    assert scheme(dtype, weights="int8", activations="int8").weight.scale_dtype == "float32"
    assert scheme(dtype, weights="fp8").weight.scale_dtype == "float32"
    assert scheme(dtype, weights="mxfp4").weight.scale_dtype == "float8_e8m0fnu"
    assert scheme(dtype, weights="nvfp4").weight.scale_dtype == "float8_e4m3fn"
    assert scheme(dtype, weights="int4", scale_dtype="float16").weight.scale_dtype == "float16"


def test_a_torch_dtype_is_stored_by_name():
    config = QuantizerConfig(
        "int4", scale_dtype=torch.float16, modules={"a": {"weights": "nf4", "scale_dtype": torch.float32}}
    )
    fields = config.to_dict()
    assert fields["scale_dtype"] == "float16" and fields["modules"]["a"]["scale_dtype"] == "float32"


def test_cpu_activations():
    found = scheme(weights="int4", cpu_activations="int8")
    assert found.activation is None and found.cpu_activation == TensorQuant("int8", "row")
    assert found.activation_on("cpu") == "int8" and found.activation_on("cuda") is None
    assert str(found).endswith("int8 activations on CPUs, rotated by 128")
    assert LinearScheme.from_dict(found.to_dict()) == found
    assert "cpu_activation" not in scheme(weights="int4").to_dict()  # older versions read what does not use it
    assert scheme(weights="W8A8").activation_on("cpu") == "int8"
    assert scheme(**fields_of(found)) == found


def test_activations():
    assert scheme(weights="int8").activation is None
    assert scheme(weights="int8", activations="int8").activation == TensorQuant("int8", "row")
    assert scheme(weights="int4", activations="FP8").activation == TensorQuant("fp8_e4m3", "row")


def test_a_preset_may_be_completed_and_confirmed():
    preset = TensorQuant("int4", "group", 128, scale_dtype="bfloat16")
    assert scheme(weights="W4A16").weight == preset
    assert scheme(weights="W4A16", group_size=64).weight == replace(preset, group_size=64)
    assert scheme(weights="W4A16", scale_dtype="float8_e4m3fn").weight == replace(preset, scale_dtype="float8_e4m3fn")
    assert scheme(weights="W4A16", granularity="row").weight == replace(preset, granularity="row", group_size=None)
    assert scheme(weights="W8A8_FP8", activations="fp8_e4m3") == scheme(weights="W8A8_FP8")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weights": "int9"}, r"unknown format or preset 'int9'; did you mean 'int"),
        ({"weights": "w4a17"}, r"unknown format or preset 'w4a17'"),
        ({"weights": 4}, r"weights is 4; needs a format or preset name"),
        ({"weights": "int4", "activations": "int2"}, r"activations is 'int2'; allowed: None, 'int8', 'fp8'"),
        ({"weights": "int4", "activations": 8}, r"activations is 8"),
        ({"weights": "W4A8", "activation_scale": "statics"}, r"activation_scale is 'statics'; allowed: 'dynamic'"),
        ({"weights": "int4", "activation_scale": "static"}, r"activation_scale is 'static', but activations is None"),
        ({"weights": "int4", "cpu_activations": "fp8"}, r"cpu_activations is 'fp8'; allowed: None, 'int8'"),
        ({"weights": "nf4", "cpu_activations": "int8"}, r"with weights 'nf4'; only int2, int4 and int8 gain"),
        ({"weights": "W8A8", "cpu_activations": "int8"}, r"activations='int8' holds on CPUs already"),
        ({"weights": "int4", "granularity": "rows"}, r"unknown granularity 'rows'; did you mean 'row'"),
        ({"weights": "int4", "granularity": "block"}, r"int4 has no granularity 'block'; allowed: row, group, tensor"),
        ({"weights": "mxfp4", "granularity": "row"}, r"mxfp4 has no granularity 'row'; allowed: group"),
        ({"weights": "int4", "group_size": 48}, r"group_size is 48; allowed: 16, 32, 64, 96, 128, 192, 256"),
        ({"weights": "int4", "group_size": 0}, r"group_size is 0; allowed"),
        ({"weights": "int4", "group_size": -1}, r"group_size is -1; allowed"),
        ({"weights": "int4", "group_size": 128.0}, r"group_size is 128.0; allowed"),
        ({"weights": "int4", "group_size": True}, r"group_size is True; allowed"),
        ({"weights": "int4", "group_size": "128"}, r"group_size is '128'; allowed"),
        ({"weights": "int4", "group_size": 64, "granularity": "row"}, r"group_size is 64 with granularity 'row'"),
        ({"weights": "mxfp4", "group_size": 64}, r"group_size is 64, but mxfp4 is defined with 32"),
        ({"weights": "int8", "symmetric": False}, r"int8 has no zero point; int4, int3, int2 have one"),
        ({"weights": "nf4", "symmetric": False}, r"nf4 has no zero point"),
        ({"weights": "int4", "symmetric": 0}, r"symmetric is 0; needs True, False or None"),
        ({"weights": "int4", "scale_dtype": "bf16"}, r"unknown scale_dtype 'bf16'; did you mean 'bfloat16'"),
        ({"weights": "int4", "scale_dtype": 16}, r"unknown scale_dtype 16; known: "),
        ({"weights": "nvfp4", "scale_dtype": "float16"}, r"scale_dtype is 'float16', but nvfp4 is defined with"),
        ({"weights": "int8", "scale_dtype": "float8_e4m3fn"}, r"'float8_e4m3fn' needs granularity 'group'"),
        ({"weights": "int4", "algorithm": "absmx"}, r"unknown algorithm 'absmx'; did you mean 'absmax'"),
        ({"weights": "int4", "algorithm": ["absmax"]}, r"unknown algorithm \['absmax'\]"),
        ({"weights": "int4", "sparsity": "1:2"}, r"sparsity is '1:2'; allowed: None, '2:4'"),
        ({"weights": "int4", "sparsity": "2:4", "symmetric": False}, "needs symmetric weights: int4 with zero points"),
        ({"weights": "int4", "sparsity": "2:4", "algorithm": "gptq"}, "'gptq', which moves weights: prune the model"),
        ({"weights": "int4", "sparsity": "2:4", "input_transform": "hadamard"}, "rotated weights have no zeros"),
        ({"weights": "W8A8", "activations": "fp8"}, r"preset 'W8A8' sets activations='int8', but activations='fp8'"),
        (
            {"weights": "W4A16_ASYM", "symmetric": True},
            r"preset 'W4A16_ASYM' sets symmetric=False, but symmetric=True",
        ),
    ],
)
def test_errors_of_a_scheme_alone_and_in_modules(fields, message):
    with pytest.raises(ValueError, match=message):
        QuantizerConfig(**fields)
    with pytest.raises(ValueError, match=r"modules\['\*\.mlp'\]: .*" + message):
        QuantizerConfig("int8", modules={"*.mlp": fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 4}, r"unknown field 'bits'; known: weights, activations"),
        ({"weights_": "int4"}, r"unknown field 'weights_'; did you mean 'weights'"),
        (
            {"group": 4, "symmetric_": True},
            r"unknown field 'group'.*; unknown field 'symmetric_'; did you mean 'symmetric'",
        ),
        ({"weights": None}, r"weights, kv_cache and attention are None and `modules` names no format"),
        (
            {"weights": None, "modules": {"a": None}},
            r"weights, kv_cache and attention are None and `modules` names no format",
        ),
        (
            {"weights": None, "activations": "int8", "modules": {"a": "int4"}},
            r"'activations': 'int8'.* applies to nothing",
        ),
        ({"weights": None, "group_size": 64, "modules": {"a": "int4"}}, r"'group_size': 64.* applies to nothing"),
        ({"modules": ["lm_head"]}, r"modules is \['lm_head'\]; needs \{pattern"),
        ({"modules": {3: "int4"}}, r"the pattern 3; patterns are strings"),
        ({"modules": {"re:(": "int4"}}, r"pattern 're:\(' is not a regular expression"),
        ({"modules": {"a": 4}}, r"modules\['a'\]: got 4; needs a format name, a dict"),
        ({"modules": {"a": {"weight": "int4"}}}, r"modules\['a'\]: unknown field 'weight'; did you mean 'weights'"),
        ({"modules": {"a": {"group_size": 64}}}, r"modules\['a'\]: weights is None; needs a format"),
        ({"modules_to_not_convert": "lm_head"}, r"modules_to_not_convert is 'lm_head'; needs a list"),
        ({"fuse_projections": "yes"}, "fuse_projections is 'yes'; needs True, False or None"),
        ({"fuse_projections": 1}, "fuse_projections is 1; needs True, False or None"),
        ({"quantization_device": "gpu"}, r"quantization_device is 'gpu'; needs a device of torch, such as 'cuda'"),
        ({"weights": "auto", "budget": {"kl": 1}, "candidates": ["auto", "int4"]}, "candidate .auto.: a search"),
        ({"modules_to_not_convert": [None]}, r"modules_to_not_convert has None"),
        ({"modules_to_not_convert": ["re:["]}, r"pattern 're:\[' is not a regular expression"),
        ({"quant_method": "awq"}, r"quant_method is 'awq'; .*reads 'hf_quant' only"),
        ({"format_version": FORMAT_VERSION + 1}, r"format_version 3, hf_quant .* reads up to 2: install a newer"),
        ({"format_version": 0}, r"format_version is 0"),
        ({"format_version": "1"}, r"format_version is '1'; needs an integer"),
        ({"format_version": True}, r"format_version is True; needs an integer"),
    ],
)
def test_errors_of_the_config(fields, message):
    with pytest.raises(ValueError, match=message):
        QuantizerConfig(**fields)
    with pytest.raises(ValueError, match=message):
        QuantizerConfig.from_dict(fields)


def test_as_config_takes_a_config_a_name_or_fields():
    config = QuantizerConfig("int4")
    assert as_config(config) is config
    assert as_config("int4") == as_config({"weights": "int4"}) == config
    with pytest.raises(ValueError, match="config is a int; needs a QuantizerConfig, a format name or a dict"):
        as_config(4)


def test_entry_fields():
    assert entry_fields("int4") == {"weights": "int4"}
    assert entry_fields({"weights": "int4", "group_size": 64}) == {"weights": "int4", "group_size": 64}


@pytest.mark.parametrize(
    ("pattern", "name", "matched", "excluded"),
    [
        ("lm_head", "lm_head", True, True),
        ("lm_head", "model.lm_head", False, True),
        ("*.down_proj", "layers.0.down_proj", True, True),
        ("*.down_proj", "layers.0.down_proj.x", False, False),
        ("layers.1", "layers.1.mlp.up", False, True),
        ("layers.1", "layers.11.mlp.up", False, False),
        ("mlp", "layers.1.mlp.up", False, True),
        ("re:.*\\.(up|down)_proj", "a.up_proj", True, True),
        ("re:.*\\.(up|down)_proj", "a.up_proj.b", False, False),
        ("re:up", "a.up", False, False),
    ],
)
def test_patterns(pattern, name, matched, excluded):
    assert matches(pattern, name) is matched
    assert excludes(pattern, name) is excluded


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "int4", "granularity": "rows"}, r"granularity is 'rows'; allowed: tensor, row, group, block"),
        ({"format": "int4", "granularity": "row", "group_size": 64}, r"'row' with group_size 64"),
        ({"format": "int4", "granularity": "group"}, r"'group' with group_size None"),
        ({"format": "int4"}, r"not a tensor quantization record"),
        ({"format": "int4", "granularity": "row", "bits": 4}, r"not a tensor quantization record: .*bits"),
    ],
)
def test_a_stored_scheme_is_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        LinearScheme.from_dict({"weight": fields})


@pytest.mark.parametrize("stored", [None, {}, {"activation": None}, {"weight": {}, "bias": 1}, "int4"])
def test_what_is_no_scheme_is_refused(stored):
    with pytest.raises(
        ValueError,
        match=r"a scheme is \{weight, .*, input_transform\}|not a tensor quantization record",
    ):
        LinearScheme.from_dict(stored)


@pytest.mark.parametrize("fields", all_scheme_fields().values(), ids=all_scheme_fields())
def test_schemes_survive_json(fields):
    found = scheme(**fields, activations="int8")
    assert LinearScheme.from_dict(json.loads(json.dumps(found.to_dict()))) == found


@pytest.mark.parametrize("activations", [None, "int8", "fp8"])
@pytest.mark.parametrize("fields", all_scheme_fields().values(), ids=all_scheme_fields())
def test_fields_of_a_scheme_give_it_back_for_any_dtype(fields, activations):
    for dtype in (torch.float16, torch.float32):
        found = scheme(dtype, **fields, activations=activations)
        assert scheme(torch.bfloat16, **fields_of(found)) == found


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": "int9"}, "unknown format or preset 'int9'"),
        ({"format": ["int4"]}, "needs a format or preset name"),
        ({"group_size": -4}, "group_size is -4; allowed"),
        ({"group_size": [64]}, r"group_size is \[64\]; allowed"),
        ({"symmetric": 3}, "symmetric is 3; needs"),
        ({"scale_dtype": "float64"}, "unknown scale_dtype 'float64'"),
        ({"scale_dtype": None}, "this version has no scheme"),
        ({"dynamic": False}, "this version has no scheme"),
        ({"format": "W8A8", "granularity": "row", "group_size": None}, "this version has no scheme"),
    ],
)
def test_schemes_that_this_version_does_not_have(changed, message):
    stored = {**scheme(weights="W4A16").weight.to_dict(), **changed}
    with pytest.raises(ValueError, match=message):
        fields_of(LinearScheme.from_dict({"weight": stored}))


def quoted_names(text: str) -> set[str]:
    return set(re.findall(r'"([^"]+)"', text))


def test_lists_of_names_in_texts_are_those_of_the_registries():
    docstring = QuantizerConfig.__doc__
    formats, algorithms, caches = (
        quoted_names(re.search(begin, docstring, re.DOTALL)[1])
        for begin in (r"weights: format \((.*?)\)", r"algorithm: [^(]*\((.*?)\)", r"kv_cache: format (.*?), or")
    )
    assert {ALIASES.get(name, name) for name in formats} == set(FORMATS)
    assert algorithms == {*ALGORITHMS, *SOLVERS}
    assert {ALIASES.get(name, name) for name in caches} == set(DEFAULTS)
    assert set(_parser.ALGORITHMS_HELP.split(", ")) == {*ALGORITHMS, *SOLVERS}
    shown = {name for name in re.findall(r"\w+", _parser.FORMATS_HELP.partition(", or a preset")[0])}
    assert shown == {*FORMATS, *ALIASES}
    assert set(re.findall(r"\b[WN]\w*\d\w*", _parser.FORMATS_HELP)) <= set(PRESETS)


def test_the_configuration_comes_without_algorithms_and_cache_layers():
    program = "import sys, hf_quant.config; print(*(m for m in sys.modules if m.startswith('hf_quant.')))"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    loaded = set(output.split())
    assert "hf_quant.kv_cache._config" in loaded
    assert not {"hf_quant.algorithms", "hf_quant.kv_cache._layers", "hf_quant.modules", "hf_quant.planning"} & loaded
