"""Reducers made of reducers: error feedback, schedules, and policies by parameter; one file each."""

from tersegrad.wrappers.by_dimension import ByDimension
from tersegrad.wrappers.by_name import ByName
from tersegrad.wrappers.by_size import BySize
from tersegrad.wrappers.error_feedback import ErrorFeedback
from tersegrad.wrappers.every import Every
from tersegrad.wrappers.low_memory import LowMemory
from tersegrad.wrappers.momentum_correction import MomentumCorrection
from tersegrad.wrappers.schedule import Schedule
from tersegrad.wrappers.step_ahead import StepAhead
from tersegrad.wrappers.warmup import Warmup

__all__ = [
    "ByDimension",
    "ByName",
    "BySize",
    "ErrorFeedback",
    "Every",
    "LowMemory",
    "MomentumCorrection",
    "Schedule",
    "StepAhead",
    "Warmup",
]
