"""Parsing of disassembly, and checks that fail where they must."""

import pytest

from gpulab.build import Built
from gpulab.code_checks import check_built, is_excepted, wide_share
from gpulab.machine_code import (
    Resources,
    Summary,
    access_bits,
    dots,
    main_loop,
    parse_gcn,
    parse_gcn_metadata,
    parse_resource_usage,
    parse_sass,
    summarize,
)
from gpulab.model import CHIPS, Work, modelled, occupancy
from hf_quant.kernels.gpu.launch import TARGETS


def sass(*lines: str) -> str:
    """Disassembly in cuobjdump's form: 16 bytes an instruction, its encoding beside and below."""
    rows = ["\tcode for sm_90a", "\t\tFunction : _kernel"]
    for i, line in enumerate(lines):
        rows += [f"        /*{16 * i:04x}*/ {line:>40} ;   /* 0x00000a00ff017b82 */", " " * 60 + "/* 0x000fe200 */"]
    return "\n".join(rows)


LOOP = sass(
    "MOV R1, c[0x0][0x28]",
    "@!P4 BRA 0xc0",
    "LDGSTS.E.BYPASS.128 [R3], desc[UR4][R2.64]",  # 0x20: the main loop
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R4]",  # 0x30: a wait
    "@!P0 BRA 0x30",
    "HGMMA.64x128x16.F32 R24, gdesc[UR8], R24",
    "HGMMA.64x128x16.F32 R24, gdesc[UR8], R24, gsb0",
    "IADD3 R2, R2, 0x80, RZ",
    "LDG.E.U16 R5, desc[UR4][R6.64]",
    "ISETP.GE.AND P4, PT, R2, R3, PT",
    "BAR.SYNC.DEFER_BLOCKING 0x0",
    "@!P4 BRA 0x20",
    "STG.E.128 desc[UR4][R2.64], R24",
    "@UP1 EXIT",
    "BRA 0xe0",
    "NOP",
)


def test_sass_is_read_with_its_main_loop():
    instructions = parse_sass(LOOP)
    assert len(instructions) == 15, "the padding is left out"
    assert [i.name for i in main_loop(instructions)][:2] == ["LDGSTS.E.BYPASS.128", "SYNCS.PHASECHK.TRANS64.TRYWAIT"]
    summary = summarize(instructions)
    assert (summary.instructions, summary.loop) == (15, 10)
    assert summary.matrix == {"HGMMA": 2}
    assert summary.mix["LDGSTS.128"] == 1 and summary.mix["LDG.16"] == 1 and summary.mix["HGMMA"] == 2
    assert summary.local_accesses == 0
    assert wide_share(summary.mix) == 128 / 144


def test_the_inner_loop_counts_not_the_loop_over_tiles():
    text = sass(
        "S2R R0, SR_CTAID.X",
        *["IADD3 R1, R1, 0x1, RZ"] * 20,  # 0x10: over tiles
        *["LDG.E.128 R4, desc[UR4][R2.64]", "IMMA.16832.S8.S8 R8, R4, R5, R8"] * 4,  # 0x150: over K
        "@P0 BRA 0x150",
        "@P1 BRA 0x10",
        "EXIT",
    )
    assert summarize(parse_sass(text)).loop == 9


def test_waiting_behind_the_end_is_no_loop():
    text = sass(
        "S2R R0, SR_CTAID.X",
        *["LDG.E R4, desc[UR4][R2.64]"] * 3,  # 0x10: over K
        "@!P0 BRA 0x110",  # 0x40: wait out of line
        *["HGMMA.64x128x16.F32 R24, gdesc[UR8], R24"] * 4,  # 0x50
        "@P1 BRA 0x10",  # 0x90
        *["STG.E.128 desc[UR4][R2.64], R24"] * 5,
        "BRA.U UP0, 0x10",  # 0xf0: a condition among the operands
        "EXIT",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R4]",  # 0x110
        "@!P0 BRA 0x110",
        "BRA 0x50",
        "BRA 0x140",
    )
    loop = [i.address for i in main_loop(parse_sass(text))]
    assert loop == [*range(0x10, 0x100, 16), *range(0x110, 0x140, 16)]
    assert [i.address for i in main_loop(parse_sass(text.replace("BRA.U UP0, 0x10", "BAR.SYNC 0x0    ")))] == [
        *range(0x10, 0xA0, 16),
        *range(0x110, 0x140, 16),
    ]


def test_two_functions_do_not_mix():
    instructions = parse_sass(LOOP + "\n" + LOOP)
    assert len({i.address for i in instructions}) == len(instructions) == 30
    assert summarize(instructions).matrix == {"HGMMA": 4} and summarize(instructions).loop == 10


