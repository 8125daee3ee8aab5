"""Barriers of rings in Gluon's IR that a loop leaves at one place, so that the other warps wait for ever.

Triton's front end does not see that a loop changes a variable, if before the loop it is the very value of another one
that the loop changes (3.6 to 3.9): the loop then signals the place in the ring that it began with.
"""

import re


_LOOP = re.compile(r"scf\.(?:for|while)\b")
_DEFINED = re.compile(r"^\s*(%[\w$.-]+)(?::\d+)? = ")
_ARGUMENTS = re.compile(r"(%[\w$.-]+) = %")
_PLACE = re.compile(r"(%[\w$.-]+) = ttg\.memdesc_index (%[\w$.-]+)\[(%[\w$.#-]+)\]")
_BARRIER = re.compile(r"ttng\.(arrive|wait)_barrier (%[\w$.-]+)")


def still_barriers(ttgir: str) -> tuple[str, ...]:
    """Name the barriers of loops whose place the loop does not change, as text for people."""
    found: list[str] = []
    loops: list[tuple[int, set[str]]] = []  # indentation, and what is defined inside, of the loops around a line
    places: dict[str, tuple[str, str]] = {}
    for line in ttgir.splitlines():
        indent = len(line) - len(line.lstrip())
        while loops and line.strip() and indent <= loops[-1][0]:
            loops.pop()
        defined = _DEFINED.match(line)
        if loops and defined:
            loops[-1][1].add(defined[1])
        if place := _PLACE.search(line):
            places[place[1]] = place[2], place[3].split("#")[0]
        if loops and (barrier := _BARRIER.search(line)) and barrier[2] in places:
            ring, index = places[barrier[2]]
            if index not in loops[-1][1]:
                found.append(f"each turn of a loop does {barrier[1]} at {ring}[{index}], which it does not change")
        if _LOOP.search(line):
            loops.append((indent, set(_ARGUMENTS.findall(line))))
    return tuple(found)
