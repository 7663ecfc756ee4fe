"""The body of `/v1/chat/completions`: what is understood, what is refused by name."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from epd_engine.server.errors import TAG

MAX_MESSAGES = 4096
MAX_PARTS = 4096
Uuid = Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9._:-]*$")]

# Fields of the chat API that do not change the answer; they are taken and left alone.
HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
# Fields that change the answer and are not supported yet: only the value that asks for nothing passes.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "n": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
}


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


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


class StreamOptions(Strict):
    include_usage: bool = False


class ChatCompletionRequest(Strict):
    """OpenAI's chat completion request, with vLLM's `cache_salt`, `mm_processor_kwargs`,
    `return_token_ids` and `ignore_eos`."""

    model: str
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: list[str] | None = Field(None, max_length=16)
    cache_salt: str | None = Field(None, max_length=256)
    mm_processor_kwargs: dict[str, Any] | None = None
    return_token_ids: bool = False
    ignore_eos: bool = False

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            raise ValueError("the body must be a JSON object")
        known = {}
        for name, value in body.items():
            if name in cls.model_fields:
                if value is not None:
                    known[name] = value
            elif name not in HARMLESS and value is not None and value not in NEUTRAL.get(name, ()):
                verb = "is not supported yet" if name in NEUTRAL else "is not a field that is supported"
                raise ValueError(f"{name} {verb}")
        return known

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

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens
