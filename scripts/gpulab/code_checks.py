"""Checks of compiled kernels: memory, matrix instructions and their waits, width of accesses; with exceptions."""

import re
from typing import NamedTuple

from gpulab.build import Built
from gpulab.machine_code import access_bits
from hf_quant.kernels.gpu.launch import Target


_HOPPER = {"f16": "HGMMA", "bf16": "HGMMA", "tf32": "HGMMA", "i8": "IGMMA", "f8": "QGMMA"}
_AMPERE = {"f16": "HMMA", "bf16": "HMMA", "tf32": "HMMA", "i8": "IMMA"}
_ADA = {**_AMPERE, "f8": "QMMA"}
# Instruction by target and kind of operand; a kind that is missing has no matrix instruction and must not be used.
MATRIX = {
    "sm75": {},  # Triton makes none
    "sm80": _AMPERE,
    "sm86": _AMPERE,
    "sm89": _ADA,
    "sm90": _HOPPER,
    "sm100": {"f16": "UTCHMMA", "bf16": "UTCHMMA", "tf32": "UTCHMMA", "i8": "UTCIMMA", "f8": "UTCQMMA"},
    "sm120": _ADA,
    "gfx942": dict.fromkeys(("f16", "bf16", "tf32", "i8", "f8"), "v_mfma"),
}
# Bytes of a thread that ptxas may keep in local memory while a loop runs: offsets and pointers that are needed behind
# it. Such a tile fills all 255 registers; a smaller one would decode its weights twice to save 20 accesses a tile.
KEPT_BYTES = 64


class Accepted(NamedTuple):
    """A finding that is accepted.

    `kernel`, `target`, `case` and `triton` are regular expressions: `case` of `case_label`, `triton` of a version.
    """

    check: str
    kernel: str
    target: str
    case: str
    reason: str
    triton: str = ".*"


EXCEPTIONS = (
    Accepted(
        *("matrix", "_(weight_only|grouped)_mm_kernel", "sm75", r".*\bBLOCK_M=(8|16)\b.*"),
        "Triton has FMAs only; so few tokens are bound by bytes",
    ),
    # Triton 3.6 makes no wgmma, and no product in tensor memory, 8 wide. So few tokens are bound by bytes, and
    # mma.sync takes fewer instructions (sm90, 3.6: 180 a step of int4, 3.9 with wgmma: 204).
    Accepted("matrix", ".*", "sm90|sm100", r".*\bBLOCK_M=8\b.*", "8 tokens: bound by bytes"),
    Accepted("matrix", "_few_mm_kernel", "sm90|sm100", ".*", "mma.sync reads what was decoded from registers"),
    Accepted(
        "matrix",
        "_weight_only_mm_kernel|_grouped_mm_kernel",
        "sm90",
        r".*\bBLOCK_M=(16|32)\b.*",
        "mma.sync: 1.06 to 1.09 times as fast as the best tile by wgmma of a decoded weight on an H200",
    ),
    Accepted(
        *(
            "matrix",
            "_(scaled_mm|int8_attention|grouped_scaled).*",
            "sm100",
            "(W8A8 int8|int8 attention|int8 x int8).*",
        ),
        "Triton 3.6 multiplies int8 by mma.sync there, 3.9 in tensor memory",
        triton=r"3\.6\..*",
    ),
    Accepted(
        *("width", "_hopper_(mm|attention)_kernel", "sm90", ".*"),
        "tiles come by TMA, which is not counted; scales by registers",
    ),
    Accepted(
        *("local", "_hopper_mm_kernel", "sm90", r"W4A8 int8 g32 fp8.*\bBLOCK_M=256\b.*"),
        "120 bytes behind the loop, where the scales of 256 tokens meet the sums",
        triton=r"3\.6\..*",
    ),
    Accepted(
        *("local", "_hopper_scaled_mm_kernel", "sm90", "int8 x int8, .*"),
        "8 bytes, written and read once for a tile of experts with a bias",
        triton=r"3\.6\..*",
    ),
    Accepted("width", ".*", ".*", ".*(off-tile|odd) .*", "rows that do not start at multiples of 16 bytes"),
    Accepted("width", ".*", ".*", "(int3|fp6).*", "two planes: a lane's codes of one are half, or less, of 16 bytes"),
    Accepted("width", "_quantize_rowwise.*", ".*", r".* rows \d+x(64|128|1000), .*", "short or odd rows"),
    Accepted("width", "_quantize_rowwise.*", ".*", r".*, M=\d{1,3}, .*", "few rows: many lanes each, latency counts"),
    Accepted("width", "_dequantize.*", ".*", "nf4.*", "levels are looked up in the cache, 4 bytes each"),
    Accepted("width", ".*", "gfx942", "nf4.*", "without NVIDIA's byte permute, levels are looked up in the cache"),
    Accepted("width", "_int8_attention_stats.*", "gfx942", ".*", "one pass over k; attention makes many"),
    # Tiles of 16 rows: the left operand of wgmma, and of tcgen05, has 64 and more.
    Accepted("matrix", "_kv_decode.*", "sm90|sm100", ".*", "few queries: bound by bytes"),
    Accepted("matrix", "_kv_prefill.*", "sm90|sm100", r".*\bBLOCK_M=(16|32)\b.*", "few queries: bound by bytes"),
    Accepted("width", "_kv_prefill.*", ".*", ".*", "scales and masks: the loop is bound by products and softmax"),
    Accepted("width", "_kv_decode.*", ".*", ".*(fp32|fp16|masked).*", "32 tokens a step: 8 bytes of codes a lane"),
    Accepted("width", "_kv_decode.*", "gfx942", ".*", "scales and offsets, 4 bytes a token, go by registers"),
    Accepted("width", "_kv_.*", ".*", "int2.*", "a tile of codes is less than 16 bytes for each thread"),
    Accepted("width", "_kv_append.*", ".*", ".*", "words and scales of a token are apart; 3 bytes a value in all"),
    Accepted(
        "width", "_kv_query.*", ".*", ".*", "a row of each head, and of several a part of a prefill's time: latency"
    ),
    Accepted("width", "_adam_step.*", ".*", ".*", "8 values a thread: states of a byte; and scalars of its table"),
    Accepted("width", "_kv_merge.*", ".*", ".*", "a row of fp32 for each split: 4 bytes a lane, all in flight"),
)


