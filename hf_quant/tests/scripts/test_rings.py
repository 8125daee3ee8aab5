"""Barriers at which a loop stays: found in the text of Gluon's IR."""

import pytest

from gpulab.rings import still_barriers


RING = """
    %0 = ttg.memdesc_index %empty[%c0] : !ttg.memdesc<4x1xi64> -> !ttg.memdesc<1xi64>
    ttng.init_barrier %0, 1 : !ttg.memdesc<1xi64>
    %tile:2 = scf.for %i = %c0 to %n step %c1 iter_args(%slot = %c0, %phase = %c0) -> (i32, i32)  : i32 {
      %before:3 = scf.for %step = %c0 to %k step %c1 iter_args(%s = %slot, %p = %phase, %b = %slot) -> (i32) {
        %1 = ttg.memdesc_index %full[%s] : !ttg.memdesc<4x1xi64> -> !ttg.memdesc<1xi64>
        ttng.wait_barrier %1, %p, %true : !ttg.memdesc<1xi64>
        %2 = ttg.memdesc_index %empty[%b] : !ttg.memdesc<4x1xi64> -> !ttg.memdesc<1xi64>
        ttng.arrive_barrier %2, 1, %true : !ttg.memdesc<1xi64>
        %3 = arith.addi %s, %c1 : i32
        scf.yield %3, %p, %s : i32, i32, i32
      } loc(#loc1)
      %4 = ttg.memdesc_index %empty[%before#2] : !ttg.memdesc<4x1xi64> -> !ttg.memdesc<1xi64>
      ttng.arrive_barrier %4, 1, %true : !ttg.memdesc<1xi64>
      scf.yield %before#0, %before#1 : i32, i32
    } loc(#loc2)
    ttng.arrive_barrier %0, 1, %true : !ttg.memdesc<1xi64>
"""


def test_places_that_loops_change_are_fine():
    assert still_barriers(RING) == ()


@pytest.mark.parametrize("old, new", [("%empty[%b]", "%empty[%slot]"), ("%empty[%before#2]", "%empty[%c0]")])
def test_a_place_that_stays_is_named(old, new):
    (text,) = still_barriers(RING.replace(old, new))
    assert text == f"each turn of a loop does arrive at {new}, which it does not change"
