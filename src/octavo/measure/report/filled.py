"""Tables of those columns that some record fills, with units where a name has none."""

from collections.abc import Sequence
from dataclasses import replace

from octavo.measure.records import Measurement
from octavo.measure.report.labels import label
from octavo.measure.report.tables import Table, from_records

# Names whose ending is no unit: those of vLLM's files, and ratios.
_HEADS = {
    "auc_percent": "area under the curve (%)",
    "cache_ratio": "cache (× of the baseline)",
    "difference_high_points": "at most (points)",
    "difference_low_points": "at least (points)",
    "difference_percent": "difference (points)",
    "difference_points": "difference (points)",
    "difference_standard_error_percent": "± s.e. (points)",
    "measured_speedup": "measured (×)",
    "num_answers": "answers",
    "num_cut": "cut",
    "num_questions": "questions",
    "num_unparsed": "unparsed",
    "num_windows": "windows",
    "output_throughput": "output (tokens/s)",
    "output_throughput_gain": "gain (×)",
    "peak_bytes_ratio": "memory (× of the baseline)",
    "perplexity_ratio": "ratio",
    "perplexity_standard_error": "± s.e.",
    "predicted_speedup": "predicted (×)",
    "recovery_standard_error_percent": "± s.e. (%)",
    "repetition_standard_error_percent": "± of repetitions (%)",
    "request_goodput": "goodput (requests/s)",
    "request_throughput": "requests/s",
    "score_standard_error_percent": "± s.e. (%)",
    "speedup": "speed-up (×)",
    "total_token_throughput": "all (tokens/s)",
    "weight_bytes_ratio": "weights (× of the baseline)",
}


def filled_table(records: Sequence[Measurement], *, caption: str, columns: Sequence[str]) -> Table:
    """One row per record; a column is left out if no record has a value for it."""
    kept = [name for name in columns if any(record.get(name) is not None for record in records)]
    table = from_records(records, caption=caption, columns=kept)
    return replace(table, header=tuple(_HEADS.get(name, label(name)) for name in kept))
