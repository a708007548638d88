"""A section of the options: read-only attributes with types for type checkers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: bool) -> Any:
        """Does nothing: only type checkers use it."""
        return lambda kind: kind


class FrozenList(tuple[Any, ...]):
    """An immutable list: a tuple that also equals a list, the form in which users write it."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, tuple(other) if isinstance(other, list) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__


@dataclass_transform(frozen_default=True)
class Section:
    """A section of the options, for type checkers a frozen dataclass. Its values were validated by the schema."""

    _sections: ClassVar[Mapping[str, type[Section]]] = {}

    def __init_subclass__(cls) -> None:
        # Annotations are strings because of the __future__ import; those that name a class of the module are sections.
        names, annotations = vars(sys.modules[cls.__module__]), vars(cls).get("__annotations__", {})
        cls._sections = {**cls._sections, **{key: names[kind] for key, kind in annotations.items() if kind in names}}

    def __init__(self, values: Mapping[str, Any]) -> None:
        attributes = {key: self._sections.get(key, _freeze)(value) for key, value in values.items()}
        vars(self).update(attributes, _names=tuple(attributes))

    if not TYPE_CHECKING:  # so that type checkers report unknown options, and settings of known ones

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__") or name == "_names":
                raise AttributeError(name)
            raise AttributeError(f"there is no option {name!r} here: the options are {sorted(self._names)}")

        def __setattr__(self, name: str, value: Any) -> NoReturn:
            raise AttributeError(
                f"options are immutable, so {name!r} can't be set: create new ORTTrainerOptions from a changed dict "
                "(to_dict() returns one)"
            )

        def __delattr__(self, name: str) -> NoReturn:
            self.__setattr__(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self)["_names"])

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.to_dict()!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.to_dict(),)

    def __copy__(self) -> Section:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Section:
        return self

    def to_dict(self) -> dict[str, Any]:
        """Returns all values, including defaults, as new nested dicts and lists."""
        return {key: thawed(getattr(self, key)) for key in self}


def _freeze(value: Any) -> Any:
    """Returns a value in an immutable form."""
    if isinstance(value, Mapping):
        return MappingProxyType({key: _freeze(entry) for key, entry in value.items()})
    return FrozenList(value) if isinstance(value, (list, tuple, set)) else value


def thawed(value: Any) -> Any:
    """Returns the value of an option in the form in which users write it: new dicts and lists."""
    if isinstance(value, Section):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {key: thawed(entry) for key, entry in value.items()}
    return list(value) if isinstance(value, tuple) else value
