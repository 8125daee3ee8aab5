"""The suite's whole logic on tiny shapes, its verdicts, and that a section that hangs or crashes costs only itself."""

import argparse
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import triton
from triton.runtime.errors import OutOfResources

import bench_fusion
import bench_kernels
import gpu_suite
import tune
from gpu_suite import SECTIONS, Options, read_section, report, run_section, wait_for
from gpulab import build as kernel_build
from gpulab import cells as suite_cells
from gpulab import checks as gpu_checks
from gpulab import collect as kernel_collect
from gpulab import measures as kernel_measures
from gpulab.all_cases import all_cases
from gpulab.cache_cases import Cached, append_case, cached_case
from gpulab.cases import CANDIDATES, LLAMA, Linear, candidate, gpu_ops, linear_case, memory_case
from gpulab.collect import Collected, Use
from gpulab.measures import measure, measure_linear
from gpulab.rivals import RIVALS, rivals_of
from gpulab.targets import TARGETS, Target, judge
from gpulab.timing import Ceilings, HostTimer, installed
from hf_quant import QuantizerConfig
from hf_quant.kernels.gpu.launch import TARGETS as KERNEL_TARGETS


CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory) -> dict:
    folder, found = tmp_path_factory.mktemp("dry"), {}
    for section in SECTIONS:
        path = folder / section.name
        run_section(section, Options(dry_run=True), path, 600)
        found[section.name] = read_section(path, "done")
    return found


def test_dry_run_measures_everything_and_nothing_fails(dry_run):
    for name, found in dry_run.items():
        skipped = name == "diffusion" and not installed("diffusers")
        assert skipped or found["status"] == "done"
        assert not found["failures"], (name, found["failures"])
    missing = [
        verdict.target
        for verdict in judge(TARGETS, dry_run)
        if verdict.value is None and verdict.target.versus in ("bf16", "copy", "tok/s", "seconds")
    ]
    ops = {"G10": "hadamard", "D5": "int8_attention"}  # measured as soon as they have a kernel
    if dry_run["diffusion"]["status"] == "done":
        missing += [v.target for v in judge(TARGETS, dry_run) if v.value is None and v.target.section == "diffusion"]
        missing = [target for target in missing if target.versus != "torchao"]
    assert not [target for target in missing if ops.get(target.id) in gpu_ops() or target.id not in ops]
    text, passed = report(dry_run)
    assert not passed and "short by" in text and "next for G1" in text


def test_dry_run_rehearses_the_launches_of_a_real_run(monkeypatch, tmp_path):
    cases = [cached_case(Cached("odd", 1, 1, 300, 2, 2, 80), "int2", torch.bfloat16)]
    cases.append(append_case(Cached("odd", 1, 1, 300, 2, 2, 80), "int2", torch.bfloat16))
    assert not kernel_collect.rehearse(cases, [KERNEL_TARGETS["sm90"]])

    def groups_of_40(case):
        def make(device):
            arguments, options = case.make(device)
            halved = [
                torch.empty((*t.shape[:3], 2, 2), dtype=t.dtype, device=device)[..., 0] if i in (4, 5, 7, 8) else t
                for i, t in enumerate(arguments)
            ]
            return (*halved[: len(arguments)],), options

        return case._replace(make=make)

    monkeypatch.setattr(gpu_suite, "correctness_cases", lambda **_: [groups_of_40(cases[1])])
    monkeypatch.setattr(suite_cells, "CELLS", {})
    gpu_suite.warm_up(HostTimer(), Options(dry_run=True), gpu_suite.Writer(tmp_path / "a", time.monotonic() + 60))
    failures = read_section(tmp_path / "a", "done")["failures"]
    assert len(failures) == 1 and failures[0].startswith("kv_append: Tensor.item() cannot be called on meta tensors")
    silent = cases[0]._replace(op="dequantize", make=lambda device: ((), {}))
    monkeypatch.setattr(kernel_collect, "launcher", lambda op: lambda: None)
    assert list(kernel_collect.rehearse([silent], [KERNEL_TARGETS["sm90"]])) == [
        ("dequantize", "no kernel is launched")
    ]


