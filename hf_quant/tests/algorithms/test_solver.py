"""Solvers see the inputs of a layer and correct its weights, on the grid of any format; the driver stores them."""

import pytest
import torch
from torch import Tensor

from hf_quant.algorithms import Grid, Solution, Statistics, quantize_matrix, solve_matrix
from hf_quant.scheme import TensorQuant
from hf_quant.tests.algorithms.test_driver import SCHEMES, assert_equal, decoded, scheme


N, K = 160, 192


def correlated_inputs(num_tokens: int = 512) -> Tensor:
    """Inputs whose features depend on each other, as those of a trained network do."""
    generator = torch.Generator().manual_seed(5)
    sources = torch.randn(num_tokens, K // 4, generator=generator)
    return sources @ torch.randn(K // 4, K, generator=generator) + 0.1 * torch.randn(
        num_tokens, K, generator=generator
    )


def statistics_of(x: Tensor) -> Statistics:
    return Statistics(len(x), x.abs().amax(0), x.square().mean(0), x.t() @ x / len(x))


def weight(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(6)).to(dtype)


def unchanged(w: Tensor, statistics: Statistics, grid: Grid) -> Solution:
    """The solver that looks at nothing."""
    return Solution(w, [grid.choose(w[:, grid.columns(g)]) for g in range(grid.num_groups)])


def gptq(w: Tensor, statistics: Statistics, grid: Grid) -> Solution:
    """GPTQ column by column, without its batches: the textbook form."""
    w, rounded, scales = w.clone(), torch.empty_like(w), []
    hessian = statistics.hessian + 0.01 * statistics.hessian.diagonal().mean() * torch.eye(K)
    inverse = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    for group in range(grid.num_groups):
        columns = grid.columns(group)
        scales.append(grid.choose(w[:, columns]))
        for k in range(columns.start, min(columns.stop, K)):
            rounded[:, k] = w[:, k]
            error = (w[:, k] - grid.snap(w[:, k : k + 1], scales[-1])[:, 0]) / inverse[k, k]
            w[:, k + 1 :] -= error[:, None] * inverse[k, k + 1 :]
    return Solution(rounded, scales)


def output_error(w: Tensor, packed, quant: TensorQuant, x: Tensor) -> float:
    return (x @ (w - decoded(packed, quant, w.shape)).t()).square().mean().item()


@pytest.mark.parametrize("quant", SCHEMES, ids=str)
def test_what_is_stored_is_what_the_grid_says(quant):
    w, seen = weight(), []

    def spy(w: Tensor, statistics: Statistics, grid: Grid) -> Solution:
        solution = unchanged(w, statistics, grid)
        seen.append(torch.cat([grid.snap(w[:, grid.columns(g)], s) for g, s in enumerate(solution.scales)], 1))
        return solution

    packed = solve_matrix(w, quant, spy, statistics_of(correlated_inputs()))
    torch.testing.assert_close(decoded(packed, quant, w.shape), seen[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("quant", [scheme("int4"), scheme("int8"), scheme("nvfp4"), scheme("int3")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_solver_that_changes_nothing_gives_the_bits_of_its_algorithm(quant, dtype):
    w = weight(dtype)
    solved = solve_matrix(w, quant, unchanged, statistics_of(correlated_inputs()), "mse")
    assert_equal(solved, quantize_matrix(w, quant, "mse"))


@pytest.mark.parametrize(
    "quant", [scheme("int4"), scheme("int3"), scheme("nf4"), scheme("nvfp4"), scheme("int2")], ids=str
)
def test_gptq_lowers_the_error_of_the_output(quant):
    w, x = weight(), correlated_inputs()
    plain, solved = quantize_matrix(w, quant), solve_matrix(w, quant, gptq, statistics_of(x))
    assert output_error(w, solved, quant, x) < 0.6 * output_error(w, plain, quant, x)
    independent = Statistics(1, hessian=torch.eye(K))  # nothing to correct by
    assert_equal(solve_matrix(w, quant, gptq, independent), solve_matrix(w, quant, unchanged, independent))


def test_wrong_statistics_and_weights_are_refused():
    quant, good = scheme("int4"), statistics_of(correlated_inputs())
    with pytest.raises(ValueError, match="inputs 192 wide"):
        solve_matrix(weight()[:, :64], quant, unchanged, good)
    with pytest.raises(ValueError, match="one matrix"):
        solve_matrix(weight()[None], quant, unchanged, good)
    with pytest.raises(ValueError, match="NaN or inf"):
        solve_matrix(weight().fill_(float("nan")), quant, unchanged, good)
    with pytest.raises(ValueError, match="of one layer"):
        Statistics(1, amax=torch.ones(3), second_moment=torch.ones(4))
    with pytest.raises(ValueError, match="of one layer"):
        Statistics(1)
    with pytest.raises(ValueError, match="num_tokens is 0"):
        Statistics(0, amax=torch.ones(3))
