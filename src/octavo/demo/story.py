"""The demonstration: the chart reader, SmolLM2, the small image model and advice, in stages."""

from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

from octavo.demo.chart_reader import load_chart_reader
from octavo.demo.chart_story import IMAGE, SCALES, ChartDemo
from octavo.demo.language import TEXT, LanguageDemo
from octavo.demo.stage import Sizes, Stage, one_thread
from octavo.integrations.transformers.text_model import load_text_model
from octavo.measure import store
from octavo.measure.advise import advice as words
from octavo.measure.advise.advice import Advice
from octavo.measure.advise.advise import advise
from octavo.measure.advise.gpus import find_gpu
from octavo.measure.advise.measured import advice_records
from octavo.measure.advise.shape import Workload, find_model
from octavo.measure.evaluate import images
from octavo.measure.evaluate.image_scores import keep_compared
from octavo.measure.evaluate.requests import ImageRequest
from octavo.measure.records import Measurement
from octavo.measure.report.quality import needle_table
from octavo.measure.report.tables import Table
from octavo.measure.run import Progress, Watch

COMMAND = "octavo demo"
MODEL, GPU, CONTEXT = "llama-3.1-8b", "h200", 32768  # of the advice
IMAGE_ROWS = ("bf16", "fp8")
# What the stages write beside the records, as patterns.
FILES = (SCALES, TEXT, IMAGE, "pictures/compared_*.jpg")


def sample_text() -> str:
    """A page of English about books and numbers."""
    return _data("sample.txt")


def long_text() -> str:
    """Some pages of English, with the sample as the first."""
    return f"{sample_text()}\n\n{_data('essay.txt')}"


def _data(name: str) -> str:
    folder = resources.files("octavo.demo")
    return folder.joinpath("assets", name).read_text(encoding="utf-8")


def make_stages(records: Path, results: Path, sizes: Sizes | None = None) -> list[Stage]:
    """All stages, in their order; the models are loaded, on the CPU.

    records: the file that they append to. results: a folder of records that the advice is by, if
    it has any.
    """
    sizes = sizes or Sizes()
    # First what may be missing here: nothing has run then.
    text_model = load_text_model(device="cpu")
    charts = ChartDemo(load_chart_reader(), records, COMMAND, sizes)
    language = LanguageDemo(text_model, long_text(), records, COMMAND, sizes)
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
    )
    job = images.make_job(request)

    def run(watch: Watch) -> list[Measurement]:
        from octavo.integrations.diffusers.load import load_pipeline

        rows = images.parse_image_rows(IMAGE_ROWS, job.dtype)
        progress = Progress(watch, "drawing", len(rows) * len(job.prompts))

        def step(row: str) -> None:
            progress.what = f"drawing in {row}"
            progress.add()

        watch("loading", 0, progress.total)
        with one_thread():
            return images.evaluate(
                lambda: load_pipeline(None, images.torch_dtype(job.dtype), "cpu"),
                rows,
                job,
                command=request.command,
                lpips=False,
                keep=keep_compared(records.parent / "pictures", job.prompts, records),
                on_image=step,
                on_row=lambda record, _: store.append(records, [record]),
            )

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
        advice = made[-1]
        return [
            words.title(advice),
            words.expectation_table(advice),
            words.memory_table(advice),
            "\n".join(words.sentences(advice)),
            f"\nRecipe (recipe.toml)\n{words.recipe_text(advice)}",
            "\n".join(words.how_to_run(advice)),
        ]

    return Stage(f"Advice: {MODEL} on an {GPU.upper()}, {CONTEXT // 1024}k tokens", run, tell)


# What was measured, of which model, unquantized, with what in FP8, and what came out.
Line = tuple[str, str, str, str, str]


def summary_table(records: Sequence[Measurement]) -> Table:
    """A row for each recipe in FP8 beside the one that it is compared with."""
    makers: dict[str, Callable[[Sequence[Measurement]], list[Line]]] = {
        "chartqa": _charts,
        "perplexity": _perplexity,
        "needle": _needle,
        "texts": _texts,
        "images": _images,
        "accumulation_error": _accumulation,
        "advice": _advice,
    }
    rows: list[Line] = []
    for op, make in makers.items():
        own = [record for record in records if record.op == op]
        rows += make(own) if own else []
    return Table(
        caption="What was measured",
        header=("what", "model", "unquantized", "FP8", "result"),
        rows=tuple(rows),
    )


def _pairs(records: Sequence[Measurement]) -> list[tuple[Measurement, Measurement]]:
    """Each record that is compared with another, and that one."""
    firsts = {record.case["recipe"]: record for record in records if record.baseline is None}
    return [(firsts[record.baseline], record) for record in records if record.baseline is not None]


def _charts(records: Sequence[Measurement]) -> list[Line]:
    value = "relaxed_accuracy_percent"
    return [
        (
            f"{own.case['num_questions']} questions about charts, right",
            str(own.case["model"]),
            f"{first.values[value]:.1f} %",
            str(own.case["recipe"]),
            f"{own.values[value]:.1f} %",
        )
        for first, own in _pairs(records)
    ]


def _perplexity(records: Sequence[Measurement]) -> list[Line]:
    return [
        (
            "perplexity of a text",
            str(own.case["model"]),
            f"{first.values['perplexity']:.3f}",
            str(own.case["recipe"]),
            f"{own.values['perplexity']:.3f}, recovers {own.values['recovery_percent']:.1f} %",
        )
        for first, own in _pairs(records)
    ]


def _needle(records: Sequence[Measurement]) -> list[Line]:
    longest = max(int(record.case["length"]) for record in records)
    first, *others = needle_table(records).rows
    count = sum(int(r.case["repetitions"]) for r in records if r.case["recipe"] == first[0])
    return [
        (
            f"{count} needles in up to {longest:,} tokens, found",
            str(records[0].case["model"]),
            f"{first[-3]:.0f} %",
            str(other[0]),
            f"{other[-3]:.0f} %",
        )
        for other in others
    ]


def _texts(records: Sequence[Measurement]) -> list[Line]:
    return [
        (
            "an answer, by the token",
            str(own.case["model"]),
            f"{first.values['num_tokens']:.0f} tokens",
            str(own.case["recipe"]),
            f"the same for {own.values['num_same_tokens']:.0f} of {own.values['num_tokens']:.0f}",
        )
        for first, own in _pairs(records)
    ]


def _images(records: Sequence[Measurement]) -> list[Line]:
    return [
        (
            f"{record.case['num_pictures']} images, PSNR",
            str(record.case["model"]),
            str(record.baseline),
            str(record.case["row"]),
            f"{record.values['psnr_db']:.1f} dB, the worst {record.values['worst_psnr_db']:.1f} dB",
        )
        for record in records
        if record.baseline is not None
    ]


def _accumulation(records: Sequence[Measurement]) -> list[Line]:
    longest = max(int(record.case["length"]) for record in records)
    return [
        (
            f"a needle among {longest:,} keys",
            "one head of attention",
            "",
            f"{record.case['accumulation']} accumulation",
            "found" if record.values["is_found"] else "lost",
        )
        for record in records
        if record.case["length"] == longest
    ]


def _advice(records: Sequence[Measurement]) -> list[Line]:
    return [
        (
            f"predicted: {record.case['what']}",
            f"{record.case['model']}, {record.case['gpu']}",
            f"{record.values['before_ms']:,.1f} ms",
            "the recipe advised",
            f"{record.values['after_ms']:,.1f} ms, {record.values['speedup']:.2f} times as fast",
        )
        for record in records
        if "speedup" in record.values
    ]
