"""Finds the number that the paper publishes for the settings of a single run."""

from collections.abc import Iterator
from math import isfinite

from kvt.reports.names import metric_of
from kvt.run.config import RunConfig
from kvt.study.grid import FULL, GridFile, Run, has, runs_of
from kvt.system import GRIDS, read_yaml

FREE = ("trainer.accelerator", "trainer.val_check_interval")  # settings that may differ from the paper's


def paper_of(config: RunConfig, task: str) -> Iterator[tuple[str, str]]:
    """Yield pairs of a metric, such as "test/acc", and a line with the number that the paper has for a run's settings.

    Args:
        config: the configuration of a run.
        task: the `task_name` of the run's data. The function builds no runs of other tasks, to save time.
    """
    for path in sorted(GRIDS.glob("*.yaml")):
        content = read_yaml(path, "the grid")
        entries = [entry for entry in content.get("tables", ()) if entry.get("published")]
        tasks = [name for name in content["tasks"] if f"{task}_".startswith(f"{name}_")]
        if not (entries and tasks):
            continue
        file = GridFile.parse({**content, "tables": entries, "seeds": [config.seed_everything]})
        for run in runs_of(path, file, FULL, tasks):
            if all(name in FREE for name, *_ in config.differences(run.config)):
                yield from _published(run, file)


def _published(run: Run, file: GridFile) -> Iterator[tuple[str, str]]:
    for entry in file.tables or ():
        columns = entry.columns or file.columns
        wanted = columns if isinstance(columns, dict) else {run.task: {"task": run.task}}
        for printed, (mean, std) in entry.published_pairs.get(run.attention, {}).items():
            column = entry.relabelled.get(printed, printed)
            if column in wanted and all(has(run, *setting) for setting in wanted[column].items()):
                kind = metric_of(entry.metric)
                spread = f" ± {kind.value(std)}, mean over its settings" if isfinite(std) else ""
                yield entry.metric, f"the paper, {column}: {entry.metric} {kind.value(mean)}{spread}"
