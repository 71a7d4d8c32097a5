"""Records from before and after a change, of the same measurements: what is better or worse."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.errors import ConfigError
from octavo.measure.records import Measurement
from octavo.measure.report.evidence import make_verdicts
from octavo.measure.report.sections import Rows, Section
from octavo.measure.report.tables import MISSING, Table, label, machine_name, newest
from octavo.measure.report.verdict import Verdict

# A change beyond this share counts; repetitions of one command differ by less.
CHANGED = 0.03
# What is compared -> whether more is better.
_VALUES: Mapping[str, bool] = {
    "median_ms": False,
    "median_us": False,
    "median_ttft_ms": False,
    "median_itl_ms": False,
    "output_throughput": True,
    "peak_bytes": False,
    "cache_bytes": False,
    "perplexity": False,
    "score_percent": True,
    "relaxed_accuracy_percent": True,
    "found_percent": True,
    "worst_psnr_db": True,
}
# Of a case, what a change may change without making it another measurement.
_OUTCOMES = {"num_pages", "weight_bytes", "cache_bytes", "recipe_digest"}
_OUTCOMES |= {"picture", "picture_problem", "picture_prompts"}


@dataclass(frozen=True)
class Change:
    """A value of one measurement, before and after."""

    record: Measurement
    name: str
    before: float
    after: float

    @property
    def share(self) -> float:
        """By how much it changed; above 0 is better. Out of nothing it is all, 1."""
        if self.before == self.after:
            return 0.0
        change = (self.after - self.before) / abs(self.before) if self.before else 1.0
        return change if _VALUES[self.name] else -change

    @property
    def row(self) -> tuple[str | float, ...]:
        """The cells of a table."""
        case = self.record.case
        about = ", ".join(f"{name} {value}" for name, value in _setting(case).items())
        percent = f"{100 * self.share:+.1f} %".replace("-", "−")
        what = self.record.op, label(self.name), percent, self.before, self.after
        return (*what, self.record.impl, machine_name(self.record), about)


def changed_section(before: Rows, after: Rows) -> Section:
    """What is better and what is worse after, of what was measured both times.

    ConfigError if nothing was.
    """
    old, new = (_by_measurement(records) for records in (before, after))
    changes = [
        Change(new[key], name, old[key].values[name], record.values[name])
        for key, record in new.items()
        if key in old
        for name in _VALUES
        if name in record.values and name in old[key].values
    ]
    if not changes:
        raise ConfigError(
            "expected records of the same measurements on the same machine to compare, got none: "
            "run the same commands before and after"
        )
    worse = sorted((c for c in changes if c.share <= -CHANGED), key=lambda c: c.share)
    better = sorted((c for c in changes if c.share >= CHANGED), key=lambda c: -c.share)
    num_same = len(changes) - len(worse) - len(better)
    alone = [len(one.keys() - other.keys()) for one, other in ((old, new), (new, old))]
    tables = [
        _table(f"{word}: {len(own)}", own)
        for word, own in (("Worse", worse), ("Better", better))
        if own
    ]
    answers = _answers(make_verdicts(before), make_verdicts(after))
    return Section(
        title="What changed",
        group="Before and after",
        headline=f"{len(better)} better, {len(worse)} worse, {num_same} the same.",
        text=f"Values of the newest records of {len(old.keys() & new.keys())} measurements. What "
        f"changed by less than {100 * CHANGED:.0f} % is the same. The change is above 0 % where "
        f"more is better and there is more, or less is better and there is less. Measured before "
        f"alone: {alone[0]}, after alone: {alone[1]}.",
        tables=(*([answers] if answers.rows else []), *tables),
        is_open=True,
    )


def _by_measurement(records: Rows) -> dict[object, Measurement]:
    return {
        (r.op, r.impl, machine_name(r), tuple(sorted(_setting(r.case).items()))): r
        for r in sorted(newest(records), key=lambda record: record.date)
    }


def _setting(case: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in case.items() if name not in _OUTCOMES}


def _table(caption: str, changes: Sequence[Change]) -> Table:
    header = ("op", "value", "change", "before", "after", "impl", "machine", "case")
    return Table(caption=caption, header=header, rows=tuple(change.row for change in changes))


def _answers(before: Sequence[Verdict], after: Sequence[Verdict]) -> Table:
    """The verdicts whose answer or recipe is another one."""
    old = {(one.machine, one.model, one.workload): one for one in before}
    rows = []
    for one in after:
        was = old.get((one.machine, one.model, one.workload))
        said = [f"{v.answer} ({v.recipe})" if v else MISSING for v in (was, one)]
        if said[0] != said[1]:
            rows.append((one.model, *said, one.workload, one.machine))
    header = ("model", "before", "after", "workload", "machine")
    return Table(caption="Verdicts that changed", header=header, rows=tuple(rows))
