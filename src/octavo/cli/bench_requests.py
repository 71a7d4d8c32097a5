"""octavo bench serve and mm-processor: requests as vLLM's commands of these names time them."""

import shlex
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.console import (
    err,
    out,
    print_error,
    print_json,
    print_parts,
    progress_bar,
    write_result,
)
from octavo.cli.model_options import EncoderFlags
from octavo.cli.options import (
    PLACES,
    AsJson,
    Flags,
    RecordsFile,
    Strict,
    Written,
    field_names,
    repeat_command,
    split_numbers,
    takes_settings,
)
from octavo.errors import ConfigError
from octavo.extras import need
from octavo.measure.bench.cases import PromptSource, ServingCase, Workload, parse_goodput
from octavo.measure.bench.requests import ImageRequests

if TYPE_CHECKING:
    from octavo.measure.bench.serving import Served

Percentiles = Annotated[str, typer.Option("--metric-percentiles", help="With commas between.")]


def _flags(prefix: str, *names: str) -> dict[str, str]:
    return {name: prefix + name.replace("_", "-") for name in names}


RANDOM_TOKENS = _flags("--random-", "input_len", "output_len", "range_ratio")
# Flags of other settings, or none.
NOT_OF_CASE = ("base_url", "workload", "backend", "timeout_s", "percentiles", "goodput_ms")
RANDOM_IMAGES = _flags("--random-mm-", "base_items_per_request", "bucket_config")


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """Whether and where vLLM's JSON file of a run is written.

    Attributes:
        save_result: Write vLLM's JSON file of the run.
        save_detailed: With the times of every request in it.
        result_dir: For that file.
        result_filename: Its name; left out, made of rate, concurrency, model and time.
        metadata: KEY=VALUE for that file; more than once.
    """

    save_result: Annotated[bool, typer.Option("--save-result")] = False
    save_detailed: Annotated[bool, typer.Option("--save-detailed")] = False
    result_dir: Path | None = None
    result_filename: str | None = None
    metadata: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if any("=" not in pair or pair.startswith("=") for pair in self.metadata):
            raise ConfigError(f"expected --metadata KEY=VALUE, got {', '.join(self.metadata)}")

    def write(self, case: ServingCase, served: "Served") -> None:
        """Write the file if it was asked for, by vLLM's name for it if none was given."""
        from octavo.measure.bench.serving import vllm_result

        if not (self.save_result or self.save_detailed or self.result_filename):
            return
        notes = dict(pair.partition("=")[::2] for pair in self.metadata)
        result = vllm_result(case, served, metadata=notes, is_detailed=self.save_detailed)
        name = self.result_filename
        if name is None:
            limit = "" if case.max_concurrency is None else f"-concurrency{case.max_concurrency}"
            model = served.model.split("/")[-1]
            name = f"{case.backend}-{case.request_rate}qps{limit}-{model}-{result['date']}.json"
        write_result((self.result_dir or Path()) / name, result, indent=2)


@takes_settings
def serve(
    *,
    context: typer.Context,
    workload: Annotated[
        Workload,
        Flags(names=RANDOM_TOKENS, help={"seed": "Of prompts and arrivals."}),
    ],
    data: Annotated[PromptSource, Flags(names=RANDOM_IMAGES)],
    case: Annotated[
        ServingCase,
        Flags(
            defaults={"num_warmups": 1},
            without=NOT_OF_CASE,
        ),
    ],
    results: ResultOptions,
    served_model: Annotated[str | None, typer.Argument(metavar="MODEL")] = None,
    base_url: str | None = None,
    backend: str | None = None,
    goodput: tuple[str, ...] = (),
    percentiles: Percentiles = "99",
    ready_s: Annotated[float, typer.Option("--ready-check-timeout-sec")] = 600.0,
    output: RecordsFile = None,
    as_json: AsJson = False,
) -> None:
    """Load a server with prompts over HTTP: throughput, TTFT, TPOT, ITL, whole latency.

    octavo bench serve --base-url http://localhost:8000 --num-prompts 48 --max-concurrency 8
    --random-input-len 20000 --random-output-len 2000 --random-range-ratio 0.15

    octavo bench serve path/to/model --max-concurrency 8 -o results.jsonl -- --kv-cache-dtype fp8

    Options, printed lines and the file of --save-result are those of vLLM's command of this name.
    TPOT is a request's time after its first token for each other token; ITL is the time between
    two parts of a stream, of all requests. Goodput counts requests that met every limit. Random
    prompts are tokens, which OpenAI's completions take; those of other data sets are texts.
    The exit code is 1 if a request failed. Without HTTP: octavo bench throughput.

    Attributes:
        served_model: Start octavo serve with this model, and stop it at the end; options of octavo
            serve go after --. Left out: --base-url.
        base_url: Of a server that runs: http://localhost:8000.
        backend: openai (completions) or openai-chat; left out, chat for random-mm alone.
        goodput: Limits in ms that a good request meets, all of them: ttft:200, tpot:50 or
            e2el:5000; more than once, or with commas between.
        ready_s: For a server of our own to be ready.
    """
    from octavo import env
    from octavo.measure.bench.serving import make_record, own_server, run_serving, told
    from octavo.measure.run import Records

    model, url, options = served_model, base_url, list(context.args)
    if (model is None) == (url is None):
        raise ConfigError(f"expected a model or --base-url, got {model} and {url}")
    if url is not None and options:
        raise ConfigError(f"options after -- are for a server of our own, got {options}")
    case = replace(
        case,
        base_url=url or case.base_url,
        workload=data.open(workload),
        backend=backend or ("openai-chat" if data.dataset_name == "random-mm" else "openai"),
        goodput_ms=parse_goodput(goodput),
        api_key=case.api_key or env.API_KEY.read() or None,
        percentiles=split_numbers(percentiles, "percentiles such as 50,99"),
    )
    with ExitStack() as stack:
        if model is not None:
            with err.status("starting octavo serve"):
                own = own_server([model, *options], ready_s=ready_s)
                case = replace(case, base_url=stack.enter_context(own))
        move = stack.enter_context(progress_bar("requests", workload.num_prompts))
        served = run_serving(case, on_request=move)
    places = (*PLACES, "api_key", "ready_s", *field_names(ResultOptions))
    file = None if data.dataset_path is None else data.dataset_path.name
    command = repeat_command(context, without=places, taken={"dataset_path": file})
    command += f" -- {shlex.join(options)}" if options else ""
    is_own = model is not None
    record = make_record(case, served, command=command, has_own_server=is_own, options=options)
    Records.of_file(output).keep(record)
    if as_json:
        print_json([record])
    else:
        print_parts(told(case, served))
    results.write(case, served)
    if failed := [one.error for one in served.times if one.error is not None]:
        print_error(f"{len(failed)} of {len(served.times)} requests failed; the first: {failed[0]}")
        raise typer.Exit(1)