def test_nothing_found_is_an_error():
    with pytest.raises(ValueError, match="no instructions"):
        summarize(parse_sass("nvdisasm fatal: unknown architecture"))
    with pytest.raises(ValueError, match="no resource usage"):
        parse_resource_usage("")
    with pytest.raises(ValueError, match="lacks vgpr_count"):
        parse_gcn_metadata("    .sgpr_count: 3")


WIDTHS = {
    128: "LDG.E.128.CONSTANT LDGSTS.E.BYPASS.128 UTMALDG.2D STG.E.128 global_load_dwordx4",
    64: "LDG.E.64 buffer_load_dwordx2",
    32: "LDG.E buffer_store_dword",
    16: "LDG.16 STG.E.U16 global_load_ushort",
    8: "LDG.E.U8 buffer_load_ubyte",
    256: "LDG.E.ENL2.256",
    0: "LDS.128 STS.128 ds_read_b128 s_load_dwordx4",
}


@pytest.mark.parametrize("bits", WIDTHS)
def test_widths_of_accesses(bits):
    assert {name: access_bits(name) for name in WIDTHS[bits].split()} == dict.fromkeys(WIDTHS[bits].split(), bits)


def test_resource_usage():
    text = "Function _a:\n  REG:130 STACK:0 SHARED:1024 LOCAL:0\n Function _b:\n  REG:64 STACK:16 SHARED:0 LOCAL:8 X"
    assert parse_resource_usage(text) == Resources(130, 24)


GCN = """
_kernel:
\ts_load_dwordx8 s[0:7], s[0:1], 0x0
.LBB0_3:                                ; =>This Inner Loop Header
\t.loc\t1 11 13
\tbuffer_load_dwordx4 v[14:17], v5, s[20:23], 0
\ts_waitcnt vmcnt(0)
\tds_write_b128 v37, v[120:123] offset:8192
\tds_read_b128 v[1:4], v37
\tv_mfma_f32_32x32x8_bf16 v[0:15], v[96:97], v[56:57], 0
\tv_mfma_f32_32x32x8_bf16 v[0:15], v[98:99], v[58:59], v[0:15]
\ts_add_i32 s3, s3, 64
\ts_cmp_lt_i32 s3, s4
\ts_cbranch_scc1 .LBB0_3
; %bb.4:
\ts_endpgm
  - .agpr_count:     0
    .private_segment_fixed_size: 0
    .sgpr_spill_count: 2
    .vgpr_count:     130
    .vgpr_spill_count: 0
"""


def test_amd_assembly_is_read():
    summary = summarize(parse_gcn(GCN))
    assert summary.loop == 9 and summary.matrix == {"v_mfma_f32_32x32x8_bf16": 2}
    assert wide_share(summary.mix) == 1
    assert parse_gcn_metadata(GCN) == Resources(130, 0, 0, 2)


def test_operand_types_of_dots():
    text = """
    %a = tt.dot %x, %y, %z, inputPrecision = tf32 : tensor<64x64xbf16> * tensor<64x128xbf16> -> tensor<64x128xf32>
    %b = tt.dot %x, %y, %z : tensor<2x16x32xi8> * tensor<2x32x16xi8> -> tensor<2x16x16xi32>
    %c = tt.dot %x, %y, %z {maxNumImpreciseAcc = 0 : i32} : tensor<16x32xf8E4M3FN> * tensor<32x16xf8E4M3FN> -> tensor
    """
    assert dots(text) == {("bf16", "bf16"), ("i8", "i8"), ("f8E4M3FN", "f8E4M3FN")}


GOOD = Built(
    error=None,
    shared=65536,
    resources=Resources(128, 0),
    summary=Summary(500, 100, {"LDGSTS.128": 8, "HGMMA": 8}, {"HGMMA": 8}, 0),
    dots=(("bf16", "bf16"),),
)


def findings(target="sm90", **changes):
    summary = {key: changes.pop(key) for key in Summary._fields if key in changes}
    built = GOOD._replace(summary=GOOD.summary._replace(**summary), **changes)
    return [finding.check for finding in check_built(built, TARGETS[target])]


def test_good_code_passes():
    assert findings() == []
    assert findings("sm80", matrix={"HMMA": 16}) == []
    assert findings("gfx942", matrix={"v_mfma_f32_32x32x8_bf16": 2}) == []
    assert findings(dots=(), matrix={}) == []
    assert findings(resources=Resources(255, 64), local_accesses=20) == [], "kept while a loop runs"
    assert findings(dots=(("f32", "f32"),), matrix={}) == [], "fp32 units, by intention"
    assert findings("gfx942", matrix={"v_mfma_f32_32x32x8_bf16": 2}, resources=Resources(128, 0, 0, 2)) == []


