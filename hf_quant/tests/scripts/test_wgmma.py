"""The walk that finds registers which are touched while a product of four warps may still use them."""

import pytest

from gpulab.build import ptxas_warnings
from gpulab.machine_code import parse_sass
from gpulab.wgmma import hazards, product_of, touched
from hf_quant.tests.scripts.test_machine_code import sass


ARRIVE, WAIT = "WARPGROUP.ARRIVE", "WARPGROUP.DEPBAR.LE gsb0, 0x0"
PRODUCT = "HGMMA.64x16x16.F32.BF16 R24, R32, gdesc[UR8], R24, gsb0"  # sums R24 to R31, operand R32 to R35


def found(*lines: str) -> list[str]:
    return [hazard.text for hazard in hazards(parse_sass(sass(*lines, "EXIT")))]


def test_a_product_is_waited_for():
    assert found(ARRIVE, PRODUCT, WAIT, "FMUL R24, R24, R2", "MOV R32, R3") == []
    assert found(ARRIVE, PRODUCT, "FADD R36, R32, R2", "STS.128 [R3], R32", WAIT) == [], "its operand may be read"


@pytest.mark.parametrize(
    "line, register",
    [
        ("FMUL R31, R2, R3", "R31"),
        ("MOV R32, R3", "R32"),
        ("LDS.128 R28, [R3]", "R28, R29, R30, R31"),
        ("LDG.E.64 R34, desc[UR4][R2.64]", "R34, R35"),
        ("LDSM.16.M88.4 R32, [R3]", "R32, R33, R34, R35"),
        ("IMAD.WIDE R30, R2, R3, R4", "R30, R31"),
        ("SHFL.BFLY PT, R35, R2, 0x1, 0x1f", "R35"),
        ("LOP3.LUT P0, R33, R2, R3, RZ, 0xc0, !PT", "R33"),
        ("STG.E.128 desc[UR4][R2.64], R24", "R24"),
        ("ISETP.GE.AND P0, PT, R24, R3, PT", "R24"),
        ("HMMA.16816.F32.BF16 R24, R4, R6, R24", "R24, R25, R26, R27"),
        ("IGMMA.64x8x32.S8.S8 R40, R24, gdesc[UR8], RZ, !UPT, gsb0", "R24, R25, R26, R27"),
    ],
)
def test_what_may_not_be_touched_before(line, register):
    assert [text.split(" touches ")[1] for text in found(ARRIVE, PRODUCT, line, WAIT)] == [
        f"{register} of the product at 0x10"
    ]
    assert found(ARRIVE, PRODUCT, WAIT, line) == []


def test_the_last_groups_may_stay_in_flight():
    second = PRODUCT.replace("R24", "R40").replace("R32", "R48")
    one_left = WAIT.replace("0x0", "0x1")
    assert found(ARRIVE, PRODUCT, second, one_left, "MOV R24, R2") == []
    assert len(found(ARRIVE, PRODUCT, second, one_left, "MOV R40, R2")) == 1
    assert len(found(ARRIVE, PRODUCT.replace(", gsb0", ""), second, one_left, "MOV R24, R2")) == 1, "one group"


def test_products_add_to_the_same_sums():
    assert found(ARRIVE, PRODUCT.replace(", gsb0", ""), PRODUCT, WAIT) == []


def test_loops_are_walked_with_what_their_end_leaves_in_flight():
    loop = (
        "MOV R32, R3",  # 0x00
        ARRIVE,
        PRODUCT,
        "ISETP.GE.AND P0, PT, R2, R3, PT",
        "@P0 BRA 0x0",
        WAIT,
    )
    assert [text.split(" at ")[0] for text in found(*loop)] == ["MOV"]
    waits = (loop[0], ARRIVE, PRODUCT, WAIT, "@P0 BRA 0x0")
    assert found(*waits) == []


def test_registers_of_products():
    def one(line):
        return parse_sass(sass(line, "EXIT"))[0]

    product = product_of(one("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"))
    assert product.operand == set() and product.sums == set(range(24, 88))
    assert len(product_of(one("HGMMA.64x128x16.F16 R24, gdesc[UR8], R24")).sums) == 32
    assert len(product_of(one("IGMMA.64x64x32.S8.S8 R24, gdesc[UR8], RZ, !UPT")).sums) == 32
    assert len(product_of(one("QGMMA.64x64x32.F32.E4M3.E4M3 R24, R4, gdesc[UR8], R24")).operand) == 4
    assert product_of(one("HMMA.16816.F32 R4, R8, R10, R4")) is None
    with pytest.raises(ValueError, match="unknown form"):
        product_of(one("HGMMA.128x64x16.F32 R24, gdesc[UR8], R24"))
    assert touched(one("R2UR UR4, R7")) == (set(), {7})
    assert touched(one("CS2R R4, SRZ"))[0] == {4, 5}


def test_warnings_of_ptxas():
    log = """
    ptxas info    : Used 168 registers
    ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized
    ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized
    """
    assert len(ptxas_warnings(log)) == 1 and "C7515" in ptxas_warnings(log)[0]
    assert ptxas_warnings("ptxas info : Used 75 registers, 0xC7515 bytes") == ()
