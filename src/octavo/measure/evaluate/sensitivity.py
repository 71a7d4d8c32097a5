"""Which layers of a pipeline matter, as records."""

from collections.abc import Mapping, Sequence

import torch

from octavo.integrations.diffusers.sensitivity import Sensitivity
from octavo.kernels.device import describe
from octavo.measure.records import Machine, Measurement, Scalar


def sensitivity_records(
    found: Sensitivity,
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
    described = describe(device)
    machine = Machine.current(gpu=described.gpu, capability=described.capability)
    total = sum(row.num_weights for row in found.rows)
    records = [
        Measurement(
            op="sensitivity",
            impl="fp8",
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
            machine=machine,
            command=command,
        )
        for row in found.rows
    ]
    for name, error in (("all", found.error), ("all but those proposed", rest)):
        records.append(
            Measurement(
                op="sensitivity_of_all",
                impl="fp8",
                case={**about, "layer": name},
                values={"error": error, "floor": found.floor},
                machine=machine,
                command=command,
            )
        )
    return records
