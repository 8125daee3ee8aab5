"""Finds registers that sm90's code touches while a product of four warps (WGMMA) may still use them.

Such a product runs beside the instructions behind it: it reads its left operand, if that is in registers, and writes
its sums until a wait says that its group is complete. ptxas 12.8 is known to miscompile products whose left operand
is in registers (https://github.com/triton-lang/triton/issues/11781), and no interpreter sees it. So the code is walked
as the hardware runs it, loops as often as the groups in flight change: from a product to the `WARPGROUP.DEPBAR` that
waits for its group, no other instruction may write its operand or its sums, or read its sums.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from gpulab.machine_code import Instruction


_PRODUCT = re.compile(r"^[HIQB]GMMA\.(?:SP\.)?64x(\d+)x\d+\.(\w+)")
_REGISTER = re.compile(r"(?<!U)\bR(\d+)\b")
# Instructions without a result in registers; the first operand of all others is one, behind predicates.
_NO_RESULT = re.compile(
    r"^(?:\w*SET[P]\w*|ST|STG|STS|STL|STSM|STAS|RED\w*|R2UR|R2P|R2B|BAR|BRA|BRX|JMP|JMX|CALL|RET|EXIT|BSYNC|BSSY|BREAK|"
    r"WARPSYNC|SYNCS|ARRIVES|DEPBAR|LDGDEPBAR|LDGSTS|MEMBAR|FENCE|CCTL\w*|ERRBAR|NANOSLEEP|YIELD|NOP|WARPGROUP|ELECT|"
    r"UTMA\w*|UBLK\w*|UTMACMDFLUSH|ACQBULK|CGAERRBAR|UCGABAR\w*|BMOV|BPT|KILL|LEPC|RPCMOV|UTMAPF|USETMAXREG|"
    r"PREEXIT)$"
)
_MOST_GROUPS = 8  # in flight; more only where waits are missing


class Product(NamedTuple):
    """The registers of a product: those that it only reads, and its sums."""

    operand: frozenset[int]
    sums: frozenset[int]


class Hazard(NamedTuple):
    """An instruction that touches a register of a product in flight."""

    address: int
    text: str


State = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]  # groups in flight, products of the next one


def product_of(instruction: Instruction) -> Product | None:
    """The registers of a WGMMA, None for another instruction. Raises ValueError if its form is unknown."""
    if not re.match(r"^[HIQB]GMMA\b", instruction.name):
        return None
    match = _PRODUCT.match(instruction.name)
    if match is None:
        raise ValueError(f"a product of an unknown form: {instruction.name} {instruction.operands}")
    # 64 x N sums on 128 threads: N / 2 registers of 32 bits.
    count = int(match[1]) // (4 if match[2] == "F16" else 2)
    first, second = [part.strip() for part in instruction.operands.split(",")][:2]
    sums, left = _REGISTER.match(first), _REGISTER.match(second)
    if sums is None:
        raise ValueError(f"a product without sums in registers: {instruction.name} {instruction.operands}")
    operand = range(int(left[1]), int(left[1]) + 4) if left else ()  # 64 x 32 bytes on 128 threads
    return Product(frozenset(operand), frozenset(range(int(sums[1]), int(sums[1]) + count)))


def _width(name: str) -> int:
    """Registers of an instruction's result."""
    base, *parts = name.split(".")
    if base in ("HMMA", "IMMA", "QMMA"):
        return 2 if "F16" in parts[1:2] and "F32" not in parts else 4
    if base == "DMMA" or (base == "LDSM" and "4" in parts):
        return 4
    if base == "LDSM":
        return 2 if "2" in parts else 1
    if base.startswith(("LD", "ATOM", "SULD", "TLD")):
        return 8 if "256" in parts else 4 if "128" in parts else 2 if "64" in parts else 1
    if base == "CS2R":
        return 1 if "32" in parts else 2
    is_double = base in ("DADD", "DMUL", "DFMA", "DMNMX") or (base in ("F2F", "I2F") and parts[:1] == ["F64"])
    return 2 if is_double or "WIDE" in parts or base == "F2F" and "F64" in parts else 1


def touched(instruction: Instruction) -> tuple[frozenset[int], frozenset[int]]:
    """(registers that an instruction other than a product writes, registers that it names)."""
    named = frozenset(int(number) for number in _REGISTER.findall(instruction.operands))
    if _NO_RESULT.match(instruction.name.split(".")[0]):
        return frozenset(), named
    parts = (part.strip() for part in instruction.operands.split(","))
    result = next((part for part in parts if not re.fullmatch(r"!?U?P(?:\d|T|R)", part)), "")
    match = _REGISTER.match(result)
    if match is None:
        return frozenset(), named
    written = range(int(match[1]), int(match[1]) + _width(instruction.name))
    return frozenset(written), named | frozenset(written)


def hazards(instructions: Sequence[Instruction]) -> list[Hazard]:
    """List the hazards of a kernel, by address. Raises ValueError if a product has an unknown form."""
    products = {i.address: product for i in instructions if (product := product_of(i)) is not None}
    if not products:
        return []
    places = {instruction.address: n for n, instruction in enumerate(instructions)}
    touches = cache(lambda n: touched(instructions[n]))
    found: dict[int, Hazard] = {}
    todo: list[tuple[int, State]] = [(0, ((), ()))]
    seen = set(todo)
    while todo:
        n, state = todo.pop()
        instruction = instructions[n]
        text = _conflict(instruction, state, products, touches(n))
        if text is not None:
            found[instruction.address] = Hazard(instruction.address, text)
        following = _after(instruction, state)
        for other in _successors(instruction, n, places, len(instructions)):
            if (other, following) not in seen:
                seen.add((other, following))
                todo.append((other, following))
    return [found[address] for address in sorted(found)]


def _successors(instruction: Instruction, n: int, places: dict[int, int], count: int) -> Iterator[int]:
    if instruction.continues and n + 1 < count:
        yield n + 1
    if instruction.target in places:
        yield places[instruction.target]


def _after(instruction: Instruction, state: State) -> State:
    groups, current = state
    if re.match(r"^[HIQB]GMMA\b", instruction.name):
        current = tuple(dict.fromkeys((*current, instruction.address)))
        if "gsb0" in instruction.operands:  # the last of a group
            return (*groups, current)[-_MOST_GROUPS:], ()
    elif instruction.name.startswith("WARPGROUP.DEPBAR"):
        left = int(instruction.operands.rsplit(",", 1)[1].strip(), 16)
        return groups[len(groups) - min(left, len(groups)) :], current
    return groups, current


def _conflict(
    instruction: Instruction,
    state: State,
    products: dict[int, Product],
    touch: tuple[frozenset[int], frozenset[int]],
) -> str | None:
    """Say which registers of which product an instruction touches; None if it touches none."""
    groups, current = state
    written, named = touch
    mine = products.get(instruction.address)
    for address in (*(a for group in groups for a in group), *current):
        product = products[address]
        if mine is not None:  # products follow each other; the sums of one are no operand of the next
            wrong = mine.operand & product.sums
        else:
            wrong = written & (product.operand | product.sums) | named & product.sums
        if wrong:
            what = ", ".join(f"R{number}" for number in sorted(wrong)[:4])
            return f"{instruction.name} at {instruction.address:#x} touches {what} of the product at {address:#x}"
    return None
