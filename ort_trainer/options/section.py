"""A section of the options: read-only attributes with types for type checkers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, overload

__all__ = ["Option", "Section"]

Value = TypeVar("Value")


class Option(Generic[Value]):
    """An option as an attribute of its section.

    Args:
        section: The class of the value if it is a section.
    """

    def __init__(self, section: type[Section] | None = None) -> None:
        self.section = section

    def __set_name__(self, owner: type[Section], name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type[Section]) -> Option[Value]: ...

    @overload
    def __get__(self, instance: Section, owner: type[Section]) -> Value: ...

    def __get__(self, instance: Section | None, owner: type[Section]) -> Option[Value] | Value:
        if instance is None:
            return self
        value: Value = instance._values[self._name]
        return value

    def __set__(self, instance: Section, value: NoReturn) -> None:
        instance.__setattr__(self._name, value)  # raises


class Section:
    """A section of the options with read-only attributes."""

    __slots__ = ("_values",)
    _values: Mapping[str, Any]

    def __init__(self, values: Mapping[str, Any]) -> None:
        frozen = {}
        for key, value in values.items():
            option = getattr(type(self), key, None)
            section = option.section if isinstance(option, Option) else None
            frozen[key] = _freeze(value) if section is None else section(value)
        object.__setattr__(self, "_values", MappingProxyType(frozen))

    if not TYPE_CHECKING:  # so that type checkers report unknown options, too

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            try:
                return self._values[name]
            except KeyError:
                known = sorted(self._values)
                raise AttributeError(f"there is no option {name!r} here: the options are {known}") from None

    def __setattr__(self, name: str, value: NoReturn) -> None:
        raise AttributeError(
            f"options are immutable, so {name!r} can't be set: create new ORTTrainerOptions from a changed dict "
            "(to_dict() returns one)"
        )

    def __delattr__(self, name: str) -> None:
        Section.__setattr__(self, name, None)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.to_dict()!r})"

    def __copy__(self) -> Section:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Section:
        return self

    def to_dict(self) -> dict[str, Any]:
        """Returns all values, including defaults, as new nested dicts and lists."""
        return {key: _thaw(value) for key, value in self._values.items()}


def _freeze(value: Any) -> Any:
    if isinstance(value, Mapping):
        return MappingProxyType({key: _freeze(entry) for key, entry in value.items()})
    return tuple(value) if isinstance(value, (list, tuple, set)) else value


def _thaw(value: Any) -> Any:
    if isinstance(value, Section):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {key: _thaw(entry) for key, entry in value.items()}
    return list(value) if isinstance(value, tuple) else value
