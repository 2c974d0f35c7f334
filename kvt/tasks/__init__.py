"""The tasks of kvt. Each family of tasks has a file with its data modules and its Lightning modules."""

from kvt.tasks.anomaly import AnomalyTask, SetAnomalies
from kvt.tasks.base import Classification, Task
from kvt.tasks.datamodule import TaskData
from kvt.tasks.images import Images, ImageTask
from kvt.tasks.language import Characters, CharacterTask, HumanNumbers, LanguageModelTask, NumberTask, TextTokens
from kvt.tasks.lists import DigitLists, ListTask
from kvt.tasks.recall import Recall, RecallTask
from kvt.tasks.translation import SentencePairs, TranslationTask

__all__ = ["AnomalyTask", "CharacterTask", "Classification", "ImageTask", "LanguageModelTask", "ListTask", "NumberTask"]
__all__ += ["RecallTask", "Task", "TranslationTask"]
__all__ += ["Characters", "DigitLists", "HumanNumbers", "Images", "Recall", "SentencePairs", "SetAnomalies", "TaskData"]
__all__ += ["TextTokens"]
