"""Language models that take part in an evaluation: rows of a local model, or servers.

What a row's name means, and with which scales it runs; how a local model or a server answers.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from octavo import env
from octavo.calibration.observers import CalibrationSettings
from octavo.calibration.scale_file import ScaleHeader, ScaleSet, load_scales
from octavo.errors import ConfigError, OctavoError
from octavo.extras import need
from octavo.integrations.apply import apply_, restore_
from octavo.integrations.linear_twin import quantized_twin, split_linear
from octavo.integrations.transformers.calibrate_text import observe_windows
from octavo.integrations.transformers.text_model import (
    SMALL_MODEL,
    TextModel,
    load_text_model,
    load_tokenizer,
)
from octavo.integrations.transformers.tokenizer import prepare_tokenizer
from octavo.measure.bench.timing import machine_of as machine_at
from octavo.measure.evaluate.requests import LanguageRequest, ServedRequest
from octavo.measure.records import Machine, Scalar
from octavo.measure.rows import Row
from octavo.measure.run import Participant, Progress, Watch
from octavo.recipe import Recipe

MAX_BODY = 300  # of an error's body, for a message

Message = Mapping[str, str]

Item = TypeVar("Item")
Ask = Callable[[Sequence[Item]], list[str]]  # the greedy answers to some items


@dataclass(frozen=True)
class Reply:
    """The answer to a chat; is_cut: whether it ended because it was too long."""

    text: str
    is_cut: bool = False
    num_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A server, what a table calls it, and how it is asked.

    model: None is the first one that the server names. concurrency: requests open at once.
    """

    url: str
    name: str
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    concurrency: int = 4
    timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"expected a URL such as http://localhost:8000, got {self.url}")
        if self.concurrency < 1:
            raise ConfigError(f"expected 1 or more requests at once, got {self.concurrency}")

    @staticmethod
    def parse(text: str, **settings: Any) -> "Endpoint":
        """URL, or NAME=URL; /v1 at its end may be left out."""
        name, equals, url = text.partition("=")
        if not equals or "/" in name:
            name, url = text, text
        return Endpoint(url=url.rstrip("/").removesuffix("/v1"), name=name, **settings)


def endpoints(request: ServedRequest) -> tuple[Endpoint, ...]:
    """The servers that take part; their key may be in the environment."""
    key = request.api_key or env.API_KEY.read() or None
    settings = {"model": request.served_model_name, "concurrency": request.max_concurrency}
    return tuple(Endpoint.parse(url, api_key=key, **settings) for url in request.endpoint)


