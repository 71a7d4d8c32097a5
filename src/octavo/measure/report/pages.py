"""One page from records alone: which section shows which records, and which records none shows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from octavo.errors import ConfigError
from octavo.measure.records import Measurement
from octavo.measure.report import accuracy, answers, steps
from octavo.measure.report.advice import advice_sections
from octavo.measure.report.advice_given import given_sections
from octavo.measure.report.calibration import calibration_section, pipeline_table
from octavo.measure.report.errors import CASES, VALUES, error_sections
from octavo.measure.report.html import Section
from octavo.measure.report.images import images_sections
from octavo.measure.report.kernels import KERNEL_OPS, Roof, kernel_sections
from octavo.measure.report.provenance import not_shown_section, sources_section
from octavo.measure.report.select import grouped, newest
from octavo.measure.report.sensitivity import sensitivity_sections
from octavo.measure.report.summary import latency_with_headlines, summary_section
from octavo.measure.report.throughput import serve_sections, throughput_sections

UNKNOWN = "no section for this op"
# Known, and left to another section.
REASONS = {
    op: "fits are made again from the records of lengths" for op in ("latency_fit", "ttft_fit")
}


@dataclass(frozen=True)
class Part:
    """Sections of a page: the ops whose records they show, and the names that records must have."""

    ops: tuple[str, ...]
    needs: tuple[str, ...]
    make: Callable[[Sequence[Measurement]], list[Section]]

    def missing(self, record: Measurement) -> list[str]:
        """The names that a record would need to be shown."""
        return [name for name in self.needs if record.get(name) is None]


def make_parts(roofs: Sequence[Roof] = ()) -> tuple[Part, ...]:
    """All parts of a page in their order. roofs: of the GPUs whose ceilings are known."""
    percentiles = tuple(
        f"{which}_{metric}_ms" for metric in ("itl", "ttft") for which in ("median", "p10", "p90")
    )
    latency = ("model", "row", "input_len", "output_len", "batch_size", *percentiles)
    step = ("model", "recipe", "median_ms")
    return (
        Part(("latency",), latency, latency_with_headlines),
        Part(("throughput",), ("model", "row", "output_throughput"), throughput_sections),
        Part(("serve",), ("model", "output_throughput"), serve_sections),
        Part(("encoder",), (*step, "images", "resolution"), steps.encoder_sections),
        Part(("diffusion_step",), step, steps.diffusion_sections),
        Part(("generate",), (*step, "batch", "context"), steps.generate_sections),
        Part(KERNEL_OPS, ("shape", "operands", "median_ms"), partial(kernel_sections, roofs=roofs)),
        Part(
            ("perplexity",),
            ("model", "recipe", "perplexity", "context", "chunk"),
            accuracy.perplexity_sections,
        ),
        Part(
            ("chartqa",),
            ("model", "recipe", "relaxed_accuracy_percent", "num_questions"),
            accuracy.chartqa_sections,
        ),
        Part(
            ("needle",),
            ("model", "haystack", "recipe", "length", "depth", "repetitions", "found_percent"),
            accuracy.needle_sections,
        ),
        Part(
            ("mrcr",),
            ("model", "data", "recipe", "bucket", "num_needles", "score_percent"),
            accuracy.mrcr_sections,
        ),
        Part(
            ("choice", "math"),
            ("model", "data", "recipe", "score_percent", "num_questions", "repetitions"),
            answers.pass_sections,
        ),
        Part(("texts",), ("model", "recipe", "prompt", "text"), answers.texts_sections),
        Part(("images",), ("model", "row"), images_sections),
        Part(("sensitivity", "sensitivity_of_all"), ("layer", "error"), sensitivity_sections),
        Part(("calibrate",), ("layer", "tensor", "amax", "headroom", "sqnr_db"), _scales),
        Part(("calibrate_pipeline",), ("group", "tensor", "amax", "headroom"), _pipeline_scales),
        *(Part((op,), CASES[op] + VALUES[op], error_sections) for op in CASES),
        Part(("advice",), ("model", "gpu", "context", "what", "recipe", "reasons"), given_sections),
        Part(("advise",), ("model", "what", "row", "measured_speedup"), advice_sections),
    )


def report_sections(
    records: Sequence[Measurement],
    *,
    roofs: Sequence[Roof] = (),
    compared: Sequence[Measurement] = (),
    notes: Sequence[str] = (),
) -> list[Section]:
    """The sections of a page: a summary, what was measured, where it comes from, what is not shown.

    compared: advice beside what was measured, made from the same records. notes: what could not be
    made of the records, and why. ConfigError if there are no records.
    """
    if not records:
        raise ConfigError("expected records to show, got none")
    parts = make_parts(roofs)
    by_op = {op: part for part in parts for op in part.ops}
    shown: dict[int, list[Measurement]] = {}
    hidden: dict[str, list[Measurement]] = {}
    for record in (*records, *compared):
        part = by_op.get(record.op)
        if part is None:
            hidden.setdefault(REASONS.get(record.op, UNKNOWN), []).append(record)
        elif missing := part.missing(record):
            hidden.setdefault(f"without {', '.join(missing)}", []).append(record)
        else:
            shown.setdefault(parts.index(part), []).append(record)
    made = _numbered(
        [section for index in sorted(shown) for section in parts[index].make(shown[index])]
    )
    summary = summary_section(made)
    sections = [*([summary] if summary else []), *made, sources_section(records)]
    if hidden or notes:
        sections.append(not_shown_section(hidden, notes))
    return sections


def _numbered(sections: Sequence[Section]) -> list[Section]:
    """The sections with titles of their own, which links lead to: the second of a title is (2)."""
    counts: dict[str, int] = {}
    found = []
    for section in sections:
        title = section.title
        counts[title] = counts.get(title, 0) + 1
        if counts[title] > 1:
            section = replace(section, title=f"{title} ({counts[title]})")
        found.append(section)
    return found


def _scales(records: Sequence[Measurement]) -> list[Section]:
    """One section for each command of `octavo calibrate`."""
    return [
        calibration_section(newest(own, "layer", "tensor"))
        for own in grouped(records, "command").values()
    ]


def _pipeline_scales(records: Sequence[Measurement]) -> list[Section]:
    return [
        Section(
            title="Static scales of a pipeline, by kind of layer",
            text="Headroom is 448 · scale / amax: below 1 the largest values seen saturate.",
            tables=(pipeline_table(newest(own, "layer", "tensor")),),
        )
        for own in grouped(records, "command").values()
    ]
