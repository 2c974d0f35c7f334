"""Read YAML settings; errors are one line that names the file."""

from pathlib import Path
from typing import Any

import yaml

from kvt.system.errors import UserError, resource_limit_message


def read_yaml(path: Path, name: str) -> Any:
    """Return the content of a YAML file.

    Raises FileNotFoundError if there is none, and UserError, beginning with `name`, if it cannot be read or parsed.
    """
    try:
        return parse_yaml(path.read_text(encoding="utf-8-sig"), name)
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 at byte {error.start}: save it as UTF-8") from error
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise UserError(f"{name}: cannot be read: {resource_limit_message(error) or error}") from error


def parse_yaml(text: str, name: str) -> Any:
    """Return the content of a YAML document; mappings must have unique keys that are strings.

    Dates stay strings. Raises UserError, beginning with `name`, if the text is not such a document.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise UserError(f"{name}: not readable as YAML: {line}{error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a malformed number such as 0b_
        raise UserError(f"{name}: not readable as YAML: {error}") from error


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """SafeLoader that refuses duplicate keys, of which YAML's own keeps the last, and keys that are not strings."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not key.tag.endswith((":str", ":merge")):
                problem = "a key that is not a string: put it in quotes"
            elif key.value in lines:
                problem = f"{key.value!r} is repeated, first on line {lines[key.value]}: keep one"
            else:
                lines[key.value] = key.start_mark.line + 1
                continue
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_yaml_str)