class Client:
    """Requests to an endpoint; a context that closes its connections."""

    def __init__(self, endpoint: Endpoint) -> None:
        need("--endpoint", "httpx")
        import httpx

        key = endpoint.api_key
        self.endpoint = endpoint
        self._http = httpx.Client(
            base_url=endpoint.url,
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=endpoint.timeout_s,
        )
        self.model = ""

    def __enter__(self) -> "Client":
        try:
            self.model = self.endpoint.model or str(self._ask("GET", "models")["data"][0]["id"])
        except (LookupError, TypeError):
            self._http.close()
            raise OctavoError(f"expected a server with models at {self.endpoint.url}") from None
        except OctavoError:
            self._http.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def complete(self, text: str, max_tokens: int) -> str:
        """The greedy continuation of a text."""
        body = {"prompt": text, "max_tokens": max_tokens, "temperature": 0}
        answer = self._ask("POST", "completions", {"model": self.model, **body})
        try:
            return str(answer["choices"][0]["text"])
        except (LookupError, TypeError):
            raise self._unexpected(answer) from None

    def reply(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Reply:
        """The answer to a chat with these fields of OpenAI's API, such as temperature."""
        body = {"messages": [dict(m) for m in messages], **options}
        answer = self._ask("POST", "chat/completions", {"model": self.model, **body})
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"] or ""
            tokens = (answer.get("usage") or {}).get("completion_tokens")
            return Reply(str(text), choice.get("finish_reason") == "length", tokens)
        except (AttributeError, LookupError, TypeError):
            raise self._unexpected(answer) from None

    def map(self, ask: Callable[[Any], str], items: Sequence[Any]) -> list[str]:
        """The answers to all items, in their order; as many at once as the endpoint says."""
        with ThreadPoolExecutor(self.endpoint.concurrency) as pool:
            return list(pool.map(ask, items))

    def _unexpected(self, answer: Any) -> OctavoError:
        return OctavoError(
            f"expected an answer with choices from {self.endpoint.url}, got "
            f"{str(answer)[:MAX_BODY]}"
        )

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        import httpx

        try:
            response = self._http.request(method, f"/v1/{path}", json=body)
        except httpx.HTTPError as error:
            raise OctavoError(
                f"expected an answer from {self.endpoint.url}, got {type(error).__name__}: {error}"
            ) from None
        if response.status_code != 200:
            raise OctavoError(
                f"expected an answer from {self.endpoint.url}/v1/{path}, got status "
                f"{response.status_code}: {response.text[:MAX_BODY]}"
            )
        try:
            return response.json()
        except ValueError:
            raise OctavoError(
                f"expected JSON from {self.endpoint.url}, got {response.text[:MAX_BODY]}"
            ) from None


@dataclass(frozen=True, kw_only=True)
class Keys:
    """What is done to keys before they are stored, and was before their scales were found."""

    rotate_keys: bool = False
    center_keys: bool = False

    @staticmethod
    def of(scales: ScaleSet) -> "Keys":
        """Those of a scale file."""
        has_means = any(layer.k_mean is not None for layer in scales.layers.values())
        return Keys(rotate_keys=scales.header.rotate_keys, center_keys=has_means)

    @staticmethod
    def of_row(row: Row) -> "Keys":
        """Those of a row."""
        settings = row.kv_cache
        if settings is None:
            return PLAIN_KEYS
        return Keys(rotate_keys=settings.rotate_keys, center_keys=settings.center_keys)

    @property
    def num_passes(self) -> int:
        """How often calibration goes over its data."""
        return 2 if self.center_keys else 1

    def __str__(self) -> str:
        words = {"rotate": self.rotate_keys, "center": self.center_keys}
        done = [word for word, is_done in words.items() if is_done]
        return f"keys with {' and '.join(done)}" if done else "keys as they are"


PLAIN_KEYS = Keys()
Scales = Mapping[Keys, ScaleSet]


_FORMAT_NAMES = {"e4m3": "fp8", "e5m2": "fp8_e5m2"}


def given_scales(request: LanguageRequest) -> dict[Keys, ScaleSet]:
    """Those of the request's file, none without one; ConfigError if a row cannot use them."""
    if request.scales is None:
        return {}
    scales = load_scales(request.scales)
    given = {Keys.of(scales): scales}
    for row in request.rows_with_scales:
        choose_scales(row, given)
    return given


def load_model(request: LanguageRequest) -> TextModel:
    """The request's local model."""
    name = None if request.model == SMALL_MODEL else request.model
    return load_text_model(name, dtype=request.dtype, prompts=request.prompts)


def local_rows(
    request: LanguageRequest, text_model: TextModel, scales: Scales
) -> list[tuple[Row, Row]]:
    """Every row as it was asked for, and by the name of its records, with its scales."""
    found = []
    for row in request.parsed_rows:
        chosen = choose_scales(row, scales)
        recipe = row.recipe(None if chosen is None else chosen.to_dict())
        named = row
        if row.is_plain:
            named = replace(row, name=text_model.dtype)
        elif row.digest is None and row.kv_cache is not None:
            named = replace(row, name=f"{_FORMAT_NAMES[row.kv_cache.format]} {row.name}")
        found.append((row, named if recipe is None else named.using(recipe)))
    return found


def choose_scales(row: Row, scales: Scales) -> ScaleSet | None:
    """The scales of keys such as this row's, None if it needs none; ConfigError without any."""
    settings = row.kv_cache
    if not row.needs_scales or settings is None:
        return None
    keys = Keys.of_row(row)
    found = scales.get(keys)
    if found is None and settings.granularity == "token":
        # Only the means are used, which are those of keys before they are rotated.
        found = scales.get(replace(keys, rotate_keys=not keys.rotate_keys))
    if found is None:
        got = ", ".join(map(str, scales)) or "none"
        raise ConfigError(f"expected scales for the row {row.name}, of {keys}, got {got}")
    return found


def calibrate_rows(
    text_model: TextModel,
    windows: Sequence[Tensor],
    rows: Sequence[Row],
    *,
    data: str,
    margin: float,
    watch: Watch,
) -> dict[Keys, ScaleSet]:
    """Scales by these windows for all kinds of keys that the rows have."""
    kinds = list(dict.fromkeys(map(Keys.of_row, rows)))
    total = len(windows) * sum(keys.num_passes for keys in kinds)
    progress = Progress(watch, "calibrating", total)
    return {
        keys: calibration_scales(
            text_model,
            windows,
            keys,
            data=data,
            margin=margin,
            on_window=lambda num_windows: progress.add(),
        )
        for keys in kinds
    }


def calibration_scales(
    text_model: TextModel,
    windows: Sequence[Tensor],
    keys: Keys = PLAIN_KEYS,
    *,
    data: str,
    margin: float = 1.5,
    on_window: Callable[[int], None] = lambda num_windows: None,
) -> ScaleSet:
    """Static scales per head by the largest values in these windows, of such keys.

    Rows per tensor take the largest of the heads. on_window is told how many windows are done; all
    passes count.
    """
    settings = CalibrationSettings(granularity="head", margin=margin, **vars(keys))
    header = ScaleHeader(kind="kv_cache", model=text_model.name[:1000], data=data[:1000])
    tokens = [window.tolist() for window in windows]
    seen = observe_windows(text_model.model, tokens, settings, on_window=on_window)
    return seen.result(header).scales


def recipe_digest(recipe: Recipe | None, calibration: object = None) -> str | None:
    """What a row's name does not say of its recipe and scales, as a few letters; files may change.

    None of a row without a recipe. calibration: what scales that were found in the same run depend
    on, in place of their values: by the same data they are the same, but for what a GPU rounds
    otherwise.
    """
    if recipe is None:
        return None
    document = json.loads(recipe.to_json())
    if calibration is not None:
        document["scales"] = calibration
    elif isinstance(recipe.scales, str):
        document["scales"] = load_scales(recipe.scales).to_dict()
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:12]


