"""The JSON Schema of systems.yaml, for editors: ``python -m pytest_mlhpc.config.json_schema [--write]``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Final

PATH: Final = Path(__file__).with_name("systems.schema.json")


def json_schema() -> str:
    """Return the text that :data:`PATH` should hold."""
    from pytest_mlhpc.config.schema import SystemsFile

    schema = SystemsFile.model_json_schema(by_alias=True)
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    return json.dumps(schema, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def main() -> int:
    """Write the schema, or print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PATH}")
    if parser.parse_args().write:
        PATH.write_text(json_schema(), encoding="utf-8")
    else:
        sys.stdout.write(json_schema())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
