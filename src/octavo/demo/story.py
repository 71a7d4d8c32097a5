"""The demonstration: the chart reader, SmolLM2, the small image model and advice, in stages."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from octavo.demo.chart_story import IMAGE, SCALES, ChartDemo
from octavo.demo.language import TEXT, LanguageDemo
from octavo.demo.stage import Sizes, Stage, one_thread
from octavo.integrations.transformers.chart_reader import load_chart_reader
from octavo.integrations.transformers.text_model import load_text_model
from octavo.measure import store
from octavo.measure.advise import advice as words
from octavo.measure.advise.advice import Advice
from octavo.measure.advise.advise import advise
from octavo.measure.advise.gpus import find_gpu
from octavo.measure.advise.measured import advice_records
from octavo.measure.advise.shape import Workload, find_model
from octavo.measure.evaluate import images
from octavo.measure.evaluate.image_sheets import keep_compared
from octavo.measure.records import Measurement
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
    return folder.joinpath("data", name).read_text(encoding="utf-8")


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
    prompts = images.choose_prompts(images.read_prompts(None), sizes.num_images)
    job = images.ImageJob(
        model="small-image",
        dtype="bfloat16",
        prompts=prompts,
        num_inference_steps=sizes.num_inference_steps,
    )

    def run(watch: Watch) -> list[Measurement]:
        from octavo.integrations.diffusers.load import load_pipeline

        rows = images.parse_image_rows(IMAGE_ROWS, job.dtype)
        progress = Progress(watch, "drawing", len(rows) * len(prompts))

        def step(row: str) -> None:
            progress.what = f"drawing in {row}"
            progress.add()

        watch("loading", 0, progress.total)
        with one_thread():
            return images.evaluate(
                lambda: load_pipeline(None, images.torch_dtype(job.dtype), "cpu"),
                rows,
                job,
                command=_images_command(sizes),
                lpips=False,
                keep=keep_compared(records.parent / "pictures", prompts, records),
                on_image=step,
                on_row=lambda record, _: store.append(records, [record]),
            )

    title = f"Small image model: {sizes.num_images} images in BF16 and FP8"
    return Stage(title, run, lambda found: [images.images_table(found)])


def _images_command(sizes: Sizes) -> str:
    rows = " ".join(f"--row {row}" for row in IMAGE_ROWS)
    return (
        f"octavo eval images --num-pictures {sizes.num_images} {rows} --num-inference-steps "
        f"{sizes.num_inference_steps} --seed 0 --dtype bfloat16"
    )


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