class Finding(NamedTuple):
    """A failed check: its name, and the numbers."""

    check: str
    text: str


def dot_kind(left: str, right: str) -> str:
    """Kind of the operands of a dot in MATRIX, by the names of Triton's IR; fp8 of any layout is "f8"."""
    kinds = {"f8" if name.startswith("f8") else name for name in (left, right)}
    return kinds.pop() if len(kinds) == 1 else "/".join(sorted(kinds))


def check_built(built: Built, target: Target) -> list[Finding]:
    """Everything that is wrong with compiled code; an empty list passes."""
    if built.error is not None:
        return [Finding("compiles", built.error)]
    findings = []
    if built.shared > target.shared_memory:
        text = f"{built.shared} bytes of shared memory, a block on {target.name} has {target.shared_memory}"
        findings.append(Finding("shared", text))
    summary, resources = built.summary, built.resources
    is_kept = resources.local_memory <= KEPT_BYTES and not resources.spills and not summary.looped_local_accesses
    if not is_kept or (summary.local_accesses and not summary.loop):
        text = (
            f"{resources.local_memory} bytes of local memory a thread, {resources.spills} spilled registers, "
            f"{summary.local_accesses} local loads and stores, {summary.looped_local_accesses} of them in loops; at "
            f"most {KEPT_BYTES} bytes may be kept there while a loop runs that does not touch them"
        )
        findings.append(Finding("local", text))
    findings += _check_matrix(built, target)
    if built.hazards:
        findings.append(Finding("hazard", f"{len(built.hazards)} hazards: {built.hazards[0]}"))
    if built.warnings:
        findings.append(Finding("waits", f"ptxas: {built.warnings[0]}"))
    share = wide_share(summary.mix)
    if share is not None and share < 0.5:
        text = f"{share:.0%} of the bytes of the main loop move in accesses of 16 bytes a lane; at least 50% must"
        findings.append(Finding("width", text))
    return findings


def _check_matrix(built: Built, target: Target) -> list[Finding]:
    wanted = set()
    for left, right in built.dots:
        kind = dot_kind(left, right)
        if kind == "f32":  # tl.dot(..., input_precision="ieee") runs on fp32 units by intention
            continue
        instruction = MATRIX[target.name].get(kind)
        if instruction is None:
            return [Finding("matrix", f"tl.dot of {left} and {right}: {target.name} has no such matrix instruction")]
        wanted.add(instruction)
    found = built.summary.matrix
    missing = [name for name in wanted if not any(base.startswith(name) for base in found)]
    if missing:
        text = f"tl.dot of {built.dots} gave {dict(found) or 'no matrix instruction'}, not {', '.join(missing)}"
        return [Finding("matrix", text)]
    other = [base for base in found if not any(base.startswith(name) for name in wanted)]
    if other:
        return [Finding("matrix", f"{', '.join(other)} beside {', '.join(wanted)}: a dot runs on slower units")]
    return []


def wide_share(mix: dict[str, int]) -> float | None:
    """Share of the bytes of the main loop in accesses of at least 16 bytes a lane; None if it has no access."""
    total = wide = 0
    for name, count in mix.items():
        bits = access_bits(name)
        total += bits * count
        wide += bits * count if bits >= 128 else 0
    return wide / total if total else None


def is_excepted(finding: Finding, kernel: str, target: str, case: str, triton: str) -> bool:
    """Return True if EXCEPTIONS accepts a finding in the code of a version of Triton."""
    return any(
        e.check == finding.check
        and re.fullmatch(e.kernel, kernel)
        and re.fullmatch(e.target, target)
        and re.fullmatch(e.case, case)
        and re.fullmatch(e.triton, triton)
        for e in EXCEPTIONS
    )
