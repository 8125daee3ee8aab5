"""`plan`: who gets which scheme and why not, sizes, the table, and the compact names that config.json stores."""

import copy
import json

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_quant import FORMATS, QuantizerConfig, plan, quantize_
from hf_quant.planning import fold_names, schemes_from_list, schemes_to_list, unfold_name
from hf_quant.resolve import resolve_scheme
from hf_quant.testing import all_scheme_fields


BITS = [  # of a 4096 x 4096 bf16 matrix, as the formats table has them
    ("int8", {}, 8 + 16 / 4096),
    ("int8", {"activations": "int8"}, 8 + 32 / 4096),
    ("int4", {}, 4.25),
    ("int4", {"symmetric": False}, 4.5),
    ("W4A16", {}, 4.125),
    ("W4A16_ASYM", {}, 4.1875),
    ("int3", {}, 3.5),
    ("int2", {}, 2.5),
    ("fp8_e4m3", {}, 8 + 32 / 4096),
    ("fp8_e4m3", {"granularity": "block"}, 8 + 32 / 128**2),
    ("fp8_e5m2", {}, 8 + 32 / 4096),
    ("fp6_e3m2", {}, 6 + 32 / 4096),
    ("fp6_e2m3", {}, 6.25),
    ("fp6_e2m3", {"granularity": "row"}, 6 + 32 / 4096),
    ("nf4", {}, 4.25),
    ("nf4", {"group_size": 64}, 4.125),
    ("mxfp4", {}, 4.25),
    ("nvfp4", {}, 4.5),
]


def mlp(K: int = 64, N: int = 96) -> nn.Sequential:
    return nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.LayerNorm(N), nn.Linear(N, K))


def nbytes(model: nn.Module) -> int:
    """Bytes of the parameters and buffers that a model really holds."""
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    return sum(t.nbytes for t in tensors.values())


class Tied(nn.Module):
    """An embedding and a head with one weight, around a body; declares its head as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(80, 64), nn.Linear(64, 64), nn.Linear(64, 80, bias=False)
        self.head.weight = self.embed.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.head


class Mixture(nn.Module):
    """A router and a list of experts, as older MoE models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 80)
        self.router = nn.ModuleDict({"classifier": nn.Linear(64, 80)})
        self.experts = nn.ModuleList(nn.ModuleDict({"gate_proj": nn.Linear(64, 64)}) for _ in range(2))


@pytest.mark.parametrize(("name", "extra", "bits"), BITS)
def test_bits_per_weight_are_those_of_the_formats_table(name, extra, bits):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 4096, dtype=torch.bfloat16))
    found = plan(model, {"weights": name, **extra})
    assert found.bits_per_weight == pytest.approx(bits, abs=1e-5)  # one fp32 global_scale is 2e-6
    assert found.nbytes == pytest.approx(4096 * 4096 * bits / 8 + 4096 * 2, abs=4)


@pytest.mark.parametrize("fields", all_scheme_fields().values(), ids=all_scheme_fields())
def test_bytes_are_those_that_the_model_then_has(fields):
    model = mlp(70, 136).to(torch.bfloat16)  # K off the packing unit, off the group and off the block
    found = plan(copy.deepcopy(model).to("meta"), QuantizerConfig(**fields))
    assert found.nbytes_before == nbytes(model)
    quantize_(model, fields)
    assert found.nbytes == nbytes(model)
    assert found.nbytes < found.nbytes_before


def test_bytes_with_tied_weights_and_biases():
    model = Tied()
    found = plan(model, {"weights": "int8", "modules": {"head": "int4"}})
    assert found.nbytes_before == nbytes(model)
    quantize_(model, {"weights": "int8", "modules": {"head": "int4"}})
    assert found.nbytes == nbytes(model)


def test_planning_changes_nothing():
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    plan(model, "int4")
    after = model.state_dict()
    assert list(before) == list(after) and all(torch.equal(before[k], after[k]) for k in before)
    assert type(model[0]) is nn.Linear


