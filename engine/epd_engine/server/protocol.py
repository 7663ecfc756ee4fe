"""The body of `/v1/chat/completions`: what is understood, what is refused by name."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from epd_engine.server.errors import TAG

MAX_MESSAGES = 4096
MAX_PARTS = 4096
Uuid = Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9._:-]*$")]

MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20
MAX_BIASED_TOKENS = 1024
MAX_STOP_TOKENS = 128

# Fields of the chat API that do not change the answer; they are taken and left alone.
HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
# Fields that change the answer and are not supported: only the value that asks for nothing passes.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_grammar": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "spaces_between_special_tokens": (True,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, value: Any) -> Any:
        """Also where the field is unknown: clients send an answer's empty fields back in its next turn."""
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Url(Strict):
    url: str
    detail: str | None = None


class InputAudio(Strict):
    data: str
    format: str


class ImageUrlPart(Strict):
    type: Literal["image_url"]
    image_url: Url
    uuid: Uuid | None = None


class AudioUrlPart(Strict):
    type: Literal["audio_url"]
    audio_url: Url
    uuid: Uuid | None = None


class VideoUrlPart(Strict):
    type: Literal["video_url"]
    video_url: Url
    uuid: Uuid | None = None


class InputAudioPart(Strict):
    type: Literal["input_audio"]
    input_audio: InputAudio
    uuid: Uuid | None = None


class _EmbedsPart(Strict):
    """An item that an encoder has put into the store: its metadata and its key."""

    uuid: str = Field(pattern=r"^[0-9a-f]{64}$", description="the mm_hash that the encoder reported")


class ImageEmbedsPart(_EmbedsPart):
    type: Literal["image_embeds"]
    image_embeds: dict[str, Any]


class AudioEmbedsPart(_EmbedsPart):
    type: Literal["audio_embeds"]
    audio_embeds: dict[str, Any]


class VideoEmbedsPart(_EmbedsPart):
    type: Literal["video_embeds"]
    video_embeds: dict[str, Any]


PARTS = (
    TextPart,
    ImageUrlPart,
    AudioUrlPart,
    VideoUrlPart,
    InputAudioPart,
    ImageEmbedsPart,
    AudioEmbedsPart,
    VideoEmbedsPart,
)
RawMediaPart = ImageUrlPart | AudioUrlPart | VideoUrlPart | InputAudioPart
EmbedsPart = ImageEmbedsPart | AudioEmbedsPart | VideoEmbedsPart


def _part_tag(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"{TAG}{kind}" if isinstance(kind, str) else None


def _content_tag(value: Any) -> str:
    return f"{TAG}text" if isinstance(value, str) else f"{TAG}parts"


ContentPart = Annotated[
    Annotated[TextPart, Tag("~text")]
    | Annotated[ImageUrlPart, Tag("~image_url")]
    | Annotated[AudioUrlPart, Tag("~audio_url")]
    | Annotated[VideoUrlPart, Tag("~video_url")]
    | Annotated[InputAudioPart, Tag("~input_audio")]
    | Annotated[ImageEmbedsPart, Tag("~image_embeds")]
    | Annotated[AudioEmbedsPart, Tag("~audio_embeds")]
    | Annotated[VideoEmbedsPart, Tag("~video_embeds")],
    Discriminator(
        _part_tag,
        custom_error_type="content_part",
        custom_error_message="a content part is an object whose type is text, image_url, audio_url, "
        "input_audio, video_url, image_embeds, audio_embeds or video_embeds",
    ),
]
Content = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[ContentPart], Field(max_length=MAX_PARTS), Tag("~parts")],
    Discriminator(_content_tag),
]


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _an_answer_can_be_sent_back(cls, value: Any) -> Any:
        """It may have no content; servers write empty lists where they mean nothing."""
        if not isinstance(value, dict) or value.get("role") != "assistant":
            return value
        said = {name: part for name, part in value.items() if name == "content" or part != []}
        return {**said, "content": ""} if said.get("content") is None else said


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Strict):
    name: str = Field("", max_length=128)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_goes_with_its_type(self) -> "ResponseFormat":
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("json_schema is given with the type json_schema, and only with it")
        return self


