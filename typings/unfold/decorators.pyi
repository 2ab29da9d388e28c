from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

F = TypeVar("F", bound=Callable[..., Any])

@overload
def display(function: F) -> F: ...
@overload
def display(
    function: None = None,
    *,
    boolean: bool | None = None,
    image: bool | None = None,
    ordering: Any = None,
    description: Any = None,
    empty_value: str | None = None,
    dropdown: bool | None = None,
    label: bool | str | Mapping[Any, str] | None = None,
    header: bool | None = None,
) -> Callable[[F], F]: ...
