"""Writes tables of answers, differences and claims into README.md and pages of docs, from the records in docs/results.

    python experiments/claims.py

A table stands in a page between the comments `<!-- table NAME -->` and `<!-- end -->`. claims.yaml lists the rows. The
evidence of a claim is the name of a function below with its arguments, or tests of kvt. A claim is "not tested yet" if
it has no evidence or an entry `untested`, if its record does not exist or has none of the runs, or if one of
its comparisons is not tested and no other fails.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from kvt.grids.cycles import ACCURACY, NEAR, add_cycles, level, longer_cycles
from kvt.grids.padding import COUNTED, REAL, perplexity_costs
from kvt.markdown import Markdown, markdown_table
from kvt.reports.comparisons import NEARLY, Compared, by_seed, finite
from kvt.reports.report import measure
from kvt.reports.statistics import TOO_FEW, UNDECIDED, Comparison, compare, verdict
from kvt.reports.tables import Table, counted, label, metric_of
from kvt.reports.text import better_in, difference_of, interval_of, left_out_of, pair_of
from kvt.study.grid import FULL, Grid, Run, read_grid
from kvt.study.outcomes import Outcome, State
from kvt.study.records import RECORD, find_outcomes, read_record
from kvt.system import parse_yaml, write_atomically
from kvt.tasks.metrics import Metric

REPOSITORY = Path(__file__).parents[1]
RECORDS = REPOSITORY / "docs" / "results"
CLAIMS = Path(__file__).with_name("claims.yaml")
PAGES = (
    "README.md",
    *(f"docs/{name}.md" for name in ("findings", "claims", "symmetry", "sharing", "recall", "lacks", "reliability")),
)
COSTS = {"parameters": "parameters", "training_ms": "time of a training step"}
UNITS = {"acc": "points", "loss": "hundredths of a nat", "bleu": "BLEU", "real_ppl": "points"}
"""A dict that maps the name of a metric to the unit of its differences."""
DURATION = {"max_epochs": "epochs", "max_steps": "steps"}
HOW_OFTEN = (*DURATION, "val_check_interval", "batch_size")  # settings that change neither the model nor the task
HOLDS, FAILS, UNTESTED = "holds", "fails", "not tested yet"
CONTRADICTED, NOISY = "contradicted, but not significant", "too noisy"
COUNTED_AS = (HOLDS, FAILS, CONTRADICTED, NOISY, UNTESTED)
OURS = ("kv", "kv+pos")
"""The attentions that the table of answers compares with QKV."""
PAPER = (("kv", "qkv"), ("kv+pos", "qkv"))
MARK = re.compile(r"(<!-- table (\w+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


class Evidence(NamedTuple):
    measured: str
    verdict: str


class Record(NamedTuple):
    rows: pd.DataFrame  # finished runs of a grid, or layer sizes of `kvt bench`
    grid: Grid | None = None
    tables: Sequence[Table] = ()
    lines: Sequence[Compared] = ()  # the comparisons of the record's report
    made: Sequence[Run] = ()  # the grid's finished runs, including those that `best_of` does not choose
    wanted: int = 0  # number of runs of the grid

    def table(self, metric: str) -> Table:
        """Return the table of a metric, or else a copy of the first, with this metric and no published numbers."""
        other = self.tables[0]._replace(metric=metric, kind=metric_of(metric), published={})
        return next((table for table in self.tables if table.metric == metric), other)


def write_tables(page: str) -> str:
    """Return the text of a page with its tables, which stand between comments, written anew."""
    content, judged = judge_all()

    def table(mark: re.Match[str]) -> str:
        name = mark[2]
        if name == "answers":
            rows = answers(content["answers"], judged)
        elif name == "total":
            rows = total()
        elif name in content["differences"]:
            rows = differences(**content["differences"][name])
        else:
            rows = claims({key: one for key, one in judged.items() if one[0]["table"] == name}, name)
        return f"{mark[1]}{rows}\n"

    return MARK.sub(table, page)


@cache
def judge_all() -> tuple[Mapping[str, Any], Mapping[str, tuple[Any, Evidence]]]:
    """Return the content of claims.yaml, and each claim by name with its evidence."""
    content = parse_yaml(CLAIMS.read_bytes(), CLAIMS.name)
    named = {name: {"table": whose, **claim} for whose in ("paper", "ours") for name, claim in content[whose].items()}
    return content, {name: (claim, judge(claim, open_record)) for name, claim in named.items()}


# ---- the first table ----


def answers(rows: Sequence[Mapping[str, Any]], judged: Mapping[str, Any]) -> Markdown:
    """Return the table of answers, with published differences, ours, and the pairs in which KV or KV+Pos is better.

    An answer is bold if its row has `rests_on`, and all claims in this list hold or fail. A bold answer has a dagger if
    one of these claims has `confirm`.
    """
    lines = [
        ["KV − QKV / KV+Pos − QKV", "the paper", "we", "pairs in which KV / KV+Pos is better", "answer", "our runs"]
    ]
    for row in rows:
        kind, how = next(((name, row[name]) for name in ANSWERS if name in row), ("", {}))
        ours, pairs = ANSWERS[kind](**how) if kind else (row["ours"], "–")
        theirs = row["published"] if isinstance(row["published"], str) else published(**row["published"])
        rests = [judged[name] for name in row.get("rests_on", ())]
        decided = all(found.verdict.partition(":")[0] in (HOLDS, FAILS) for _, found in rests)
        form = "{} †" if decided and any("confirm" in claim for claim, _ in rests) else "{}"
        answer = Markdown(f"**{form}**" if decided and "rests_on" in row else form).format(row["answer"])
        lines.append([row["item"], theirs, ours, pairs, answer, row["runs"]])
    return markdown_table(lines)


def published(record: str, metric: str, columns: Sequence[str], mean: bool = True) -> str:
    """Return the published differences of `OURS` from QKV: with `mean`, the mean over columns, else one per column.

    An attention without published numbers has a dash.
    """
    table = _known(record).table(metric)
    theirs, said = table.published, []
    for name in OURS:
        gaps = [theirs[name][c][0] - theirs["qkv"][c][0] for c in columns if c in theirs.get(name, {})]
        gaps = [float(np.mean(gaps))] if mean and gaps else gaps
        said.append(", ".join(_short(gap, table.kind) for gap in gaps) or "–")
    return " / ".join(said)


def measured(record: str, metric: str, column: str) -> tuple[str, str]:
    """Return two texts about a column or pool: the differences of `OURS` from QKV with intervals, and the pairs.

    The second text has the numbers of pairs in which KV and KV+Pos are better than QKV, as in `_pairs`.
    """
    opened = _known(record)
    lines, kind = [_lines_of(opened, metric, column, (name, "qkv"))[0] for name in OURS], opened.table(metric).kind
    said = [_short(one.difference, kind) + f" [{_short(one.low, kind)}, {_short(one.high, kind)}]" for one in lines]
    return " / ".join(said), _pairs([(one.better_in, one.pairs) for one in lines])


def listed(record: str, metric: str, columns: Sequence[str], mean: bool = False) -> tuple[str, str]:
    """Return the texts of `measured`, without intervals, for several columns; with `mean`, the mean difference.

    The numbers of pairs are sums over the columns.
    """
    opened = _known(record)
    table = opened.table(metric)
    every = [by_seed(opened.rows, table, column)[0] for column in columns]  # with settings that comparisons leave out
    said, pairs = [], []
    for name in OURS:
        differences = [(runs[name] - runs["qkv"]).dropna() for runs in every]
        gaps = [float(of.groupby("setting").mean().mean()) for of in differences]
        said.append(", ".join(_short(gap, table.kind) for gap in ([float(np.mean(gaps))] if mean else gaps)))
        better = [of > 0 if table.kind.better == "more" else of < 0 for of in differences]
        pairs.append((sum(int(of.sum()) for of in better), sum(map(len, differences))))
    return " / ".join(said), _pairs(pairs)


def solved(record: str, task: str) -> tuple[str, str]:
    """Return in how many runs QKV and each of `OURS` solve a task, as text, and a dash in place of pairs."""
    counts, number = solved_of_all(_known(record), task)
    return f"{', '.join(f'{label(name)} {counts[name]}' for name in ('qkv', *OURS))} of {number}", "–"


def ratios(record: str, attention: str) -> tuple[str, str]:
    """Return the costs of a layer divided by those of QKV, as text, and a dash in place of pairs."""
    found = costs(_known(record), attention, ["parameters", "training_ms"])
    assert found
    return found.measured, "–"


def solved_of_all(record: Record, task: str) -> tuple[dict[str, int], int]:
    """Return in how many runs each of the paper's attentions solves a task, and how many runs each has.

    A run counts only if each of the three attentions has a run with the same setting and seed.
    """
    rows = _choose(record.rows, {"task": [task], "attention": ["kv+pos", "kv", "qkv"]})
    runs = rows.pivot(index=["setting", "seed"], columns="attention", values="test/acc").dropna() >= NEARLY
    return {name: int(runs[name].sum()) for name in ("kv+pos", "kv", "qkv")}, len(runs)


ANSWERS: dict[str, Callable[..., tuple[str, str]]] = {f.__name__: f for f in (measured, listed, solved, ratios)}


def _known(name: str) -> Record:
    record = open_record(name)
    assert record is not None, name
    return record


def _short(difference: float, kind: Metric) -> str:
    rounded = round(difference / kind.point, 1)
    return f"{rounded:+.1f}".replace("-", "−") if rounded else "0.0"


def _pairs(counts: Sequence[tuple[float, int]]) -> str:
    """Return numbers of pairs, such as "3 / 17 of 51", or "0 of 20 / 5 of 21" if the totals differ."""
    if len({number for _, number in counts}) == 1:
        return f"{' / '.join(f'{better:.0f}' for better, _ in counts)} of {counts[0][1]}"
    return " / ".join(f"{better:.0f} of {number}" for better, number in counts)


def differences(record: str, metric: str, columns: Sequence[str], pairs: Sequence[Sequence[str]] = PAPER) -> Markdown:
    """Return a table with a row for each column or pool.

    A row has the mean of the first pair's baseline and, for each pair of attentions, the difference and the number of
    pairs of runs in which its first attention is better.
    """
    opened = _known(record)
    table, baseline = opened.table(metric), pairs[0][1]
    heading = ["", label(baseline)] + [words for pair in pairs for words in (" − ".join(map(label, pair)), "better in")]
    lines = [heading]
    for column in columns:
        means = by_seed(opened.rows, table, column)[0][baseline].dropna().groupby("setting").mean()
        found = [line for pair in pairs for line in _lines_of(opened, metric, column, pair)]
        cells = [text for one in found for text in (difference_of(one, table.kind), better_in(one))]
        lines.append([column, table.kind.value(means.mean()), *cells])
    return markdown_table(lines)


def total() -> Markdown:
    """Return a text with the numbers of finished runs and hours, and the CPUs, of all records.

    A run in two records counts once.
    """
    rows = pd.concat([pd.read_csv(path, low_memory=False) for path in sorted(RECORDS.glob("*/results.csv"))])
    rows = rows[rows.state == State.FINISHED].drop_duplicates(["name", "started"])
    on_gpu = rows["machine.gpus"].astype(str).str.contains("NVIDIA")
    hours = [(of.seconds * of["machine.threads"]).sum() / 3600 for of in (rows[~on_gpu], rows[on_gpu])]
    where = Markdown(" and ").join(sorted({*rows["machine.processor"][~on_gpu].dropna()}))
    said = Markdown("{:,} runs on CPUs ({}) took {:,.0f} core-hours of training. {:,} runs on an NVIDIA H200, ")
    said += Markdown("with up to 16 runs at once, took {:,.1f} hours.")
    return said.format((~on_gpu).sum(), where, hours[0], on_gpu.sum(), hours[1])


# ---- the tables of claims ----


def claims(judged: Mapping[str, Any], name: str) -> Markdown:
    """Return a table with a row for each claim, after a sentence that counts the verdicts."""
    own = name == "paper"
    lines = [["", "claim", *["published"] * own, "measured", "verdict", "our runs"]]
    for key, (claim, found) in judged.items():
        says = Markdown("“{}” ({})").format(claim["says"], claim["where"]) if own else claim["says"]
        words, _, why = found.verdict.partition(":")
        mark = " †" * ("confirm" in claim and words in (HOLDS, FAILS))
        said = Markdown("**{}**{}{}").format(words, mark, f": {why.strip()}" * bool(why))
        lines.append([key, says, *[claim.get("published", "–")] * own, found.measured, said, _rests_on(claim)])
    verdicts = [found.verdict for _, found in judged.values()]
    counts = {word: sum(text.startswith(word) for text in verdicts) for word in COUNTED_AS}
    told = Markdown("; ").join(Markdown("*{}*: {}").format(word, number) for word, number in counts.items() if number)
    return Markdown("Verdicts on {} claims: {}.\n\n").format(str(len(judged)), told) + markdown_table(lines)


def judge(claim: Mapping[str, Any], find: Callable[[str], Record | None]) -> Evidence:
    """Return the measurement and the verdict of a claim; `find` returns a record by name, or None."""
    found = None
    kind, arguments = _evidence(claim)
    if kind == "tested":
        found = Evidence("by tests", arguments["verdict"])
    elif kind and (record := find(arguments["record"])) is not None:
        found = OF_A_RECORD[kind](record, **{name: value for name, value in arguments.items() if name != "record"})
    if found and "untested" in claim:
        found = found._replace(verdict=f"{UNTESTED}: {claim['untested']}")
    return found or Evidence("–", UNTESTED)


def _evidence(claim: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the kind of a claim's evidence and its arguments, or "" and {} if the claim has no evidence."""
    return next(((kind, claim[kind]) for kind in (*OF_A_RECORD, "tested") if kind in claim), ("", {}))