@takes_settings
def mm_processor(
    *,
    requests: Annotated[ImageRequests, Flags(names=RANDOM_IMAGES)],
    options: EncoderFlags,
    model: Annotated[str | None, typer.Argument()] = None,
    model_option: Annotated[str | None, typer.Option("--model")] = None,
    num_warmups: int = 1,
    output_len: int = 1,
    strict: Strict = False,
    graph_budgets: str | None = None,
    percentiles: Percentiles = "99",
    output_json: Written = None,
    is_quiet: Annotated[bool, typer.Option("--disable-tqdm")] = False,
) -> None:
    """Time the stages of requests with images, one after the other, and the encoder in them.

    Two runs make static scales and use them:

    octavo bench mm-processor --model MODEL --num-prompts 16 --mm-encoder-attn-dtype fp8
    --mm-encoder-fp8-scale-save-path scales.json

    octavo bench mm-processor --model MODEL --mm-encoder-attn-dtype fp8 --mm-encoder-fp8-scale-path
    scales.json

    Stages and JSON are those of vLLM's command of this name. Stages that octavo has not, those of
    a cache of processed images, are 0.

    Attributes:
        model: A model's folder, or its name on the hub; left out, the chart reader that comes with
            octavo, or a tiny Qwen3-VL with random weights.
        model_option: The same, as vLLM's command takes it.
        num_warmups: Requests before.
        output_len: Tokens to generate.
        graph_budgets: Run the encoder by CUDA graphs of so many tokens, with commas between;
            requests beyond the largest run without.
        output_json: Write the results to this file.
        is_quiet: Show no bar of the requests that are done.
    """
    need("octavo bench mm-processor", "transformers", "PIL")
    from octavo.integrations.transformers.vision_language import open_vision_language
    from octavo.kernels.device import default_device
    from octavo.measure.bench.mm_processor import run_mm_processor, told
    from octavo.measure.bench.requests import make_image_prompts

    if model is not None and model_option not in (None, model):
        raise ConfigError(f"expected one model, got {model} and --model {model_option}")
    if options.note is not None:
        err.print(f"note: {options.note}", soft_wrap=True)
    if graph_budgets is not None:
        budgets = split_numbers(graph_budgets, "budgets such as 1024,4096", int)
        options = replace(options, graph_budgets=budgets)
    prompts = make_image_prompts(requests)
    numbers = split_numbers(percentiles, "percentiles such as 50,99")
    language = open_vision_language(model_option or model, default_device().torch_device)
    num_requests = len(prompts) + num_warmups
    with progress_bar("requests", num_requests, is_quiet=is_quiet) as move:
        result = run_mm_processor(
            language,
            prompts,
            options,
            num_warmups=num_warmups,
            output_len=output_len,
            percentiles=numbers,
            progress=move,
        )
    print_parts(told(result))
    for error in result["errors"]:
        err.print(f"failed: {error}", soft_wrap=True)
    if options.fp8_scale_save_path is not None:
        out.print(f"Scales: {options.fp8_scale_save_path}", soft_wrap=True)
    if output_json is not None:
        write_result(output_json, result, indent=2)
