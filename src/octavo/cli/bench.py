"""octavo bench: how fast ops, models and servers run on this machine.

Here are kernels, and whole models: encoder, diffusion and generate.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import track

from octavo.cli.bench_engine import latency, sweep, throughput
from octavo.cli.bench_requests import mm_processor, serve
from octavo.cli.console import CASES, Collected, err, out, print_json, print_table, print_verdicts
from octavo.cli.options import (
    PLACES,
    AsJson,
    RecordsFile,
    repeat_command,
    split_names,
    split_rows,
    takes_settings,
)
from octavo.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from octavo.measure.bench.benchmark import Objection
    from octavo.measure.records import Measurement, Scalar

app = typer.Typer(add_completion=False, help="Measure speed; every result is checked first.")
Layers = Annotated[
    int | None, typer.Option(min=1, help="Only so many layers; with random weights.")
]
Folder = typer.Option(exists=True, file_okay=False)
# Columns of tables.
TIMES = ("median_ms", "p20_ms", "p80_ms")
KERNELS: tuple[str, ...] = ("impl", CASES, *TIMES, "tflops", "gb_per_s", "of_ceiling_percent")
KERNELS += ("speedup", "relative_rms", "sm_mhz", "watts")
ENCODER: tuple[str, ...] = ("impl", "recipe", "graphs", "tokens", *TIMES)
ENCODER += ("speedup", "fused_speedup", "relative_rms", "tower_relative_rms")
DIFFUSION: tuple[str, ...] = ("recipe", "graphs", "attention", *TIMES, "speedup")
DIFFUSION += ("peak_bytes_ratio", "linear_relative_rms", "attention_relative_rms", "relative_rms")
HOST = ("impl", "call", "median_us", "p20_us", "p80_us", "over_linear", "budget", "relative_rms")
CALLS = ("impl", "recipe", *TIMES, "speedup", "relative_rms")
GENERATE = ("impl", "recipe", *TIMES, "speedup", "cache_bytes", "cache_ratio", "relative_rms")


@app.callback()
def bench() -> None:
    """Measure speed on this machine; every result is checked before its time counts."""


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """Where records go."""

    output: RecordsFile = None
    as_json: AsJson = False


@app.command()
@takes_settings
def kernels(
    *,
    context: typer.Context,
    op: tuple[str, ...] = (),
    peers: Annotated[Path | None, Folder] = None,
    shape: tuple[str, ...] = (),
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1)] = 1,
    tune: Annotated[bool, typer.Option("--tune")] = False,
    load_s: Annotated[float | None, typer.Option("--load", min=0.1, metavar="SECONDS")] = None,
    sample_s: Annotated[float, typer.Option("--sample-time", min=0.001, metavar="SECONDS")] = 0.5,
    resume: Annotated[bool, typer.Option("--resume")] = False,
    results: ResultOptions,
) -> None:
    """Time each op with each implementation and each peer that is installed.

    Every result is compared with float64 first; a wrong one ends the run, a wrong peer is left out.
    On a GPU the calls are replayed in CUDA graphs over inputs that rotate through more than the L2
    cache. The speed-up is that over the fastest BF16 participant of the same run; the ceiling is
    the larger share of this machine's own memory bandwidth or matrix products, measured at the
    start. Who could not take part is listed, with the reason.

    attention_grid is attention over 32,768 tokens: sequences of six lengths, seven head_dims, full
    and causal, 16/16 and 16/2 heads. On one GPU it takes about ten minutes; the same command goes
    on where it was stopped:

    octavo bench kernels --op attention_grid --jobs 12 --resume -o grid.jsonl

    attention_levels is FP8 attention whose sums move to float32 never (one level), every 4 tiles
    and every tile: what each costs, and its error over values of mean 0 and 1.

    prefill_attention is attention of 512, 2,048 and 8,192 new tokens after up to 131,072 that are
    cached in pages; gathering the pages is part of the time.

    Attributes:
        op: Only this op; may be given more than once. Left out, all but attention_grid and
            attention_levels.
        shape: Only shapes with these words, such as "head_dim 128"; may be given more than once.
        peers: Folder with other libraries' kernels (FlashAttention-3's *.abi3.so, the cudnn
            package); those that are installed are found without it.
        jobs: Processes that compile kernels before they are timed.
        tune: Search for launch settings first, and keep the winners for this GPU. Compiles every
            candidate: allow minutes.
        load_s: Time each participant after it alone has loaded the GPU for so long, at the clock
            that the power limit leaves it; all in turn, at a clock they share, unless given.
        sample_s: Time each participant for about so long at most; 3 samples are taken in any case,
            and never more than 15.
        resume: Leave out what --output has records of already, from this GPU and these versions.
    """
    from octavo.kernels.device import default_device
    from octavo.measure.bench.benchmark import measure_ceilings, run_benchmark
    from octavo.measure.bench.kernels import benchmarks, records_of
    from octavo.measure.bench.timing import machine_of
    from octavo.measure.run import Records

    device = default_device().torch_device
    stored = Records.of_file(results.output, is_resumed=resume).known.values()
    chosen = benchmarks(device, list(op), peers, shape)
    if tune:
        _tune(op, jobs, results.output)
    machine = machine_of(device)
    known = [records_of(one, stored, machine, load_s) for one in chosen]
    todo = [one for one, own in zip(chosen, known, strict=True) if not own]
    if resume:
        err.print(f"{len(todo)} of {len(chosen)} shapes are left", soft_wrap=True)
    _precompile(dict.fromkeys(one.op for one in todo), jobs, peers, [one.case for one in todo])
    command = repeat_command(context, without=(*PLACES, "peers", "jobs", "tune", "resume"))
    ceilings = measure_ceilings(device)
    parts = (run_benchmark(one, device, command, ceilings, load_s, sample_s) for one in todo)
    before = [record for own in known for record in own]
    _run(results, parts, len(todo), ("op", KERNELS, "{op}"), before=before)


def _precompile(
    ops: Iterable[str],
    jobs: int,
    peers: Path | None = None,
    cases: "Sequence[Mapping[str, Scalar]] | None" = None,
    *,
    is_search: bool = False,
) -> None:
    """Compile what some ops call, in so many processes; what one would, is compiled as it runs."""
    from octavo.measure.bench.kernels import precompile, tasks

    if jobs > 1:
        found = [t for op in ops for t in tasks(op, peers, is_search=is_search, cases=cases)]
        for _ in track(precompile(found, jobs), "compiling", total=len(found), console=err):
            pass


def _tune(op: Sequence[str], jobs: int, output: Path | None) -> None:
    """Search for the settings of some ops, or of all that have any."""
    from octavo.kernels import tuning
    from octavo.kernels.device import default_device
    from octavo.measure.bench.kernels import SEARCHES, searches, tune
    from octavo.measure.report.tables import from_records

    device, collected = default_device(), Collected(output)
    names = list(op or SEARCHES)
    _precompile(names, jobs, is_search=True)
    chosen = [search for name in names for search in searches(name, device)]
    for search in track(chosen, description="tuning", console=err):
        records = tune(search, device, tuning.FOLDER, "octavo bench kernels --tune")
        records.sort(key=lambda record: record.values["median_ms"])
        collected.keep(records)
        caption = f"{search.benchmark.op}: {search.problem}"
        columns = ("impl", "is_winner", *TIMES)
        print_table(from_records(records[:5], caption=caption, columns=columns))
    out.print(f"Winners: {tuning.FOLDER / tuning.file_name(device)}", soft_wrap=True)


def _run(
    asked: ResultOptions,
    parts: "Iterable[tuple[list[Measurement], Iterable[Objection]]]",
    num_parts: int,
    by_case: tuple[str, Sequence[str], str],
    title: str | None = None,
    before: "Sequence[Measurement]" = (),
) -> "list[Objection]":
    """Measure all parts, keep and show their records; who could not take part.

    by_case: the field with a table for each of its values, their columns and caption. before:
    records of an earlier run, to show with the others.
    """
    collected = Collected(asked.output, before)
    for part in track(parts, "measuring", total=num_parts, console=err):
        collected.keep(*part)
    if asked.as_json:
        print_json(collected.records)
    else:
        if title is not None:
            out.print(title)
        collected.print_tables(*by_case)
        print_verdicts(collected.records)
    return collected.objections


@app.command()
@takes_settings
def encoder(
    *,
    context: typer.Context,
    model: Annotated[Path | None, typer.Argument(exists=True, file_okay=False)] = None,
    config: str | None = None,
    resolutions: str | None = None,
    images: Annotated[int, typer.Option(min=1)] = 3,
    recipes: str = "bf16,fused-bf16,dynamic,static",
    layers: Layers = None,
    graphs: bool | None = None,
    peers: Annotated[Path | None, Folder] = None,
    results: ResultOptions,
) -> None:
    """Time the whole vision tower of one model, stock and with attention in FP8.

    Everyone has the same weights and gets the same images. Attention of the first, the middle and
    the last layer is first compared with stock transformers' on the same inputs (relative_rms is
    the worst of them), and a graph's result with that of the same tower without one; a wrong one
    ends the run. On a GPU each is timed after a second of nothing
    else, at the clock that the power limit leaves it. The speed-up is that over
    the fastest stock tower in BF16, without graphs; the fused speed-up is that over octavo's own
    path in BF16 (fused-bf16), graphs against graphs: what FP8 itself buys. Static scales are those
    of the images that are timed.

    Attributes:
        model: A model's folder; without weights in it they are random.
        config: Instead of a folder: qwen3-vl-30b-a3b (the default on a GPU), qwen3-vl-8b, or tiny
            (the default on a CPU); weights are random.
        resolutions: Of hd, fullhd, qhd, 4k, with commas between; all of them, or hd,fullhd for
            tiny.
        images: Images in one request.
        recipes: Of bf16 (stock), fused-bf16 (octavo's path in BF16), dynamic, static (both FP8),
            with commas between.
        graphs: Also by CUDA graphs, those who can be captured; the default on a GPU.
        peers: Folder with FlashAttention-3's *.abi3.so, which then attends in a stock tower, and
            in octavo's in BF16 if it is the fastest.
    """
    from octavo.integrations.transformers.vision_tower import make_tower, open_tower
    from octavo.kernels.device import default_device
    from octavo.measure.bench.cases import RESOLUTIONS
    from octavo.measure.bench.encoder import EncoderCase, encoder_rows, run_encoder

    device = default_device()
    if model is not None and config is not None:
        raise ConfigError(f"expected a folder or a config, got {model} and {config}")
    is_cuda = device.capability is not None
    if model is None and config is None:
        config = "qwen3-vl-30b-a3b" if is_cuda else "tiny"
    names = ["hd", "fullhd"] if config == "tiny" else list(RESOLUTIONS)
    if resolutions is not None:
        names = split_names(resolutions)
    cases = [EncoderCase(name, images) for name in names]
    rows = split_rows(recipes)
    encoder_rows(rows)
    make = partial(make_tower, str(config)) if model is None else partial(open_tower, model)
    tower = make(device.torch_device, num_layers=layers)
    taken = {"config": config, "images": images, "recipes": ",".join(rows)}
    parts = (
        run_encoder(
            tower,
            case,
            repeat_command(context, taken=taken | {"resolutions": case.resolution}),
            recipes=rows,
            use_graphs=is_cuda if graphs is None else graphs,
            folder=peers,
        )
        for case in cases
    )
    title = f"{tower.name}, {tower.weights} weights, {tower.num_layers} layers: {device.name}"
    caption = "{images} images, {resolution}; baseline: {baseline}"
    _run(results, parts, len(cases), ("resolution", ENCODER, caption), title)


@app.command()
@takes_settings
def diffusion(
    *,
    context: typer.Context,
    config: str | None = None,
    recipes: str = "bf16,linear,linear+attention",
    layers: Annotated[int | None, typer.Option(min=1)] = None,
    compile: bool = True,
    graphs: bool | None = None,
    peers: Annotated[Path | None, Folder] = None,
    results: ResultOptions,
) -> None:
    """Time one step of a diffusion transformer with random weights, in BF16 and in FP8.

    The baseline is diffusers' own model, compiled block by block, with the fastest BF16 attention
    at hand, with or without CUDA graphs. Layers of the first and the last block are first compared
    with those of the BF16 model on the same inputs, and compiled models with themselves; a wrong
    one is not timed, and the command ends with 1. The memory is that of the weights and one step
    together.

    Attributes:
        config: Sizes, with commas between: flux.1-dev, qwen-image, wan2.2-14b, or tiny-flux,
            tiny-qwen, tiny-wan (for a CPU). Weights are random. flux.1-dev on a GPU and tiny-flux
            on a CPU if left out.
        recipes: Of bf16, linear, attention, linear+attention (FP8), linear+attention+modulation
            (modulation in FP8 weights alone), linear-block (blocks of 128 x 128), linear-static,
            linear-static+attention, linear-static+attention-static (scales found before the step),
            bf16-faster (no FP8, but what else a recipe makes faster), with commas between; bf16 is
            the baseline and must be there.
        layers: Only so many blocks of each kind.
        compile: Compile the blocks, in BF16 as in FP8.
        graphs: By CUDA graphs as well, in BF16 as in FP8; the default on a GPU.
        peers: Folder with FlashAttention-3's *.abi3.so: the baseline attends by whatever is
            fastest, torch's own or these.
    """
    from octavo.kernels.device import default_device
    from octavo.measure.bench.diffusion import StepCase, run_step

    device = default_device()
    is_cuda = device.capability is not None
    rows = tuple(split_rows(recipes))
    use_graphs = is_cuda if graphs is None else graphs
    cases = [
        StepCase(name, rows, layers, compile, use_graphs)
        for name in split_names(config or ("flux.1-dev" if is_cuda else "tiny-flux"))
    ]
    taken = {"recipes": ",".join(rows)}
    parts = (
        part
        for case in cases
        for part in run_step(
            case,
            device.torch_device,
            repeat_command(context, taken=taken | {"config": case.size}),
            peers,
        )
    )
    by_case = ("model", DIFFUSION, "{model}, {inputs}; baseline: {baseline}")
    for objection in _run(results, parts, len(cases) * len(rows), by_case):
        if objection.operands in rows:
            failed = f"{objection.operands}: {objection.reason}"
            raise UnsupportedError(f"expected every recipe to run and be right, got {failed}")


@app.command()
@takes_settings
def generate(
    *,
    called: typer.Context,
    config: str | None = None,
    context: str | None = None,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    recipes: str | None = None,
    layers: Layers = None,
    calls: Annotated[bool, typer.Option("--calls")] = False,
    results: ResultOptions,
) -> None:
    """Time one token of a decoder after a long context, its KV cache in BF16 and in FP8.

    Everyone has the same weights, and the same random keys and values in the cache; steps are CUDA
    graphs on a GPU and are timed in turn. Logits of the token after the context are compared with
    the baseline's first (relative_rms); wrong ones end the run.

    With --calls, model.generate() is timed as users call it: eagerly, after a real prompt, on a
    copy of the model to which the row's recipe is applied. That includes what the host does.

    Attributes:
        config: llama-3.1-8b (the default on a GPU) or tiny (the default on a CPU); weights are
            random.
        context: Tokens in the cache, with commas between, such as 32k,128k; the default on a GPU,
            256 elsewhere. With --calls, tokens of the prompt; 16k and 64.
        batch: Sequences.
        recipes: Of bf16, fp8, fp8-head, fp8-token, fp8-unit, stock, with commas between (default:
            bf16,fp8,fp8-token,stock); the first is the baseline. With --calls, of stock, kv,
            linear, kv+linear and others of that kind (default: stock,kv,kv+linear). bf16 is
            octavo's own attention over pages that are not quantized. fp8 has a calibrated scale for
            the keys and one for the values of each layer, fp8-head one for each head, fp8-token one
            for each token and head; fp8-unit has scales of 1.0, as without calibration, and counts
            what they cannot hold. stock is transformers, without --calls with a static cache.
        calls: Time calls of generate().
    """
    from octavo.amounts import parse_tokens
    from octavo.integrations.transformers.decoder import make_decoder
    from octavo.kernels.device import default_device
    from octavo.measure.bench.generate import GenerateCase, run_generate
    from octavo.measure.bench.generate_calls import ROWS, CallCase, run_generate_calls

    device = default_device()
    is_cuda = device.capability is not None
    name = config or ("llama-3.1-8b" if is_cuda else "tiny")
    defaults = ("16k", "64") if calls else ("32k,128k", "256")
    lengths = dict.fromkeys(map(parse_tokens, (context or defaults[not is_cuda]).split(",")))
    make = CallCase if calls else GenerateCase
    cases: list[CallCase | GenerateCase] = [make(length, batch=batch) for length in lengths]
    rows = split_rows(recipes or ("bf16,fp8,fp8-token,stock" if not calls else ",".join(ROWS)))
    model = make_decoder(name, device.torch_device, layers)
    about = {"model": name, "layers": model.config.num_hidden_layers}
    taken = {"config": name, "batch": batch, "recipes": ",".join(rows)}

    def measure(length: int, case: CallCase | GenerateCase) -> "list[Measurement]":
        command = repeat_command(called, taken=taken | {"context": length})
        if isinstance(case, CallCase):
            return run_generate_calls(model, case, rows, about=about, command=command)
        return run_generate(model, case, rows, about=about, command=command)

    parts = ((measure(*each), ()) for each in zip(lengths, cases, strict=True))
    size = "prompt" if calls else "context"
    caption = f"{{batch}} × {{{size}}} tokens; baseline: {{baseline}}"
    title = f"{name}, random weights: {device.name}"
    columns = CALLS if calls else GENERATE
    _run(results, parts, len(cases), (size, columns, caption), title)


@app.command()
@takes_settings
def host(*, context: typer.Context, results: ResultOptions) -> None:
    """Time what one eager call costs the host, beside torch's own calls.

    All tensors are tiny. On a GPU the clock stops when everything is launched, before the GPU is
    waited for; on a CPU a call's time includes its work. Every result is compared with float64
    first; a wrong one ends the run. Times are also told in units of F.linear with 16 rows, as
    budgets are.
    """
    from octavo.kernels.device import default_device
    from octavo.measure.bench.host import run_host

    device = default_device()
    parts = ((run_host(device.torch_device, repeat_command(context)), ()) for _ in range(1))
    title = f"{device.name}: time of one call"
    _run(results, parts, 1, ("device", HOST, "baseline: {baseline}"), title)


app.command("latency")(latency)
app.command("throughput")(throughput)
app.command("sweep")(sweep)
app.command("serve", context_settings={"allow_extra_args": True})(serve)
app.command("mm-processor")(mm_processor)
