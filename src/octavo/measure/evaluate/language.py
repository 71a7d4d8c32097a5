"""Language models that take part in an evaluation: rows of a local model, or servers.

What a row's name means, and with which scales it runs; how a local model or a server answers.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from octavo import env
from octavo.calibration.observers import CalibrationSettings
from octavo.calibration.scale_file import ScaleHeader, ScaleSet, load_scales
from octavo.errors import ConfigError, OctavoError
from octavo.extras import need
from octavo.integrations.apply import apply_, quantized_twin, restore_, split_linear
from octavo.integrations.embedded_models import RETRIEVAL_MODEL
from octavo.integrations.transformers.calibrate import observe_windows
from octavo.integrations.transformers.text_model import (
    SMALL_MODEL,
    TextModel,
    load_text_model,
    load_tokenizer,
)
from octavo.integrations.transformers.tokenizer import prepare_tokenizer
from octavo.measure.bench.timing import machine_of as machine_at
from octavo.measure.evaluate.answering import Content, answer_text
from octavo.measure.evaluate.fp8_layers import watched
from octavo.measure.evaluate.requests import LanguageRequest, NeedleRequest, ServedRequest
from octavo.measure.records import Machine, Scalar
from octavo.measure.rows import Row
from octavo.measure.run import Participant, Progress, Watch
from octavo.recipe import Recipe

T = TypeVar("T")
MAX_BODY = 300  # characters of a server's answer in an error
TIMEOUT_S = 3600.0  # of a request: a long prompt and its answer


@dataclass(frozen=True)
class Prompt:
    """A text or chat to answer; num_tokens: its length, for the progress."""

    content: Content
    max_tokens: int
    num_tokens: int
    repetition: int = 0


Ask = Callable[[Sequence[Prompt]], list[str]]  # the answers to some prompts


@dataclass(frozen=True)
class Reply:
    """A server's or engine's answer; is_cut: whether it ended because it was too long."""

    text: str
    is_cut: bool = False
    num_tokens: int | None = None


@dataclass(kw_only=True)
class Client:
    """A server, what a table calls it, and requests to it while it is entered.

    concurrency: requests open at once.
    """

    url: str
    name: str
    model: str = ""
    api_key: str | None = field(default=None, repr=False)
    concurrency: int = 4

    def __enter__(self) -> "Client":
        need("--endpoint", "httpx")
        import httpx

        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def first_model(self) -> str:
        """The first model that the server names."""
        try:
            return str(self._ask("GET", "models")["data"][0]["id"])
        except (LookupError, TypeError):
            raise OctavoError(f"expected a server with models at {self.url}") from None

    def reply(self, content: Content, options: Mapping[str, Any]) -> Reply:
        """The answer to a text or chat with these fields of OpenAI's API, such as temperature."""
        if isinstance(content, str):
            path, body = "completions", {"prompt": content, **options}
        else:
            path, body = "chat/completions", {"messages": list(map(dict, content)), **options}
        found = self._ask("POST", path, {"model": self.model, **body})
        try:
            choice = found["choices"][0]
            text = choice["text"] if path == "completions" else choice["message"]["content"]
            tokens = (found.get("usage") or {}).get("completion_tokens")
            return Reply(str(text or ""), choice.get("finish_reason") == "length", tokens)
        except (AttributeError, LookupError, TypeError):
            raise OctavoError(
                f"expected an answer with choices from {self.url}, got {str(found)[:MAX_BODY]}"
            ) from None

    def reply_all(
        self,
        asked: Sequence[tuple[Content, Mapping[str, Any]]],
        on_reply: Callable[[int, Reply], None],
    ) -> None:
        """Ask as many at once as `concurrency`; on_reply: given the place of each as it comes."""
        with ThreadPoolExecutor(self.concurrency) as pool:
            futures = {pool.submit(self.reply, *one): place for place, one in enumerate(asked)}
            try:
                for future in as_completed(futures):
                    on_reply(futures[future], future.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        import httpx

        try:
            response = self._http.request(method, f"/v1/{path}", json=body)
            if response.status_code == 200:
                return response.json()
            problem = f"status {response.status_code}: {response.text[:MAX_BODY]}"
        except httpx.HTTPError as error:
            problem = f"{type(error).__name__}: {error}"
        except ValueError:
            problem = f"no JSON: {response.text[:MAX_BODY]}"
        raise OctavoError(f"expected an answer from {self.url}/v1/{path}, got {problem}")


def clients(request: ServedRequest) -> list[Client]:
    """The servers that take part, each with the model that was named or else its first one.

    A server is URL or NAME=URL, with or without /v1 at the end. Their key may be in the
    environment. All servers answer here, before one has to work.
    """
    found = []
    for text in request.endpoint:
        name, equals, url = text.partition("=")
        if not equals or "/" in name:
            name, url = text, text
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"expected a URL such as http://localhost:8000, got {url}")
        client = Client(
            url=url.rstrip("/").removesuffix("/v1"),
            name=name,
            model=request.served_model_name or "",
            api_key=request.api_key or env.API_KEY.read() or None,
            concurrency=request.max_concurrency,
        )
        if not client.model:
            with client:
                client.model = client.first_model()
        found.append(client)
    return found


