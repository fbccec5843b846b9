"""What sentences say, however they are worded: by their codes, and by the numbers in them."""

import re
from collections.abc import Iterable

from jaxpace.core.words import Sentence


def only(sentences: Iterable[str], code: str) -> Sentence:
  """The one sentence that has this code; fails where there is none, or another."""
  (said,) = (s for s in sentences if isinstance(s, Sentence) and s.code == code)
  return said


def numbers(sentence: str) -> list[float]:
  """All numbers of a sentence, in their order: 1,234 is one, and so is the 3 of host3."""
  return [float(number.replace(",", ""))
          for number in re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", sentence)]