def compared(
    record: Record, metric: str, column: str | Sequence[str], pairs: Sequence[Sequence[str]], claimed: str
) -> Evidence | None:
    """Return the comparisons of pairs in a report, and whether they agree with a claim.

    Args:
        record: the record of the report.
        metric: the metric of the table.
        column: a column or pool of the table, or several.
        pairs: pairs of attentions.
        claimed: what the first attention of each pair is said to be, "better", "worse" or "as good".

    Returns:
        The evidence; None if the report lacks one of the comparisons.
    """
    kind, found, texts = record.table(metric).kind, list[Compared](), []
    for place in [column] if isinstance(column, str) else column:
        lines = [line for pair in pairs for line in _lines_of(record, metric, place, pair)]
        if len(lines) < len(pairs):
            return None
        texts.append(f"{place}: {'; '.join(_told(line, kind) for line in lines)}")
        found += lines
    less = ", less is better" * (kind.better == "less")
    counts = all(np.isfinite(line.solved) for line in found)  # numbers of solved runs have no unit
    unit = f" ({UNITS[kind.name]}{less})" if kind.name in UNITS and not counts else ""
    return Evidence(". ".join(texts) + unit, _verdict(found, kind, claimed))


def _told(one: Compared, kind: Metric) -> str:
    ahead = f", better in {better_in(one)}" * (not np.isfinite(one.solved))
    return f"{pair_of(one)} {difference_of(one, kind)}{ahead}{left_out_of(one)}"


