"""Ratios, bandwidth and targets of the CPU benchmark, on a matrix of a few rows."""

import json

import pytest
import torch

import bench_cpu
from bench_cpu import Record, judge
from cpulab import attention as cpu_attention
from cpulab import timing as cpu_timing
from gpulab.cases import CANDIDATES, candidate
from hf_quant import kernels
from hf_quant.algorithms import quantize_matrix
from hf_quant.kernels import native
from hf_quant.modules.rotation import signs
from hf_quant.scheme import InputTransform


KERNELS = (bench_cpu.TORCH, *native.instruction_sets()[:1])  # the second where the extension is built
TINY = ("linear", "--shapes", "256x384", "--threads", "1", "--copies", "2", "--rounds", "2", "--read-bytes", "65536")


@pytest.fixture(autouse=True)
def everything_as_before():
    before, threads = native.active(), torch.get_num_threads()
    yield
    assert (native.active(), torch.get_num_threads()) == (before, threads)


def test_kernels_take_turns_in_one_run(capsys, tmp_path, monkeypatch):
    only, used, call_of = ("--only", "int3 g128", "W8A8 int8"), {}, bench_cpu.forward_call

    def watched(case, K):
        def call(x, packed):
            used.setdefault((case.name, packed.qdata.data_ptr()), set()).add(bench_cpu.kernels_in_use())
            return call_of(case, K)(x, packed)

        return call

    monkeypatch.setattr(bench_cpu, "forward_call", watched)
    options = ("--m", "1", "3", "--kernels", ",".join(KERNELS), "--json", str(tmp_path / "out.json"))
    bench_cpu.main([*TINY, *only, *options])
    text = capsys.readouterr().out
    names = [
        c.name
        for c in (*CANDIDATES, *bench_cpu.GROUPS, *bench_cpu.ROTATED)
        if any(word in c.name for word in only[1:])
    ]
    for name in names:
        for kind in KERNELS:
            label = f"{name}, {kind}" if len(KERNELS) > 1 else name
            (line,) = (line for line in text.splitlines() if line.startswith(f"{label} "))
            ratio, _, gbps, share = line.removeprefix(label).split()
            assert float(ratio) > 0 and float(gbps) >= 0 and share.endswith("%")
    assert len(used) == len(names) * len(KERNELS) * 2, "each of the kernels has copies of its own"
    assert sorted(map(sorted, used.values())) == sorted([kind] for kind in KERNELS for _ in range(2 * len(names)))
    found = json.loads((tmp_path / "out.json").read_text())
    records = [Record(**fields) for fields in found["records"]]
    assert {(r.name, r.kernels, r.M) for r in records if r.kernels} == {
        (name, kind, M) for name in names for kind in KERNELS for M in (1, 3)
    }
    bandwidth = max(r.gbps for r in records if r.name.startswith("read"))
    for record in records:
        base = next(r for r in records if (r.name, r.M) == ("bf16", record.M))
        if record.kernels:
            assert record.ratio == pytest.approx(base.seconds / record.seconds)
            assert record.share == (pytest.approx(record.gbps / bandwidth) if record.M == 1 else None)
    assert base.gbps == pytest.approx(256 * 384 * 2 / base.seconds / 1e9)
    assert found["targets"] == [] and "torch" in found["environment"]


def test_targets_are_judged(capsys, tmp_path):
    bench_cpu.main([*TINY, "--targets", "--kernels", "torch", "--m", "1", "4", "--json", str(tmp_path / "out.json")])
    goals = json.loads((tmp_path / "out.json").read_text())["targets"]
    # Six at M = 1, one of the bandwidth, three at M = 4; twelve against groups of 128 at each M; two rotated at M = 1.
    assert len(goals) == 36
    text = capsys.readouterr().out
    assert f"{sum(goal['pass'] for goal in goals)} of 36 targets are reached" in text
    for goal in goals:
        assert goal["pass"] == (goal["reached"] >= goal["target"])
    assert sum("PASS" in line or "short by" in line for line in text.splitlines()) == 36


def test_small_groups_are_compared_with_their_peer():
    place = {"kernels": "avx512", "threads": 1, "direction": "forward", "M": 1, "gbps": 1, "ratio": 3.0}
    records = [
        Record(name="nf4 g128", shape="4096x4096", seconds=9, **place),
        Record(name="nf4 g128", shape="576x1536", seconds=1, **place),
        Record(name="nf4 g32 fp8 scales", shape="4096x4096", seconds=10, **place),
        Record(name="nf4 g64 fp8 scales", shape="4096x4096", seconds=11, **place),
    ]
    found = [(g["name"], g["what"], g["reached"], g["pass"]) for g in judge(records)]
    assert found == [
        ("nf4 g32 fp8 scales", "x nf4 g128", pytest.approx(0.9), True),
        ("nf4 g64 fp8 scales", "x nf4 g128", pytest.approx(9 / 11), False),
    ]