def test_the_table():
    with torch.device("meta"):
        model = nn.ModuleDict({"layers": nn.ModuleList(mlp(128, 256) for _ in range(3)), "small": nn.Linear(8, 8)})
    model = nn.ModuleDict({"model": model}).to(torch.bfloat16)
    lines = str(plan(model, QuantizerConfig("int4", modules={"*.1.3": None}))).splitlines()
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    assert cells[0] == "modules,count,shape,scheme,bits,MB before,MB after,kernels,reason".split(",")
    assert set(lines[1]) == {"-"}
    assert cells[2] == ["model.layers.*.*", "3", "256x128", "int4 g32", "4.25", "0.20", "0.05", "A"]
    assert cells[3] == ["model.layers.*.*", "2", "128x256", "int4 g32", "4.25", "0.13", "0.03", "A"]
    assert cells[4][3:5] == ["16-bit", "16.00"] and cells[4][-1] == "kept by modules['*.1.3']"
    assert cells[5][0] == "model.small" and cells[5][-1] == "fewer than 4096 weights"
    assert lines[6].startswith("A  cpu: ") and lines[7].startswith("   cuda: Triton, decoded in registers (M <= ")
    assert lines[8].startswith("5 of 7 modules quantized, 4.251 bits per weight; model 0.40 -> ")
    assert len(lines) == 9


def test_advice_for_small_language_models():
    model = mlp()
    assert plan(model, "int4").advice is None
    model.can_generate = lambda: True
    found = plan(model, QuantizerConfig("int4", modules={"3": "int8"}))
    assert str(found).splitlines()[-1] == found.advice
    text = "advice: int4 costs a language model of 0.0M parameters much, fp6_e2m3 little, int8 next to nothing"
    assert found.advice.startswith(text)
    assert found.advice.endswith("of 4 bits nf4 loses least; algorithm='gptq' takes off three quarters")
    assert plan(model, {"weights": "int4", "algorithm": "gptq"}).advice is None
    assert "nf4 costs" in plan(model, "nf4").advice and "of 4 bits" not in plan(model, "nf4").advice
    assert plan(model, "int8").advice is None and plan(model, "fp6").advice is None
    with torch.device("meta"):
        model.large = nn.Linear(40_000, 25_000)
    assert plan(model.to("meta"), "int2").advice is None


def test_advice_for_large_output_embeddings():
    config = LlamaConfig(vocab_size=2048, hidden_size=64, intermediate_size=1024, num_hidden_layers=1)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    lines = plan(model, "int8").advice.splitlines()
    assert len(lines) == 1 and lines[0].startswith("advice: lm_head stays in 16 bit, ") and "% of" in lines[0]
    assert len(plan(model, "int4").advice.splitlines()) == 2
    for modules in ({"lm_head": "int8"}, {"lm_head": None}):
        assert plan(model, QuantizerConfig("int8", modules=modules)).advice is None
    with torch.device("meta"):
        config.vocab_size = 64
        assert plan(LlamaForCausalLM(config), "int8").advice is None


def test_the_table_names_a_kernel_for_each_device_and_kind():
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Embedding(64, 64), "c": nn.Conv1d(64, 64, 3)})
    found = plan(model, {"weights": "int8", "activations": "int8", "modules": {"b": "int4", "c": "fp8"}})
    for entry in found.quantized.values():
        assert all("(" in entry.kernel(device) for device in ("cpu", "cuda"))
    assert found.entries["a"].scheme.activation is not None
    assert plan(model, "int4").entries["b"].kernel("cpu") == "16-bit"


