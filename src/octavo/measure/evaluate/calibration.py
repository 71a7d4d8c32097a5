"""The statistics of a calibration as records."""

from octavo.calibration.run import CalibrationResult
from octavo.measure.records import Machine, Measurement


def calibration_records(result: CalibrationResult, command: str) -> list[Measurement]:
    """One row for each layer's q, k and v: what was seen, and what its scale does to it."""
    machine = Machine.current()
    header = result.scales.header
    return [
        Measurement(
            op="calibrate",
            impl=header.observer or "amax",
            case={"layer": row.layer, "tensor": row.tensor},
            values={
                "amax": row.amax,
                "scale": row.scale,
                "headroom": row.headroom,
                "sqnr_db": row.sqnr_db,
                "num_passes": row.num_passes,
                "num_nonfinite": row.num_nonfinite,
            },
            machine=machine,
            command=command,
        )
        for row in result.statistics
    ]
