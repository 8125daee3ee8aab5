"""Algorithms: weight -> codes, scale, zero point.

An algorithm without data is one function in one file, `(Groups) -> Choice`. It sees the values of the groups and the
grid of the format, so it works for every format and granularity; each code is then the nearest on the grid.

A solver, `(weight, Statistics, Grid) -> Solution`, also sees the inputs of the layer, and may correct the weights that
it has not reached yet for the errors of those that it has (`solver`).
"""

from hf_quant.algorithms.driver import Algorithm, empty_packed, geometry
from hf_quant.algorithms.float_zeros import unused_scale
from hf_quant.algorithms.matrix import (
    ALGORITHMS,
    SOLVERS,
    calibrated_matrix,
    default_algorithm,
    quantize_matrix,
    solve_matrix,
)
from hf_quant.algorithms.solver import Grid, Scales, Solution, Solver, Statistics
from hf_quant.kernels.weight import PackedWeight


__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Grid",
    "PackedWeight",
    "SOLVERS",
    "Scales",
    "Solution",
    "Solver",
    "Statistics",
    "calibrated_matrix",
    "default_algorithm",
    "empty_packed",
    "geometry",
    "quantize_matrix",
    "solve_matrix",
    "unused_scale",
]
