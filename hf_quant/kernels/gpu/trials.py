"""Ways to launch that are compiled, interpreted and modelled, and off until a GPU has measured them.

`HF_QUANT_TRIALS=dependent_launches,stripes` in the environment, or `use_trials`, turns them on;
`scripts/bench_kernels.py --trials` measures them against what is shipped.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from hf_quant.kernels.gpu.launch import Target, forget_plans


VARIABLE = "HF_QUANT_TRIALS"  # environment variable: names, separated by commas


class Trials(NamedTuple):
    """The trials, each on or off.

    Attributes:
        dependent_launches: programmatic dependent launches (sm90 and newer) of the kernels of decoding: a kernel is
            set up while the one before it ends. An estimate: 1 to 2 of the 2.5 to 3.5 us of a launch in a graph.
        stripes: weight-only products of few tokens (sm90, sm100) in two programs a multiprocessor, each of which takes
            an equal share of all steps (stream-K, https://arxiv.org/abs/2301.03598), instead of parts of K.
        merged_splits: in attention of few queries over a quantized cache the program that comes last adds the
            splits, instead of a launch of its own.
    """

    dependent_launches: bool = False
    stripes: bool = False
    merged_splits: bool = False


_chosen: Trials | None = None


def trials() -> Trials:
    """The trials that plans follow. Raises ValueError if the environment names one that does not exist."""
    global _chosen
    if _chosen is None:
        _chosen = named_trials([name for name in os.environ.get(VARIABLE, "").split(",") if name])
    return _chosen


def dependent_options(target: Target) -> dict[str, Any]:
    """The options of a kernel that calls `begin` first: whether it is a dependent launch."""
    if trials().dependent_launches and target.capability >= 90:
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}


def named_trials(names: list[str]) -> Trials:
    """The trials of these names. Raises ValueError for an unknown one."""
    unknown = [name for name in names if name not in Trials._fields]
    if unknown:
        raise ValueError(f"no trial is named {', '.join(unknown)}; {VARIABLE} takes: {', '.join(Trials._fields)}")
    return Trials(**dict.fromkeys(names, True))


@contextmanager
def use_trials(chosen: Trials) -> Iterator[None]:
    """Launch by these trials in this block, in all threads."""
    global _chosen
    before, _chosen = _chosen, chosen
    forget_plans()
    try:
        yield
    finally:
        _chosen = before
        forget_plans()
