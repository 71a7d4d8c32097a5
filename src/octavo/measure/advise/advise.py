"""octavo advise: from a model's config, a GPU and stored records to a recipe with reasons."""

from collections.abc import Collection, Sequence
from typing import Any

from octavo.measure.advise import cautions
from octavo.measure.advise.advice import Advice, Part
from octavo.measure.advise.choose_decoder import choose_decoder, choose_other
from octavo.measure.advise.choose_encoder import choose_step, choose_tower
from octavo.measure.advise.gpus import Gpu
from octavo.measure.advise.model_shape import ModelShape
from octavo.measure.advise.predict import Predictor
from octavo.measure.advise.workload import Workload
from octavo.measure.records import Measurement
from octavo.recipe import Recipe


def advise(
    model: ModelShape,
    gpu: Gpu,
    workload: Workload,
    records: Sequence[Measurement] = (),
    *,
    leave_out: Collection[str] = (),
    served: str = "MODEL",
) -> Advice:
    """What to quantize in a model on a GPU for a workload.

    records: of kernels and of whole models, on any GPU. leave_out: names of models whose records
    do not count. served: what the model is called in commands.
    """
    predictor = Predictor(records, gpu, leave_out=leave_out, shapes=[model])
    parts: list[Part] = []
    if model.decoder is not None:
        parts.append(choose_decoder(predictor, model, workload))
    if model.tower is not None:
        parts.append(choose_tower(predictor, model, workload))
    if model.step is not None:
        parts.append(choose_step(predictor, model))
    if model.other is not None:
        parts.append(choose_other(predictor, model, model.other))
    fields: dict[str, Any] = {}
    for part in parts:
        fields |= part.fields
    warnings = [text for text in (model.note, gpu.caution) if text is not None]
    warnings += [text for part in parts for text in part.warnings]
    return Advice(
        model=model.name,
        served=served,
        parts=model.parts,
        gpu=gpu,
        workload=workload,
        recipe=Recipe(**fields),
        is_omni=model.step is not None,
        expectations=tuple(one for part in parts for one in part.expectations),
        memory=tuple(row for part in parts for row in part.memory),
        reasons=tuple(text for part in parts for text in part.reasons),
        warnings=(*warnings, *cautions.of_records(predictor, model, fields)),
        refused=model.refused,
        has_images=model.tower is not None or model.unknown_tower is not None,
    )
