"""Writes docs/claims.md: the claims of the paper and of this project, with their evidence from records or tests.

    python experiments/claims.py

The script also updates the table in README.md.

An entry of claims.yaml has a claim and one kind of evidence: the name of a function below, with its arguments. A claim
is "not tested yet" if its record does not exist, or has none of the runs.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from kvt.grids.cycles import ACCURACY, NEAR, add_cycles, level, longer_cycles
from kvt.grids.padding import COUNTED, REAL, perplexity_costs
from kvt.markdown import Markdown, markdown_table
from kvt.reports.comparisons import NEARLY, Compared, finite
from kvt.reports.names import in_words, label, metric_of
from kvt.reports.section import measure
from kvt.reports.statistics import TOO_FEW, UNDECIDED, Comparison, compare, verdict
from kvt.reports.tables import Table
from kvt.reports.text import better_in, counts_of, difference_of, interval_of, left_out_of, pair_of, verdict_in_words
from kvt.study.grid import FULL, Grid, Run, read_grid
from kvt.study.outcomes import Outcome, State
from kvt.study.records import RECORD, find_outcomes, read_record
from kvt.system import read_yaml, write_atomically

REPOSITORY = Path(__file__).parents[1]
CLAIMS = Path(__file__).with_name("claims.yaml")
COSTS = {"parameters": "parameters", "training_ms": "time of a training step", "training_peak_bytes": "peak memory"}
DURATION = {"max_epochs": "epochs", "max_steps": "steps"}
HOW_OFTEN = (*DURATION, "val_check_interval", "batch_size")  # settings that change neither the model nor the task
UNTESTED = "not tested yet"
CONFIRM = "to be confirmed by declared seeds"
KINDS = {  # of one claim, of several
    "holds": ("holds", "hold"),
    "fails": ("fails", "fail"),
    "undecided": ("is undecided", "are undecided"),
    UNTESTED: (f"is {UNTESTED}", f"are {UNTESTED}"),
}
WHOSE = {"paper": "the paper's", "ours": "our own"}


PAGE = Markdown("""\
# Claims

This page compares the claims of the paper, and claims of ours, with our measurements. {counts} The
[glossary](glossary.md) defines the terms.

## Scope

The claims are sentences of "Key-Value Transformer" (Borji 2023), of its follow-up, and of ours. Our models are small
and our runs are short, most of them on machines without a GPU. A claim that fails here may hold at the paper's sizes,
and a claim that holds here may fail there.

QKV is standard attention. KV uses keys as queries. KV+Pos is KV with scores that positions make asymmetric. Q≠K=V has
a query, and one projection for key and value. Q=K=V has one projection for query, key and value.

## Methodology

* We wrote the code from the paper's formulas. Where the paper gives no detail, we follow the authors' notebooks.
* The numbers of a claim are in the report that the claim links to, with the same interval and verdict.
* Two runs form a pair if they have the same task, settings and seed. A difference is the mean over settings, in points.
  A point is 0.01 of an accuracy, of a nat or of the logarithm of a perplexity, or 1 BLEU. "Better in 3 of 51" counts
  pairs. Settings that differ only in heads are a block. The 95 % interval is Welch's t over the seeds of blocks, and
  allows for a correlation of 0.2 that a seed leaves between blocks ([simulated coverage](reliability.md)). A single
  seed has no interval and no verdict.
* **We chose this procedure after seeing these records.** A verdict that only this procedure decides is marked
  "{confirm}".
* A setting is left out if every attention is at the ceiling or at chance. If runs either solve a task or stay far from
  it, we count solved runs. "KV − QKV: solved 2 against 4 of 4, blocks 0 : 1" means that 2 of 4 runs of KV and 4 of 4
  runs of QKV are solved, and that QKV has more solved runs in one block with one seed, KV in none. The test is a sign
  test over blocks.
* Verdicts are corrected for all claims about the same report (Holm). Intervals are not. So an interval may exclude zero
  while the verdict is undecided.
* *As good* means that the 90 % interval is within a margin: the largest difference that the paper itself calls similar.
  It is 1 point of accuracy on images (P4, P7), 0.03 nats on characters (P8), 3 points on numbers in words (P10) and
  2 BLEU (P13). For all other claims it is 1 point.
* *Undecided* names the smallest margin that contains the 90 % interval.
* CIFAR-100 and sort were undecided with three seeds, so we added seeds. Their p values are not corrected for this.
* *Scale* counts the settings of the paper's grid, or of our own full grid, that we ran for a claim. "Other" settings
  are not in this grid.