def test_dry_run_covers_every_op_with_a_kernel(dry_run):
    measured = {record["op"] for found in dry_run.values() for record in found["records"]}
    compared = {case.op for case in gpu_checks.correctness_cases(tiny=True)}
    compiled = {case.op for case in all_cases()}
    assert compared == set(gpu_ops()) <= compiled
    assert {"weight_only_mm", "dynamic_mm", "grouped_mm", "fp8_scaled_mm", "quantize_rowwise"} <= measured


def test_tokens_of_targets_are_measured(dry_run):
    for target in TARGETS:
        sizes = {r["M"] for r in dry_run[target.section]["records"] if r["candidate"] in target.candidates}
        assert not sizes or set(target.tokens) <= sizes, (target.id, set(target.tokens) - sizes)


def record(ms, bf16=None, M=1, linear="llama o", **rivals):
    values = {"candidate": "int4 g128", "M": M, "linear": linear, "ms": ms, "bf16_ms": bf16, "gbps": 900.0}
    return {**values, "rivals_ms": rivals}


def verdict(records, versus="bf16", limit=3.0, **fields):
    target = Target("G1", "x", "weights", ("int4 g128",), (1, 2), versus, limit, "try this", **fields)
    return judge([target], {"weights": {"status": "done", "records": records, "ceilings": {"copy": 1000.0}}})[0]


def test_verdicts():
    assert verdict([record(1.0, 3.0)]).text() == "PASS"
    assert verdict([record(1.0, 1.5)]).text() == "short by 50%"
    weighted = verdict([record(1.0, 4.0), record(9.0, 18.0, linear="llama down")])
    assert weighted.value == pytest.approx(2.2), "layers are weighted by their time"
    assert verdict([record(1.0, 4.0), record(1.0, 2.0, M=2)]).value == 2, "the worst M counts"
    assert verdict([record(1.0, 4.0, M=64)]).passed is None
    assert verdict([]).text() == "nothing measured"
    assert verdict([record(1.0, 4.0)], "gemlite").text() == "no gemlite in this run"
    best = verdict([record(1.0, gemlite=2.0, tinygemm=1.5), record(1.0)], "best rival")
    assert best.value == 1.5 and best.reason == "the best: tinygemm"
    assert verdict([record(1.0, gemlite=2.0)], "gemlite").value == 2
    assert verdict([record(1.0)], "copy", 0.85).text() == "PASS"
    late = verdict([{**record(1.0), "seconds": 4.0}], "seconds", is_upper=True)
    assert late.text() == "short by 33%"
    assert judge([late.target], {"weights": {"status": "killed after 3 s"}})[0].text() == (
        "nothing measured (killed after 3 s)"
    )


def test_a_section_that_hangs_or_crashes_is_recorded(tmp_path, monkeypatch):
    start = time.monotonic()
    assert wait_for([sys.executable, "-c", "import time; time.sleep(60)"], 1) == "killed after 1 s"
    assert time.monotonic() - start < 30
    assert wait_for([sys.executable, "-c", "raise SystemExit('illegal access')"], 60).endswith("illegal access")
    assert wait_for([sys.executable, "-c", "pass"], 60) == "done"
    path = tmp_path / "weights"
    path.write_text(json.dumps({"kind": "record", "value": record(1.0, 3.0)}) + "\n")
    found = read_section(path, "killed after 1 s")
    assert found["status"] == "killed after 1 s" and len(found["records"]) == 1
    assert not report({"weights": found})[1]