def _lines_of(record: Record, metric: str, column: str, pair: Sequence[str]) -> list[Compared]:
    """Return the comparisons of a pair of attentions in a column, or pool, of the tables of a metric."""
    asked = (column, *pair)
    lines = [one for one in record.lines if (one.column, one.attention, one.baseline) == asked]
    return [one for one in lines if record.tables[one.table].metric == metric]


def _verdict(lines: Sequence[Compared], kind: Metric, claimed: str) -> str:
    """Return "holds" if all comparisons agree with a claim, else the first of the other verdicts that applies.

    In order, these are "fails: …", "not tested yet: …", `CONTRADICTED`, and `NOISY` with half the widest interval.
    """
    if all(line.verdict == claimed for line in lines):
        return HOLDS
    contrary = {"better", "worse", "as good"} - {claimed}
    for line in lines:
        if line.verdict in contrary:
            than = "as" if line.verdict == "as good" else "than"
            where = f" in {line.column}" * (len({one.column for one in lines}) > 1)
            return f"{FAILS}: {label(line.attention)} is {line.verdict} {than} {label(line.baseline)}{where}"
    for line in lines:
        if line.verdict not in (claimed, UNDECIDED):
            return f"{UNTESTED}: {line.verdict}"
    undecided = [line for line in lines if line.verdict == UNDECIDED]
    if any(_contradicts(one.difference, one.margin * kind.point, claimed, kind.better) for one in undecided):
        return CONTRADICTED
    widths = [(one.high - one.low) / 2 / kind.point for one in undecided]
    return _noisy(max((width for width in widths if np.isfinite(width)), default=np.nan))


