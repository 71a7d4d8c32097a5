"""Latency and throughput for sweeps, without a model: records that say what was asked."""

from octavo.errors import OctavoError
from octavo.measure.bench import sweep as module
from octavo.measure.bench.engine_rows import check_rows
from octavo.measure.bench.latency import LatencyResult
from octavo.measure.bench.throughput import ThroughputResult
from octavo.measure.records import Machine, Measurement


class FakeBenchmarks:
    """Stands for both benchmarks: records that say what was asked; fails, or stops, when told."""

    def __init__(self, monkeypatch):
        self.ran, self.failing, self.stop_at = [], set(), None
        monkeypatch.setattr(module, "run_latency", self.latency)
        monkeypatch.setattr(module, "run_throughput", self.throughput)
        monkeypatch.setattr(module, "open_subject", lambda *args, **options: None)
        monkeypatch.setattr(module, "make_rows", lambda names, *_, **__: check_rows(names))

    def record(self, op, row, command, baseline, **case):
        name = None if baseline is None else baseline.row.name
        return Measurement(
            op=op,
            impl="octavo",
            case={**row.about, "output_len": 3, **case},
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

    def latency(self, subject, rows, case, settings, *, command, baseline, on_run):
        (row,) = rows
        self.begin("latency", row)
        records = [
            self.record("latency", row, command, baseline, input_len=length)
            for length in case.input_lens
        ]
        return [LatencyResult.of_records(row, records)]

    def throughput(self, subject, rows, case, settings, *, command, baseline, on_token):
        (row,) = rows
        self.begin("throughput", row)
        return [ThroughputResult(row, self.record("throughput", row, command, baseline))]
