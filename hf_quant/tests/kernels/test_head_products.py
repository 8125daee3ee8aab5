"""`HeadRows`: products of each head with rows of its own of a weight, from either side, on every instruction set."""

import pytest
import torch

from hf_quant.algorithms import geometry
from hf_quant.kernels import hadamard, native
from hf_quant.kernels.native import arguments
from hf_quant.kernels.native.blocks import Block
from hf_quant.kernels.native.heads import HeadRows, unsupported_reason
from hf_quant.kernels.weight import Weight
from hf_quant.testing import assert_close
from hf_quant.tests.kernels.cases import FLOAT_ZEROS, QUANTS, decode_slowly, packed_case


HEADS, BEFORE, COUNT, BEHIND, K = 3, 5, 70, 2, 96
N = HEADS * (BEFORE + COUNT + BEHIND)
KNOWN = [quant for quant in (*QUANTS, *FLOAT_ZEROS) if arguments.knows(quant.format)]

pytestmark = pytest.mark.usefixtures("poison_empty")


@pytest.fixture(params=native.instruction_sets(), autouse=True)
def instruction_set(request):
    with native.using(request.param):
        yield


def case(quant, K=K) -> tuple[Weight, torch.Tensor]:
    """A weight, and the rows that heads are multiplied with: fp64 [HEADS, COUNT, K]."""
    packed, options = packed_case(quant, N, K)
    rows = decode_slowly(packed, quant, K).view(HEADS, -1, K)[:, BEFORE : BEFORE + COUNT]
    return Weight(*packed, options["format"], geometry(quant, N, K)[1], K), rows


def check(weight: Weight, rows: torch.Tensor, M: int, dtype: torch.dtype) -> None:
    """`rows` in the basis of x."""
    heads, generator = HeadRows(weight, HEADS, BEFORE, COUNT), torch.Generator().manual_seed(M)
    x = torch.randn(HEADS, M, weight.K + 1, generator=generator).to(dtype).transpose(0, 1)[..., : weight.K]
    rms = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert_close(heads.scores(x), torch.einsum("mhk,hnk->mhn", x.double(), rows), rms=rms)
    x = torch.randn(M, HEADS, COUNT, generator=generator).to(dtype)
    y = heads.sums(x)
    assert_close(y, torch.einsum("mhn,hnk->mhk", x.double(), rows), rms=rms)
    assert y.shape == (M, HEADS, weight.K) and y.dtype == dtype


@pytest.mark.parametrize("quant", KNOWN, ids=str)
def test_formats(quant):
    weight, rows = case(quant, 256 if quant.group_size in (64, 128) or quant.granularity == "block" else K)
    for M, dtype in ((1, torch.bfloat16), (3, torch.float32), (50, torch.float16)):
        check(weight, rows, M, dtype)


def test_transformed_inputs():
    """Codes of rows in another basis: rows and results are in that of the host."""
    for size in (32, 8):
        weight, rows = case(QUANTS[23])
        diagonal = torch.randn(K // size, size, generator=torch.Generator().manual_seed(size))
        back = hadamard(rows.float(), block_size=size).double() * diagonal.view(-1)
        check(weight._replace(input_diagonal=diagonal), back, 3, torch.float32)


def test_steps_of_blocks():
    """The same bits as by themselves; of factors that are made of those of the weight there is no step."""
    weight, _ = case(QUANTS[23])
    heads, x, q = HeadRows(weight, HEADS, BEFORE, COUNT), torch.randn(2, HEADS, K), torch.randn(2, HEADS, COUNT)
    block = Block(torch.float32, HEADS * K, HEADS * COUNT, HEADS * COUNT, HEADS * K)
    block.multiply_heads(0, 2, heads, sums=False)
    block.multiply_heads(1, 3, heads, sums=True)
    scores, sums = torch.empty_like(q), torch.empty_like(x)
    block.finish()(2, *(part.data_ptr() for part in (x, q, scores, sums)))
    assert torch.equal(scores, heads.scores(x)) and torch.equal(sums, heads.sums(q))
    derived = [quant for quant in KNOWN if not quant.symmetric or quant.granularity == "block"]
    for quant in derived:
        other = HeadRows(case(quant, 256)[0], HEADS, BEFORE, COUNT)
        with pytest.raises(ValueError, match="not read as they lie"):
            block.multiply_heads(0, 2, other, sums=False)
    assert derived


def test_many_rows_of_a_head_and_threads():
    """More rows than are decoded at once, in tasks of several threads: the bits of one."""
    quant = QUANTS[4]
    packed, options = packed_case(quant, 2 * 600, 512)
    weight = Weight(*packed, options["format"], 128, 512)
    heads, before = HeadRows(weight, 2, 0, 600), torch.get_num_threads()
    x, q = torch.randn(2, 2, 512), torch.randn(2, 2, 600)
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append((heads.scores(x), heads.sums(q)))
    finally:
        torch.set_num_threads(before)
    rows = decode_slowly(packed, quant, 512).view(2, 600, 512)
    assert_close(found[0][0], torch.einsum("mhk,hnk->mhn", x.double(), rows), rms=1e-6)
    assert_close(found[0][1], torch.einsum("mhn,hnk->mhk", q.double(), rows), rms=1e-6)
    assert all(map(torch.equal, *found))


def test_what_is_not_multiplied():
    weight, _ = case(QUANTS[0], 100)
    assert "K=100" in unsupported_reason(weight)
    with pytest.raises(ValueError, match="K=100"):
        HeadRows(weight, HEADS, 0, 1)
    assert "groups of 64 do not divide" in unsupported_reason(case(QUANTS[2])[0])