def test_reasons_for_16_bit():
    model = nn.ModuleDict(
        {
            "head": nn.Linear(64, 64),
            "keep": nn.Linear(64, 64),
            "small": nn.Linear(8, 8),
            "embed": nn.Embedding(64, 64),
            "conv": nn.Conv2d(16, 16, 5),
            "body": nn.Linear(64, 64),
        }
    )
    model.get_output_embeddings = lambda: model["head"]
    found = plan(model, QuantizerConfig("int4", modules={"keep": None}))
    assert {name: entry.reason for name, entry in found.entries.items()} == {
        "head": "output embedding",
        "keep": "kept by modules['keep']",
        "small": "fewer than 4096 weights",
        "embed": "embedding: only if named in `modules`",
        "conv": "conv: only if named in `modules`",
        "body": None,
    }
    assert list(found.quantized) == ["body"]
    found = plan(model, QuantizerConfig("int4", modules_to_not_convert=["keep"]))
    assert list(found.quantized) == ["head", "body"]  # a list replaces the default exclusions
    assert found.entries["keep"].reason == "modules_to_not_convert has 'keep'"


def test_naming_a_module_beats_every_default_exclusion():
    model = Tied()
    model.small = nn.Linear(8, 8)
    config = QuantizerConfig(
        "int4", modules={"head": "int8", "small": "nf4"}, modules_to_not_convert=["small", "head"]
    )
    found = plan(model, config)
    assert {name: str(entry.scheme) for name, entry in found.quantized.items()} == {
        "embed": "int8 row",
        "body": "int4 g32",
        "head": "int8 row",
        "small": "nf4 g32",
    }
    assert found.entries["small"].reason == "named by modules['small']"


def test_exact_names_win_then_the_first_pattern():
    model = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("up", "down", "gate")})
    found = plan(model, QuantizerConfig("int8", modules={"*": "int4", "re:u.": "nf4", "down": "int2"}))
    assert [e.scheme.weight.format for e in found.entries.values()] == ["int4", "int2", "int4"]
    # An entry stands alone: it inherits nothing.
    found = plan(model, QuantizerConfig("int4", group_size=64, activations="int8", modules={"up": "int4"}))
    assert str(found.entries["up"].scheme) == "int4 g32" and "g64" in str(found.entries["down"].scheme)


def test_tied_modules_share_one_decision():
    found = plan(Tied(), "int4")
    assert found.entries["head"].reason == "tied to embed; name it in `modules` to quantize both"
    assert found.entries["embed"].reason == "tied to head; name it in `modules` to quantize both"
    found = plan(Tied(), QuantizerConfig(None, modules={"embed": {"weights": "int8", "activations": "int8"}}))
    assert found.entries["embed"].scheme == found.entries["head"].scheme
    assert found.entries["head"].scheme.activation is None  # an embedding has no activations to quantize
    assert found.entries["head"].shared_with == "embed" and found.entries["head"].bytes_after == 0
    assert "shares the codes of embed" in str(found)
    with pytest.raises(ValueError, match="embed and head share one weight, but `modules` gives them"):
        plan(Tied(), QuantizerConfig("int4", modules={"embed": "int8", "head": "int4"}))


def test_tied_modules_as_transformers_declares_them():
    with torch.device("meta"):  # on the meta device the host has not tied anything yet
        model = Tied()
        model.head = nn.Linear(64, 80, bias=False)
    model.all_tied_weights_keys = {"head.weight": "embed.weight"}
    assert plan(model, QuantizerConfig("int4", modules={"head": "int8"})).entries["head"].shared_with == "embed"


def test_routers_stay_in_16_bit():
    model = nn.ModuleDict({"layers": nn.ModuleList([Mixture()])})
    found = plan(model, "int4")
    assert list(found.quantized) == ["layers.0.experts.0.gate_proj", "layers.0.experts.1.gate_proj"]
    assert found.entries["layers.0.gate"].reason == "MoE router"
    assert found.entries["layers.0.router.classifier"].reason == "MoE router"
    assert plan(Mixture(), "int4").entries["gate"].reason == "MoE router"
    model["layers"][0].experts = nn.Identity()  # whatever they are: no class that is known
    assert plan(nn.ModuleDict({"model": model, "up": nn.Linear(64, 64)}), "int4").entries["model.layers.0.gate"].reason
    del model["layers"][0].experts
    model.up = nn.Linear(64, 64)
    assert plan(model, "int4").entries["layers.0.gate"].scheme is not None  # a gate, but of no experts


