"""The evaluation of pictures by small pipelines of diffusers: pictures and videos."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("diffusers")


from octavo.measure.evaluate.images import (
    ImageJob,
    evaluate,
    images_table,
    parse_image_rows,
)
from octavo_testkit.models.tiny_pipelines import FAMILIES, load_pipeline, write_pipeline

pytestmark = pytest.mark.slow
# FLUX.2-klein must be told, by a tuple, which layers of its small text encoder to read.
OTHERS = [name for name in FAMILIES if name != "flux2_klein"]


@pytest.mark.parametrize("family", OTHERS)
def test_a_pipeline_is_compared_with_itself_in_fp8(family, tmp_path):
    write_pipeline(family, tmp_path)
    attention = "fp8+attention" + ("" if family == "cosmos3" else "+text_encoder")
    rows = parse_image_rows(["bf16", "fp8", attention], "bfloat16")
    job = ImageJob(
        model=family,
        dtype="bfloat16",
        prompts=("a cat on a mat",),
        num_inference_steps=1,
        options=FAMILIES[family].call,
    )
    seen = []
    records = evaluate(
        lambda: load_pipeline(tmp_path),
        rows,
        job,
        command="c",
        on_row=lambda rows: seen.append(tuple(rows[-1][1][0].shape)) or {},
    )
    num_frames = FAMILIES[family].call.get("num_frames", 1)
    assert {shape[:2] for shape in seen} == {(num_frames, 3)} and len(set(seen)) == 1
    for record in records[1:]:
        assert 15 < record.values["worst_psnr_db"] <= record.values["psnr_db"] < 100
        assert record.case["num_linear"] > 0
    assert records[2].case["num_attention"] > 0 == records[1].case["num_attention"]
    assert len(images_table(records).rows) == 3
