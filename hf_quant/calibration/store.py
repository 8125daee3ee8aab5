"""Files of statistics, such as an imatrix: kilobytes by which a model is quantized while it loads."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hf_quant.algorithms import Statistics
from hf_quant.config import check_kv_scales, check_record
from hf_quant.scheme import InputTransform


FORMAT = "hf_quant_statistics"
_PARTS = ("amax", "second_moment", "token_amax")


class StatisticsFile:
    """Statistics of the inputs of layers, by {module: {weight: one `Statistics` per matrix}}.

    Attributes:
        statistics: the statistics.
        transforms: {module: the rotation under which they were recorded, or None}.
        record: with what they were calibrated, see `QuantizerConfig.calibrated_with`.
        kv_scales: see `Calibration.kv_scales`.
    """

    def __init__(
        self,
        statistics: Mapping[str, Mapping[str, Sequence[Statistics]]],
        transforms: Mapping[str, InputTransform | None],
        record: dict[str, Any],
        kv_scales: dict[str, list[float]] | None = None,
    ) -> None:
        self.statistics = {name: dict(weights) for name, weights in statistics.items()}
        self.transforms, self.record, self.kv_scales = dict(transforms), record, kv_scales

    def save(self, path: str | Path) -> None:
        """Write a .safetensors file. Raises ValueError for Hessians, which would take gigabytes."""
        tensors: dict[str, torch.Tensor] = {}
        for module, weights in self.statistics.items():
            for weight, found in weights.items():
                if any(s.hessian is not None for s in found):
                    raise ValueError("Hessians are not saved: calibrate with kind='second_moment' or 'amax'")
                for part in _PARTS:
                    values = [getattr(s, part) for s in found]
                    if all(v is not None for v in values):
                        tensors[f"{module}|{weight}|{part}"] = torch.stack(values).cpu().contiguous()
                counts = torch.tensor([s.num_tokens for s in found], dtype=torch.int64)
                tensors[f"{module}|{weight}|num_tokens"] = counts
        blocks = {m: None if t is None else t.block_size for m, t in self.transforms.items()}
        metadata = {FORMAT: "1", "record": json.dumps(self.record), "blocks": json.dumps(blocks)}
        if self.kv_scales is not None:
            metadata["kv_scales"] = json.dumps(self.kv_scales)
        save_file(tensors, path, metadata)

    @classmethod
    def of(cls, given: "StatisticsFile | str | Path") -> "StatisticsFile":
        """Statistics, or those in a file of that path."""
        return given if isinstance(given, StatisticsFile) else cls.load(given)

    @classmethod
    def load(cls, path: str | Path) -> "StatisticsFile":
        """Read what `save` has written. Raises ValueError on any other file."""
        if not Path(path).is_file():
            raise ValueError(f"{path} is not a file; needs statistics that `hf-quant calibrate` has written")
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                if metadata.get(FORMAT) != "1":
                    raise ValueError(f"{path} holds no statistics of hf_quant: write them by `hf-quant calibrate`")
                tensors = {key: file.get_tensor(key) for key in file.keys()}
        except SafetensorError as error:
            raise ValueError(f"{path} is no safetensors file ({error})") from None
        try:
            return cls._of_tensors(tensors, metadata)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} holds broken statistics ({error}): write them again by `hf-quant calibrate`"
            ) from None

    @classmethod
    def _of_tensors(cls, tensors: dict[str, torch.Tensor], metadata: Mapping[str, str]) -> "StatisticsFile":
        record, kv_scales = json.loads(metadata["record"]), json.loads(metadata.get("kv_scales", "null"))
        check_record(record)
        if kv_scales is not None:
            check_kv_scales(kv_scales)
        blocks = json.loads(metadata["blocks"])
        transforms = {m: None if block is None else InputTransform(block) for m, block in blocks.items()}
        statistics: dict[str, dict[str, list[Statistics]]] = {}
        for key, counts in tensors.items():
            module, weight, part = key.rsplit("|", 2)
            if part != "num_tokens":
                continue
            parts = {p: tensors.get(f"{module}|{weight}|{p}") for p in _PARTS}
            if any(t is not None and len(t) != len(counts) for t in parts.values()):
                raise ValueError(f"those of {module} are of different numbers of matrices")
            statistics.setdefault(module, {})[weight] = [
                Statistics(count, **{p: t if t is None else t[i] for p, t in parts.items()})
                for i, count in enumerate(counts.tolist())
            ]
        return cls(statistics, transforms, record, kv_scales)
