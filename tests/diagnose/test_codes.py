"""Codes stand beside sentences: listed in the docs, each with a use, and left alone by copies.
Their words stand beside them."""

import ast
import copy
import pathlib
import pickle
import re
import string
from typing import get_args

import pytest

from jaxpace.core.words import Sentence
from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.words.codes import ChangeCode, HangCode, Silence, Verdict, codes
from jaxpace.diagnose.words.evidence import Evidence
from jaxpace.diagnose.words.notes import Note
from jaxpace.hang import describe, waits
from jaxpace.runs.run import PAUSES
from tests.diagnose.synthetic import run_of
from tests.synthetic.synthetic_faults import Fault
from tests.synthetic.synthetic_runs import SyntheticJob

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = [path for path in (ROOT / "jaxpace" / "diagnose").rglob("*.py")
           if path.parent.name != "words"]
KINDS = {"verdict": Verdict, "hang": HangCode, "comparison": ChangeCode, "silence": Silence,
         "evidence": Evidence, "note": Note}
BY_NAME = {kind.__name__: kind for kind in KINDS.values()}


def test_every_code_says_what_it_means():
  """docs/reference/codes.md is made of these."""
  assert all(code.meaning and code.meaning[0].islower() for own in KINDS.values() for code in own)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_code_has_a_use(kind):
  """A code that nothing says, or a cause without a code, is a mistake in the table."""
  source = "".join(path.read_text() for path in SOURCES)
  said = set(re.findall(rf"\b{kind.__name__}\.([A-Z_]+)", source))
  # a mechanism's kind becomes a code by its value
  by_value = ({*PAUSES, *re.findall(r'"([a-z_]+)"', source)} if kind is Evidence
              else hang_codes() if kind is HangCode else set())
  assert [c.name for c in kind if c.name not in said and c not in by_value] == []


def hang_codes():
  """Those of the sentences that `hang` makes: it is below the table, and has them as text."""
  source = pathlib.Path(describe.__file__).read_text()
  return {*get_args(waits.Kind), *re.findall(r'Sentence\(\s*"([a-z_]+)"', source)}


def test_every_code_of_a_sentence_of_a_hang_is_in_the_table():
  assert hang_codes() <= {*HangCode} and len(hang_codes()) > 9


def fields(template):
  return {name for _, name, _, _ in string.Formatter().parse(template) if name}


def said():
  """Code, wording (None: chosen as it runs) and values of every call of `say`."""
  for path in SOURCES:
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "say":
        wording = [getattr(one, "value", None) for one in node.args] or [""]
        yield (ast.unparse(node.func.value), *wording, {keyword.arg for keyword in node.keywords})


def test_whoever_says_something_gives_the_values_that_its_words_ask_for():
  checked = 0
  for code, wording, values in said():
    kind, _, name = code.partition(".")
    if kind not in BY_NAME:
      continue  # of a code known as it runs only
    words = BY_NAME[kind][name].wordings
    assert isinstance(words, str) == (wording == ""), code
    chosen = [words] if isinstance(words, str) else (
        words.values() if wording is None else [words[wording]])
    for template in chosen:
      assert None in values or fields(template) <= values, code
    if wording is not None and None not in values:
      assert fields(chosen[0]) == values, code
    checked += 1
  assert checked > 100


def test_no_words_of_the_table_are_left_over():
  used = {code.split(".")[-1] for code, _, _ in said()}
  by_value = {*map(str.upper, PAUSES), "THROTTLED", "STEAL"}
  assert {code.name for kind in KINDS.values() for code in kind if code.wordings} <= used | by_value


def test_a_sentence_is_a_string_and_keeps_its_code():
  said = Sentence(Note.WARMUP, "Warm-up left out.")
  for one in (said, copy.deepcopy(said), pickle.loads(pickle.dumps(said))):
    assert one == "Warm-up left out." and one.code is Note.WARMUP
  assert codes([said, "somebody's own"]) == ["warmup", None]


@pytest.mark.parametrize("fault", [
    Fault("compute", 4e-3, (3,)), Fault("rotating", 8e-3), Fault("contention", 8e-3, begin=.4),
    Fault("pause", 30e-3, probability=.1, mechanism="gc"), None])
def test_every_sentence_of_a_diagnosis_has_a_code(fault):
  job = SyntheticJob(ranks=8, steps=600, processes=4, hosts=4, noise=0.02, host_columns=True,
                  faults=(fault,) if fault else ())
  found = diagnose(run_of(job)[0])
  sentences = [found.verdict, *found.notes,
               *(s for finding in found.findings for s in finding.evidence)]
  assert None not in codes(sentences)
  assert found.verdict.code == (found.findings[0].mode if fault else Verdict.HEALTHY)
