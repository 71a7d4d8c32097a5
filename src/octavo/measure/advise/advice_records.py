"""Advice as records, for a report: one for each time and each size that it expects."""

from collections.abc import Mapping

from octavo.measure.advise import words
from octavo.measure.advise.advice import Advice
from octavo.measure.records import Machine, Measurement, Scalar

OP = "advice"


def advice_records(advice: Advice, command: str) -> list[Measurement]:
    """What to expect of the recipe beside BF16, each row with the recipe, the reasons and why.

    The machine is this one, which only computed; the GPU that the advice is for is in the case.
    """
    workload = advice.workload
    about: dict[str, Scalar] = {
        "model": advice.model,
        "gpu": advice.gpu.name,
        "context": workload.context,
        "concurrency": workload.concurrency,
        "output_len": workload.output_len,
        "recipe": words.recipe_text(advice),
        "serve": "\n".join(words.how_to_run(advice)),
        "reasons": "\n".join(advice.reasons),
        "warnings": "\n".join(advice.warnings),
    }
    machine = Machine.current()

    def row(what: str, values: Mapping[str, float], note: str = "") -> Measurement:
        case = {**about, "what": what, **({"note": note} if note else {})}
        return Measurement(
            op=OP, impl="predicted", case=case, values=values, machine=machine, command=command
        )

    records = []
    for one in advice.expectations:
        values = {"before_ms": one.before_ms, "after_ms": one.after_ms}
        if one.speedup is not None:
            values["speedup"] = one.speedup
        records.append(row(one.what, values, one.note))
    for size in advice.memory:
        unit = "bytes" if size.is_bytes else "count"
        records.append(row(size.what, {f"before_{unit}": size.before, f"after_{unit}": size.after}))
    return records
