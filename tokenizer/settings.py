"""Settings as pydantic models; a wrong value is one line: `num_frames: expected a whole number of at least 2, got 1`.

Command lines, YAML, manifests and the JSON beside weights are read by the same models. The words after "expected" come
from a model's own JSON schema, so a field's bounds are written once, in its annotation.
"""

import difflib
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, overload

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from tokenizer.errors import ConfigError, TerraError

MAX_SEED = 2**63 - 1

_T = TypeVar("_T")
_Schema = dict[str, Any]
_NAMES_SHOWN = 20

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]


def expecting(words: str) -> Any:
    """A field's annotation that replaces the words after "expected" for whatever is wrong in the field."""
    return Field(json_schema_extra={"expected": words})


def _known_device(name: str) -> str:
    if re.fullmatch(r"(cpu|cuda)(:\d{1,4})?", name) is None:
        raise ValueError(f"expected cpu or cuda, got {_shown(name)}")
    return name


def _as_written(value: object) -> object:
    """The text of a whole number: YAML reads a folder named 2026 or a drive named 07 as a number."""
    return str(value) if type(value) is int else value


Text = Annotated[str, BeforeValidator(_as_written)]
"""Text; a whole number stands for its digits."""

FilePath = Annotated[Path, Field(strict=False), BeforeValidator(_as_written)]
"""A path as text, or as `pathlib.Path`."""
Device = Annotated[str, AfterValidator(_known_device)]
"""The name of a device, such as "cpu" or "cuda:1"; whether it is there is known when torch is imported."""

Dtype = Literal["float32", "bfloat16", "float16"]
"""An element type by PyTorch's name."""


class Settings(BaseModel):
    """Base of all settings: immutable, of exactly the declared keys, types and bounds, all numbers finite.

    A whole number may stand for a float; nothing else is converted. A model's own checks of several fields together
    raise ValueError with the line that the user is to see.

    Raises:
        TerraError: `error_class`, by default ConfigError, with the first wrong value as one line.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    error_class: ClassVar[type[TerraError]] = ConfigError

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise self.error_class(first_problem(error, type(self), values)) from None

    # pydantic then builds models within models without this method: their errors keep the name of the outer field.
    __init__.__pydantic_base_init__ = True  # pyright: ignore[reportFunctionMemberAccess]

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """The model's fields, picked out of settings that also hold others. Raises `error_class`."""
        return cls(**{name: values[name] for name in cls.model_fields if name in values})

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked like any other. Raises `error_class`."""
        return type(self)(**{**vars(self), **changes})


@overload
def checked(kind: type[_T], values: object, where: str = "", error_class: type[TerraError] = ConfigError) -> _T: ...


@overload
def checked(kind: object, values: object, where: str = "", error_class: type[TerraError] = ConfigError) -> Any: ...


def checked(kind: object, values: object, where: str = "", error_class: type[TerraError] = ConfigError) -> Any:
    """Plain values, as YAML or JSON has them, as an object of a kind.

    Args:
        kind: a model, or the type of one value, such as `Count`.
        values: a mapping with the model's keys, or the value.
        where: what the values stand in, for the message: a file, a line, a setting, or a group that ends with a dot.
        error_class: what is raised.

    Raises:
        error_class: the first wrong value as one line, which begins with `where`.
    """
    try:
        return _adapter(kind).validate_python(values)
    except ValidationError as error:
        line = first_problem(error, kind, values)
        separator = "" if not where or where.endswith(".") or line.startswith("[") else ": "
        raise error_class(f"{where}{separator}{line}") from None


def first_problem(error: ValidationError, kind: object, values: object) -> str:
    """The first thing that is wrong with `values`, in one line: which key, what `kind` expects there, what came."""
    problems = error.errors(include_url=False)
    # A mistyped key comes before the one that is missed in its place.
    problem = next((each for each in problems if each["type"] == "extra_forbidden"), problems[0])
    location = problem["loc"]
    schema = _adapter(kind).json_schema(schema_generator=_Lenient)
    if problem["type"] == "extra_forbidden":
        parent, _, _ = _descend(schema, values, location[:-1])
        return _unknown_key(location, parent.get("properties", {}))
    if problem["type"] in ("value_error", "assertion_error"):
        message = str(problem.get("ctx", {}).get("error"))
        node, _, _ = _descend(schema, values, location)
        # A check of several fields of an inner model begins its line with one of them.
        inner = message.partition(":")[0] in node.get("properties", {})
        return _dotted(location) + ("." if inner else ": ") + message if location else message
    node, value, depth = _descend(schema, values, location)
    expected = _words(node, schema, finite=problem["type"] == "finite_number")
    got = "none" if problem["type"] == "missing" and depth == len(location) else _shown(value)
    line = f"expected {expected}, got {got}"
    return f"{_dotted(location[:depth])}: {line}" if depth else line


def _adapter(kind: Any) -> TypeAdapter[Any]:
    try:
        return _kept_adapter(kind)
    except TypeError:  # a type with a constraint that has no hash
        return _new_adapter(kind)


@lru_cache(maxsize=64)
def _kept_adapter(kind: Any) -> TypeAdapter[Any]:
    return _new_adapter(kind)


def _new_adapter(kind: Any) -> TypeAdapter[Any]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return TypeAdapter(kind)
    return TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """The known name that a mistyped one is nearest to; None if none is near."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def expected_names(known: Sequence[str], got: str, what: str = "one of") -> str:
    """What to say of a name that is not known: "expected one of a, b and 7 more, got aa; did you mean a?"."""
    more = f" and {len(known) - _NAMES_SHOWN} more" if len(known) > _NAMES_SHOWN else ""
    near = did_you_mean(got, known)
    hint = f"; did you mean {near}?" if near is not None else ""
    return f"expected {what} {', '.join(known[:_NAMES_SHOWN])}{more}, got {reprlib.repr(got)}{hint}"


