"""The statistics of a calibration, and which layers of a pipeline matter, as records."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from octavo.calibration.run import CalibrationResult
from octavo.integrations.fused_layers import group_of
from octavo.measure.bench.timing import machine_of
from octavo.measure.records import Measurement, Scalar

if TYPE_CHECKING:
    from octavo.integrations.diffusers.calibrate import PipelineResult
    from octavo.integrations.diffusers.sensitivity import Sensitivity

VALUES = ("amax", "scale", "headroom", "sqnr_db", "num_passes", "num_nonfinite")


def calibration_records(
    result: "CalibrationResult | PipelineResult", command: str, device: torch.device | str = "cpu"
) -> list[Measurement]:
    """One row for each layer's q, k and v: what was seen, and what its scale does to it.

    device: where the model ran.
    """
    machine = machine_of(device)
    return [
        Measurement(
            op="calibrate",
            impl=result.scales.header.observer or "amax",
            case={"layer": row.layer, "tensor": row.tensor},
            values={name: getattr(row, name) for name in VALUES},
            machine=machine,
            command=command,
        )
        for row in result.statistics
    ]


def pipeline_records(
    result: "PipelineResult", command: str, device: torch.device | str = "cpu"
) -> list[Measurement]:
    """One row for each tensor of a pipeline: as above, and how its amax moves over the steps."""
    ranges = {(row.layer, row.tensor): row for row in result.ranges.rows}
    records = []
    for record in calibration_records(result, command, device):
        layer, tensor = str(record.case["layer"]), str(record.case["tensor"])
        component, _, name = layer.partition(".")
        values = dict(record.values)
        if (row := ranges.get((layer, tensor))) is not None:
            values |= {"lowest_amax": row.lowest, "spread": row.spread}
        case = {**record.case, "group": f"{component}.{group_of(name)}"}
        records.append(replace(record, op="calibrate_pipeline", case=case, values=values))
    return records


def sensitivity_records(
    found: "Sensitivity",
    proposed: Sequence[str],
    rest: float,
    command: str,
    *,
    about: Mapping[str, Scalar],
    device: torch.device | str = "cpu",
) -> list[Measurement]:
    """One row for each of a scan's rows, and one for all layers at once.

    proposed: the patterns to ignore; rest: the error of all other layers at once. about: the model
    and how it ran; device: where.
    """
    record = partial(Measurement, impl="fp8", machine=machine_of(device), command=command)
    total = sum(row.num_weights for row in found.rows)
    records = [
        record(
            op="sensitivity",
            case={
                **about,
                "layer": f"{row.component}.{row.name}",
                "pattern": row.pattern,
                "kept": (row.kept or "").partition(":")[0],
                "is_proposed": row.pattern in proposed and row.kept is None,
                **({"is_weight_only": True} if row.is_weight_only else {}),
            },
            values={
                "error": row.error,
                "worst_error": max(row.errors.values()),
                "num_layers": len(row.layers),
                "weight_share": row.num_weights / total,
            },
        )
        for row in found.rows
    ]
    for name, error in (("all", found.error), ("all but those proposed", rest)):
        values = {"error": error, "floor": found.floor}
        case = {**about, "layer": name}
        records.append(record(op="sensitivity_of_all", case=case, values=values))
    return records