@contextmanager
def applied(model: Any, recipe: Recipe | None) -> Iterator[Any]:
    """The model as a recipe has it; afterwards `model` is as it was.

    FP8 linear layers cannot be undone: with such a recipe it is a twin that shares all else.
    """
    if recipe is None:
        yield model
        return
    linear, rest = split_linear(recipe)
    if linear is not None:
        model, _ = quantized_twin(model, linear)
    if linear is None or rest.settings():
        apply_(model, rest)
    try:
        yield model
    finally:
        if linear is None:  # nobody else has a twin
            restore_(model)


def machine_of(model: Any) -> Machine:
    """The machine that a model runs on, with its GPU if it is on one."""
    return machine_at(next(model.parameters()).device)


def local_participants(
    request: LanguageRequest,
    text_model: TextModel,
    scales: Scales,
    answer: Callable[[TextModel, Item], str],
    *,
    calibration: object,
) -> list[Participant[Ask[Item]]]:
    """Rows of a local model, each with its recipe applied for as long as it answers.

    answer: a model's answer to one item. calibration: what scales that were calibrated here depend
    on, for the digest of a recipe.
    """
    machine, prompts = machine_of(text_model.model), text_model.prompts.about
    participants = []
    for asked, row in local_rows(request, text_model, scales):
        is_calibrated = asked.needs_scales and request.scales is None
        digest = recipe_digest(row.recipe(), calibration if is_calibrated else None)
        about: dict[str, Scalar] = {"model": text_model.name, "dtype": text_model.dtype}
        about |= {"chunk": request.chunk or 0, **prompts}
        if digest is not None:
            about["recipe_digest"] = digest
        participants.append(
            Participant(
                name=row.name,
                impl="transformers",
                about=about,
                machine=machine,
                open=partial(_open_local, text_model, row.recipe(), answer),
            )
        )
    return participants


@contextmanager
def _open_local(
    text_model: TextModel, recipe: Recipe | None, answer: Callable[[TextModel, Item], str]
) -> Iterator[Ask[Item]]:
    with applied(text_model.model, recipe) as model:
        own = replace(text_model, model=model)
        yield lambda items: [answer(own, item) for item in items]


def server_participants(
    request: ServedRequest, answer: Callable[[Client, Item], str]
) -> list[Participant[Ask[Item]]]:
    """The servers; the machine of a record is the one that asked.

    answer: a server's answer to one item.
    """
    participants = []
    for endpoint in endpoints(request):
        with Client(endpoint) as client:  # all servers are asked before one has to work
            about: dict[str, Scalar] = {"model": client.model, "url": endpoint.url}
        if request.tokenizer is not None:
            about["tokenizer"] = request.tokenizer
        participants.append(
            Participant(
                name=endpoint.name,
                impl="http",
                about=about,
                machine=Machine.current(),
                open=partial(_open_server, endpoint, answer),
            )
        )
    return participants


@contextmanager
def _open_server(endpoint: Endpoint, answer: Callable[[Client, Item], str]) -> Iterator[Ask[Item]]:
    with Client(endpoint) as client:
        yield lambda items: client.map(partial(answer, client), items)


def participants(
    request: ServedRequest,
    text_model: TextModel | None,
    scales: Scales,
    answer: Callable[[TextModel, Item], str],
    reply: Callable[[Client, Item], str],
    *,
    calibration: object,
) -> list[Participant[Ask[Item]]]:
    """Rows of the local model that answer, or the servers that reply where there is none."""
    if text_model is None:
        return server_participants(request, reply)
    return local_participants(request, text_model, scales, answer, calibration=calibration)


def counting_tokenizer(request: ServedRequest, text_model: TextModel | None) -> Any:
    """The local model's tokenizer, or the one that is named for servers; None without either."""
    if text_model is not None:
        return text_model.tokenizer
    if request.tokenizer is None:
        return None
    return prepare_tokenizer(load_tokenizer(request.tokenizer), request.prompts)