* *Minutes* is the training time of the runs in the record, on one core beside other work, or on a GPU that many runs
  share ([results](results/README.md)). Repeated runs count once. The command runs the complete grid. If the record has
  a part of the grid ("for 98 of 105 runs"), the command takes longer.
* *Proven* means shown by a test, *reproduced* means shown by our runs, *theirs* means a published number alone.

`python experiments/claims.py` writes this page from the records in [docs/results](results).

## The paper's claims

{paper}

## Our claims

{ours}

## The paper's claims, one by one

{paper_blocks}

## Our claims, one by one

{ours_blocks}

## What was easy

Each attention is a formula of one line. The lists of digits need no data. The authors' notebooks name settings that
the paper leaves out.

## What was hard

Some facts took long to find: the order of Table 2's columns, the number of settings in its means, the validation data
of the CIFAR models, the tokens that the BLEU counts, and the position of the anomaly. [Findings](findings.md) explains
them. The paper names the sizes of its character models, but not which sizes belong together.

## Contact with the authors

None. [Findings](findings.md) lists their later publications, with commits.
""")


class Evidence(NamedTuple):
    measured: str
    verdict: str
    size: str = "–"  # only the numbers of `measured`


class Record(NamedTuple):
    rows: pd.DataFrame  # finished runs of a grid, or layer sizes of `kvt bench`
    grid: Grid | None = None
    tables: Sequence[Table] = ()
    lines: Sequence[Compared] = ()  # the comparisons of its report
    made: Sequence[Run] = ()  # the grid's finished runs, including those that `best_of` does not choose
    wanted: int = 0  # number of runs of the grid
    seconds: float = 0.0  # training time of the finished runs

    def table(self, metric: str) -> Table:
        """Return the table of a metric; if there is none, a new table with the columns and pools of the first."""
        other = self.tables[0]._replace(metric=metric, kind=metric_of(metric), published={})
        return next((table for table in self.tables if table.metric == metric), other)


@cache
def open_record(name: str, folder: Path = REPOSITORY / "docs" / "results") -> Record | None:
    """Return a record by its name; None if it does not exist."""
    return _read(folder / name)


def write_claims(records: Path) -> str:
    """Return the page of claims as Markdown, with evidence from the records in a folder."""
    claims: Mapping[str, Sequence[dict[str, Any]]] = read_yaml(CLAIMS, CLAIMS.name)
    find = partial(open_record, folder=records)
    texts: dict[str, Markdown] = {}
    counts = []
    for whose, letter in (("paper", "P"), ("ours", "O")):
        lines, blocks, verdicts = [["claim", "verdict", "size", "scale"]], [], []
        for number, claim in enumerate(claims[whose], start=1):
            found, name = judge(claim, find), f"{letter}{number}"
            verdicts.append(found.verdict)
            mark = f"; {CONFIRM}" * ("confirm" in claim and not found.verdict.startswith("undecided"))
            says = f"“{claim['says']}” ({claim['where']})" if whose == "paper" else claim["says"]
            scale, minutes, evidence = _rests_on(claim, find)
            short = found.verdict.partition(":")[0] + mark
            linked = Markdown("[{}](#{}) {}").format(name, name.lower(), says)
            lines.append([linked, Markdown("**{}**").format(short), found.size, scale])
            about = {"Published": claim.get("published"), "Measured": found.measured, "Verdict": found.verdict + mark}
            about |= {"Note": claim.get("note"), "Scale": scale, "Minutes": minutes, "Evidence": evidence}
            items = [Markdown("* {}: {}").format(word, text) for word, text in about.items() if text not in (None, "–")]
            blocks += [Markdown("### {}").format(name), Markdown("{}").format(says), Markdown("\n").join(items)]
        texts |= {whose: markdown_table(lines), f"{whose}_blocks": Markdown("\n\n").join(blocks)}
        numbers = {words: sum(text.startswith(kind) for text in verdicts) for kind, words in KINDS.items()}
        parts = ", ".join(f"{number} {words[number > 1]}" for words, number in numbers.items() if number)
        counts.append(f"Of {WHOSE[whose]} {len(verdicts)} claims {parts}.")
    return str(PAGE.format(counts=" ".join(counts), confirm=CONFIRM, **texts))


def paper_table(records: Path) -> str:
    """Return the Markdown table of README.md, with a row for each table and figure of the paper."""
    find = partial(open_record, folder=records)
    lines = [["", "the paper says", "we find", "our runs", "command"]]
    for row in read_yaml(CLAIMS, CLAIMS.name)["table"]:
        found: str = Markdown(row.get("find", "–"))
        scale, command = "–", Markdown("`kvt reproduce {}`").format(row["command"])
        if (record := find(row.get("record", ""))) is not None and record.grid is not None:
            found = Markdown("; ").join(_found(record, row, one) for one in row["compared"])
            if "untested" in row:
                found += Markdown("; {}: {}").format(UNTESTED, row["untested"])
            scale = f"{100 * len(record.made) / record.wanted:.0f} % of the runs of scale {record.grid.scale}"
            scale += f", {record.seconds / 60:,.0f} min"
        elif record is not None:
            measured = costs(record, "kv", ["parameters", "training_ms"])
            found, scale = measured.size if measured else "–", "sizes of a layer"
        lines.append([row["item"], row["says"], found, scale, command])
    return str(markdown_table(lines))


def _found(record: Record, row: Mapping[str, Any], one: Mapping[str, Any]) -> str:
    """Return a comparison of a row of the table; one of runs that a grid has no column of has no verdict."""
    before = f"{one['words']}: " if "words" in one else ""
    if "where" in one:
        first, second = one["pair"]
        rows = _choose(record.rows, one["where"])
        rows = rows.pivot(index=["setting", "seed"], columns="attention", values=row["metric"])[[first, second]]
        rows, kind = rows.dropna().reset_index(), metric_of(row["metric"])
        numbers = compare(rows[first], rows[second], rows.setting, rows.seed)
        said = kind.points(numbers.difference) + interval_of(*numbers.interval, kind)
        return f"{before}{label(first)} − {label(second)} {said}"
    [line] = _lines_of(record, row["metric"], one["column"], one["pair"])
    said = f"{before}{pair_of(line)} {difference_of(line, record.tables[line.table].kind)}"
    said += f", {line.verdict}" * ("untested" not in row and line.verdict != "") + left_out_of(line)
    if np.isfinite(line.solved):
        counts, number = solved_of_all(record, one["column"])
        said += f"; solved of all {number}: {', '.join(f'{label(name)} {count}' for name, count in counts.items())}"
    return said


def solved_of_all(record: Record, task: str) -> tuple[dict[str, int], int]:
    """Return how many runs of a task each of the paper's attentions solves, and how many each has; none is left out."""
    rows = _choose(record.rows, {"task": [task], "attention": ["kv+pos", "kv", "qkv"]})
    runs = rows.pivot(index=["setting", "seed"], columns="attention", values="test/acc").dropna() >= NEARLY
    return {name: int(runs[name].sum()) for name in ("kv+pos", "kv", "qkv")}, len(runs)


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
        claimed: "better", "worse" or "as good", of the first attention of each pair.

    Returns:
        The evidence, None if the report lacks one of the comparisons.
    """
    found, texts, sizes = [], [], []
    for place in [column] if isinstance(column, str) else column:
        lines = [line for pair in pairs for line in _lines_of(record, metric, place, pair)]
        if len(lines) < len(pairs):
            return None
        table = record.tables[lines[0].table]
        less = " (less is better)" * (table.kind.better == "less")
        said = [f"{pair_of(line)}: {difference_of(line, table.kind)}" for line in lines]
        rows = [f"{text}, {counts_of(one)}, better in {better_in(one)}" for text, one in zip(said, lines, strict=True)]
        texts.append(f"{place}, {table.title}{less}: {'; '.join(rows)}")
        shown = [text + left_out_of(line) for text, line in zip(said, lines, strict=True)]
        sizes.append(f"{place}: {'; '.join(shown)}")
        found += lines
    words = [verdict_in_words(line, table.kind) for line in found]
    return Evidence(". ".join(texts), _verdict(found, words, claimed), ". ".join(sizes))


def _lines_of(record: Record, metric: str, column: str, pair: Sequence[str]) -> list[Compared]:
    """Return the comparisons of a pair of attentions in a column, or pool, of the tables of a metric."""
    asked = (column, *pair)
    lines = [one for one in record.lines if (one.column, one.attention, one.baseline) == asked]
    return [one for one in lines if record.tables[one.table].metric == metric]


def _verdict(lines: Sequence[Compared], words: Sequence[str], claimed: str) -> str:
    if all(line.verdict == claimed for line in lines):
        return "holds"
    contrary = {"better", "worse", "as good"} - {claimed}
    for line in lines:
        if line.verdict in contrary:
            than = "as" if line.verdict == "as good" else "than"
            where = f" in {line.column}" * (len({line.column for line in lines}) > 1)
            return f"fails: {label(line.attention)} is {line.verdict} {than} {label(line.baseline)}{where}"
    return next(
        (f"undecided{word.removeprefix('undecided')}" if word.startswith("undecided") else f"undecided: {word}")
        for word in words
        if word != claimed
    )


def levels(record: Record, attentions: Sequence[str]) -> Evidence | None:
    """Return how many one-layer, one-head runs exceed the level of the law of cycles, for cycles of over two tokens."""
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
    text = (
        f"one head of {who}, shifts with longer cycles: {above} of {len(runs)} runs are more accurate than the level "
        f"of the law of cycles, {on} are on it. The level is no bound on accuracy: it assumes that a token uses "
        "only the value of the key with the largest weight"
    )
    judged = "holds" if (above == 0) == (attentions != ["qkv"]) else "fails"
    return Evidence(text, judged, f"{above} of {len(runs)} runs above the level")


def means(record: Record, metric: str, where: Mapping[str, Any]) -> Evidence | None:
    """Return the mean of each attention; the claim holds if every run is within one point of the best possible."""
    kind, rows = metric_of(metric), finite(_choose(record.rows, where), metric)
    if not len(rows):
        return None
    found = rows.groupby("attention", sort=False)[metric].mean()
    text = ", ".join(f"{label(attention)} {kind.value(mean)}" for attention, mean in found.items())
    learned = (rows[metric] > kind.highest - kind.point).mean()
    said = f"{', '.join(rows.task.unique())}, {in_words(metric)}: {text}, {len(rows)} runs"
    return Evidence(said, "holds" if learned == 1 else f"fails: {100 * learned:.0f} % of the runs", text)


def raised(
    record: Record, metric: str, above: str, claimed: str, where: Mapping[str, Any] | None = None
) -> Evidence | None:
    """Return a comparison of two metrics of the same runs; the first is `claimed` to be "better" or "as good".

    Settings in which all runs of an attention are at the ceiling for both metrics are left out, because the metrics
    cannot differ there.
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
    text = f"{in_words(metric)} − {in_words(above)}: {said}, {len(rows)} runs of {numbers.settings} settings"
    text += f", {easy.sum()} at the ceiling left out" * bool(easy.any())
    judged = verdict(numbers.difference, _corrected(numbers, record), numbers.margin < kind.point, kind.better)
    if judged in (TOO_FEW, UNDECIDED):
        return Evidence(text, "undecided", said)
    return Evidence(text, "holds" if judged == claimed else f"fails: it is {judged}", said)


