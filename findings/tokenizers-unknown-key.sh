#!/usr/bin/env bash
# tokenizers refuses a tokenizer.json with an unknown key at the top level, and ignores unknown keys below it.
#
# Expected: as in most JSON formats, a reader skips keys that it does not know, so that a program may add a note of its own
#   to the file and older versions read files of newer versions. If it did refuse a key, the message would name it.
# Real: one additional key at the top level makes the file unreadable, with the message of a JSON syntax error, although the
#   file is valid JSON. The same key inside "model" is ignored.
#
# Python 3.11.7, tokenizers 0.23.3. Seen on 2026-11-28:
#   key inside "model": read
#   key at the top level: expected `,` or `}` at line 1 column N
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet tokenizers==0.23.3
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
import re

from tokenizers import Tokenizer
from tokenizers.models import WordLevel


def read(saved: dict) -> str:
    try:
        Tokenizer.from_str(json.dumps(saved))
    except Exception as error:
        return re.sub(r"column \d+", "column N", str(error))
    return "read"


file = json.loads(Tokenizer(WordLevel({"a": 0}, unk_token="a")).to_str())
inside = read(file | {"model": file["model"] | {"note": "mine"}})
above = read(file | {"note": "mine"})
print('key inside "model":', inside)
print("key at the top level:", above)
assert inside == "read" and above == "expected `,` or `}` at line 1 column N", "this finding is out of date"
PYTHON
