"""imatrix: the codes of an algorithm without data, with the squared errors of a column weighted by its input's.

Each column counts as much as the mean of the square of its input, its part of the diagonal of the Hessian. llama.cpp
keeps these means in a file of the same name, https://github.com/ggml-org/llama.cpp/pull/4861.
"""

from torch import Tensor

from hf_quant.algorithms.solver import Grid, Solution, Statistics


def imatrix(weight: Tensor, statistics: Statistics, grid: Grid) -> Solution:
    """Choose the scales of weight [N, K] for its inputs; each weight is rounded to the nearest.

    Raises ValueError if no second moment was recorded.
    """
    moment = statistics.second_moment
    if moment is None:
        raise ValueError("imatrix needs the mean square of the layer's inputs: calibrate with kind='second_moment'")
    spans = map(grid.columns, range(grid.num_groups))
    # What was never seen counts a little: a group of zeros would fit any scale.
    importance = moment + 1e-4 * moment.mean() + 1e-30
    return Solution(weight, [grid.choose(weight[:, span], importance[span]) for span in spans])