def _corrected(numbers: Comparison, record: Record) -> float:
    """Return the p-value multiplied by the number of claims with a p-value: no less than by Holm's method."""
    return min(1, numbers.different * (1 + sum(np.isfinite(line.p) for line in record.lines)))


def _choose(rows: pd.DataFrame, where: Mapping[str, Any] | None) -> pd.DataFrame:
    for name, values in (where or {}).items():
        rows = rows[rows[name].isin(values if isinstance(values, list) else [values])]
    return rows


def costs(record: Record, attention: str, claimed: Sequence[str]) -> Evidence | None:
    """Return ratios of a layer's costs to QKV's for each size; the claim is that the costs in `claimed` are lower."""
    rows = record.rows[record.rows.kv_heads.isna() | (record.rows.kv_heads == record.rows.heads)]
    sizes = rows.set_index(["n", "d"])
    ours, first = sizes[sizes.attention == attention], sizes[sizes.attention == "qkv"]
    if not len(ours):
        return None
    ratios = {name: ours[name] / first[name] for name in COSTS}
    texts = [f"{COSTS[name]} {of.median():.2f} ({of.min():.2f} to {of.max():.2f})" for name, of in ratios.items()]
    text = f"one layer, {label(attention)} / QKV, median (range) of {len(ours)} sizes: {'; '.join(texts)}"
    more = [COSTS[name] for name in claimed if (ratios[name] >= 1).any()]
    size = "; ".join(f"{COSTS[name]} × {ratios[name].median():.2f}" for name in claimed)
    return Evidence(text, f"fails: not less {' and '.join(more)} in every size" if more else "holds", size)


