"""octavo bench generate: a token after a long context, the KV cache in BF16 and in FP8."""

from typing import Annotated

import typer

from octavo.cli.console import err, out
from octavo.cli.options import AsJson, RecordsFile, check_folder
from octavo.cli.records import print_file, print_json
from octavo.cli.tables import print_table

COLUMNS = (
    *("impl", "recipe", "median_ms", "p20_ms", "p80_ms", "speedup"),
    *("cache_bytes", "cache_ratio", "relative_rms"),
)


def generate(
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            help="llama-3.1-8b (the default on a GPU) or tiny (the default on a CPU); weights are "
            "random.",
        ),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(
            "--context",
            help="Tokens in the cache, with commas between, such as 32k,128k; the default on a "
            "GPU, 256 elsewhere.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences.")] = 1,
    recipes: Annotated[
        str,
        typer.Option(
            "--recipes",
            help="Of bf16, fp8, fp8-head, fp8-token, fp8-unit, stock, with commas between; the "
            "first is the baseline. bf16 is octavo's own attention over pages that are not "
            "quantized. fp8 has a calibrated scale for the keys and one for the values of each "
            "layer, fp8-head one for each head, fp8-token one for each token and head; fp8-unit "
            "has scales of 1.0, as without calibration, and counts what they cannot hold. stock is "
            "transformers with a static cache.",
        ),
    ] = "bf16,fp8,fp8-token,stock",
    layers: Annotated[
        int | None, typer.Option("--layers", min=1, help="Only so many layers.")
    ] = None,
    output: RecordsFile = None,
    as_json: AsJson = False,
) -> None:
    """Time one token of a decoder after a long context, its KV cache in BF16 and in FP8.

    Everyone has the same weights, and the same random keys and values in the cache; steps are CUDA
    graphs on a GPU and are timed in turn. Logits of the token after the context are compared with
    the baseline's first (relative_rms); wrong ones end the run.
    """
    from rich.progress import track

    from octavo.integrations.transformers.decoder import make_decoder
    from octavo.kernels.device import default_device
    from octavo.measure import store
    from octavo.measure.advise.memory import parse_tokens
    from octavo.measure.bench.generate import GenerateCase, run_generate
    from octavo.measure.records import Measurement
    from octavo.measure.report.tables import from_records

    device = default_device()
    is_cuda = device.capability is not None
    name = config or ("llama-3.1-8b" if is_cuda else "tiny")
    asked = (context or ("32k,128k" if is_cuda else "256")).split(",")
    lengths = list(dict.fromkeys(map(parse_tokens, asked)))
    chosen = [part.strip() for part in recipes.split(",") if part.strip()]
    check_folder(output)
    model = make_decoder(name, device.torch_device, layers)
    command = f"octavo bench generate --config {name} --batch {batch} --recipes {','.join(chosen)}"
    command += f" --layers {layers}" if layers is not None else ""
    records: list[Measurement] = []
    for length in track(lengths, description="measuring", console=err):
        about = {"model": name, "layers": model.config.num_hidden_layers}
        case = GenerateCase(length, batch)
        of_case = f"{command} --context {length}"
        found = run_generate(model, case, chosen, about=about, command=of_case)
        records += found
        if output is not None:
            store.append(output, found)
    if as_json:
        print_json(records)
        return
    out.print(f"{name}, random weights: {device.name}")
    for length in lengths:
        of_length = [record for record in records if record.case["context"] == length]
        caption = f"{batch} × {length} tokens; baseline: {chosen[0]}"
        print_table(from_records(of_length, caption=caption, columns=COLUMNS))
    print_file(output)
