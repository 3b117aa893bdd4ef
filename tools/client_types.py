"""Write the types of the client from the OpenAPI document of a server.

Run it after a change of the HTTP interface; a test fails if the file is out of date:

    curl http://127.0.0.1:8000/openapi.json | python tools/client_types.py
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).parents[1] / "src/listwise/client/answers.py"
PLAIN = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
HEAD = '''"""Types of the responses of a server, written by `tools/client_types.py`."""

from typing import TypedDict
'''


def source(document: Mapping[str, Any]) -> str:
    """Return the source code of the types in an OpenAPI document."""
    schemas = document["components"]["schemas"]
    classes = ["\n".join(_class(name, schema)) for name, schema in schemas.items()]
    return HEAD + "".join(f"\n\n{each}\n" for each in classes)


def _class(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    summary = schema.get("description", name).split("\n\n")[0]
    yield f"class {name}(TypedDict):"
    yield f'    """{" ".join(summary.split())}"""'
    yield ""
    for field, value in schema["properties"].items():
        yield f"    {field}: {_type(value)}"


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return f'"{schema["$ref"].rpartition("/")[2]}"'
    if "anyOf" in schema:
        return " | ".join(_type(each) for each in schema["anyOf"])
    if schema["type"] == "array":
        return f"list[{_type(schema['items'])}]"
    if schema["type"] == "object":
        return f"dict[str, {_type(schema['additionalProperties'])}]"
    return PLAIN[schema["type"]]


if __name__ == "__main__":
    OUTPUT.write_text(source(json.load(sys.stdin)), encoding="utf-8")
