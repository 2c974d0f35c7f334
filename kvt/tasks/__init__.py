"""One file a task family: its data and its Lightning module."""

from kvt.tasks.base import Task, TaskData
from kvt.tasks.synthetic import DigitLists, ListTask
from kvt.tasks.vision import Images, ImageTask

__all__ = ["DigitLists", "ImageTask", "Images", "ListTask", "Task", "TaskData"]
