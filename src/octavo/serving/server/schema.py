"""What requests look like: OpenAI's fields, and those that vLLM adds.

A field that we do not know is refused, and so is a value of a known one that we do not serve.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from octavo.brief import brief
from octavo.serving.engine.request import MAX_BIAS, MAX_BIASES, MAX_LOGPROBS

MAX_INT = 2**31 - 1
MAX_CHOICES = 128  # of one request, OpenAI's limit of n


def only(*accepted: Any) -> AfterValidator:
    """A field that exists for clients who write it out: null and these values, nothing else."""

    def check(value: Any) -> Any:
        is_accepted = any(type(value) is type(one) and value == one for one in accepted)
        if value is None or is_accepted:
            return value
        expected = " or ".join(["null", *map(repr, accepted)])
        raise ValueError(f"not supported here: expected {expected}, got {brief(value)}")

    return AfterValidator(check)


Unserved = Annotated[Any, only()]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
# The first wrong item is enough: a list of a million would have a million errors.
FAIL_FAST: Any = Field(fail_fast=True)
Tokens = Annotated[list[TokenId], FAIL_FAST]
TokenName = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]  # JSON's keys are texts
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
ModelName = Annotated[str, Field(max_length=1000)]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]


class Body(BaseModel):
    """A strict object: unknown fields and other types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: Annotated[Any, only(False)] = None


class SamplingFields(Body):
    """What both kinds of completions share."""

    model: ModelName | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1000)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Seed | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    logit_bias: Annotated[dict[TokenName, Bias], Field(max_length=MAX_BIASES)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16, fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None  # OpenAI's new names of `user`
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
    # vLLM's
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1000)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1000, fail_fast=True)] | None = None
    # known, not served
    service_tier: Annotated[Any, only("auto", "default")] = None
    store: Annotated[Any, only(False)] = None


class ImageUrl(Body):
    url: str
    detail: Annotated[Any, only("auto")] = None


class TextPart(Body):
    type: Literal["text"]
    text: str


class ImagePart(Body):
    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class CalledFunction(Body):
    name: str
    arguments: str


class MessageToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], FAIL_FAST] | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], FAIL_FAST] | None = None
    tool_call_id: str | None = None
    # what an answer carries and a client sends back
    refusal: str | None = None
    annotations: list[Any] | None = None
    provider_specific_fields: dict[str, Any] | None = None  # litellm's
    audio: Unserved = None
    function_call: Unserved = None

    @property
    def parts(self) -> list[TextPart | ImagePart]:
        """The content as a list, whatever it was written as."""
        content = self.content or ""
        return [TextPart(type="text", text=content)] if isinstance(content, str) else content

    @property
    def text(self) -> str:
        """The texts of the content, in lines of their own."""
        return "\n".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def num_chars(self) -> int:
        """The characters of its texts and of the arguments in its calls."""
        calls = self.tool_calls or ()
        return len(self.text) + sum(len(call.function.arguments) for call in calls)


class Function(Body):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Body):
    model_config = ConfigDict(populate_by_name=True)
    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    # known, not served
    audio: Unserved = None
    function_call: Unserved = None
    functions: Unserved = None
    modalities: Annotated[Any, only(["text"])] = None
    prediction: Unserved = None
    reasoning_effort: Unserved = None
    verbosity: Unserved = None
    web_search_options: Unserved = None


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: str | Tokens | Annotated[list[str], FAIL_FAST] | Annotated[list[Tokens], FAIL_FAST]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    # known, not served
    suffix: Annotated[Any, only("")] = None


class TokenizeRequest(Body):
    """POST /tokenize: a prompt, or messages as they would be asked."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Tokens


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """What every refusal and failure looks like."""

    error: ErrorDetail