def _contradicts(difference: float, margin: float, claimed: str, better: str | None) -> bool:
    """Return whether a difference contradicts a claim: it has the other sign, or exceeds the margin of "as good"."""
    if claimed == "as good":
        return abs(difference) > margin
    return (difference > 0) != (claimed == ("worse" if better == "less" else "better"))


def _noisy(width: float) -> str:
    return f"{NOISY}: ± {width:.1f}" if np.isfinite(width) else NOISY


def levels(record: Record, attentions: Sequence[str]) -> Evidence | None:
    """Return how many one-layer, one-head runs exceed the level of the law of cycles (kvt/grids/cycles.py).

    Only runs with cycles of more than two tokens count. For `attentions` ["qkv"], the claim is that some runs exceed
    the level; for other attentions, that none does. Return None if no run counts.
    """
    assert record.grid is not None
    length = record.grid.runs[0].value("length")
    runs = add_cycles(record.rows, record.grid)
    runs = runs[runs.attention.isin(attentions) & (runs.depth == 1) & (runs.heads == 1) & (runs.cycle > 2)]
    if not len(runs):
        return None
    heights = runs.cycle.map(lambda cycle: level(length, longer_cycles(length, cycle)))
    above = int((runs[ACCURACY] > heights + NEAR).sum())
    on = int(((runs[ACCURACY] - heights).abs() <= NEAR).sum())
    who = " and ".join(map(label, attentions))
    text = f"{above} of {len(runs)} runs of {who} are more accurate than the level of the law of cycles, {on} are on it"
    return Evidence(text, HOLDS if (above == 0) == (attentions != ["qkv"]) else FAILS)


