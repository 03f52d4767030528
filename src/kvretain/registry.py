"""A small registry: names to classes, with errors that list what is valid."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps public names to classes of one kind (``"scorer"``, ``"refiner"``, ``"selector"``)."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Class decorator: make the class reachable under ``name`` in policy texts.

        Raises:
            ValueError: the name is taken, or the class is no frozen dataclass.
        """

        def add(cls: type[T]) -> type[T]:
            check_dataclass(f"{self.kind} {name!r}", cls)
            if name in self._items:
                raise ValueError(f"{self.kind} {name!r} is registered already, by {self._items[name].__qualname__}")
            self._items[name] = cls
            return cls

        return add

    def __getitem__(self, name: str) -> type[T]:
        if name not in self._items:
            raise ValueError(f"unknown {self.kind} {name!r}; valid: {', '.join(sorted(self._items))}")
        return self._items[name]

    def name_of(self, item: T) -> str:
        """The name under which the class of ``item`` is registered, or the class's own name."""
        return next((name for name, cls in self._items.items() if cls is type(item)), type(item).__name__)

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._items))


def check_dataclass(owner: str, cls: type) -> None:
    """Raise ``ValueError`` unless ``cls`` is a frozen dataclass: policies compare, hash and write down its fields."""
    if not dataclasses.is_dataclass(cls) or not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise ValueError(
            f"{owner}: the class {cls.__qualname__} is no frozen dataclass, from which policies read its arguments: "
            "put @dataclass(frozen=True) on it, directly above `class`"
        )
