"""The arguments of a class's constructor, and type checks of plain values against them."""

import inspect
from collections.abc import Mapping
from typing import Any, get_type_hints

from kvt.system.errors import UserError


def argument_types(cls: type) -> dict[str, Any]:
    """Return the type of each constructor argument by name, including those passed on to base classes by **kwargs.

    >>> class Base:
    ...     def __init__(self, width: int, depth: int = 2): ...
    >>> class Wide(Base):
    ...     def __init__(self, width: float, **kwargs): ...
    >>> argument_types(Wide)
    {'width': <class 'float'>, 'depth': <class 'int'>}
    """
    types: dict[str, Any] = {}
    for base in inspect.getmro(cls):
        if "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(base.__init__).parameters.values())[1:]  # type: ignore[misc]
        hints = get_type_hints(base.__init__)  # type: ignore[misc]
        for parameter in parameters:
            if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                types.setdefault(parameter.name, hints.get(parameter.name, Any))
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return types


def require_types(values: Mapping[str, Any], cls: type) -> None:
    """Raise UserError, naming the argument, unless `cls` takes each of `values` by name and type.

    Nothing is converted, imported or called.
    """
    from pydantic import ConfigDict, TypeAdapter, ValidationError  # slow to import, and few commands need it

    types = argument_types(cls)
    for name, value in values.items():
        if name not in types:
            raise UserError(f"{cls.__name__} takes no {name}")
        adapter = TypeAdapter(types[name], config=ConfigDict(arbitrary_types_allowed=True))
        try:
            adapter.validate_python(value, strict=True)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise UserError(f"{name}={value!s:.60} is not what {cls.__name__} takes: {reason}") from None