def test_sections_share_what_one_compiles(monkeypatch):
    """gpulab/build.py sets an environment variable that is part of Triton's cache key."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "")
    monkeypatch.delenv("TRITON_DEFAULT_FP_FUSION")
    seen = []

    def in_process(*_):
        seen.append(os.environ.get("TRITON_DEFAULT_FP_FUSION"))
        return "done"

    monkeypatch.setattr(gpu_suite, "in_process", in_process)
    monkeypatch.setattr(sys, "argv", ["gpu_suite", "--dry-run", "--sections", "rowwise", "warm_up"])
    gpu_suite.main()
    assert seen == ["1", "1"]


def test_warming_up(monkeypatch, tmp_path):
    units = [SimpleNamespace(key=str(i), name=f"_kernel_{i}") for i in range(4)]
    errors = dict(zip("0123", (None, kernel_build.OUT_OF_TIME, kernel_build.OUT_OF_TIME, "does not compile")))
    built = {key: kernel_build.Built(error) for key, error in errors.items()}
    collected = Collected({unit.key: Use(unit, []) for unit in units}, {}, {}, {})
    monkeypatch.setattr(kernel_build, "check_environment", lambda: None)
    monkeypatch.setattr(kernel_collect, "collect", lambda *_: collected)
    monkeypatch.setattr(kernel_build, "warm", lambda units, seconds: built)
    gpu_suite.warm_up(HostTimer(), Options(quick=True), gpu_suite.Writer(tmp_path / "a", time.monotonic() + 60))
    found = read_section(tmp_path / "a", "done")
    assert found["failures"] == ["_kernel_3: does not compile"]
    assert found["notes"][1:] == ["2 kernels left to their first launch: out of time"]


def test_warming_up_makes_launchers_where_there_is_a_gpu(monkeypatch):
    made, unit = [], SimpleNamespace(key="a")
    monkeypatch.setattr(kernel_build, "_compile", lambda unit: SimpleNamespace(src="source", metadata="metadata"))
    monkeypatch.setattr(kernel_build, "_log_to", lambda path: None)  # the process's own output
    monkeypatch.setattr(
        kernel_build, "_in_processes", lambda todo, workers, work, seconds: [work(*args) for args in todo.values()]
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    kernel_build.warm([unit])
    assert not made
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    driver = SimpleNamespace(launcher_cls=lambda *args: made.append(args))
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    kernel_build.warm([unit])
    assert made == [("source", "metadata")]


def test_sections_end_in_time_and_survive_failures(tmp_path):
    timer, writer = HostTimer(), gpu_suite.Writer(tmp_path / "a", time.monotonic() + 60)

    def fails(_):
        raise RuntimeError("out of memory")

    gpu_suite.measured(timer, Options(dry_run=True), writer, iter([fails, lambda _: {"ms": 1.0}]))
    found = read_section(tmp_path / "a", "done")
    assert found["failures"] == ["RuntimeError: out of memory"] and found["records"] == [{"ms": 1.0}]
    writer = gpu_suite.Writer(tmp_path / "b", time.monotonic() - 1)
    gpu_suite.measured(timer, Options(dry_run=True), writer, iter([fails]))
    assert read_section(tmp_path / "b", "done")["status"] == "stopped: out of time"


def test_what_a_compiler_raises_ends_no_section(monkeypatch, tmp_path):
    errors = iter([OutOfResources(300000, 232448, "shared memory"), subprocess.CalledProcessError(1, "ptxas")])

    def fails(*_, **__):
        raise next(errors)

    case = memory_case("quantize", 128, 4, torch.bfloat16)
    monkeypatch.setattr(gpu_suite, "correctness_cases", lambda **_: [case])
    monkeypatch.setattr(gpu_suite, "check_case", fails)
    monkeypatch.setattr(gpu_suite, "check_no_recompilation", fails)
    writer = gpu_suite.Writer(tmp_path / "a", time.monotonic() + 60)
    gpu_suite.correctness(HostTimer(), Options(dry_run=True), writer)
    first, second = read_section(tmp_path / "a", "done")["failures"]
    assert "OutOfResources: out of resource: shared memory" in first and "CalledProcessError" in second


def test_budgets_keep_the_promise():
    whole = [section for section in SECTIONS if not section.by_name]
    assert sum(section.budget for section in whole) <= 470
    assert sum(section.quick_budget for section in whole) <= 180


def test_what_a_section_leaves_of_its_time_goes_to_the_next(monkeypatch):
    given, clock = [], iter([0.0, 4.0, 4.0, 40.0, 40.0, 41.0])
    sections = [gpu_suite.Section(name, lambda *_: None, 10, 0) for name in "abc"]
    monkeypatch.setattr(gpu_suite, "SECTIONS", sections)
    monkeypatch.setattr(gpu_suite.time, "monotonic", lambda: next(clock))
    gpu_suite.run_all(
        Options(), [], lambda section, options, path, budget: given.append(budget) or "done", lambda _: None
    )
    assert given == [10, 16, 10], "6 of 10 seconds were left, then none"


def test_without_diffusers_its_section_is_skipped_and_fails_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_suite, "installed", lambda package: package != "diffusers")
    section = next(s for s in SECTIONS if s.name == "diffusion")
    run_section(section, Options(dry_run=True), tmp_path / "a", 60)
    found = {"diffusion": read_section(tmp_path / "a", "done")}
    assert found["diffusion"]["status"] == "skipped: diffusers is not installed"
    text, passed = report(found)
    assert passed and "nothing measured (skipped: diffusers is not installed)" in text


def test_diffusion_models_are_judged_by_what_the_run_compared(dry_run):
    if dry_run["diffusion"]["status"] != "done":
        pytest.skip("diffusers is not installed")
    records = {record["candidate"]: record for record in dry_run["diffusion"]["records"]}
    ours, plain = records["flux compiled fp8 attention"], records["flux compiled bf16, eager"]
    assert ours["extrapolated"] and ours["M"] == 4608 and ours["name"] == "fp8 attention, compiled"
    assert ours["x eager bf16"] == pytest.approx(plain["ms"] / ours["ms"])
    assert ours["x compiled bf16"] == pytest.approx(records["flux compiled bf16, compiled"]["ms"] / ours["ms"])
    assert ours["s/image"] == pytest.approx(28e-3 * ours["ms"])
    assert 0.5 < ours["of bf16 weights"] < 0.7 and 15 < ours["call SNR dB"] < 60
    assert records["cogvideox eager int4"]["M"] == 17776


def test_without_a_gpu_the_scripts_say_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for script in (gpu_suite, bench_kernels, tune):
        monkeypatch.setattr(sys, "argv", [script.__name__])
        assert script.main() == 2
        assert "no CUDA or ROCm GPU here" in capsys.readouterr().err


def test_one_section_in_a_process_of_its_own(tmp_path):
    section = next(s for s in SECTIONS if s.name == "rowwise")
    status = gpu_suite.in_process(section, Options(quick=True, dry_run=True), tmp_path / "rowwise", 120)
    assert status == "done" and read_section(tmp_path / "rowwise", status)["records"]


def test_wrong_results_are_found(monkeypatch):
    case = linear_case(candidate("int4 g128"), gpu_checks.shrunk(LLAMA[1]), 5, torch.bfloat16)
    assert gpu_checks.check_case(case, CPU) is None
    right = gpu_checks.reference(case.op)

    def wrong(kind):
        def compute(*args, **kwargs):
            y = right(*args, **kwargs)
            if kind == "drop":
                y[:, -1] = 0
            if kind == "nan":
                y[0, 0] = float("nan")
            if kind == "noise":
                y += torch.randn_like(y) * 1e-3
            return y.float() if kind == "dtype" else y

        return compute

    for kind, reason in (
        ("drop", "RMS error"),
        ("nan", "not finite"),
        ("noise", "other bits"),
        ("dtype", "torch.float32 instead of"),
    ):
        monkeypatch.setattr(gpu_checks.torch.ops.hf_quant, "weight_only_mm", wrong(kind))
        assert reason in gpu_checks.check_case(case, CPU)


def test_wrong_codes_are_found(monkeypatch):
    case = memory_case("quantize", 256, 4, torch.bfloat16)
    assert gpu_checks.check_case(case, CPU) is None
    right = gpu_checks.reference(case.op)

    def shifted(*args, **kwargs):
        codes, scale = right(*args, **kwargs)
        return codes.roll(1, -1), scale

    monkeypatch.setattr(gpu_checks.torch.ops.hf_quant, "quantize_rowwise", shifted)
    assert "of the codes differ" in gpu_checks.check_case(case, CPU)


def test_fresh_memory_is_nan(monkeypatch):
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn):
        memory = torch.zeros(4, 8).to(dtype)
        monkeypatch.setattr(gpu_checks.torch, "empty_like", lambda part, memory=memory: memory)
        gpu_checks._poison([memory])
        assert memory.float().isnan().all()


def test_attention_is_checked_with_and_without_a_bound():
    """Scores within 85 units of log 2 need no online softmax in bf16, above 160 all do; fp16 always does."""
    kinds = set()
    for case in gpu_checks.correctness_cases(tiny=True):
        if case.op == "int8_attention":
            (q, k, _), options = case.make(CPU)
            norms = (k.float() - k.float().mean(2, keepdim=True)).norm(dim=3).amax(2)
            norms = norms.repeat_interleave(q.shape[1] // k.shape[1], 1)
            bounds = q.float().norm(dim=3).amax(2) * norms * 1.4427 * q.shape[3] ** -0.5
            assert ((bounds < 80) | (bounds > 170)).all()
            kinds.add((case.dtype, options["value_format"], (bounds > 160).unique().numel()))
    bf16, fp16 = torch.bfloat16, torch.float16
    assert kinds == {(bf16, None, 1), (bf16, None, 2), (bf16, "fp8_e4m3", 1), (fp16, None, 1)}


def test_experts_in_16_bits_are_no_longer_in_the_cache_when_their_turn_comes(monkeypatch):
    sizes = []
    monkeypatch.setattr(kernel_measures, "num_copies", lambda nbytes, device: sizes.append(nbytes) or 5)
    torch.manual_seed(0)
    calls = kernel_measures.grouped_bf16(Linear("", 8, 128, 16, 2), 1, 1 / 8, CPU)
    assert sizes == [2 * 2 * 8 * 128], "two experts of 16 are read"
    assert len(calls) == 5 and len({tuple(call.args[2]) for call in calls}) > 1


def test_comparisons_that_compile_for_long_come_last(monkeypatch):
    order = []
    monkeypatch.setattr(suite_cells, "measure_memory", lambda *_, case, inductor, **__: order.append((case, inductor)))
    for cell in suite_cells.rowwise(False, False):
        cell.run(HostTimer(), Ceilings(1.0, 1.0))
    plain, compiled = order[:-2], order[-2:]
    assert {case.op for case, _ in plain} >= {"act_quantize_rowwise", "layer_norm_quantize_rowwise", "hadamard"}
    assert not any(inductor for _, inductor in plain) and all(inductor for _, inductor in compiled)
    assert [case.name.split(",")[0] for case, _ in compiled] == ["RMSNorm -> int8", "quantize -> int8"]


def asked(op, **options):
    defaults = {"format": None, "shape": None, "m": [1], "vs": None, "model": False}
    return argparse.Namespace(op=op, **{**defaults, **options})


def test_what_the_benchmark_is_asked_for():
    names = [job.case.name for job in bench_kernels.jobs(asked("rowwise", format=["quantize"]))]
    assert len(names) == len(set(names)) == 2, "4096 and 14336"
    job = bench_kernels.jobs(asked("weight_only_mm", vs="torch,gemlite"))[0]
    assert job.run.keywords["wanted"] == ("tinygemm", "_int", "_scaled", "gemlite")
    assert bench_kernels.jobs(asked("dynamic_mm", vs="none"))[0].run.keywords["wanted"] == ()
    for bad, message in (
        (asked("rowwise", vs="torch"), "rowwise has no choice of rivals"),
        (asked("weight_only_mm", vs="torch", model=True), "a model has no choice of rivals"),
        (asked("weight_only_mm", vs="torchoa"), "torchoa: no such rivals; known: torch, torchao"),
        (asked("weight_only_mm", format=["int5"]), "no format int5"),
    ):
        with pytest.raises(ValueError, match=message):
            bench_kernels.jobs(bad)


def test_what_is_compared_with_fused_projections_is_not_fused(monkeypatch):
    monkeypatch.setitem(bench_fusion.SHAPES, "tiny", (128, {"q_proj": 128, "k_proj": 128, "v_proj": 128}))
    fuses = QuantizerConfig("int8", fuse_projections=True)  # as None does on a GPU
    plain, single, fused = bench_fusion.variants("tiny", fuses, "cpu")
    assert len(plain) == len(single) == len(fused) == 4
    assert all(module.q_proj.fused is None for module in single)
    assert all(module.q_proj.fused is not None for module in fused)


def test_fused_projections_are_timed_with_and_without_a_rotation():
    plain = {"weights": "W8A8", "input_transform": "none"}
    found = bench_fusion.configs(["int4", "W8A8"])
    assert found == [("int4", {"weights": "int4"}), ("W8A8", {"weights": "W8A8"}), ("W8A8, not rotated", plain)]


def test_a_rival_that_fails_is_recorded(monkeypatch):
    case = linear_case(candidate("int8"), gpu_checks.shrunk(LLAMA[1]), 2, torch.bfloat16)

    def unsupported():
        raise RuntimeError("not on this device\nmore")

    rivals = {"bad": unsupported, "good": lambda: [lambda: None]}
    found = measure(HostTimer(), case, Ceilings(100.0, 1.0), rivals=rivals)
    assert found["rivals_failed"] == {"bad": "RuntimeError: not on this device"}
    assert set(found["vs_rivals"]) == {"good"} and found["vs_bf16"] is None and found["ms"] > 0

    class Timer(HostTimer):
        def __call__(self, variants, *, rounds=9):
            if "good" in variants:
                raise RuntimeError("not permitted when stream is capturing")
            return super().__call__(variants, rounds=rounds)

    found = measure(Timer(), case, Ceilings(100.0, 1.0), rivals=rivals)
    assert found["rivals_failed"]["good"].startswith("in a graph") and found["ms"] > 0


def test_rivals_are_of_known_candidates():
    names = {one.name for one in CANDIDATES}
    assert all(set(rival.candidates) <= names for rival in RIVALS)
    assert [r.name for r in rivals_of("int4 g128", 1, 4096, 4096, ("tinygemm",))] == ["tinygemm"]
    assert rivals_of("int4 g128", 1, 4096, 4096, ()) == []
    assert [r.name for r in rivals_of("W8A8 int8", 1, 4096, 4096) if r.package is None] == []
    assert [r.name for r in rivals_of("W8A8 int8", 64, 4096, 4096) if r.package is None] == ["_int_mm"]


def test_int_mm_is_a_product_of_quantized_operands():
    torch.manual_seed(0)
    found = measure_linear(HostTimer(), candidate("W8A8 int8"), gpu_checks.shrunk(LLAMA[1]), 32, Ceilings(1.0, 1.0))
    assert set(found["vs_rivals"]) >= {"_int_mm"}


def test_weights_of_every_format_are_random_and_of_use():
    torch.manual_seed(0)
    for one in CANDIDATES:
        case = linear_case(one, gpu_checks.shrunk(LLAMA[1]), 16, torch.float32)
        arguments, options = case.make(CPU)
        y = gpu_checks.reference(case.op)(*arguments, **options)
        assert y.isfinite().all() and 0.3 < y.std() < 3, one.name
        again, _ = case.make(CPU)
        assert not torch.equal(again[1].view(torch.uint8), arguments[1].view(torch.uint8)), "each copy differs"
        meta, _ = case.make("meta")
        assert [t if t is None else t.shape for t in meta] == [t if t is None else t.shape for t in arguments]