def means(record: Record, metric: str, where: Mapping[str, Any]) -> Evidence | None:
    """Return the mean of each attention; the claim holds if every run is within one point of the best possible value.

    Return None without runs.
    """
    kind, rows = metric_of(metric), finite(_choose(record.rows, where), metric)
    if not len(rows):
        return None
    found = rows.groupby("attention", sort=False)[metric].mean()
    text = ", ".join(f"{label(attention)} {kind.value(mean)}" for attention, mean in found.items())
    learned = (rows[metric] > kind.highest - kind.point).mean()
    said = f"{', '.join(rows.task.unique())}: {text}, {len(rows)} runs"
    return Evidence(said, HOLDS if learned == 1 else f"{FAILS}: {100 * learned:.0f} % of the runs")


def raised(
    record: Record, metric: str, above: str, claimed: str, where: Mapping[str, Any] | None = None
) -> Evidence | None:
    """Compare two metrics of the same runs. `claimed` says that `metric` is "better" than `above`, or "as good".

    If all runs of an attention in a setting are at the ceiling for both metrics, they are left out, because the metrics
    hardly differ there. Return None if no run is left.
    """
    kind, rows = metric_of(metric), finite(finite(_choose(record.rows, where), metric), above)
    worst = rows.groupby(["task", "setting", "attention"])[[metric, above]].transform("min").min(axis=1)
    easy = worst > kind.highest - kind.point
    if not len(rows := rows[~easy]):
        return None
    both = rows.assign(ours=kind.scaled(rows[metric]), theirs=kind.scaled(rows[above]))
    both = both.groupby(["task", "setting", "seed"], as_index=False)[["ours", "theirs"]].mean()  # over attentions
    numbers = compare(both.ours, both.theirs, both.task + " " + both.setting, both.seed)
    said = kind.points(numbers.difference) + interval_of(*numbers.interval, kind)
    text = f"{said}, {len(rows)} runs of {numbers.settings} settings"
    text += f", {easy.sum()} at the ceiling left out" * bool(easy.any())
    judged = verdict(numbers.difference, _corrected(numbers, record), numbers.margin < kind.point, kind.better)
    if judged in (TOO_FEW, UNDECIDED):
        return Evidence(text, _noisy((numbers.interval[1] - numbers.interval[0]) / 2 / kind.point))
    return Evidence(text, HOLDS if judged == claimed else f"{FAILS}: it is {judged}")


