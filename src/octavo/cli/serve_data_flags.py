"""Flags of octavo bench serve that say what is sent, and how fast; names are vLLM's."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.measure.bench.request_times import Workload
    from octavo.measure.bench.serving import Ramp
    from octavo.measure.bench.serving_data import DataSet

DatasetName = Annotated[
    str,
    typer.Option(
        "--dataset-name",
        help="Where prompts come from: random (tokens), sharegpt (a JSON file in its form), custom "
        '(JSON Lines of {"prompt": "…", "output_tokens": 128}), or random-mm (letters with random '
        "images, for chat).",
    ),
]
DatasetPath = Annotated[
    Path | None,
    typer.Option("--dataset-path", help="The file of sharegpt or custom.", show_default=False),
]
Backend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        help="openai (completions) or openai-chat; left out, chat for random-mm alone.",
        show_default=False,
    ),
]
ShareGptOutputLen = Annotated[
    int | None,
    typer.Option(
        "--sharegpt-output-len",
        min=1,
        help="Tokens of an answer; left out, those of the file's, counted by --tokenizer.",
        show_default=False,
    ),
]
CustomOutputLen = Annotated[
    int | None,
    typer.Option(
        "--custom-output-len",
        min=1,
        help="Tokens of an answer; left out, each row's output_tokens.",
        show_default=False,
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        help="Folder or hub name; counts tokens of sharegpt, of which vLLM's limits then hold.",
        show_default=False,
    ),
]
ItemsPerRequest = Annotated[
    int,
    typer.Option("--random-mm-base-items-per-request", min=1, help="Images of a prompt."),
]
BucketConfig = Annotated[
    str | None,
    typer.Option(
        "--random-mm-bucket-config",
        help="Sizes of images and their shares: {(256, 256, 1): 0.5, (720, 1280, 1): 0.5}.",
        show_default=False,
    ),
]
Goodput = Annotated[
    list[str] | None,
    typer.Option(
        "--goodput",
        help="Limits in ms that a good request meets, all of them: ttft:200, tpot:50 or e2el:5000; "
        "more than once, or with commas between.",
        show_default=False,
    ),
]
RampStrategy = Annotated[
    str | None,
    typer.Option(
        "--ramp-up-strategy",
        help="linear or exponential: a rate that changes from the first request to the last.",
        show_default=False,
    ),
]
RampStart = Annotated[
    float | None,
    typer.Option(
        "--ramp-up-start-rps", help="Requests per second at the start.", show_default=False
    ),
]
RampEnd = Annotated[
    float | None,
    typer.Option("--ramp-up-end-rps", help="Requests per second at the end.", show_default=False),
]


def make_ramp(strategy: str | None, start: float | None, end: float | None) -> "Ramp | None":
    """The ramp that was asked for, if one was; all of it must be."""
    from octavo.measure.bench.serving import Ramp

    if strategy is None and start is None and end is None:
        return None
    if strategy is None or start is None or end is None:
        raise ConfigError(
            "a ramp needs --ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps, got "
            f"{strategy}, {start} and {end}"
        )
    return Ramp(strategy, start, end)


def parse_goodput(texts: list[str]) -> dict[str, float]:
    """Limits from ttft:200,tpot:50 and so on."""
    found: dict[str, float] = {}
    for part in (part.strip() for text in texts for part in text.split(",")):
        name, _, limit = part.partition(":")
        try:
            value = float(limit)
        except ValueError:
            raise ConfigError(f"expected --goodput such as ttft:200, got {part!r}") from None
        if name in found:
            raise ConfigError(f"expected one limit of {name}, got two")
        found[name] = value
    return found


def choose_data(
    random: "Workload",
    name: str,
    path: Path | None,
    *,
    sharegpt_output_len: int | None,
    custom_output_len: int | None,
    tokenizer: str | None,
    items_per_request: int,
    bucket_config: str | None,
) -> "Workload | DataSet":
    """The prompts of this data set; random: what is asked of random ones, and how many."""
    from octavo.measure.bench.images import DataOptions
    from octavo.measure.bench.serving_data import (
        NAMES,
        custom_data,
        random_mm_data,
        sharegpt_data,
    )

    if name not in NAMES:
        raise ConfigError(f"expected a data set of {', '.join(NAMES)}; got {name!r}")
    owned = {
        "--sharegpt-output-len": (sharegpt_output_len, "sharegpt"),
        "--tokenizer": (tokenizer, "sharegpt"),
        "--custom-output-len": (custom_output_len, "custom"),
        "--random-mm-bucket-config": (bucket_config, "random-mm"),
    }
    for flag, (value, owner) in owned.items():
        if value is not None and owner != name:
            raise ConfigError(f"{flag} is for --dataset-name {owner}, got {name}")
    if (path is not None) != (name in ("sharegpt", "custom")):
        raise ConfigError(
            f"expected a --dataset-path for sharegpt and custom alone, got {path} for {name}"
        )
    count, seed = random.num_prompts, random.seed
    if name == "random-mm":
        options = DataOptions(
            num_prompts=count,
            random_input_len=random.input_len,
            base_items_per_request=items_per_request,
            bucket_config=bucket_config,
            seed=seed,
        )
        return random_mm_data(options, output_len=random.output_len)
    if path is None:
        return random
    if name == "custom":
        return custom_data(path, count, output_len=custom_output_len, seed=seed)
    counter = None
    if tokenizer is not None:
        from octavo.integrations.transformers.text_model import load_tokenizer

        counter = partial(_count_tokens, load_tokenizer(tokenizer))
    return sharegpt_data(
        path, count, output_len=sharegpt_output_len, count_tokens=counter, seed=seed
    )


def _count_tokens(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text).input_ids)
