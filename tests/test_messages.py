"""The list of all texts that a user may read."""

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
