"""Reads what a GPU kernel was compiled to: instructions, main loop, resources; SASS of NVIDIA, GCN assembly of AMD.

Used by aot_compile.py; nothing here needs a GPU or imports triton.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        name: with its modifiers ("LDG.E.128").
        target: address that it may jump to, or None.
        continues: whether the next instruction may follow.
        operands: as they are written, of NVIDIA's.
    """

    address: int
    name: str
    target: int | None
    continues: bool = True
    operands: str = ""


class Resources(NamedTuple):
    """Resources that one thread, or one block, holds.

    Attributes:
        registers: 32-bit registers a thread; on AMD vector registers, accumulators included.
        local_memory: bytes of a thread's stack and spilled registers, which are in device memory.
        spills: vector registers that the compiler says it spilled (AMD only; NVIDIA's are in `local_memory`).
        scalar_spills: scalar registers likewise; they go to lanes of vector registers, not to memory.
    """

    registers: int
    local_memory: int
    spills: int = 0
    scalar_spills: int = 0


class Summary(NamedTuple):
    """A kernel's instructions in numbers.

    Attributes:
        instructions: how many there are, padding left out.
        loop: how many are in the main loop; 0 if there is none.
        mix: {"HGMMA": 4, "LDGSTS.128": 8, ...} of the main loop, or of everything where there is no loop.
        matrix: {"HGMMA": 12, ...} of everything: products on matrix units.
        local_accesses: loads from and stores to local memory, anywhere.
        looped_local_accesses: those of them that are in a loop.
    """

    instructions: int
    loop: int
    mix: dict[str, int]
    matrix: dict[str, int]
    local_accesses: int
    looped_local_accesses: int = 0


_SASS_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,6})\*/\s+(@!?U?P[T\d]+\s+)?([A-Z][\w.]*)([^;]*);", re.MULTILINE)
_JUMPS, _ENDS = ("BRA", "BRX", "JMP"), ("EXIT", "RET", "s_endpgm", "s_branch")
# HMMA IMMA QMMA DMMA: a warp's; HGMMA IGMMA QGMMA: of four warps (sm90); UTC?MMA: tensor memory (sm100). "mfma": AMD.
_MATRIX = re.compile(r"^(?:[HIQDO]G?MMA|UTC\w*MMA|v_mfma\w*|v_smfmac\w*)$")
_GLOBAL_LOAD = re.compile(r"^(?:LDG|LDGSTS|UTMALDG|UBLKCP|global_load\w*|buffer_load\w*)$")
_GLOBAL_STORE = re.compile(r"^(?:STG|UTMASTG|global_store\w*|buffer_store\w*)$")
_BULK = ("UTMALDG", "UTMASTG", "UBLKCP")  # the copy engine moves whole tiles
_MIN_LOOP = 8  # shorter ones wait for a barrier


def parse_sass(text: str) -> list[Instruction]:
    """Instructions of `cuobjdump -sass`, functions one after the other; trailing NOPs are left out."""
    found, base, last = [], 0, -1
    for match in _SASS_LINE.finditer(text):
        address, predicate, name, operands = int(match[1], 16), match[2], match[3], match[4].strip()
        if address <= last:  # the next function counts from 0 again
            base += last + 16
        last = address
        short = name.split(".")[0]
        target = re.findall(r"0x([0-9a-f]+)", operands) if short in _JUMPS else []
        # BRA.U !UP0, 0x1350 and BRA.DIV UR4, 0x1350 have their condition among the operands.
        always = predicate is None and (short in _ENDS or bool(target) and re.fullmatch(r"0x[0-9a-f]+", operands))
        if name != "NOP":
            goal = base + int(target[-1], 16) if target else None
            found.append(Instruction(base + address, name, goal, not always, operands))
    return found


def parse_gcn(text: str) -> list[Instruction]:
    """Instructions of AMD assembly text; addresses are positions."""
    labels, pending, found = {}, [], []
    for line in text.splitlines():
        label = re.match(r"^(\.?\w+):", line)
        if label:
            labels[label[1]] = len(found)
            continue
        match = re.match(r"^\s+([a-z]+_[a-z0-9_]+)\b\s*([^;]*)", line)
        if match is None or line.lstrip().startswith("."):
            continue
        jump = match[2].split()[0] if match[1].startswith(("s_cbranch", "s_branch")) and match[2].split() else None
        pending.append(jump)
        found.append((len(found), match[1]))
    return [
        Instruction(address, name, labels.get(jump), name not in _ENDS)
        for (address, name), jump in zip(found, pending)
    ]


def main_loop(instructions: Sequence[Instruction]) -> list[Instruction]:
    """The innermost loop with the most products on matrix units, else the most loads, else the longest; or []."""
    bodies = [[instructions[i] for i in sorted(loop)] for loop in _loops(instructions)]
    for kind in (_MATRIX, _GLOBAL_LOAD):
        working = [body for body in bodies if _count(body, kind)]
        if working:
            inner = [body for body in working if not any(set(other) < set(body) for other in working)]
            return max(inner, key=lambda body: (_count(body, kind), len(body)))
    return max(bodies, key=len, default=[])


