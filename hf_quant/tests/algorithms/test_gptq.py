"""`gptq` and `imatrix`: less error of the output than without data, on every grid; with wrong statistics, not."""

import pytest
import torch
from torch import Tensor

from hf_quant.algorithms import SOLVERS, Statistics, calibrated_matrix, quantize_matrix, solve_matrix
from hf_quant.scheme import TensorQuant
from hf_quant.tests.algorithms.test_driver import SCHEMES, assert_equal, decoded, scheme
from hf_quant.tests.algorithms.test_solver import K, correlated_inputs, output_error, statistics_of, weight


INT4 = scheme("int4")


def errors(quant: TensorQuant, hessian: Tensor, algorithm: str = "gptq") -> tuple[float, float]:
    """Squared errors of the output: (of the algorithm, of the one without data)."""
    w, x = weight(), correlated_inputs()
    solved = solve_matrix(w, quant, SOLVERS[algorithm], Statistics(1, hessian=hessian))
    return output_error(w, solved, quant, x), output_error(w, quantize_matrix(w, quant), quant, x)


def hessian_of(x: Tensor) -> Tensor:
    return x.t() @ x / len(x)


# One scale for a whole matrix, and fp8 with its small errors, leave least to correct.
@pytest.mark.parametrize("quant", SCHEMES, ids=str)
def test_gptq_corrects_on_every_grid(quant):
    solved, plain = errors(quant, hessian_of(correlated_inputs()))
    assert solved < 0.7 * plain


def test_gptq_with_the_statistics_of_something_else_does_not():
    """Negative controls: inputs that depend on nothing, and columns in another order."""
    right, plain = errors(INT4, hessian_of(correlated_inputs()))
    assert right < 0.5 * plain
    assert errors(INT4, torch.eye(K))[0] > 0.8 * plain
    shuffled = torch.randperm(K, generator=torch.Generator().manual_seed(1))
    assert errors(INT4, hessian_of(correlated_inputs()[:, shuffled]))[0] > plain


def test_gptq_needs_fewer_inputs_than_columns():
    few = correlated_inputs()[:96]
    solved, plain = errors(INT4, hessian_of(few))
    assert solved < plain


def test_scales_in_fp32_of_more_rows_than_are_done_at_once():
    quant = TensorQuant("int4", "group", 64, scale_dtype="float32")
    w, statistics = weight().repeat(20, 1), Statistics(1, hessian=hessian_of(correlated_inputs()))
    found = decoded(solve_matrix(w, quant, SOLVERS["gptq"], statistics), quant, w.shape)
    alone = decoded(solve_matrix(weight(), quant, SOLVERS["gptq"], statistics), quant, weight().shape)
    torch.testing.assert_close(found, alone.repeat(20, 1))


def test_columns_without_input_are_rounded_to_the_nearest():
    x = correlated_inputs()
    x[:, 32:64] = 0  # a group of its own
    w = weight()
    solved = solve_matrix(w, INT4, SOLVERS["gptq"], Statistics(1, hessian=hessian_of(x)), "absmax")
    plain = quantize_matrix(w, INT4, "absmax")
    assert torch.equal(solved.scale[:, 1].float(), plain.scale[:, 1].float())
    found, expected = decoded(solved, INT4, w.shape), decoded(plain, INT4, w.shape)
    assert torch.equal(found[:, 32:64], expected[:, 32:64]) and not torch.equal(found, expected)


def test_a_hessian_without_a_factorization_is_refused():
    for bad in (torch.full((K, K), float("nan")), -torch.eye(K) * 100):
        with pytest.raises(ValueError, match="the Hessian of the inputs"):
            solve_matrix(weight(), INT4, SOLVERS["gptq"], Statistics(1, hessian=bad))
    for algorithm, kind in (("gptq", "hessian"), ("imatrix", "second_moment")):
        with pytest.raises(ValueError, match=f"calibrate with kind='{kind}'"):
            solve_matrix(weight(), INT4, SOLVERS[algorithm], Statistics(1, amax=torch.ones(K)))
        with pytest.raises(ValueError, match="needs the statistics"):
            quantize_matrix(weight(), INT4, algorithm)


@pytest.mark.parametrize("quant", [INT4, scheme("nf4"), scheme("int3", symmetric=False), scheme("nvfp4")], ids=str)
def test_imatrix_spends_the_bits_where_the_inputs_are_large(quant):
    x = torch.randn(512, K, generator=torch.Generator().manual_seed(3))
    x[:, ::8] *= 20
    w = weight()
    moment = x.square().mean(0)
    solved = solve_matrix(w, quant, SOLVERS["imatrix"], Statistics(1, second_moment=moment))
    plain = output_error(w, quantize_matrix(w, quant, "mse"), quant, x)
    assert output_error(w, solved, quant, x) < 0.9 * plain
    wrong = solve_matrix(w, quant, SOLVERS["imatrix"], Statistics(1, second_moment=moment.roll(1)))
    assert output_error(w, wrong, quant, x) > plain
    alike = solve_matrix(w, quant, SOLVERS["imatrix"], Statistics(1, second_moment=torch.ones(K)))
    assert output_error(w, alike, quant, x) == pytest.approx(plain, rel=0.02)


def test_what_was_held_out_decides():
    x = correlated_inputs()
    w, hessian = weight(), hessian_of(x)
    plain, solved = quantize_matrix(w, INT4), solve_matrix(w, INT4, SOLVERS["gptq"], Statistics(1, hessian=hessian))
    for held_out, expected, kept in ((x[:64], solved, 0), (torch.randn(64, K), plain, 1), (None, solved, 0)):
        found = calibrated_matrix(w, INT4, "gptq", [Statistics(1, hessian=hessian, held_out=held_out)])
        assert_equal(found[0], expected)
        assert found[1] == kept


@pytest.mark.parametrize("quant", [INT4, scheme("int8"), scheme("fp8_e4m3", "tensor"), scheme("nvfp4")], ids=str)
def test_matrices_of_experts_have_statistics_of_their_own(quant):
    w = torch.stack([weight(), weight().flip(0)])
    own = [statistics_of(correlated_inputs()), statistics_of(correlated_inputs().roll(3, 1))]
    packed, _ = calibrated_matrix(w, quant, "gptq", own)
    for i in range(2):
        alone = calibrated_matrix(w[i], quant, "gptq", own[i : i + 1])[0]
        for part, expected in zip(packed, alone):
            assert (part is None) == (expected is None)
            assert part is None or torch.equal(
                part[i].reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)
            )
    with pytest.raises(ValueError, match="statistics of 1 matrices"):
        calibrated_matrix(w, quant, "gptq", own[:1])
