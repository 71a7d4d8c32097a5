"""Answers of any server with OpenAI's API: completions of a text, or of a chat."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import ConfigError, OctavoError
from octavo.extras import need

# Of an error's body, for a message.
MAX_BODY = 300

Message = Mapping[str, str]


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

    def chat(self, messages: Sequence[Message], max_tokens: int) -> str:
        """The greedy answer to a chat."""
        return self.reply(messages, {"temperature": 0, "max_tokens": max_tokens}).text

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
