"""The targets of the GPU kernels, as data, and how records of a run are judged by them. Used by gpu_suite.py.

"at least" is a ratio of times in the same run, if nothing else is said; products over several layers are weighted by
their time. `next` names what to try first where a target is missed, or has never been measured.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from gpulab.cache_cases import CACHED
from gpulab.cases import ATTENTION
from gpulab.measures import Record


class Target(NamedTuple):
    """One line of the table.

    Attributes:
        id: G1, ...; lines of one goal share it.
        what: for people.
        section: of gpu_suite.py, which measures it.
        candidates: whose records count; each is judged alone, the worst counts.
        tokens: likewise, M.
        linears: whose times are added up; None: all.
        versus: "bf16", a rival's name, "best rival", "copy" (share of the copy's bandwidth), or the key of a record's
            own value.
        limit: the least value; the largest one if `is_upper`.
        next: what to try first.
    """

    id: str
    what: str
    section: str
    candidates: tuple[str, ...]
    tokens: tuple[int, ...]
    versus: str
    limit: float
    next: str
    linears: tuple[str, ...] | None = None
    is_upper: bool = False


class Verdict(NamedTuple):
    """`value` is None, and `reason` says why, where nothing was measured."""

    target: Target
    value: float | None
    reason: str = ""

    @property
    def passed(self) -> bool | None:
        if self.value is None:
            return None
        return self.value <= self.target.limit if self.target.is_upper else self.value >= self.target.limit

    def text(self) -> str:
        """PASS, or by how much the target was missed, or why it was not judged."""
        if self.value is None:
            return self.reason
        short = self.value / self.target.limit - 1 if self.target.is_upper else 1 - self.value / self.target.limit
        return "PASS" if self.passed else f"short by {short:.0%}"


INT4, INT8, FP8 = ("int4 g128",), ("int8",), ("fp8_e4m3",)
W8A8_INT8, W8A8_FP8 = ("W8A8 int8",), ("W8A8 fp8",)
MIDDLE, LARGE, EVERY = (256, 512, 1024), (4096, 8192), tuple(2**i for i in range(14))
_DECODE = "HF_QUANT_UNTRIED_KERNELS=1: codes straight to registers, warps that share K (weight_only.few)"
_TILES = "smaller steps of the ring (gpu.hopper): the first and the last of a tile are not hidden"
_PREFILL = "blocks that stay and share the last tiles: 512 tokens make 3.4 rounds of tiles, which take the time of 4"
_DENSE = "blocks that stay, so that the end of a tile hides behind the next one"
_FP8 = "two groups of warps in turns, so that the end of a tile hides behind the other's products"
_INT8 = _FP8
_W4A8 = "HF_QUANT_UNTRIED_KERNELS=1: codes of 4 bits as int8 operands of wgmma, the sum of each group scaled in fp32"
_BLOCKS = (
    "profile one block: what is neither a product nor attention (norms, rotary embeddings, quantizing q, k, v thrice)"
)
_EAGER = (
    "launches per block: quantize an input once for q, k and v; fuse the norm, its modulation and the quantization"
)
_EXPERTS = "few rows: as the other products; tiles of codes of experts, which follow those of plain weights"


def _caches(format: str) -> tuple[str, ...]:
    return tuple(f"{format} cache {one.batch}x{one.T}" for one in CACHED if one.S == 1 and one.T >= 32768)


def _diffusion() -> tuple[Target, ...]:
    """Make the targets of whole models, extrapolated from few blocks; bench_pipeline.py measures all blocks."""
    flux, video = (4608,), (17776,)
    both = ("flux eager fp8 attention", "flux eager int8 attention")
    fast, long = ("flux compiled fp8 attention",), ("cogvideox compiled fp8 attention",)
    small, small_video = ("flux eager int4",), ("cogvideox eager int4",)

    def target(id: str, what: str, names: tuple[str, ...], M: tuple[int, ...], versus: str, limit: float, **more: Any):
        return Target(id, what, "diffusion", names, M, versus, limit, **{"next": _BLOCKS, **more})

    upper = {"is_upper": True, "next": "which modules stay in 16 bit: print(plan)"}
    return (
        target("D1", "Flux.1-dev, fp8, 8-bit attention", fast, flux, "x compiled bf16", 1.55),
        target("D1", "the same over plain bf16", fast, flux, "x eager bf16", 2.6),
        target("D1", "the same, seconds an image", fast, flux, "s/image", 2.5, is_upper=True),
        target("D1", "the same", fast, flux, "torchao", 1.12),
        target("D2", "Flux.1-dev, 8 bit, not compiled", both, flux, "x eager bf16", 1.35, next=_EAGER),
        target("D3", "CogVideoX-5b, fp8, 8-bit attention", long, video, "x compiled bf16", 1.35),
        target("D3", "the same", long, video, "torchao", 1.15),
        target("D3", "the same, weights", long, video, "of bf16 weights", 0.505, **upper),
        target("D3", "CogVideoX-5b, int4, weights", small_video, video, "of bf16 weights", 0.27, **upper),
        target("D4", "Flux.1-dev, int4, not compiled", small, flux, "x eager bf16", 0.90, next=_PREFILL),
        target("D4", "the same, GB of weights", small, flux, "GB", 6.4, **upper),
        target("Q", "8 bit, dB of a call of few blocks", (*both, *fast), flux, "call SNR dB", 25, next="skip lists"),
        target("Q", "8 bit, dB of a call of few blocks", long, video, "call SNR dB", 25, next="skip lists"),
    )


TARGETS: tuple[Target, ...] = (
    Target("G1", "int4, layers of a Llama-3.1-8B", "weights", INT4, (1,), "bf16", 3.0, _DECODE),
    Target("G1", "int4, gate_up", "weights", INT4, (1,), "bf16", 3.3, _DECODE, ("llama gate_up",)),
    Target("G1", "int4, 4096 x 4096", "weights", INT4, (1,), "bf16", 2.2, _DECODE, ("llama o",)),
    Target("G1", "int4", "weights", INT4, (1,), "tinygemm", 1.25, _DECODE),
    Target("G1", "int4", "weights", INT4, (1,), "gemlite", 1.7, _DECODE),
    Target("G2", "int4", "weights", INT4, (8,), "bf16", 2.9, _DECODE),
    Target("G2", "int4", "weights", INT4, (16,), "bf16", 2.8, _DECODE),
    Target("G2", "int4", "weights", INT4, (32,), "bf16", 2.6, _TILES),
    Target("G2", "int4", "weights", INT4, (8, 16, 32), "gemlite", 2.0, _DECODE),
    Target("G3", "int4", "weights", INT4, (64,), "bf16", 2.0, _TILES),
    Target("G3", "int4", "weights", INT4, (128,), "bf16", 1.2, _TILES),
    Target("G3", "int4", "weights", INT4, (64, 128), "best rival", 1.3, _TILES),
    Target("G4", "int4, prefill", "weights", INT4, MIDDLE, "bf16", 0.82, _PREFILL),
    Target("G4", "int4, prefill", "weights", INT4, (2048,), "bf16", 0.90, _DENSE),
    Target("G4", "int4, prefill", "weights", INT4, LARGE, "bf16", 0.94, _DENSE),
    Target("G4", "int4, prefill", "weights", INT4, (*MIDDLE, 2048, *LARGE), "gemlite", 1.7, _PREFILL),
    Target("G5", "W4A8", "dynamic", ("W4A8 int8",), (64,), "bf16", 2.6, _W4A8),
    Target("G5", "W4A8", "dynamic", ("W4A8 int8",), (256,), "bf16", 1.6, _W4A8),
    Target(
        "G5",
        "W4A8",
        "dynamic",
        ("W4A8 int8",),
        (4096,),
        "bf16",
        1.45,
        "scales of groups keep it from int8 products: one scale a row, or the vendor's GEMM without passes beside it",
    ),
    Target("G6", "int8, fp8 weights", "weights", INT8 + FP8, (1, 8, 64), "bf16", 1.75, _DECODE),
    Target("G6", "int8, fp8 weights", "weights", INT8 + FP8, (512, 4096), "bf16", 0.95, _PREFILL),
    Target("G6", "int8 weights", "weights", INT8, (1, 8, 64, 512, 4096), "best rival", 1.2, _DECODE),
    Target("G7", "fp8 product alone", "dynamic", ("fp8_e4m3",), (4096, 8192), "bf16", 1.55, _FP8),
    Target("G7", "fp8 product alone", "dynamic", ("fp8_e4m3",), (4096, 8192), "_scaled_mm", 0.97, _FP8),
    Target("G8", "fp8 with activations", "dynamic", W8A8_FP8, LARGE, "bf16", 1.45, _FP8),
    Target("G8", "fp8 with activations", "dynamic", W8A8_FP8, LARGE, "torchao compiled", 1.05, _FP8),
    Target("G8", "fp8 with activations", "dynamic", W8A8_FP8, LARGE, "torchao", 1.3, _FP8),
    Target("G9", "int8 product alone", "dynamic", ("int8",), (4096, 8192), "bf16", 1.55, _INT8),
    Target("G9", "int8 product alone", "dynamic", ("int8",), (4096, 8192), "_int_mm", 0.97, _INT8),
    Target(
        "G9",
        "int8 with activations",
        "dynamic",
        W8A8_INT8,
        (2048, 4096),
        "bf16",
        1.45,
        "quantize in the product before",
    ),
    Target("G9", "int8 with activations", "dynamic", W8A8_INT8, (1, 16, 128), "bf16", 1.7, "quantize in the GEMM"),
    Target(
        "G9",
        "int8 with activations",
        "dynamic",
        W8A8_INT8,
        (128, 2048, 4096),
        "_int_mm",
        1.5,
        "num_stages",
    ),
    Target("G9", "int8 with activations", "dynamic", W8A8_INT8, (128, 2048, 4096), "torchao", 1.5, "as for _int_mm"),
    Target(
        "G10",
        "row quantization, alone and fused",
        "rowwise",
        ("quantize -> int8", "RMSNorm -> int8", "SiLU * up -> int8", "LayerNorm, modulated -> int8"),
        (8192,),
        "copy",
        0.85,
        "rows of a block and warps in rowwise CONFIGS; random rounding and GELU are bound by instructions (modelled)",
    ),
    Target("G10", "RMSNorm + quantize", "rowwise", ("RMSNorm -> int8",), (8192,), "inductor", 1.1, "warps a row"),
    Target("G10", "Hadamard", "rowwise", ("Hadamard",), (8192,), "copy", 0.85, "warps; order of the butterflies"),
    Target("G11", "experts, decode", "experts", ("int4 g128",), (1, 16), "bf16", 2.5, _EXPERTS),
    Target("G11", "experts, decode", "experts", INT8 + ("W8A8 fp8",), (1, 16), "bf16", 1.6, _EXPERTS),
    Target("G11", "experts, prefill", "experts", ("int4 g128", "int8", "W8A8 fp8"), (4096,), "bf16", 0.9, _EXPERTS),
    Target(
        "D5",
        "8-bit attention",
        "attention",
        ("int8 attention", "int8 attention, fp8_e4m3"),
        tuple(one.S for one in ATTENTION),
        "bf16",
        1.25,
        "HF_QUANT_UNTRIED_KERNELS=1: two groups of warps in turns; the exponentials bound it at D = 64 (modelled)",
    ),
    *(
        Target(
            "K1", f"attention over an {format} cache", "attention", _caches(format), (1,), "best rival", limit, next
        )
        for format, limit, next in (
            ("int8", 1.8, "one sequence: the sum of its splits, a launch; stages, warps and BLOCK_N are tried"),
            (
                "int4",
                3.0,
                "fewer instructions: half of the issue slots, and of the bandwidth, are in use; BLOCK_N is tried",
            ),
            ("int2", 4.2, "instructions: skip the rescaling of the sums where the maximum stays"),
        )
    ),
    Target("S1", "int4, every M", "weights", INT4, EVERY, "bf16", 0.9, _PREFILL, ("llama o",)),
    Target("L1", "generate, bf16 in a graph", "models", ("bf16 graph",), (1,), "tok/s", 235, "profile attention"),
    Target("L1", "generate, int8", "models", ("int8",), (1,), "tok/s", 430, "fuse norms with their neighbours"),
    Target("L1", "generate, int4 and int8 head", "models", ("int4",), (1,), "tok/s", 700, "launches per layer; PDL"),
    Target("L1", "int4, `generate` itself", "models", ("int4 generate",), (1,), "tok/s", 700, "host time of a replay"),
    Target("L1", "int4 over bf16 in a graph", "models", ("int4",), (1,), "x bf16 graph", 2.9, "launches per layer"),
    Target("L1", "int4 over plain generate", "models", ("int4",), (1,), "x bf16 eager", 15, "launches per layer"),
    Target(
        "Q2",
        "quantize an 8B model, int4",
        "models",
        ("quantize int4",),
        (1,),
        "seconds",
        3.0,
        "profile `quantize_`: passes over the weight beside reading it and writing the codes",
        is_upper=True,
    ),
    *_diffusion(),
)


def judge(targets: Iterable[Target], sections: dict[str, dict[str, Any]]) -> list[Verdict]:
    """Verdicts by the records of each section: {section: {"records", "ceilings", "status"}}."""
    return [_judge(target, sections.get(target.section, {"status": "not run"})) for target in targets]


def _judge(target: Target, section: dict[str, Any]) -> Verdict:
    wanted = [
        record
        for record in section.get("records", ())
        if record["candidate"] in target.candidates
        and record["M"] in target.tokens
        and (target.linears is None or record["linear"] in target.linears)
    ]
    if not wanted:
        status = section.get("status", "done")
        return Verdict(target, None, "nothing measured" + (f" ({status})" if status != "done" else ""))
    groups: dict[tuple[str, int], list[Record]] = {}
    for record in wanted:
        groups.setdefault((record["candidate"], record["M"]), []).append(record)
    values = [_value(target.versus, group, section) for group in groups.values()]
    known = [value for value in values if value is not None]
    if not known:
        return Verdict(target, None, f"no {target.versus} in this run")
    missing = len(values) - len(known)
    reasons = [f"{missing} of {len(values)} without {target.versus}"] if missing else []
    if target.versus == "best rival":
        best = {min(record["rivals_ms"], key=record["rivals_ms"].get) for record in wanted if record["rivals_ms"]}
        reasons.insert(0, f"the best: {', '.join(sorted(best))}")
    reason = "; ".join(reasons)
    return Verdict(target, max(known) if target.is_upper else min(known), reason)


def _value(versus: str, records: Sequence[Record], section: dict[str, Any]) -> float | None:
    """One number for the records of one candidate and one M; None if what they are compared with is missing."""
    if versus == "copy":
        return min(record["gbps"] for record in records) / section["ceilings"]["copy"]
    if versus in records[0]:
        return min(record[versus] for record in records)
    others = [_other_ms(versus, record) for record in records]
    pairs = [(other, record["ms"]) for other, record in zip(others, records) if other is not None]
    # A rival that does not do every layer is compared on those that it does.
    return sum(other for other, _ in pairs) / sum(ours for _, ours in pairs) if pairs else None


def _other_ms(versus: str, record: Record) -> float | None:
    if versus == "bf16":
        return record["bf16_ms"]
    rivals = record["rivals_ms"]
    if versus == "best rival":
        return min(rivals.values(), default=None)
    return min((ms for name, ms in rivals.items() if name == versus), default=None)
