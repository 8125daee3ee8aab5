"""Calibration: run a 16-bit model on data, or on text of its own, and keep the statistics of its layers' inputs."""

from hf_quant.calibration.calibration import (
    TOKENIZERS,
    Calibration,
    calibrate,
    check_writer,
    find_data,
    is_file,
    needed,
    needs_data,
    takes_data,
)
from hf_quant.calibration.solve import of_file, solve, with_outliers
from hf_quant.calibration.store import StatisticsFile


__all__ = [
    "Calibration",
    "StatisticsFile",
    "TOKENIZERS",
    "calibrate",
    "check_writer",
    "find_data",
    "is_file",
    "needed",
    "needs_data",
    "of_file",
    "solve",
    "takes_data",
    "with_outliers",
]
