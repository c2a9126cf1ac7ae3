"""Reducers made of reducers: what is remembered, when, and for which parameters."""

from tersegrad.wrappers.by_name import ByName
from tersegrad.wrappers.error_feedback import ErrorFeedback
from tersegrad.wrappers.schedule import Schedule

__all__ = ["ByName", "ErrorFeedback", "Schedule"]
