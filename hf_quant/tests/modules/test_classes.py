"""Classes of modules that change under the hooks of hosts."""

import functools

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import nn

from hf_quant import convert_qat_, dequantize_, finish_training_, prepare_qat_, prepare_training_, quantize_
from hf_quant.modules import runs_its_class, set_class_


class Doubled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def by_accelerate(layer: nn.Module) -> None:
    add_hook_to_module(layer, ModelHook())


def by_diffusers(layer: nn.Module) -> None:
    hooks = pytest.importorskip("diffusers.hooks.hooks", reason="diffusers is an optional host")
    registry = hooks.HookRegistry.check_if_exists_or_initialize(layer)
    for name in ("inner", "outer"):
        registry.register_hook(hooks.ModelHook(), name)


def layer(hook=None) -> nn.Linear:
    torch.manual_seed(0)
    found = nn.Linear(64, 64)
    if hook is not None:
        hook(found)
    return found


X = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("hook", [None, by_accelerate, by_diffusers])
def test_a_hook_calls_the_new_class(hook):
    plain, hooked = layer(), layer(hook)
    set_class_(hooked, Doubled)
    assert runs_its_class(hooked) and torch.equal(hooked(X), 2 * plain(X))
    set_class_(hooked, nn.Linear)
    assert torch.equal(hooked(X), plain(X))


def test_hooks_around_hooks():
    hooked = layer(by_accelerate)
    inner = hooked.forward

    def outer(*args):
        return inner(*args)

    hooked.forward = outer
    set_class_(hooked, Doubled)
    assert torch.equal(hooked(X), 2 * layer()(X))
    bare = layer()
    original = bare.forward

    def first(*args):
        return original(*args)

    def second(*args):
        return first(*args)

    bare.forward = lambda *args: second(*args) if args else later
    assert runs_its_class(bare)
    set_class_(bare, Doubled)
    later = None  # until here the cell of the function is empty
    assert torch.equal(bare(X), 2 * layer()(X))


@pytest.mark.parametrize(
    ("into", "out"),
    [
        (functools.partial(prepare_training_, min_size=1), finish_training_),
        (functools.partial(prepare_qat_, config="int4"), convert_qat_),
        (functools.partial(quantize_, config="W8A8"), dequantize_),
    ],
)
@pytest.mark.parametrize("hook", [by_accelerate, by_diffusers])
def test_a_hooked_model_computes_as_one_without(hook, into, out):
    plain, hooked = nn.Sequential(layer()), nn.Sequential(layer(hook))
    for change in (into, out):
        change(plain)
        change(hooked)
        assert type(plain[0]) is type(hooked[0]) and torch.equal(plain(X), hooked(X))
    if hook is by_accelerate:
        remove_hook_from_module(hooked[0])
    else:
        hooked[0]._diffusers_hook.remove_hook("outer")
        hooked[0]._diffusers_hook.remove_hook("inner")
    assert torch.equal(plain(X), hooked(X))


def test_a_forward_that_never_reaches_the_class_is_refused():
    model = nn.Sequential(layer(), layer())
    model[0].forward = lambda x: x
    assert "something has replaced its forward" in str(prepare_training_(model, min_size=1))
    assert type(model[0]) is nn.Linear
    finish_training_(model)
    with pytest.raises(ValueError, match="0 would not compute in training .* something has replaced its forward"):
        prepare_qat_(model, "int4")
    assert type(model[1]) is nn.Linear
