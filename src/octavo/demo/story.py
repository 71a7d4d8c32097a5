"""The demonstration: the chart reader, SmolLM2, the small image model and advice, in stages."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from octavo.demo.chart_reader import load_chart_reader
from octavo.demo.stages import (
    IMAGE,
    SCALES,
    TEXT,
    ChartDemo,
    LanguageDemo,
    Sizes,
    Stage,
    one_thread,
)
from octavo.integrations.transformers.text_model import load_text_model
from octavo.measure import store
from octavo.measure.advise.advice import Advice, told
from octavo.measure.advise.advise import advise
from octavo.measure.advise.gpus import find_gpu
from octavo.measure.advise.measured import advice_records
from octavo.measure.advise.shape import Workload, find_model
from octavo.measure.evaluate import images
from octavo.measure.evaluate.image_requests import ImageRequest
from octavo.measure.records import Measurement
from octavo.measure.report.tables import Table
from octavo.measure.run import Watch

MODEL, GPU, CONTEXT = "llama-3.1-8b", "h200", 32768  # of the advice
IMAGE_ROWS = ("bf16", "fp8")
# What the stages write beside the records, as patterns.
FILES = (SCALES, TEXT, IMAGE, "pictures/compared_*.jpg", "pictures/sheet.png", "pictures/?_*/*.png")


def sample_text() -> str:
    """A page of English about books and numbers."""
    return _data("sample.txt")


def long_text() -> str:
    """Some pages of English, with the sample as the first."""
    return f"{sample_text()}\n\n{_data('essay.txt')}"


def _data(name: str) -> str:
    folder = resources.files("octavo.demo")
    return folder.joinpath("assets", name).read_text(encoding="utf-8")


def make_stages(records: Path, results: Path) -> list[Stage]:
    """All stages, in their order; the models are loaded, on the CPU.

    records: the file that they append to. results: a folder of records that the advice is by, if
    it has any.
    """
    sizes = Sizes()
    # First what may be missing here: nothing has run then.
    text_model = load_text_model(device="cpu")
    charts = ChartDemo(load_chart_reader(), records, sizes)
    language = LanguageDemo(text_model, long_text(), records, sizes)
    return [
        *charts.stages,
        *language.stages,
        image_stage(records, sizes),
        advice_stage(records, results),
    ]


def image_stage(records: Path, sizes: Sizes) -> Stage:
    """Images of the small image model in BF16 and FP8."""
    request = ImageRequest(
        num_pictures=sizes.num_images,
        row=IMAGE_ROWS,
        num_inference_steps=sizes.num_inference_steps,
        device="cpu",
        lpips=False,
        save_pictures=records.parent / "pictures",
    )

    def run(watch: Watch) -> list[Measurement]:
        with one_thread():
            return images.run(request, records, watch)

    title = f"Small image model: {sizes.num_images} images in BF16 and FP8"
    return Stage(title, run, lambda found: [images.images_table(found)])


def advice_stage(records: Path, results: Path) -> Stage:
    """What to quantize in a larger model on a GPU that need not be here."""
    made: list[Advice] = []

    def run(watch: Watch) -> list[Measurement]:
        watch("computing", 0, 1)
        known = store.read(results) if any(results.glob("*.jsonl")) else []
        made.append(
            advise(find_model(MODEL), find_gpu(GPU), Workload(context=CONTEXT), records=known)
        )
        command = f"octavo advise {MODEL} --gpu {GPU} --context {CONTEXT}"
        found = advice_records(made[-1], command)
        store.append(records, found)
        watch("computing", 1, 1)
        return found

    def tell(found: Sequence[Measurement]) -> list[Table | str]:
        return list(told(made[-1]))

    return Stage(f"Advice: {MODEL} on an {GPU.upper()}, {CONTEXT // 1024}k tokens", run, tell)


# By op: a line for each record that is compared, by its case and values; first: the values of the
# record that it is compared with. Of several lengths it is the longest.
LINES = {
    "chartqa": "{num_questions} questions about charts, right | {model} | "
    "{first[relaxed_accuracy_percent]:.1f} % | {recipe} | {relaxed_accuracy_percent:.1f} %",
    "accumulation_error": "a needle among {length:,} keys | one head of attention | | "
    "{accumulation} accumulation | {found}",
    "perplexity": "perplexity of a text | {model} | {first[perplexity]:.3f} | {recipe} | "
    "{perplexity:.3f}, recovers {recovery_percent:.1f} %",
    "needle": "a needle in {length:,} tokens, found | {model} | "
    "{first[found_percent]:.0f} % | {recipe} | {found_percent:.0f} %",
    "texts": "an answer, by the token | {model} | {first[num_tokens]:.0f} tokens | {recipe} | "
    "the same for {num_same_tokens:.0f} of {num_tokens:.0f}",
    "images": "{num_pictures} images, PSNR | {model} | {baseline} | {row} | "
    "{psnr_db:.1f} dB, the worst {worst_psnr_db:.1f} dB",
    "advice": "predicted: {what} | {model}, {gpu} | {before_ms:,.1f} ms | the recipe advised | "
    "{after_ms:,.1f} ms, {speedup:.2f} times as fast",
}


def summary_table(records: Sequence[Measurement]) -> Table:
    """A row for each recipe in FP8 beside the one that it is compared with."""
    rows: list[tuple[str, ...]] = []
    for op in dict.fromkeys(record.op for record in records if record.op in LINES):
        own = [record for record in records if record.op == op]
        longest = max(int(record.case.get("length", 0)) for record in own)
        own = [record for record in own if record.case.get("length", 0) == longest]
        for record in own:
            if record.baseline is not None or "speedup" in record.values:
                about = {**record.case, **record.values, "baseline": record.baseline}
                found = "found" if record.values.get("is_found") else "lost"
                line = LINES[op].format(**about, first=own[0].values, found=found)
                rows.append(tuple(cell.strip() for cell in line.split("|")))
    header = ("what", "model", "unquantized", "FP8", "result")
    return Table(caption="What was measured", header=header, rows=tuple(rows))
