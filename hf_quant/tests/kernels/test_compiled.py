"""Launches of compiled kernels past Triton's JIT: which of them share a kernel, and what the driver gets."""

import types

import pytest
import torch

from hf_quant.kernels.gpu import compiled
from hf_quant.kernels.gpu.compiled import run_compiled


pytestmark = pytest.mark.skipif(not hasattr(compiled, "knobs"), reason="triton is not installed")


class Kernel:
    """A JIT function of (x, scale, M, N, stride, eps, BLOCK), M and the place of `scale` not specialized."""

    def __init__(self) -> None:
        self.by_jit, self.sent = [], []
        names = {"x": "", "scale": "align", "M": "all", "N": "", "stride": "align", "eps": "", "BLOCK": "constexpr"}
        self.params = [
            types.SimpleNamespace(
                name=name,
                is_constexpr=kind == "constexpr",
                do_not_specialize=kind == "all",
                do_not_specialize_on_alignment=kind == "align",
            )
            for name, kind in names.items()
        ]

    def __getitem__(self, grid):
        def run(*args, **options):
            self.by_jit.append((grid, args, options))
            return types.SimpleNamespace(
                run=lambda *sent: self.sent.append(sent), function="function", packed_metadata="metadata"
            )

        return run


@pytest.fixture
def kernel(monkeypatch):
    active = types.SimpleNamespace(get_current_stream=lambda device: 70 + device)
    monkeypatch.setattr(compiled, "driver", types.SimpleNamespace(active=active))
    monkeypatch.setattr(compiled, "_launchers", {})
    return Kernel()


class Elsewhere(torch.Tensor):
    """A tensor on a GPU, among tensors on the CPU."""

    def get_device(self) -> int:
        return 0


X, SCALE = torch.zeros(64), torch.zeros(64)


def run(kernel, *, x=X, scale=SCALE, M=5, N=32, stride=64, eps=0.5, grid=(2, 3), device=0, BLOCK=16, shared=None):
    shared = {} if shared is None else {"shared": shared}
    options = {"BLOCK": BLOCK} if not shared else {}
    run_compiled(kernel, grid, device, (x, scale, M, N, stride, eps), options, **shared)
    return len(kernel.by_jit)


def test_the_second_launch_goes_to_the_driver_as_it_is(kernel):
    assert run(kernel) == 1 and not kernel.sent
    assert run(kernel, M=7, eps=0.25, grid=(9,)) == 1
    head = (9, 1, 1, 70, "function", "metadata", None, None, None)
    assert kernel.sent == [(*head, X.data_ptr(), SCALE.data_ptr(), 7, 32, 64, 0.25, 16)]
    run(kernel, grid=(1, 2, 3))
    assert kernel.sent[-1][:3] == (1, 2, 3)


def test_tensor_descriptors_go_to_the_driver_as_they_are(kernel):
    def tiles(dtype):
        return types.SimpleNamespace(base=torch.zeros(64, dtype=dtype), block_shape=[8, 8])

    first, second = tiles(torch.float32), tiles(torch.float32)
    assert run(kernel, x=first) == 1 and run(kernel, x=second) == 1
    assert kernel.sent[-1][9] is second
    assert run(kernel, x=tiles(torch.float16)) == 2


def test_launches_that_the_jit_would_compile_alike_share_a_kernel(kernel):
    run(kernel)
    for same in ({"M": 1}, {"M": 2**31 - 1}, {"N": 64}, {"stride": 3}, {"scale": SCALE[1:]}, {"x": X[4:]}):
        assert run(kernel, **same) == 1, same


@pytest.mark.parametrize(
    "other",
    [
        {"N": 33},
        {"N": 1},
        {"stride": 1},
        {"x": X[1:]},
        {"x": X.half()},
        {"x": None},
        {"scale": None},
        {"scale": SCALE.double()},
        {"scale": SCALE.as_subclass(Elsewhere)},
        {"BLOCK": 32},
        {"device": 1},
        {"shared": {"BLOCK": 16}},
    ],
    ids=lambda other: "-".join(other),
)
def test_launches_that_it_would_not(kernel, other):
    run(kernel)
    assert run(kernel, **other) == 2 and run(kernel, **other) == 2 and len(kernel.sent) == 1


def test_sizes_have_the_classes_of_the_jit(kernel):
    run(kernel)
    key_of, sizes = compiled._launchers[id(kernel)].key_of, (0, 1, 2, 8, 15, 16, 17, 31, 32, 48, 2**31 - 16)
    keys = {N: key_of((), X, SCALE, 1, N, 1, 0.5)[0] for N in sizes}
    for a in sizes:
        for b in sizes:
            assert keys[a] != keys[b] or (a == 1, a % 16 == 0) == (b == 1, b % 16 == 0), (a, b)
    assert keys[16] == keys[48] == keys[2**31 - 16]


@pytest.mark.parametrize("size", [-1, 2**31])
def test_sizes_of_other_types_go_through_the_jit(kernel, size):
    run(kernel)
    run(kernel, M=size)
    assert run(kernel, M=size) == 3 and not kernel.sent


def test_profilers_see_every_launch(kernel, monkeypatch):
    run(kernel)
    for name in ("launch_enter_hook", "launch_exit_hook"):
        hook = getattr(compiled.knobs.runtime, name)
        before = len(kernel.by_jit)
        hook.add(print)
        assert run(kernel) == before + 1
        hook.remove(print)
        assert run(kernel) == before + 1


def test_options_of_a_plan_are_kept_by_identity(kernel):
    plan = {"BLOCK": 16}
    assert run(kernel, shared=plan) == 1 and run(kernel, shared=plan) == 1
    assert run(kernel, shared=dict(plan)) == 2
    ready = compiled._launchers[id(kernel)].ready.values()
    assert any(one.shared is plan for one in ready), "its id is not given to another while it is a key"
    assert kernel.by_jit[0][2] == {"BLOCK": 16} and kernel.sent[0][-1] == 16
