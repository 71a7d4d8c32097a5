"""octavo advise: what to quantize in a model on a GPU, and why."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.console import err, out, print_parts, print_verdicts
from octavo.cli.options import Flags, RecordsFile, repeat_command, takes_settings
from octavo.errors import ConfigError
from octavo.measure.advise.shape import Workload, parse_size

if TYPE_CHECKING:
    from octavo.measure.advise.shape import ModelShape


@takes_settings
def advise(
    *,
    context: typer.Context,
    workload: Annotated[
        Workload, Flags(names={"num_images": "--images"}, without=("context", "image_size"))
    ],
    model: Annotated[str, typer.Argument()],
    gpu: str = "h200",
    prompt_len: Annotated[str, typer.Option("--context")] = "8k",
    image_size: str = "fullhd",
    results: Path | None = None,
    is_measured: Annotated[bool, typer.Option("--measure")] = False,
    output: RecordsFile = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Say what to quantize in a model on a GPU for a workload: a recipe, with reasons.

    octavo advise meta-llama/Llama-3.1-8B-Instruct --gpu h200 --context 32k --concurrency 8

    Times are a sum of parts: each linear layer and each attention at the speed that records of
    kernels say (--results), corrected by records of whole models. No GPU is needed, and no
    weights.

    Attributes:
        model: A model's folder of transformers or diffusers (its config.json is enough), or the
            name of a model that octavo knows: openai/gpt-oss-20b, llama-3.1-8b, qwen3-vl,
            flux.1-dev, …
        gpu: h200, h100, b200, l40s or a100, or hopper, blackwell, ada, ampere; it need not be here.
        prompt_len: Tokens of a prompt (8192, 32k).
        image_size: 1920x1080, or hd, fullhd, qhd, 4k.
        results: Records to take speeds from, a JSON Lines file or a folder of them; left out,
            those that come with octavo.
        is_measured: Run the short benchmarks that decide, on the GPU of this machine.
        as_json: Print the advice as one JSON object.
    """
    from octavo.amounts import parse_tokens
    from octavo.kernels.device import default_device
    from octavo.measure import store
    from octavo.measure.advise.advice import told
    from octavo.measure.advise.advise import advise as make_advice
    from octavo.measure.advise.gpus import find_gpu
    from octavo.measure.advise.measured import advice_records, check_measurable, measure
    from octavo.measure.advise.shape import find_model

    if output is not None and not is_measured:
        raise ConfigError("-o is for the records of --measure, which is not asked for")
    chosen, size = find_gpu(gpu), parse_size(image_size)
    workload = replace(workload, context=parse_tokens(prompt_len), image_size=size)
    shape = find_model(model)
    records = store.read(results or store.shipped())
    if is_measured:
        device = default_device()
        check_measurable(shape, chosen, workload, device)
        width_height = f"{size[1]}x{size[0]}"
        taken = {"gpu": chosen.key, "prompt_len": workload.context, "image_size": width_height}
        command = repeat_command(context, taken=taken)
        with err.status("measuring") as status:
            measured, failures = measure(
                shape,
                workload,
                device.torch_device,
                name=model,
                command=command,
                on_progress=lambda what: status.update(f"measuring {what}"),
            )
        if output is not None:
            store.append(output, measured)
        for row, reason in failures:
            err.print(f"not measured: {row}: {reason}", soft_wrap=True)
        records += measured
    advice = make_advice(shape, chosen, workload, records, served=_served(model, shape))
    if as_json:
        return typer.echo(advice.to_json())
    print_parts(told(advice))
    out.print()
    print_verdicts(advice_records(advice, repeat_command(context)))


def _served(name: str, shape: "ModelShape") -> str:
    """What the model is called in commands: as it was given, if they can find it by that."""
    path = Path(name)
    if shape.step is not None and path.exists() and not (path / "model_index.json").is_file():
        return "PIPELINE"  # the folder has its transformer alone
    return name if path.exists() or "/" in name else "MODEL"