class _Lenient(GenerateJsonSchema):
    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> JsonSchemaValue:
        return {}


def _unknown_key(location: tuple[int | str, ...], known: Mapping[str, Any]) -> str:
    name = str(location[-1])
    if near := did_you_mean(name, known):
        return f"{_dotted(location)}: no such setting; did you mean {_dotted((*location[:-1], near))}?"
    where = f"{_dotted(location[:-1])}: " if location[:-1] else ""
    return f"{where}expected {', '.join(known)}, got {name!r}"


def _dotted(location: tuple[int | str, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".")


def _resolved(node: _Schema, root: _Schema) -> _Schema:
    if "$ref" in node:
        rest = {key: value for key, value in node.items() if key != "$ref"}
        return {**root["$defs"][node["$ref"].rpartition("/")[2]], **rest}
    return node


def _descend(root: _Schema, values: object, location: tuple[int | str, ...]) -> tuple[_Schema, Any, int]:
    """The schema at a place, the value there, and how many steps of `location` lead to what a line can name."""
    node, value = _resolved(root, root), values
    if "expected" in node:
        return node, value, 0
    for depth, part in enumerate(location):
        if "anyOf" in node:  # X | null
            options = [_resolved(option, root) for option in node["anyOf"]]
            inner = [option for option in options if {"properties", "items", "prefixItems"} & option.keys()]
            if len(inner) != 1 or "expected" in inner[0]:
                return node, value, depth
            node = inner[0]
        if "properties" in node and part in node["properties"]:
            node, missing = node["properties"][part], None
        elif isinstance(part, int) and ("items" in node or part < len(node.get("prefixItems", ()))):
            node, missing = node["prefixItems"][part] if "prefixItems" in node else node["items"], None
        elif isinstance(node.get("additionalProperties"), dict):
            node, missing = node["additionalProperties"], None
        else:  # the branch of a union, which a user never wrote
            return node, value, depth
        node = _resolved(node, root)
        value = _item(value, part, missing)
        if "expected" in node:
            return node, value, depth + 1
    return node, value, len(location)


def _item(values: Any, part: int | str, missing: object) -> Any:
    try:
        return values[part]
    except (KeyError, IndexError, TypeError):
        return getattr(values, str(part), missing)


def _words(node: _Schema, root: _Schema, *, finite: bool = False) -> str:
    """What a schema expects, in words."""
    node = _resolved(node, root)
    if "expected" in node:
        return node["expected"]
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(_words(option, root, finite=finite) for option in node["anyOf"]))
    if "const" in node:
        return str(node["const"])
    if "enum" in node:
        choices = [str(choice) for choice in node["enum"]]
        return " or ".join(choices) if len(choices) == 2 else f"one of {', '.join(choices)}"
    match node.get("type"):
        case "integer":
            return f"a whole number{_bounds(node)}"
        case "number":
            return f"a {'finite ' if finite else ''}number{_bounds(node)}"
        case "boolean":
            return "true or false"
        case "null":
            return "null"
        case "string":
            return "a path" if node.get("format") == "path" else "text"
        case "array":
            return _list_words(node, root)
        case "object":
            return "settings"
    return "another value"


def _list_words(node: _Schema, root: _Schema) -> str:
    items = node.get("items", node.get("prefixItems", [{}])[0])
    least, most = node.get("minItems", 0), node.get("maxItems")
    of = f", each {_words(items, root)}" if items else ""
    if most is not None:
        return f"a list of {least if least == most else f'{least} to {most}'}{of}"
    return f"a list{f' of at least {least}' if least else ''}{of}"


def _bounds(node: _Schema) -> str:
    least, above = node.get("minimum"), node.get("exclusiveMinimum")
    most, below = node.get("maximum"), node.get("exclusiveMaximum")
    divisible = f" divisible by {node['multipleOf']}" if "multipleOf" in node else ""
    if least is not None and most is not None:
        return f"{divisible} from {_plain(least)} to {_plain(most)}"
    words = {"of at least": least, "above": above, "of at most": most, "below": below}
    bounds = " and ".join(f"{word} {_plain(bound)}" for word, bound in words.items() if bound is not None)
    return f"{divisible} {bounds.replace('and of', 'and')}" if bounds else divisible


def _plain(bound: float) -> str:
    if bound == MAX_SEED:
        return "2**63 - 1"
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 80

    def repr_NoneType(self, value: None, level: int) -> str:  # noqa: N802
        return "null"


_SHORT = _Short()


def _shown(value: object) -> str:
    """A wrong value as the user wrote it, but not all of a long one."""
    return _SHORT.repr(value)
