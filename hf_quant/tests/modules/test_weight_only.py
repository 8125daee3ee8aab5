"""Weight-only modules whose forward is torch's: attention, transposed and normed convolutions, recurrent layers."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from hf_quant import QuantizerConfig, dequantize_, load_quantized_, plan, prepare_qat_, quantize_, save_quantized
from hf_quant.modules import QuantizedModule
from hf_quant.testing import PRODUCT_RMS, assert_close, sqnr


def values(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def old_norm(layer: nn.Module, **options: int) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch calls it deprecated; diffusers still has it
        return nn.utils.weight_norm(layer, **options)


def first(output: tuple[Tensor, ...]) -> Tensor:
    return output[0]


class Case(NamedTuple):
    """A module, its input, its call, and the name and kind of the part that is quantized."""

    make: Callable[[], nn.Module]
    x: Tensor
    call: Callable[[nn.Module, Tensor], Tensor]
    kind: str
    part: str = ""


WIDE = values(2, 5, 96, seed=2)  # keys and values of another width
SEQUENCE, IMAGE = values(2, 16, 9), values(2, 16, 5, 5)
UP = {"stride": 2, "padding": 1, "output_padding": 1}
CASES = {
    "attention": Case(
        lambda: nn.MultiheadAttention(64, 4, batch_first=True),
        values(2, 7, 64),
        lambda m, x: first(m(x, x, x)),
        "attention",
    ),
    "pooling": Case(  # the query is another tensor, as in the head of SigLIP
        lambda: nn.MultiheadAttention(64, 4, batch_first=True),
        values(2, 7, 64),
        lambda m, x: first(m(x[:, :1].detach() + 1, x, x)),
        "attention",
    ),
    "widths": Case(
        lambda: nn.MultiheadAttention(64, 4, batch_first=True, kdim=96, vdim=96, bias=False),
        values(2, 7, 64),
        lambda m, x: first(m(x, WIDE, WIDE)),
        "attention",
    ),
    "transposed 1d": Case(lambda: nn.ConvTranspose1d(16, 32, 3, **UP), SEQUENCE, lambda m, x: m(x), "conv_transpose"),
    "transposed 2d": Case(
        lambda: nn.ConvTranspose2d(16, 32, 3, groups=2, bias=False), IMAGE, lambda m, x: m(x), "conv_transpose"
    ),
    "transposed, size": Case(
        lambda: nn.ConvTranspose2d(16, 32, 3, stride=2), IMAGE, lambda m, x: m(x, [12, 12]), "conv_transpose"
    ),
    "transposed 3d": Case(
        lambda: nn.ConvTranspose3d(16, 32, 2), values(1, 16, 3, 3, 3), lambda m, x: m(x), "conv_transpose"
    ),
    "weight norm": Case(
        lambda: parametrizations.weight_norm(nn.Conv1d(16, 32, 5, groups=2), dim=2),  # as in Wav2Vec2
        SEQUENCE,
        lambda m, x: m(x),
        "weight_norm",
        "parametrizations.weight",
    ),
    "weight norm, transposed": Case(
        lambda: parametrizations.weight_norm(nn.ConvTranspose1d(16, 32, 5)),
        SEQUENCE,
        lambda m, x: m(x),
        "weight_norm",
        "parametrizations.weight",
    ),
    "old weight norm": Case(lambda: old_norm(nn.Conv1d(16, 32, 5)), SEQUENCE, lambda m, x: m(x), "conv"),
    "old weight norm, transposed": Case(
        lambda: old_norm(nn.ConvTranspose1d(16, 32, 5), dim=1), SEQUENCE, lambda m, x: m(x), "conv_transpose"
    ),
    "lstm": Case(lambda: nn.LSTM(32, 64, 2), values(7, 2, 32), lambda m, x: first(m(x)), "recurrent"),
    "lstm, two directions": Case(
        lambda: nn.LSTM(32, 64, 2, bidirectional=True, batch_first=True),
        values(2, 7, 32),
        lambda m, x: first(m(x)),
        "recurrent",
    ),
    "lstm, projection": Case(
        lambda: nn.LSTM(32, 64, proj_size=32, bias=False), values(7, 2, 32), lambda m, x: first(m(x)), "recurrent"
    ),
    "gru": Case(lambda: nn.GRU(32, 64, 2), values(7, 32), lambda m, x: first(m(x)), "recurrent"),
    "rnn": Case(lambda: nn.RNN(32, 64), values(7, 2, 32), lambda m, x: first(m(x)), "recurrent"),
}
ON_REQUEST = [name for name, case in CASES.items() if case.kind != "attention"]


def plain(name: str) -> nn.Module:
    torch.manual_seed(0)
    module = CASES[name].make()
    for key, parameter in module.named_parameters():
        if "bias" in key:
            nn.init.normal_(parameter, std=0.1)
    return module


def config(name: str, fields="int4") -> QuantizerConfig:
    return QuantizerConfig(None, modules={CASES[name].part: fields})


def quantized(name: str, fields="int4") -> nn.Module:
    return quantize_(plain(name), config(name, fields))


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_dequantized_module(name):
    case = CASES[name]
    module, reference = quantized(name), dequantize_(quantized(name))
    part = module.get_submodule(case.part)
    assert isinstance(part, QuantizedModule) and part.kind == case.kind
    x, same = case.x.clone().requires_grad_(), case.x.clone().requires_grad_()
    y, expected = case.call(module, x), case.call(reference, same)
    assert_close(y, expected, rms=1e-5)
    grad = values(*y.shape, seed=3)
    y.backward(grad)
    expected.backward(grad)
    assert_close(x.grad, same.grad, rms=1e-5)
    trained = {key: p.grad for key, p in reference.named_parameters() if "bias" in key or key.endswith(("0", "_g"))}
    for key, p in module.named_parameters():
        if p.requires_grad and key in trained:  # biases and magnitudes
            assert_close(p.grad, trained[key], rms=1e-5)
    assert 5 < sqnr(y.detach(), case.call(plain(name), case.x).detach()) < 40  # it is quantized


@pytest.mark.parametrize("name", CASES)
def test_saved_loaded_copied_and_dequantized_to_the_bit(name, tmp_path):
    module = quantized(name)
    save_quantized(module, tmp_path)
    copies = [load_quantized_(plain(name), tmp_path), copy.deepcopy(module)]
    if "norm" not in name:  # torch pickles no parametrized module, and no hook of a local function
        copies.append(pickle.loads(pickle.dumps(module)))
    expected = CASES[name].call(module, CASES[name].x)
    for other in copies:
        state = other.state_dict()
        assert state.keys() == module.state_dict().keys()
        assert all(torch.equal(tensor, state[key]) for key, tensor in module.state_dict().items())
        assert torch.equal(CASES[name].call(other, CASES[name].x), expected)
    other, host = dequantize_(copies[0]), plain(name)
    assert type(other) is type(host) or parametrize.is_parametrized(host)
    assert {key: p.shape for key, p in other.named_parameters()} == {
        key: p.shape for key, p in host.named_parameters()
    }
    assert_close(CASES[name].call(other, CASES[name].x), expected, rms=1e-5)


@pytest.mark.parametrize("name", ["attention", "transposed 2d", "weight norm", "lstm"])
@pytest.mark.parametrize("fields", ["int8", "W8A8", "nvfp4", "fp8_e4m3", {"weights": "int2"}, "int4"])
def test_they_are_weight_only_in_every_format(name, fields):
    module = quantized(name, fields)
    scheme = module.get_submodule(CASES[name].part).scheme
    assert scheme.activation is None and scheme.input_transform is None
    entry = plan(plain(name), config(name, fields)).entries[CASES[name].part]
    assert "dequantize" in entry.kernel("cpu") or "native" in entry.kernel("cpu")
    assert str(scheme) in str(plan(plain(name), config(name, fields)))
    y = CASES[name].call(module, CASES[name].x)
    assert_close(y, CASES[name].call(dequantize_(quantized(name, fields)), CASES[name].x), rms=1e-5)


@pytest.mark.parametrize("name", ON_REQUEST)
def test_they_stay_in_16_bit_unless_they_are_named(name):
    model = nn.Sequential(nn.Linear(64, 64), plain(name))
    found = plan(model, "int4")
    path = f"1.{CASES[name].part}".rstrip(".")
    assert list(found.quantized) == ["0"]
    assert found.entries[path].reason == f"{CASES[name].kind}: only if named in `modules`"


def test_attention_is_quantized_by_default():
    found = plan(nn.TransformerEncoderLayer(64, 4, 128), "int4")
    assert set(found.quantized) == {"self_attn", "self_attn.out_proj", "linear1", "linear2"}
    with pytest.raises(ValueError, match="by itself"):
        prepare_qat_(nn.Sequential(plain("attention")), QuantizerConfig("int4", modules={"*.out_proj": None}))


def test_a_weight_that_is_taken_off_its_module_is_an_error_that_says_what_to_do():
    module = quantized("attention")
    with pytest.raises(ValueError, match="in_proj_weight of this QuantMultiheadAttention .* adapt other layers"):
        del module.in_proj_weight  # as PEFT's LoRA of torch's attention does


@pytest.mark.parametrize("name", ["old weight norm", "old weight norm, transposed"])
def test_no_16_bit_weight_is_kept_between_two_calls(name):
    module = quantized(name)
    for _ in range(2):
        assert not [key for key, value in vars(module).items() if isinstance(value, Tensor)]
        CASES[name].call(module, CASES[name].x)
    assert module.weight.shape == plain(name).weight.shape  # made when it is read
    assert not [key for key, value in vars(module).items() if isinstance(value, Tensor)]


def test_recurrent_layers_move_between_dtypes_and_take_packed_sequences():
    module, reference = quantized("lstm"), dequantize_(quantized("lstm"))
    packed = nn.utils.rnn.pack_padded_sequence(CASES["lstm"].x, [7, 3])
    with torch.no_grad():
        assert_close(module(packed)[0].data, reference(packed)[0].data, rms=1e-5)
        half = module.to(torch.bfloat16)(CASES["lstm"].x.bfloat16())[0]
        assert half.dtype == torch.bfloat16
        assert_close(half, reference(CASES["lstm"].x)[0], rms=5e-2)
    assert module.weight_ih_l0.shape == (256, 32) and module.weight_ih_l0.dtype == torch.bfloat16
    module.flatten_parameters()


def test_attention_under_autocast_and_with_a_mask():
    module, reference = quantized("attention"), dequantize_(quantized("attention"))
    x = CASES["attention"].x
    options = {"attn_mask": nn.Transformer.generate_square_subsequent_mask(7), "need_weights": False}
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        y, expected = module(x, x, x, **options)[0], reference(x, x, x, **options)[0]
    assert_close(y, expected, rms=PRODUCT_RMS[torch.bfloat16])


@pytest.mark.parametrize("name", ["attention", "transposed 2d", "weight norm"])
def test_torch_compile_gives_the_same(name):
    module, reference = quantized(name), dequantize_(quantized(name))
    compiled = torch.compile(module, backend="aot_eager")
    with torch.no_grad():
        assert_close(CASES[name].call(compiled, CASES[name].x), CASES[name].call(reference, CASES[name].x), rms=1e-5)


def test_a_table_that_is_looked_up_by_function_dequantizes_its_rows_only(monkeypatch):
    class Scaled(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return nn.functional.embedding(ids, self.weight) * 2

    torch.manual_seed(0)
    table = quantize_(Scaled(32, 64), QuantizerConfig(None, modules={"": "int8"}))
    ids = torch.tensor([[3, 0], [31, 3]])
    expected = table.dequantize_weight()[ids] * 2
    monkeypatch.setattr(type(table), "dequantize_weight", lambda *_, **__: pytest.fail("the whole table"))
    assert torch.equal(table(ids), expected)