def test_modules_that_the_model_keeps_in_fp32():
    model = nn.ModuleDict({"wo": nn.Linear(64, 64), "wi": nn.Linear(64, 64), "norm_out": nn.Linear(64, 64)})
    model._keep_in_fp32_modules, model._keep_in_fp32_modules_strict = ["wo"], ["norm_out"]
    assert list(plan(model.half(), "int4").quantized) == ["wi"]
    assert plan(model, "int4").entries["wo"].reason == "kept in fp32 by the model"
    assert list(plan(model.to(torch.bfloat16), "int4").quantized) == ["wo", "wi"]  # only fp16 overflows there
    assert list(plan(model, "int4", dtype=torch.float16).quantized) == ["wi"]


def test_the_dtype_that_the_loader_will_use_decides_sizes_and_scales():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(128, 128))
    entry = plan(model, "W4A16", dtype=torch.bfloat16).entries["0"]
    assert entry.dtype == torch.bfloat16 and entry.scheme.weight.scale_dtype == "bfloat16"
    assert entry.bytes_before == 128 * 128 * 2


def test_what_cannot_be_quantized_is_listed_with_its_reason():
    model = nn.ModuleDict(
        {
            "integer": nn.Linear(64, 64),
            "renormed": nn.Embedding(64, 64, max_norm=1.0),
            "bilinear": nn.Bilinear(16, 16, 20),
            "plain": nn.Linear(64, 64),
        }
    )
    model["integer"].weight = nn.Parameter(torch.zeros(64, 64, dtype=torch.int8), requires_grad=False)
    found = plan(model, "int4")
    assert list(found.quantized) == ["plain"]
    reasons = {name: entry.reason for name, entry in found.entries.items() if entry.kind == "other"}
    assert reasons == {
        "renormed": "Embedding has no quantized counterpart",
        "bilinear": "Bilinear has no quantized counterpart: it multiplies two inputs, where codes of one matrix save "
        "nothing in time",
    }
    before = found.nbytes
    assert before == sum(t.nbytes for t in quantize_(model, "int4").parameters())


def test_bare_modules_can_be_planned():
    assert list(plan(nn.Linear(64, 64), "int4").quantized) == [""]
    assert "(model)" in str(plan(nn.Linear(64, 64), "int4"))


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        ("org/model", "int4", "model is a str; needs a torch.nn.Module: what from_pretrained"),
        (nn.Sequential(nn.ReLU()), "int4", "nothing to quantize in Sequential: it has no linear layers"),
        (nn.Linear(8, 8), "int4", "nothing to quantize in Linear: fewer than 4096 weights"),
        (nn.Linear(64, 64).to(torch.float8_e4m3fn), "int4", "Linear: stored in torch.float8_e4m3fn already"),
        (nn.Embedding(64, 64), "int4", "nothing to quantize in Embedding: embedding: only if named"),
        (mlp(), {"weights": "int4", "modules": {"*": None}}, r"nothing to quantize .*kept by modules\['\*'\]"),
        (mlp(), {"weights": "int4", "modules": {"*.down": "int8"}}, r"modules\['\*\.down'\] matches no module"),
        (mlp(), {"weights": "int4", "modules": {"1": "int8"}}, r"modules\['1'\] matches no module that can be quant"),
        (mlp(), {"weights": "int4", "modules": {"re:.*x": None}}, r"matches no module .*the model has \*\.0, \*\.3"),
    ],
)
def test_errors(model, config, message):
    with pytest.raises(ValueError, match=message):
        plan(model, config)