@dataclass(frozen=True)
class Keys:
    """What is done to keys before they are stored, and was before their scales were found."""

    rotate_keys: bool = False
    center_keys: bool = False

    @staticmethod
    def of(scales: ScaleSet) -> "Keys":
        """Those of a scale file."""
        has_means = any(layer.k_mean is not None for layer in scales.layers.values())
        return Keys(scales.header.rotate_keys, has_means)

    @staticmethod
    def of_row(row: Row) -> "Keys":
        """Those of a row."""
        own = row.kv_cache
        return Keys() if own is None else Keys(own.rotate_keys, own.center_keys)

    @property
    def num_passes(self) -> int:
        """How often calibration goes over its data."""
        return 2 if self.center_keys else 1

    def __str__(self) -> str:
        done = [name.removesuffix("_keys") for name, is_done in vars(self).items() if is_done]
        return f"keys with {' and '.join(done)}" if done else "keys as they are"


PLAIN_KEYS = Keys()
Scales = Mapping[Keys, ScaleSet]


def given_scales(request: LanguageRequest) -> dict[Keys, ScaleSet]:
    """Those of the request's file, none without one; ConfigError if a row cannot use them."""
    if request.scales is None:
        return {}
    scales = load_scales(request.scales)
    given = {Keys.of(scales): scales}
    for row in request.rows_with_scales:
        choose_scales(row, given)
    return given


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
    request: LanguageRequest,
    text_model: TextModel,
    make_windows: Callable[[], tuple[str, Sequence[Tensor]]],
    watch: Watch,
) -> dict[Keys, ScaleSet]:
    """Scales for every kind of keys among the request's rows; none if no row needs any.

    make_windows: what records call the data, and windows of its tokens.
    """
    kinds = list(dict.fromkeys(map(Keys.of_row, request.rows_with_scales)))
    if not kinds:
        return {}
    data, windows = make_windows()
    total = len(windows) * sum(keys.num_passes for keys in kinds)
    progress = Progress(watch, "calibrating", total)
    return {
        keys: calibration_scales(
            text_model,
            windows,
            keys,
            data=data,
            margin=request.margin,
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


def load_model(request: LanguageRequest) -> TextModel:
    """The request's local model; the one of needles is the retrieval model if none is named."""
    if isinstance(request, NeedleRequest) and not request.has_text:
        load: Callable[..., TextModel] = RETRIEVAL_MODEL.load_module().load_retrieval_model
        return load(dtype=request.dtype)
    name = None if request.model == SMALL_MODEL else request.model
    return load_text_model(name, dtype=request.dtype, prompts=request.prompts)


def counting_tokenizer(request: ServedRequest, text_model: TextModel | None) -> Any:
    """The local model's tokenizer, or the one that is named for servers; None without either."""
    if text_model is not None:
        return text_model.tokenizer
    if request.tokenizer is None:
        return None
    return prepare_tokenizer(load_tokenizer(request.tokenizer), request.prompts)


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
            fmt = {"e4m3": "fp8", "e5m2": "fp8_e5m2"}[row.kv_cache.format]
            named = replace(row, name=f"{fmt} {row.name}")
        found.append((row, named if recipe is None else named.using(recipe)))
    return found


def machine_of(model: Any) -> Machine:
    """The machine that a model runs on, with its GPU if it is on one."""
    return machine_at(next(model.parameters()).device)


def model_about(text_model: TextModel) -> dict[str, Scalar]:
    """What records say of a local model."""
    return {"model": text_model.name, "dtype": text_model.dtype, **text_model.prompts.about}


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


def local_participants(
    rows: Sequence[Row], model: Any, about: Mapping[str, Scalar]
) -> list[Participant[Any]]:
    """Rows of a model in this process, which has a row's recipe while the row is open."""
    machine = machine_of(model)
    return [
        Participant(
            name=row.name,
            impl="transformers",
            about=about,
            machine=machine,
            open=partial(watched, partial(applied, model, row.recipe()), ran),
            ran=ran,
        )
        for row in rows
        for ran in [dict[str, float]()]
    ]


def served_row(
    client: Client, open: Callable[[], AbstractContextManager[T]], **about: Scalar
) -> Participant[T]:
    """A server that takes part; the machine of its records is the one that asked."""
    about = {"model": client.model, "url": client.url, **about}
    machine = Machine.current()
    return Participant(name=client.name, impl="http", about=about, machine=machine, open=open)


def participants(
    request: ServedRequest,
    text_model: TextModel | None,
    scales: Scales,
    progress: Progress,
    *,
    calibration: object,
) -> list[Participant[Ask]]:
    """Rows that answer greedily: the local model's, or servers where there is none.

    progress: counts tokens of prompts. calibration: what scales that were calibrated here depend
    on, for the digest of a recipe.
    """
    if text_model is None:
        tokenizer = {} if request.tokenizer is None else {"tokenizer": request.tokenizer}
        return [
            served_row(client, partial(_open_server, client, progress), **tokenizer)
            for client in clients(request)
        ]
    about = {**model_about(text_model), "chunk": request.chunk or 0}

    @contextmanager
    def open_local(row: Participant[Any]) -> Iterator[Ask]:
        with row.open() as model:
            own = replace(text_model, model=model)
            answer = partial(answer_text, own, chunk=request.chunk or 2048, on_step=progress.add)
            yield lambda prompts: [answer(p.content, max_tokens=p.max_tokens) for p in prompts]

    found = []
    for asked, row in local_rows(request, text_model, scales):
        is_calibrated = asked.needs_scales and request.scales is None
        digest = recipe_digest(row.recipe(), calibration if is_calibrated else None)
        own = about if digest is None else {**about, "recipe_digest": digest}
        (one,) = local_participants([row], text_model.model, own)
        found.append(replace(one, open=partial(open_local, one)))
    return found


@contextmanager
def _open_server(client: Client, progress: Progress) -> Iterator[Ask]:
    def ask(prompts: Sequence[Prompt]) -> list[str]:
        texts = [""] * len(prompts)

        def keep(place: int, reply: Reply) -> None:
            texts[place] = reply.text
            progress.add(prompts[place].num_tokens)

        greedy = [
            (one.content, {"temperature": 0, "max_tokens": one.max_tokens}) for one in prompts
        ]
        client.reply_all(greedy, keep)
        return texts

    with client:
        yield ask