class StructuredOutputs(Strict):
    """vLLM's: an answer follows exactly one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    json_object: bool | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> "StructuredOutputs":
        if sum(value not in (None, False) for value in self.__dict__.values()) != 1:
            raise ValueError("exactly one of json, regex, choice and json_object is needed")
        return self


Real = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class SamplingFields(Strict):
    """How tokens are chosen: OpenAI's fields, and what vLLM adds to them."""

    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    min_tokens: int = Field(0, ge=0)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    temperature: Real | None = Field(None, ge=0, le=2)
    top_p: Real | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: Real | None = Field(None, ge=0, le=1)
    repetition_penalty: Real | None = Field(None, gt=0, le=100)
    presence_penalty: Real = Field(0.0, ge=-2, le=2)
    frequency_penalty: Real = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field({}, max_length=MAX_BIASED_TOKENS)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    stop: list[str] | None = Field(None, max_length=16)
    stop_token_ids: list[TokenId] = Field([], max_length=MAX_STOP_TOKENS)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, min_length=1)

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _stop_is_not_empty(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and not all(value):
            raise ValueError("a stop string must not be empty")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _bias_names_tokens(cls, value: dict[str, float]) -> dict[str, float]:
        for name in value:
            if not (name.isascii() and name.isdigit() and len(name) < 10):
                raise ValueError(f"the keys are token ids, got {name[:32]!r}")
        return value

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def structure(self) -> tuple[str, StructuredOutputs] | None:
        """The form that the answer must have, if any, and the field that says so. Raises `ValueError` for
        several at once."""
        asked: dict[str, StructuredOutputs] = {}
        if self.structured_outputs is not None:
            asked["structured_outputs"] = self.structured_outputs
        for kind in ("json", "regex", "choice"):
            if (value := getattr(self, f"guided_{kind}")) is not None:
                asked[f"guided_{kind}"] = StructuredOutputs.model_validate({kind: value})
        if self.response_format is not None and self.response_format.type != "text":
            schema = self.response_format.json_schema
            form: dict[str, Any] = {"json_object": True} if schema is None else {"json": schema.schema_}
            asked["response_format"] = StructuredOutputs.model_validate(form)
        if len(asked) > 1:
            raise ValueError(f"{' and '.join(asked)} contradict each other")
        return next(iter(asked.items()), None)

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        if self.output_limit is not None and self.min_tokens > self.output_limit:
            raise ValueError("min_tokens exceeds the most tokens that are asked for")
        if self.structure is not None:
            if self.ignore_eos:
                raise ValueError("ignore_eos contradicts a structured answer, which ends when it is complete")
            if self.min_tokens:
                raise ValueError("min_tokens contradicts a structured answer, which ends when it is complete")
        return self


class ChatCompletionRequest(SamplingFields):
    """OpenAI's chat completion request, with what vLLM adds to it."""

    model: str
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(None, max_length=256)
    chat_template_kwargs: dict[str, Any] = {}
    mm_processor_kwargs: dict[str, Any] | None = None
    return_token_ids: bool = False
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def output_limit(self) -> int | None:
        """Nothing for a prefill, which ends after one token whatever is asked for."""
        return None if (self.kv_transfer_params or {}).get("do_remote_decode") else super().output_limit

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            raise ValueError("the body must be a JSON object")
        known = {}
        for name, value in body.items():
            if name in cls.model_fields:
                known[name] = value
            elif name not in HARMLESS and value is not None and value not in NEUTRAL.get(name, ()):
                verb = "is not supported" if name in NEUTRAL else "is not a field that is supported"
                raise ValueError(f"{name} {verb}")
        return known