def _corrected(numbers: Comparison, record: Record) -> float:
    """Return the Bonferroni-corrected p-value for this test and the record's tests; Holm's is never larger."""
    return min(1, numbers.different * (1 + sum(np.isfinite(line.p) for line in record.lines)))


def _choose(rows: pd.DataFrame, where: Mapping[str, Any] | None) -> pd.DataFrame:
    for name, values in (where or {}).items():
        rows = rows[rows[name].isin(values if isinstance(values, list) else [values])]
    return rows


def costs(record: Record, attention: str, claimed: Sequence[str]) -> Evidence | None:
    """Return the median over sizes of each ratio (cost in `claimed`) / (QKV's cost); None if the attention is missing.

    The claim is that each of these ratios is below 1 at every size.
    """
    rows = record.rows[record.rows.kv_heads.isna() | (record.rows.kv_heads == record.rows.heads)]
    sizes = rows.set_index(["n", "d"])
    ours, first = sizes[sizes.attention == attention], sizes[sizes.attention == "qkv"]
    if not len(ours):
        return None
    shares = {COSTS[name]: ours[name] / first[name] for name in claimed}
    more = [words for words, of in shares.items() if (of >= 1).any()]
    judged = f"{FAILS}: not less {' and '.join(more)} in every size" if more else HOLDS
    return Evidence(", ".join(f"{words} × {of.median():.2f}" for words, of in shares.items()), judged)


def hidden(record: Record, attentions: Sequence[str]) -> Evidence | None:
    """Test the claim that attentions exceed QKV's perplexity by more over real targets than over all targets.

    Real targets are not padding. The unit is one per cent of QKV's perplexity. Only settings with some padding are
    compared. Return None without such settings.
    """
    pairs = perplexity_costs(record.rows, "qkv")
    pairs = pairs[pairs.attention.isin(attentions) & (pairs.padding > 0)]
    if not len(pairs):
        return None
    of_settings = pairs.groupby(["setting", "seed"], as_index=False)[[REAL, COUNTED]].mean()  # over attentions
    numbers = compare(100 * of_settings[REAL], 100 * of_settings[COUNTED], of_settings.setting, of_settings.seed)
    low, high = numbers.interval
    real, counted = (f"{100 * pairs[name].mean():+.1f} %" for name in (REAL, COUNTED))
    interval = f" [{low:+.1f}, {high:+.1f}]" if np.isfinite(low) else ""
    text = (
        f"perplexity of {', '.join(map(label, attentions))} above QKV's: {real} over real targets, {counted} over all "
    )
    text += f"({pairs.padding.mean():.0%} padding); difference {numbers.difference:+.1f}{interval}, "
    text += f"{len(pairs)} pairs of {numbers.settings} settings"
    judged = verdict(numbers.difference, _corrected(numbers, record), False, "more")
    return Evidence(text, {"better": HOLDS, "worse": FAILS}.get(judged, _noisy((high - low) / 2)))


OF_A_RECORD: dict[str, Callable[..., Evidence | None]] = {
    function.__name__: function for function in (compared, costs, hidden, levels, means, raised)
}


