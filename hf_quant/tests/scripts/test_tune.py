"""Tuning with a fake clock: it finds the fastest config that compiles, and writes what launches read."""

import json

import pytest

import tune
from gpulab.all_cases import all_cases
from gpulab.timing import HostTimer
from hf_quant.kernels.gpu.launch import TARGETS, config_table, pretend, record_launches, reload_tables
from hf_quant.kernels.int8_attention.gpu import BOUNDED, ONLINE_FP8
from hf_quant.kernels.int8_attention.op import KEY_BLOCK
from hf_quant.kernels.sign_matrices import PALEY_FIELDS
from tune import SPACES, as_python, neighbours, table_in_use, tune_table, write_tuned


TARGET = TARGETS["sm90"]


@pytest.fixture
def tuned_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_QUANT_TUNED", str(tmp_path / "tuned.json"))
    reload_tables()
    yield tmp_path / "tuned.json"
    monkeypatch.undo()
    reload_tables()


@pytest.mark.parametrize("name", SPACES)
def test_spaces_are_those_of_the_shipped_tables(name):
    for target in ("sm80", "sm86", "sm90", "sm100", "gfx942"):
        rows = SPACES[name].table(TARGETS[target])
        for i, row in enumerate(rows):
            assert list(neighbours(SPACES[name], row)), row
            assert all(len(other) == len(row) for other in neighbours(SPACES[name], row))
            assert SPACES[name].cases(row, rows[i - 1] if i else None, (), ())


def in_use(name, target=TARGET):
    """The rows that launches take."""
    return [tuple(row) for row in config_table(name, {target.table: SPACES[name].table(target)}, target)]


class Clock(HostTimer):
    """Seconds by the config in use: best at `best`, more with each doubling away from it."""

    def __init__(self, name, index, best):
        self.name, self.index, self.best = name, index, best

    def __call__(self, variants, *, rounds=9):
        return {label: self.cost(calls) for label, calls in variants.items()}

    def cost(self, calls):
        seen = []
        for call in calls:
            call()
            seen.append(Clock.row)
        return 1 + sum(abs(a.bit_length() - b.bit_length()) for a, b in zip(seen[0], self.best))


def probe(name, index):
    """A call that notes which row launches would take."""

    def call():
        Clock.row = in_use(name)[index]

    return call


def tuned(name, index, best, fits=lambda *_: None, check=lambda case, device: None):
    """(rows, what was said) of tuning with a clock for which `best` is the fastest."""
    said = []
    calls = {"make_calls": lambda case, copies, device: [probe(name, index)], "say": said.append}
    return tune_table(name, Clock(name, index, best), TARGET, fits=fits, check=check, **calls), said


@pytest.mark.parametrize("name, index", [("weight_only_mm", 0), ("quantize_rowwise", 3)])
def test_the_fastest_config_is_found(tuned_file, name, index):
    shipped = SPACES[name].table(TARGET)
    best = list(shipped[index])
    best[2] *= 2
    best[-1 if name == "quantize_rowwise" else 4] *= 2
    found, said = tuned(name, index, tuple(best))
    assert found[index] == tuple(best)
    assert [row for i, row in enumerate(found) if i != index] == [r for i, r in enumerate(shipped) if i != index]
    assert any("less time" in line for line in said)


def test_a_config_that_does_not_fit_is_not_timed(tuned_file):
    shipped = SPACES["weight_only_mm"].table(TARGET)
    best = (*shipped[0][:4], shipped[0][4] * 2, *shipped[0][5:])

    def fits(name, target, rows, cases):
        return "spills" if rows[0][4] != shipped[0][4] else None

    found, said = tuned("weight_only_mm", 0, best, fits=fits)
    assert found == shipped and any("left out: spills" in line for line in said)


def test_a_config_with_wrong_results_is_not_kept(tuned_file):
    shipped = SPACES["weight_only_mm"].table(TARGET)
    best = (*shipped[0][:2], shipped[0][2] * 2, *shipped[0][3:])

    def check(case, device):
        return "RMS error" if config_table("weight_only_mm", {}, TARGET)[0] == best else None

    found, said = tuned("weight_only_mm", 0, best, check=check)
    assert found == shipped and f"weight_only_mm {best}: left out: RMS error" in said


def test_what_no_table_may_hold_is_not_tried():
    columns = {(name, column.name): column for name, space in SPACES.items() for column in space.columns}
    assert columns["int8_attention", "BLOCK_N"].most == KEY_BLOCK, "the keys of a step share one scale"
    for op in ("hadamard", "hadamard_quantize_rowwise"):
        assert columns[op, "rows"].least >= max(PALEY_FIELDS), "an odd factor is not cut"


def test_attention_is_timed_and_checked_by_what_a_row_serves():
    space = SPACES["int8_attention"]
    for row in space.table(TARGET):
        for cases in (space.cases(row, None, (), ()), space.checks(row, None, (), ())):
            for case in cases:
                arguments, options = case.make("meta")
                with pretend(TARGET), record_launches() as launches:
                    tune.launcher("int8_attention")(*arguments, **options)
                kinds = {(x.options["BOUNDED"], x.options["FP8"]) for x in launches if "BOUNDED" in x.options}
                assert (row[1] == BOUNDED, row[1] == ONLINE_FP8) in kinds
                assert row[1] == BOUNDED or len(kinds) == 1
        assert bool(space.cases(row, None, (), ("fp8_e4m3",))) == (row[1] == ONLINE_FP8)
        assert all(case.M <= 1200 for case in space.checks(row, None, (), ()))


def test_launches_read_what_was_written(tuned_file):
    rows = [(16, 16, 64, 128, 4, 4, 16, 0), (2**30, 64, 64, 128, 4, 4, 8, 0)]
    others = [(2**30, 64, 64, 128, 4, 4, 1, 0)]
    tuned_file.write_text(json.dumps({"sm80": {"grouped_mm": others}}))
    write_tuned(TARGET, {"weight_only_mm": rows})
    reload_tables()
    assert in_use("weight_only_mm") == rows
    assert in_use("grouped_mm", TARGETS["sm80"]) == others, "other tables stay"
    with table_in_use("weight_only_mm", TARGET, rows[1:]):
        assert in_use("weight_only_mm") == rows[1:]
    assert in_use("weight_only_mm") == rows


def test_the_table_in_use_reaches_the_launch(tuned_file):
    case = next(c for c in all_cases(["weight_only_mm"]) if c.name == "int4 g128, llama o 4096x4096, M=1, bf16")
    arguments, options = case.make("meta")
    row = (2**30, 16, 32, 64, 2, 3, 1, 0)
    with table_in_use("weight_only_mm", TARGET, [row]), record_launches() as launches:
        tune.launcher("weight_only_mm")(*arguments, **options)
    assert launches[0].options["BLOCK_N"] == 32 and launches[0].options["num_warps"] == 2


def test_tables_become_python(tuned_file, capsys):
    write_tuned(TARGET, {"weight_only_mm": [(8, 16), (16, 32)]})
    assert tune.main(["--regenerate"]) == 0
    text = capsys.readouterr().out
    assert '# weight_only_mm\n"sm90": (\n    (8, 16),\n    (16, 32),\n),' in text
    assert as_python({}) == ""
    with pytest.raises(SystemExit):
        tune.main(["no_such_table"])