def hidden(record: Record, attentions: Sequence[str]) -> Evidence | None:
    """Test the claim that attentions exceed QKV's perplexity by more over real targets than over all targets.

    The unit is one per cent of QKV's perplexity. Only settings in which some targets are padding are compared.
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
        f"perplexity of {', '.join(map(label, attentions))} beside QKV's: {real} over real targets, {counted} over all "
    )
    text += f"({pairs.padding.mean():.0%} padding); difference {numbers.difference:+.1f}{interval}, "
    text += f"{len(pairs)} pairs of {numbers.settings} settings"
    judged = verdict(numbers.difference, _corrected(numbers, record), False, "more")
    size = f"{numbers.difference:+.1f}{interval}"
    return Evidence(text, {"better": "holds", "worse": "fails"}.get(judged, f"undecided: {judged}"), size)


OF_A_RECORD: dict[str, Callable[..., Evidence | None]] = {
    function.__name__: function for function in (compared, costs, hidden, levels, means, raised)
}


def open_joined(folder: Path) -> tuple[Grid, dict[str, list[Outcome]]]:
    """Return the grid of a record and the outcomes of its runs.

    At scale paper, outcomes of the grid's other records are added, for runs with the paper's settings.
    """
    record = read_record(folder)
    known = [row.outcome for row in record.rows]
    for path in sorted(folder.parent.glob(f"{record.grid}-*/{RECORD}")) if record.scale == FULL else ():
        other = read_record(path.parent)
        known += [row.outcome for row in other.rows if other.grid == record.grid and path.parent != folder]
    grid = read_grid(record.grid, record.scale)
    return grid, find_outcomes(grid.runs, (), known=known)


def _read(folder: Path) -> Record | None:
    if (table := folder / f"{folder.name}.csv").is_file():  # a table of kvt bench
        return Record(pd.read_csv(table))
    if not (folder / RECORD).is_file():
        return None
    grid, outcomes = open_joined(folder)
    asked = grid.runs
    grid, found = measure(grid, outcomes)
    first = {name: made[0] for name, made in outcomes.items() if made and made[0].state == State.FINISHED}
    made = [run for run in asked if run.name in first]
    seconds = sum(first[run.name].result["seconds"] for run in made)
    return Record(found.finished, grid, found.tables, found.compared, made, len(asked), seconds)


def _rests_on(claim: Mapping[str, Any], find: Callable[[str], Record | None]) -> list[str]:
    """Return a claim's scale, minutes and evidence: links to tests, or to a record with the command of its runs."""
    _, arguments = _evidence(claim)
    if "by" in arguments:
        tests = [test.partition("::") for test in arguments["by"]]
        links = Markdown("; ").join(Markdown("[{}](../{})").format(name, path) for path, _, name in tests)
        return ["–", "–", Markdown("proven: ") + links]
    name = arguments.get("record")
    if name is None or (record := find(name)) is None:
        return ["–", "–", "theirs"]
    command, page, minutes, scale = f"kvt reproduce {name}", f"{name}.md", "–", "sizes of a layer"
    if record.grid is not None:
        command, page = f"kvt reproduce {record.grid.name} --scale {record.grid.scale}", "report.md"
        part = f" for {len(record.made)} of {record.wanted} runs" * (len(record.made) < record.wanted)
        minutes, scale = f"{record.seconds / 60:,.0f}{part}", _scale(record, _names(record, arguments))
    link = Markdown("reproduced: [{}](results/{}/{}), `{}`").format(name, name, page, command)
    return [scale, minutes, link]