def test_a_model_of_kinds_that_only_names_quantize_is_refused_with_the_names():
    model = nn.ModuleDict({"stages": nn.ModuleList(nn.Conv2d(64, 64, 3) for _ in range(2)), "head": nn.Linear(8, 8)})
    with pytest.raises(ValueError, match=r"to quantize them, name them: modules=\{'stages\.\*': 'int8'\}$"):
        plan(model, "int4")
    assert len(plan(model, QuantizerConfig("int4", modules={"stages.*": "int8"})).quantized) == 2


def test_a_pattern_that_matches_nothing_is_answered_with_close_names():
    model = nn.ModuleDict({"down_proj": nn.Linear(64, 64), "lm_head": nn.Linear(64, 64)})
    with pytest.raises(ValueError, match=r"modules\['lmhead'\] matches no module .*close to it: lm_head"):
        plan(model, QuantizerConfig("int4", modules={"lmhead": "int8"}))
    with pytest.raises(ValueError, match=r"modules\['\*embed\*'\] .* the model has \*\.down_proj, \*\.lm_head"):
        plan(model, QuantizerConfig("int4", modules={"*embed*": "int8"}))  # none is close
    with pytest.raises(ValueError, match=r"modules\['mlp'\] matches no module .*'mlp\.\*' would match"):
        plan(nn.ModuleDict({"mlp": model}), QuantizerConfig("int4", modules={"mlp": None}))


def test_quantizing_twice():
    model = quantize_(mlp(), "int4")
    with pytest.raises(ValueError, match=r"the model is quantized already \(0 is\); dequantize_ it first"):
        plan(model, "int4")


# Names in config.json.


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["lm_head"], ["lm_head"]),
        ([""], [""]),
        (["a.0.up", "a.1.up", "a.2.up"], ["a.{0-2}.up"]),
        (["a.0.up", "a.2.up", "a.3.up", "a.4.up", "a.9.up"], ["a.{0,2-4,9}.up"]),
        (["a.7.up", "a.7.down"], ["a.7.up", "a.7.down"]),
        (["a.0.e.0", "a.0.e.1", "a.1.e.0", "a.1.e.1"], ["a.{0-1}.e.{0-1}"]),
        (["a.0.e.0", "a.0.e.1", "a.1.e.0"], ["a.0.e.0", "a.0.e.1", "a.1.e.0"]),  # no product of two sets
        (["a.007", "a.7"], ["a.007", "a.7"]),
        (["a.#", "a.1", "a.2"], ["a.#", "a.{1-2}"]),
        (["a.1234567", "a.1234568"], ["a.1234567", "a.1234568"]),
        (["0", "3"], ["{0,3}"]),
    ],
)
def test_names_are_folded_and_unfolded(names, folded):
    assert fold_names(names) == folded
    assert sorted(n for f in folded for n in unfold_name(f)) == sorted(names)


@pytest.mark.parametrize(
    ("folded", "message"),
    [
        (3, "names a module 3"),
        ("a.{}", "cannot be read"),
        ("a.{1-}", "cannot be read"),
        ("a.{x}", "cannot be read"),
        ("a.{1;2}", "cannot be read"),
        ("a.{0-999999}.{0-9}", "more than 250000 modules"),
        ("a.{" + ",".join(["0-999999"] * 1000) + "}", "more than 250000 modules"),
    ],
)
def test_malformed_names(folded, message):
    with pytest.raises(ValueError, match=message):
        unfold_name(folded)


def test_the_stored_plan_is_json_and_gives_every_scheme_back():
    model = nn.ModuleDict({"layers": nn.ModuleList(mlp() for _ in range(12)), "head": nn.Linear(64, 64)})
    found = plan(model, QuantizerConfig("int4", modules={"head": "int8", "layers.3.*": "nf4"}))
    stored = found.to_list()
    assert json.loads(json.dumps(stored)) == stored
    assert schemes_from_list(stored) == {name: entry.scheme for name, entry in found.quantized.items()}
    assert [group["modules"] for group in stored] == [["layers.{0-2,4-11}.{0,3}"], ["layers.3.{0,3}"], ["head"]]
    assert schemes_to_list(schemes_from_list(stored)) == stored


