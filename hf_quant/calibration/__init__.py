"""Calibration: run a 16-bit model on data, or on text of its own, and keep the statistics of its layers' inputs."""

from hf_quant.calibration.calibration import (
    TOKENIZERS,
    Calibration,
    calibrate,
    can_write,
    check_writer,
    find_data,
    is_file,
    memory_for_statistics,
    needed,
    needs_data,
    takes_data,
)
from hf_quant.calibration.data import Data
from hf_quant.calibration.gradients import Call, CallRecorder, InputRounding, Sensitivity, record_calls, sensitivities
from hf_quant.calibration.observe import replace_forward
from hf_quant.calibration.solve import Solved, of_file, solve, with_outliers
from hf_quant.calibration.store import StatisticsFile


__all__ = [
    "Calibration",
    "Call",
    "CallRecorder",
    "Data",
    "InputRounding",
    "Sensitivity",
    "Solved",
    "StatisticsFile",
    "TOKENIZERS",
    "calibrate",
    "can_write",
    "check_writer",
    "find_data",
    "is_file",
    "memory_for_statistics",
    "needed",
    "needs_data",
    "of_file",
    "record_calls",
    "replace_forward",
    "sensitivities",
    "solve",
    "takes_data",
    "with_outliers",
]
