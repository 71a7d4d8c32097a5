"""Latency and throughput for sweeps, without a model: records that say what was asked."""

from octavo.errors import OctavoError
from octavo.measure.bench import sweep as module
from octavo.measure.bench.cases import LatencyCase
from octavo.measure.bench.engine import check_rows, row_about
from octavo.measure.bench.engine_load import LoadResult
from octavo.measure.records import Machine, Measurement


class FakeBenchmarks:
    """Stands for both benchmarks: records that say what was asked; fails, or stops, when told."""

    def __init__(self, monkeypatch):
        self.ran, self.failing, self.stop_at = [], set(), None
        monkeypatch.setattr(module, "run_load", self.run)
        monkeypatch.setattr(module, "open_subject", lambda *args, **options: None)
        monkeypatch.setattr(module, "make_rows", lambda names, *_, **__: check_rows(names))

    def record(self, op, row, command, baseline, **case):
        name = str(baseline[0].case["row"]) if baseline else None
        return Measurement(
            op=op,
            impl="octavo",
            case={**row_about(row), "output_len": 3, **case},
            values={"median_itl_ms": 1.0, "median_ttft_ms": 2.0, "relative_rms": 0.0},
            machine=Machine.current(),
            command=command,
            baseline=name,
        )

    def begin(self, kind, row):
        if len(self.ran) == self.stop_at:
            raise KeyboardInterrupt
        self.ran.append((kind, row.name))
        if (kind, row.name) in self.failing:
            raise OctavoError("boom") if kind == "latency" else RuntimeError("out of memory")

    def run(self, subject, rows, case, settings, *, command, baseline):
        (row,) = rows
        kind = "latency" if isinstance(case, LatencyCase) else "throughput"
        self.begin(kind, row)
        cells = [{}]
        if kind == "latency":
            cells = [{"input_len": length} for length in case.input_lens]
        records = [self.record(kind, row, command, baseline, **cell) for cell in cells]
        return LoadResult(tuple(records))
