"""What a class's constructor takes, and whether plain values are of the types it asks for."""

import inspect
from collections.abc import Mapping
from typing import Any, get_type_hints

from kvt.system.errors import UserError


def argument_types(cls: type) -> dict[str, Any]:
    """The type of each argument of a class by name; those it hands on to its base classes by **kwargs included.

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
    """Checks plain values against the signature of a class, without converting, importing or calling anything.

    Args:
        values: by the names of arguments.
        cls: the class.

    Raises:
        UserError: an argument that the class does not take, or a value of another type; it is named.
    """
    from pydantic import ConfigDict, TypeAdapter, ValidationError  # here: it takes long to import, few commands need it

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