@pytest.mark.parametrize(
    "check, target, changes",
    [
        ("compiles", "sm90", {"error": "does not compile"}),
        ("shared", "sm90", {"shared": 232449}),
        ("shared", "gfx942", {"shared": 65537, "matrix": {"v_mfma_f32_32x32x8_bf16": 2}}),
        ("local", "sm90", {"resources": Resources(255, 72), "local_accesses": 24}),
        ("local", "sm90", {"resources": Resources(255, 8), "local_accesses": 2, "looped_local_accesses": 1}),
        ("local", "sm90", {"resources": Resources(255, 8), "local_accesses": 2, "loop": 0}),
        ("local", "gfx942", {"resources": Resources(256, 0, 1), "matrix": {"v_mfma_f32_32x32x8_bf16": 2}}),
        ("matrix", "sm90", {"matrix": {}}),
        ("matrix", "sm90", {"matrix": {"HMMA": 64}}),
        ("matrix", "sm90", {"matrix": {"HGMMA": 4, "HMMA": 4}}),
        ("matrix", "sm90", {"dots": (("i8", "i8"),)}),
        ("matrix", "sm80", {"dots": (("f8E4M3FN", "f8E4M3FN"),)}),
        ("matrix", "sm75", {"matrix": {"HMMA": 4}, "shared": 0}),  # bf16
        ("matrix", "sm100", {"matrix": {"HMMA": 4}}),
        ("width", "sm90", {"mix": {"LDG.32": 30, "LDG.128": 2}}),
        ("hazard", "sm90", {"hazards": ("MOV at 0x10 touches R24 of the product at 0x0",)}),
        ("waits", "sm90", {"warnings": ("ptxas info : (C7515) Potential Performance Loss",)}),
    ],
)
def test_bad_code_fails(check, target, changes):
    assert findings(target, **changes) == [check]


def test_local_memory_in_disassembly_fails():
    text = LOOP.replace("IADD3 R2, R2, 0x80, RZ", "STL [R1+0x8], R2        ")
    summary = summarize(parse_sass(text))
    assert (summary.local_accesses, summary.looped_local_accesses) == (1, 1)
    assert check_built(GOOD._replace(summary=summary), TARGETS["sm90"])[0].check == "local"


def test_exceptions_name_what_they_accept():
    finding = check_built(GOOD._replace(summary=GOOD.summary._replace(mix={"LDG.32": 1})), TARGETS["sm90"])[0]
    assert is_excepted(finding, "_weight_only_mm_kernel", "sm90", "int8, odd 1001x1000, M=1, bf16", "3.9.0")
    assert not is_excepted(finding, "_weight_only_mm_kernel", "sm90", "int8, llama o 4096x4096, M=1, bf16", "3.9.0")
    local = finding._replace(check="local")
    assert not is_excepted(local, "_weight_only_mm_kernel", "sm90", "int8, odd 1001x1000, M=1, bf16", "3.9.0")


def test_an_exception_for_a_version_accepts_no_other():
    finding = check_built(
        GOOD._replace(dots=(("i8", "i8"),), summary=GOOD.summary._replace(matrix={"IMMA": 8})), TARGETS["sm100"]
    )[0]
    where = ("_scaled_mm_split_kernel", "sm100", "W8A8 int8, llama o 4096x4096, M=17, fp16; BLOCK_M=32")
    assert is_excepted(finding, *where, "3.6.0") and not is_excepted(finding, *where, "3.9.0")


def test_occupancy_by_each_limit():
    assert occupancy("sm90", 4, Resources(128, 0), 16384) == 4  # registers: 65536 / (128 * 128)
    assert occupancy("sm90", 4, Resources(32, 0), 99 * 1024) == 2  # shared memory: 228 KB / 100 KB
    assert occupancy("sm90", 16, Resources(16, 0), 0) == 4  # warps: 64
    assert occupancy("sm90", 1, Resources(16, 0), 0) == 32  # blocks
    assert occupancy("gfx942", 4, Resources(128, 0), 16384) == 4
    assert occupancy("gfx942", 4, Resources(257, 0), 1) == 1


def test_every_target_has_a_chip():
    assert set(CHIPS) == set(TARGETS) - {"xpu"}
    for name, chip in CHIPS.items():
        assert chip.multiprocessors == TARGETS[name].multiprocessors


def test_modelled_time_is_bound_by_what_is_scarce():
    chip, summary = CHIPS["sm90"], GOOD.summary
    times = modelled("sm90", summary, 4, Work(int(chip.bandwidth * 1e6), 989e6, "16bit", 132, 132))
    assert times["memory"] == pytest.approx(1e-6, rel=1e-3) and times["matrix"] == pytest.approx(1e-6)
    assert times["issue"] == pytest.approx(132 * 4 * 500 / (132 * 4 * 1.98e9))
    one_more = modelled("sm90", summary, 4, Work(0, 0, "16bit", 133, 133))["issue"]
    assert one_more == pytest.approx(2 * times["issue"]), "133 blocks on 132 multiprocessors take two rounds"
    assert "issue" not in modelled("sm90", summary, 4, Work(1, 0, None, 132, None))
