"""Words that Kubernetes takes: names, labels, quantities, paths; as types for the models that check a file. Imports pydantic."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from pytest_mlhpc.provision.kubernetes.dropped import quantity
from pytest_mlhpc.system.quantities import parse_size
from pytest_mlhpc.system.texts import Text

#: RFC 1123 label and subdomain, and the syntax of labels (kubernetes.io/docs/concepts/overview/working-with-objects).
_LABEL: Final = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_SUBDOMAIN: Final = rf"{_LABEL}(\.{_LABEL})*"
_WORD: Final = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_KEY: Final = rf"({_SUBDOMAIN}/)?{_WORD}"
#: Set by us on every object; a value of the user's own would make objects that nobody finds again.
_OURS: Final = re.compile(r"pytest-mlhpc/|app\.kubernetes\.io/managed-by\Z")


def _matching(value: Any, pattern: str, what: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    # What a variable holds is checked once it is put in; what is only shown may still have one.
    if not isinstance(value, str) or not ("${" in value or re.fullmatch(pattern, value)):
        raise ValueError(f"{value!r:.80} is not {what}")
    return value


def _name(value: Any) -> str:
    return _matching(value, _LABEL, "a name: lower-case letters, digits and '-', at most 63")


def _dotted(value: Any) -> str:
    return _matching(value, _SUBDOMAIN, "a name: lower-case letters, digits, '-' and '.'")


def _key(value: Any) -> str:
    if isinstance(value, str) and _OURS.match(value):
        raise ValueError(f"{value!r:.80} is set for each allocation")
    return _matching(value, _KEY, "a label's or annotation's key, such as site.org/project")


def _label_value(value: Any) -> str:
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} should be text; put it in quotes")  # noqa: TRY004 - pydantic turns only ValueError into a finding
    return _matching(value, rf"({_WORD})?", "a label's value: letters, digits, '.', '_' and '-', at most 63")


def _quantity(value: Any) -> str:
    """A quantity as Kubernetes writes it; sizes may also be written as everywhere else in the file."""
    if isinstance(value, str) and "${" in value:
        return value
    if quantity(value) is None:
        try:
            return str(parse_size(value))
        except ValueError:
            raise ValueError(f"{value!r:.80} is not a quantity; write it like 2, 500m, 16Gi") from None
    if (amount := quantity(value)) is not None and amount < 0:
        raise ValueError(f"{value!r:.80} is less than 0")
    return str(value)


def _path(value: str) -> str:
    if not value.startswith(("/", "${")):
        raise ValueError(f"{value!r:.80} is not an absolute path")
    if ":" in value or "/../" in f"{value}/":
        raise ValueError(f"{value!r:.80} holds ':' or '..', which a mount cannot take")
    return value


def _below(value: str) -> str:
    if value.startswith("/") or "/../" in f"/{value}/":
        raise ValueError(f"{value!r:.80} is not a path below the volume")
    return value


def _mount(value: str) -> str:
    if value == "/mlhpc" or value.startswith("/mlhpc/"):
        raise ValueError(
            f"{value!r:.80}: /mlhpc holds the plan and the work of each allocation; mount it elsewhere"
        )
    return value


def _image(value: str) -> str:
    if re.search(r"\s", value):
        raise ValueError(f"{value!r:.80} holds a blank, which no image's name does")
    return value


_TEXT: Final = WithJsonSchema({"type": "string"})
_TEXT_OR_NUMBER: Final = WithJsonSchema({"type": ["string", "number"]})

Name = Annotated[str, BeforeValidator(_name), _TEXT]
Dotted = Annotated[str, BeforeValidator(_dotted), Field(max_length=253), _TEXT]
Key = Annotated[str, BeforeValidator(_key), Field(max_length=317), _TEXT]
LabelValue = Annotated[str, BeforeValidator(_label_value), _TEXT_OR_NUMBER]
Quantity = Annotated[str, BeforeValidator(_quantity), _TEXT_OR_NUMBER]
Image = Annotated[Text, AfterValidator(_image)]
AbsolutePath = Annotated[Text, AfterValidator(_path)]
MountPath = Annotated[AbsolutePath, AfterValidator(_mount)]
SubPath = Annotated[Text, AfterValidator(_below)]