def open_joined(folder: Path) -> tuple[Grid, dict[str, list[Outcome]]]:
    """Return the grid of a record and the outcomes of its runs.

    At scale paper, results of the same runs in the grid's other records are added.
    """
    record = read_record(folder)
    known = [row.outcome for row in record.rows]
    for path in sorted(folder.parent.glob(f"{record.grid}-*/{RECORD}")) if record.scale == FULL else ():
        other = read_record(path.parent)
        known += [row.outcome for row in other.rows if other.grid == record.grid and path.parent != folder]
    grid = read_grid(record.grid, record.scale)
    return grid, find_outcomes(grid.runs, (), known=known)


@cache
def open_record(name: str) -> Record | None:
    """Return a record by its name; None if it does not exist."""
    path = RECORDS / name
    if (table := path / f"{name}.csv").is_file():  # a table of kvt bench
        return Record(pd.read_csv(table))
    if not (path / RECORD).is_file():
        return None
    grid, outcomes = open_joined(path)
    asked = grid.runs
    grid, found = measure(grid, outcomes)
    ended = {run for run, made in outcomes.items() if made and made[0].state == State.FINISHED}
    made = [run for run in asked if run.name in ended]
    return Record(found.finished, grid, found.tables, found.compared, made, len(asked))


def _rests_on(claim: Mapping[str, Any]) -> Markdown:
    """Return links to a claim's tests, or a link to its record and the part of the grid that its runs cover.

    Return a dash without either.
    """
    _, arguments = _evidence(claim)
    if "by" in arguments:
        tests = [test.partition("::") for test in arguments["by"]]
        return Markdown("proven: ") + Markdown("; ").join(
            Markdown("[test](../{})").format(path) for path, _, name in tests
        )
    name = arguments.get("record")
    if name is None or (record := open_record(name)) is None:
        return Markdown("–")
    if record.grid is None:
        return Markdown("[{}](results/{}/{}.md), sizes of a layer").format(name, name, name)
    return Markdown("[{}](results/{}/report.md), {}").format(name, name, _scale(record, _names(record, arguments)))


def _names(record: Record, arguments: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of a claim's runs: those in its column or columns.

    A claim without a column, or of a grid that chooses the best of several runs, has all finished runs.
    """
    assert record.grid is not None
    if "column" not in arguments or record.grid.file.best_of:
        return frozenset(run.name for run in record.made)
    columns = [arguments["column"]] if isinstance(arguments["column"], str) else arguments["column"]
    return frozenset().union(*(record.table(arguments["metric"]).names(column) for column in columns))


def _scale(record: Record, names: frozenset[str]) -> str:
    """Return the part of the full grid that the runs `names` cover, such as "8 of the grid's 36 settings, 3 seeds"."""
    assert record.grid is not None
    made = [run for run in record.made if run.name in names]
    tasks = {run.task for run in made}
    full = [run for run in read_grid(record.grid.name, FULL).runs if run.task in tasks]
    ours, theirs = ({_model(run) for run in runs} for runs in (made, full))
    parts = [f"{len(ours & theirs)} of the grid's {len(theirs)} settings"]
    if others := len(ours - theirs):
        parts.append(counted(others, "other setting"))
    parts.append(counted(len({run.seed for run in made}), "seed"))
    for name, noun in DURATION.items():
        shares = [_longest(runs, name) for runs in (made, full)]
        if None not in shares and shares[0] != shares[1]:
            parts.append(f"{shares[0]} of {shares[1]:,} {noun}")
    return ", ".join(parts)


def _model(run: Run) -> tuple[str, str]:
    settings = {name: value for name, value in run.setting.items() if name not in HOW_OFTEN}
    return run.task, repr(sorted(settings.items()))


def _longest(runs: Sequence[Run], name: str) -> int | None:
    values = [run.value(name) for run in runs]
    return max((value for value in values if value and value > 0), default=None)


if __name__ == "__main__":
    for page in PAGES:
        write_atomically(REPOSITORY / page, write_tables((REPOSITORY / page).read_text()))
        print(page)