def _names(record: Record, arguments: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of a claim's runs: those in its column.

    A claim without a column, or of a grid that chooses the best of several runs, has all runs of the record.
    """
    assert record.grid is not None
    if "column" not in arguments or record.grid.file.best_of:
        return frozenset(run.name for run in record.made)
    columns = [arguments["column"]] if isinstance(arguments["column"], str) else arguments["column"]
    return frozenset().union(*(record.table(arguments["metric"]).names(column) for column in columns))


def _scale(record: Record, names: frozenset[str]) -> str:
    """Return the part of the full grid that these runs cover: such as "8 of the grid's 36 settings, 3 seeds"."""
    assert record.grid is not None
    made = [run for run in record.made if run.name in names]
    tasks = {run.task for run in made}
    full = [run for run in read_grid(record.grid.name, FULL).runs if run.task in tasks]
    ours, theirs = ({_model(run) for run in runs} for runs in (made, full))
    parts = [f"{len(ours & theirs)} of the grid's {len(theirs)} settings"]
    if others := len(ours - theirs):
        parts.append(f"{others} other setting{'s' * (others > 1)}")
    seeds = len({run.seed for run in made})
    parts.append(f"{seeds} seed{'s' * (seeds > 1)}")
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
    records = REPOSITORY / "docs" / "results"
    page = REPOSITORY / "docs" / "claims.md"
    write_atomically(page, write_claims(records))
    readme = REPOSITORY / "README.md"
    table = re.compile(r"^\|  \| the paper says .*?\n(?=\n)", re.MULTILINE | re.DOTALL)
    write_atomically(readme, table.sub(lambda _: paper_table(records) + "\n", readme.read_text()))
    print(page)
