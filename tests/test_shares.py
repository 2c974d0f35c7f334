"""The parts of all hostile inputs that the tests take add up."""

import re
from pathlib import Path


def test_as_many_inputs_as_are_asked_for():
    texts = [path.read_text() for path in Path(__file__).parent.rglob("test_*.py")]
    assert sum(float(share) for text in texts for share in re.findall(r"^@fuzz\(\s*([\d.]+)", text, re.MULTILINE)) >= 1
