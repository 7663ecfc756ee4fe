"""Pydantic's errors in words: where, what is wrong, what to do."""

import difflib
import types
from collections.abc import Iterable
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

Location = tuple[int | str, ...]


def path_of(location: Location) -> str:
    """A location as a person writes it: `spec.roles.pd.env[0].name`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def explain(error: ValidationError, root: type[BaseModel]) -> Iterable[tuple[Location, str]]:
    """Each error's location and what to say about it; `root` is the model that was validated."""
    for details in error.errors(include_url=False):
        # A bad key of a mapping has a last part of pydantic's own.
        location = tuple(part for part in details["loc"] if part != "[key]")
        # What two distant fields have to do with each other is found above both, and said at one of them.
        location += tuple(details.get("ctx", {}).get("at", ()))
        yield location, _explain(details, location, root)


def _explain(details: ErrorDetails, location: Location, root: type[BaseModel]) -> str:
    context: dict[str, Any] = details.get("ctx", {})
    value = details["input"]
    match details["type"]:
        case "missing":
            return _missing(location, root)
        case "extra_forbidden":
            return _unknown(location, root)
        case "greater_than_equal":
            return f"must be {context['ge']} or more, got {_show(value)}"
        case "less_than_equal":
            return f"must be {context['le']} or less, got {_show(value)}"
        case "literal_error":
            return f"must be {context['expected']}, got {_show(value)}"
        case "string_type":
            quoted = f"; write it in quotes: {str(value).lower()!r}" if isinstance(value, int | float) else ""
            return f"must be text, got {_show(value)}{quoted}"
        case "int_type":
            return f"must be a whole number, got {_show(value)}"
        case "bool_type":
            return f"must be true or false, got {_show(value)}"
        case "list_type":
            return f"must be a list, got {_show(value)}"
        case "model_type" | "dict_type":
            hint = "; all defaults are written `{}`" if value is None else ""
            return f"must be a mapping of fields, got {_show(value)}{hint}"
        case "string_too_long" | "string_too_short" | "too_long" | "too_short":
            return _length(details["type"], context)
        case "string_pattern_mismatch":
            return f"must match {context['pattern']}, got {_show(value)}"
        case "quantity" | "duration":
            return f"{details['msg']}, got {_show(value)}"
        case _:
            return details["msg"]


def _missing(location: Location, root: type[BaseModel]) -> str:
    model = _model_at(root, location[:-1])
    for field in model.model_fields.values() if model else ():
        if field.alias == location[-1] and field.description:
            first_sentence = " ".join(field.description.split()).split(". ")[0].rstrip(".")
            return f"is required: {first_sentence[0].lower()}{first_sentence[1:]}"
    return "is required"


def _unknown(location: Location, root: type[BaseModel]) -> str:
    model = _model_at(root, location[:-1])
    known = [field.alias or name for name, field in model.model_fields.items()] if model else []
    close = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.6)
    hint = f"did you mean `{close[0]}`?" if close else f"the fields here are {', '.join(known)}"
    return f"unknown field; {hint}"


def _length(kind: str, context: dict[str, Any]) -> str:
    unit = "characters" if kind.startswith("string") else "entries"
    if kind.endswith("long"):
        return f"must have at most {context['max_length']} {unit}"
    return f"must have at least {context['min_length']} {unit}"


def _show(value: object) -> str:
    """The value as YAML would have it, short enough for one line."""
    if value is None:
        return "nothing"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _model_at(root: type[BaseModel], location: Location) -> type[BaseModel] | None:
    """The model whose fields stand at a location."""
    model: type[BaseModel] | None = root
    for part in location:
        if model is None:
            return None
        if isinstance(part, int):
            continue
        fields = model.model_fields.items()
        annotation = next((field.annotation for name, field in fields if (field.alias or name) == part), None)
        model = _model_in(annotation)
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model within an annotation such as `list[Metric] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Annotated, Union, types.UnionType, list):
        return next(filter(None, map(_model_in, get_args(annotation))), None)
    return None