def _loops(instructions: Sequence[Instruction]) -> list[set[int]]:
    """The natural loops but the shortest, as positions: what reaches a jump back without passing its target.

    A jump back that can be reached from the entry without passing its target closes no loop: waiting for a barrier
    is often laid out behind the kernel's end, and jumps back into its middle.
    """
    places = {instruction.address: i for i, instruction in enumerate(instructions)}
    before: list[list[int]] = [[] for _ in instructions]
    for i, instruction in enumerate(instructions):
        if instruction.continues and i + 1 < len(instructions):
            before[i + 1].append(i)
        if instruction.target in places:
            before[places[instruction.target]].append(i)
    loops: dict[int, set[int]] = {}
    for i, instruction in enumerate(instructions):
        head = places.get(instruction.target, i + 1)
        if head > i:
            continue
        body, todo = {head, i}, [i] if i != head else []
        while todo:
            new = [j for j in before[todo.pop()] if j not in body]
            body.update(new)
            todo += new
        if 0 not in body or head == 0:
            loops.setdefault(head, set()).update(body)
    return [body for body in loops.values() if len(body) >= _MIN_LOOP]


def _count(body: Sequence[Instruction], kind: re.Pattern) -> int:
    return sum(bool(kind.match(i.name.split(".")[0])) for i in body)


def access_bits(name: str) -> int:
    """Bits per lane of a load from, or a store to, device memory; 0 if the instruction is neither."""
    base = name.split(".")[0]
    if not _GLOBAL_LOAD.match(base) and not _GLOBAL_STORE.match(base):
        return 0
    if base in _BULK:
        return 128
    if base.islower():  # AMD: global_load_dwordx4, buffer_store_short
        words = re.search(r"dwordx(\d)", base)
        return 32 * int(words[1]) if words else 32 if "dword" in base else 16 if "short" in base else 8
    width = [part for part in name.split(".")[1:] if part in ("8", "16", "32", "64", "128", "256")]
    if width:  # LDG.E.128; or LDG.16, as `summarize` writes it
        return int(width[0])
    return 8 if ".U8" in name or ".S8" in name else 16 if ".U16" in name or ".S16" in name else 32


def summarize(instructions: Sequence[Instruction]) -> Summary:
    """Numbers of a kernel. Raises ValueError if there are no instructions: finding nothing proves nothing."""
    if not instructions:
        raise ValueError("no instructions found in the disassembly")
    loop = main_loop(instructions)
    mix: Counter[str] = Counter()
    for instruction in loop or instructions:
        bits, base = access_bits(instruction.name), instruction.name.split(".")[0]
        mix[f"{base}.{bits}" if bits and base in ("LDG", "LDGSTS", "STG") else base] += 1
    bases = [i.name.split(".")[0] for i in instructions]
    local = [i for i, base in enumerate(bases) if base in ("LDL", "STL") or base.startswith("scratch_")]
    looped = set().union(*_loops(instructions)) if local else set()
    return Summary(
        instructions=len(instructions),
        loop=len(loop),
        mix=dict(mix.most_common()),
        matrix=dict(Counter(base for base in bases if _MATRIX.match(base)).most_common()),
        local_accesses=len(local),
        looped_local_accesses=sum(i in looped for i in local),
    )


def parse_resource_usage(text: str) -> Resources:
    """Parse `cuobjdump --dump-resource-usage`; the largest of several functions. Raises ValueError if it has none."""
    rows = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if not rows:
        raise ValueError(f"no resource usage in {text[:200]!r}")
    return Resources(max(int(r[0]) for r in rows), max(int(r[1]) + int(r[2]) for r in rows))


def parse_gcn_metadata(text: str) -> Resources:
    """Parse the metadata at the end of AMD assembly text. Raises ValueError if it is missing."""
    fields = dict(re.findall(r"^\s+(?:- )?\.(\w+):\s+(\d+)\s*$", text, re.MULTILINE))
    names = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
    if any(name not in fields for name in names):
        raise ValueError(f"the assembly's metadata lacks {', '.join(n for n in names if n not in fields)}")
    vgprs, spills, scalar_spills, private = (int(fields[name]) for name in names)
    return Resources(vgprs, private, spills, scalar_spills)


def dots(ir: str) -> set[tuple[str, str]]:
    """Element types of the operands of every dot in Triton's IR or Gluon's: {("bf16", "bf16"), ("i8", "i8"), ...}."""
    pattern = r"(?:tt\.dot(?:_scaled)?|ttng\.warp_group_dot)\b.*?: (?:tensor|!ttg\.memdesc)<(?:\d+x)+(\w+).*?"
    return set(re.findall(pattern + r"\* (?:tensor|!ttg\.memdesc)<(?:\d+x)+(\w+)", ir))