INT4 = resolve_scheme({"weights": "int4"}, torch.bfloat16)[0].to_dict()


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (None, "quantization_config has no plan: restore"),
        ({}, "a plan that is a dict, not a list"),
        (["a"], "the stored plan has 'a'; needs"),
        ([{"scheme": INT4, "modules": "a"}], "needs {scheme, modules}"),
        (
            [{"modules": ["a"]}],
            "a scheme is {weight, activation, sparsity, cpu_activation, input_transform}, got None",
        ),
        ([{"scheme": INT4, "modules": [None]}], "names a module None"),
        ([{"scheme": {"weight": {**INT4["weight"], "format": "int9"}}, "modules": ["a"]}], "'int9'"),
        ([{"scheme": {"weight": {**INT4["weight"], "group_size": 7}}, "modules": ["a"]}], "group_size is 7"),
    ],
)
def test_a_malformed_plan_is_refused(stored, message):
    with pytest.raises(ValueError, match=message):
        schemes_from_list(stored)


def test_a_plan_of_too_many_modules_is_refused(monkeypatch):
    monkeypatch.setattr("hf_quant.planning.names.MAX_MODULES", 100)
    assert len(schemes_from_list([{"scheme": INT4, "modules": ["a.{0-49}", "b.{0-49}"]}])) == 100
    with pytest.raises(ValueError, match="names more than 100 modules"):
        schemes_from_list([{"scheme": INT4, "modules": ["a.{0-49}", "b.{0-50}"]}])


def test_every_format_has_its_bits():
    assert {name for name, _, _ in BITS} >= set(FORMATS)


def test_adapters_stay_trainable():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.base_layer = nn.Linear(64, 64)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(64, 64)})

    planned = plan(nn.Sequential(Wrapper()), "int8")
    assert list(planned.quantized) == ["0.base_layer"]
    assert planned.entries["0.lora_A.default"].reason == "trainable adapter"


def test_an_exclusion_that_matches_nothing_is_said(caplog):
    plan(nn.Sequential(nn.Linear(64, 64)), QuantizerConfig("int8", modules_to_not_convert=["lm-head"]))
    assert "lm-head" in caplog.text
    caplog.clear()
    tower = nn.ModuleDict({"tower": nn.ModuleDict({"up": nn.Linear(64, 64)})})
    plan(nn.ModuleDict({"model": tower}), QuantizerConfig("int8", modules_to_not_convert=["tower.*"]))
    assert "'tower.*', which no module that can be quantized matches; '*.tower.*' would match" in caplog.text
    caplog.clear()
    plan(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), QuantizerConfig("int8", modules_to_not_convert=["1"]))
    assert not caplog.text


def test_modules_kept_in_fp32_stay_so_beside_a_list_of_exclusions():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model._keep_in_fp32_modules_strict = ["0"]
    planned = plan(model, QuantizerConfig("int8", modules_to_not_convert=["1"]))
    assert list(planned.quantized) == ["2"]


class Odd(nn.Module):
    """A table that is read in a way of its own, most of a model, beside a head and a layer."""

    def __init__(self, rows: int = 256) -> None:
        super().__init__()
        self.table, self.layer, self.head = nn.ParameterDict({"w": torch.ones(rows, 4096)}), nn.Linear(64, 64), None

    def get_output_embeddings(self) -> nn.Module | None:
        return self.head


def test_a_model_that_mostly_stays_in_16_bit_is_a_warning_and_a_line_of_the_plan(caplog):
    model = Odd()
    line = "99 % of the weights stay in 16 bit: 99 %, as ParameterDict has no quantized counterpart"
    assert line in str(plan(model, "int4")) and not caplog.records
    quantize_(model, "int4")
    (record,) = caplog.records
    assert f"Odd: {line}; hf_quant cannot quantize these" in record.getMessage()


