"""Attributes that are computed when they are first asked for."""

from collections.abc import Callable
from typing import Generic, TypeVar, overload

T = TypeVar("T")


class derived(Generic[T]):  # noqa: N801 -- used like `property`
    """An attribute computed on first use and kept; like `functools.cached_property`, whose lock cannot be traced."""

    def __init__(self, compute: Callable[..., T]) -> None:
        self.compute = compute
        self.name = compute.__name__
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> "derived[T]": ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> "derived[T] | T":
        if instance is None:
            return self
        value = self.compute(instance)
        instance.__dict__[self.name] = value
        return value