def test_a_rotated_product_rotates_and_is_compared_with_the_plain_one():
    rotated, x = bench_cpu.ROTATED[0], torch.randn(3, 192)
    packed = quantize_matrix(torch.randn(64, 192), rotated.weight, "absmax")
    found, plain = (bench_cpu.forward_call(c, 192)(x, packed) for c in (rotated, candidate("W8A8 int8")))
    factors = signs(InputTransform(64), 192, x.device)
    expected = kernels.dynamic_mm(x, *packed, None, factors, activation="int8", format="int8", group_size=192)
    assert torch.equal(found, expected) and not torch.allclose(found, plain, atol=1)
    place = {"kernels": "avx512", "shape": "64x192", "threads": 1, "direction": "forward", "gbps": 1}
    times = {"W8A8 int8": 19, rotated.name: 20}
    records = [Record(name=name, M=M, seconds=times[name], ratio=1.0, **place) for M in (1, 4) for name in times]
    (goal,) = [g for g in judge(records) if g["name"] == rotated.name]
    assert (goal["M"], goal["what"], goal["reached"], goal["pass"]) == (1, "x W8A8 int8", 0.95, True)


def test_a_verdict_says_by_how_much(capsys):
    place = {"kernels": "avx512", "shape": "14336x4096", "threads": 1, "direction": "forward", "seconds": 1, "gbps": 1}
    records = [
        Record(name="int4 g128", M=1, ratio=6.0, share=0.68, **place),
        Record(name="int4 g128", M=512, ratio=0.9, **place),
        Record(name="int4 g128", M=2, ratio=0.1, **place),  # nothing is aimed at here
        Record(name="fp8_e4m3", M=1, ratio=0.1, share=0.1, **place),
    ]
    bench_cpu.print_goals(judge(records))
    lines = capsys.readouterr().out.strip().splitlines()[2:]
    ends = ("6.00     6.00    PASS", "0.68     0.85    short by 0.17 (20%)", "0.90     0.95    short by 0.05 (5%)")
    assert [line.endswith(end) for line, end in zip(lines, ends)] == [True] * 3
    assert lines[3:] == ["1 of 3 targets are reached"]


def test_every_target_has_its_candidate():
    assert {candidate(name).name for name in bench_cpu.TARGETS} >= set(bench_cpu.SHARE_TARGETS)


def test_copies_are_different_weights_of_their_own():
    case = candidate("int4 g128")
    packed = quantize_matrix(torch.randn(64, 256), case.weight, "absmax")
    copies = bench_cpu.weight_copies(case, packed, 64, 3)
    assert len({copy.qdata.data_ptr() for copy in (packed, *copies)}) == 4
    assert torch.equal(copies[2].qdata, packed.qdata.roll(14, 0)) and not torch.equal(copies[0].qdata, copies[1].qdata)


@pytest.mark.skipif(not native.instruction_sets(), reason="the extension is not built")
def test_selecting_keeps_what_was_made_ready():
    case, x = candidate("int4 g128"), torch.randn(2, 256, dtype=torch.bfloat16)
    packed = quantize_matrix(torch.randn(512, 256), case.weight, "absmax")
    call = bench_cpu.forward_call(case, 256)
    with native.using(None):
        call(x, packed)
        before = bench_cpu.kernels.prepacked_bytes()
        for kind in (*native.instruction_sets(), bench_cpu.TORCH):
            cpu_timing.select(kind)
            assert bench_cpu.kernels_in_use() == kind
        assert bench_cpu.kernels.prepacked_bytes() == before > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kernels", "torch,sse9"], "--kernels torch,sse9: known on this machine are"),
        (["--targets", "--direction", "backward"], "--targets are for --direction forward"),
    ],
)
def test_mistakes(options, message, capsys):
    with pytest.raises(SystemExit):
        bench_cpu.main([*TINY, *options])
    assert message in capsys.readouterr().err


def test_backward(capsys):
    bench_cpu.main([*TINY, "--direction", "backward", "--only", "int8 g128", "--m", "1"])
    text = capsys.readouterr().out
    assert "int8 g128" in text and "memory is read" not in text


def test_attention(capsys, tmp_path):
    path = tmp_path / "out.json"
    shape = ("--heads", "4/2x32", "--context", "70", "--threads", "1", "--copies", "2", "--rounds", "2")
    bench_cpu.main(["kv_attention", *shape, "--json", str(path)])
    records = json.loads(path.read_text())["records"]
    seconds = {record["name"]: record["seconds"] for record in records}
    assert set(seconds) == {cpu_attention.SDPA, cpu_attention.MATMUL, cpu_attention.NATIVE, *cpu_attention.GROUPS}
    for record in records:
        assert record["ratio_to_sdpa"] == pytest.approx(seconds[cpu_attention.SDPA] / record["seconds"])
    assert "4/2x32 heads, 70 tokens" in capsys.readouterr().out


def test_the_matmuls_are_attention():
    q, k, v = torch.randn(1, 4, 1, 32), torch.randn(1, 2, 50, 32), torch.randn(1, 2, 50, 32)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert torch.allclose(cpu_attention.matmuls(q, k, v), expected, atol=1e-6)