def test_what_stays_in_16_bit_is_named_with_its_reason_and_a_pattern():
    with torch.device("meta"):
        model = nn.ModuleDict(
            {
                "layers": nn.ModuleList(nn.Conv2d(256, 512, 3) for _ in range(4)),
                "table": nn.Embedding(1000, 256),
                "head": nn.Linear(64, 64),
                "pair": nn.Bilinear(8, 64, 16),  # 0.2 %: not named
            }
        )
    line = plan(model, "int4").left
    assert line == (
        "99 % of the weights stay in 16 bit: 94 % conv (only if named in `modules`); "
        "5 % embedding (only if named in `modules`); to quantize them, too, name them: "
        "modules={'layers.*': 'int8'}"
    )
    assert plan(model, QuantizerConfig("int4", modules={"layers.*": "int8"})).left is None


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (lambda: Odd(255), "int4"),  # no large layer
        (Odd, QuantizerConfig("int4", modules_to_not_convert=["head"])),
        (Odd, QuantizerConfig(None, modules={"layer": "int8"})),
        (
            lambda: nn.Sequential(nn.Linear(2048, 1024), nn.Linear(64, 64)),
            QuantizerConfig("int4", modules={"0": None}),
        ),
        (lambda: nn.Sequential(nn.Conv2d(1024, 1024, 1), nn.Linear(1024, 1024)), "int4"),  # no more than half
    ],
    ids=["small", "excluded", "named", "kept by modules", "half"],
)
def test_no_warning_where_nothing_large_or_what_was_asked_for_stays(caplog, model, config):
    with torch.device("meta"):
        found = plan(model(), config)
    found.warn("Model")
    assert found.left is None and "stay in 16 bit" not in str(found)
    assert not [r for r in caplog.records if "stay in 16 bit" in r.getMessage()]


def test_blocks_of_a_decoder_outside_of_the_body_are_no_task_head():
    def block() -> nn.Module:
        return nn.ModuleDict({name: nn.Linear(64, 64) for name in ("q", "k", "v", "o")})

    class Masked(nn.Module):
        base_model_prefix = "encoder"

        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.ModuleList([block()])
            self.decoder = nn.ModuleDict(
                {"layers": nn.ModuleList([block(), block()]), "prediction": nn.Linear(64, 64)}
            )
            self.boxes = nn.ModuleList([nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))])
            convolved = {
                "depth": nn.Conv1d(64, 64, 7, groups=64),
                "up": nn.Linear(64, 128),
                "down": nn.Linear(128, 64),
            }
            self.convnext = nn.ModuleList([nn.ModuleDict(convolved)])

    found = plan(Masked(), "int4")
    assert {name for name, e in found.entries.items() if e.reason == "task head"} == {
        "decoder.prediction",
        *(f"boxes.0.{i}" for i in range(3)),
    }
    assert {"decoder.layers.1.o", "convnext.0.up", "convnext.0.down"} <= found.quantized.keys()


def test_exclusions_that_a_list_replaces_are_a_warning(caplog):
    model = Odd()
    model.head, model.table = nn.Linear(64, 80), nn.Identity()
    quantize_(copy.deepcopy(model), QuantizerConfig("int4", modules_to_not_convert=["head"]))
    quantize_(copy.deepcopy(model), QuantizerConfig("int4", modules={"head": "int8"}, modules_to_not_convert=["x"]))
    assert not [r for r in caplog.records if "replaces" in r.getMessage()]
    quantize_(model, QuantizerConfig("int4", modules_to_not_convert=["x"]))
    text = caplog.records[-1].getMessage()
    assert (
        "replaces the model's own exclusions, so that head (output embedding) of this Odd are quantized, too" in text
    )
