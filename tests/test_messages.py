"""The list of all texts that a user may read."""

import re

import messages

SOURCE = '''
"""A docstring is none."""
import re

PATTERN = re.compile("a pattern of words")
KEY = "one_word"


def fail(number, name):
    """Nor is this."""
    raise ValueError(f"{name}: {number:g} is too large; "
                     "use a smaller one")
'''


def test_texts_of_two_words_are_listed_whole_with_their_line_and_docstrings_and_patterns_are_not():
    assert list(messages.messages(SOURCE)) == [(11, "{name}: {number} is too large; use a smaller one")]


def test_messages_on_the_page_of_troubleshooting_are_those_of_the_code():
    page = (messages.ROOT.parent / "docs/troubleshooting.md").read_text(encoding="utf-8")
    cells = re.findall(r"^- `(.+?)`:\s", page, re.MULTILINE)
    files = [path.read_text(encoding="utf-8") for path in messages.ROOT.rglob("*.py")]
    texts = [text for source in files for _, text in messages.messages(source)]
    pieces = {piece.strip(" :") for cell in cells for piece in cell.split("...")} - {""}
    assert len(cells) >= 20
    assert [one for one in pieces if not any(one in text for text in texts)] == []
