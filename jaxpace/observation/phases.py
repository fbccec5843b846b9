"""Which phase of training an equation belongs to, by its name stack.

Differentiation leaves its mark there: `transpose(` is backward, `jvp(` forward. The stack must
be joined with those of all enclosing calls: an equation's own stack alone misclassifies what a
nested `jit` holds.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import jax

from jaxpace.core.plan import BACKWARD, DELAY, FORWARD, GAP, SYNC

OTHER = "other"
"""Neither forward nor backward: input preparation or update, by where it stands."""

_SCOPE = "jaxpace.phase."
_COLLECTIVE = "jaxpace.collective."
_NESTED = re.compile(r"jaxpace\.nested\.(\d+)\.(\d+)/?")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")
_TOKEN = re.compile(re.escape(_SCOPE) + r"([A-Za-z_][A-Za-z0-9_]*)|([a-z_]+)\(|\(|\)")
_RESERVED = {SYNC, GAP, DELAY, OTHER}


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
  """Timestamps what is traced inside as a phase of the step.

  The phase gets its own time in the trace, `phase_<name>_ns`. `forward`, `backward` and `update`
  are known by themselves; marking them by hand overrides that. Marking part of a loss function
  marks its forward part: the gradient of it stays backward.

  >>> import jaxpace
  >>> with jaxpace.phase("augment"):
  ...   pass

  Args:
    name: letters, digits and underscores, at most 32.

  Raises:
    ValueError: the name is not of that form, or is measured by itself (sync, gap, delay).
  """
  _check(name, "A phase's name, that of a column of the trace,")
  if name in _RESERVED:
    raise ValueError(f"jaxpace.phase({name!r}): {name} is measured by itself; choose another name.")
  with jax.named_scope(_SCOPE + name):
    yield


@contextlib.contextmanager
def collective_scope(name: str) -> Iterator[None]:
  """Names the collectives called inside.

  Raises:
    ValueError: the name is not letters, digits and underscores, at most 32.
  """
  _check(name, "A collective's name")
  with jax.named_scope(_COLLECTIVE + name):
    yield


def _check(name: object, what: str) -> None:
  if not isinstance(name, str) or not _NAME.fullmatch(name):
    raise ValueError(f"{what} is letters, digits and underscores, at most 32; this is {name!r}.")


def nested_scope(program: int, before: int | str = "") -> str:
  """Name of the scope of an equation of an instrumented step whose body has collectives: where the
  step is compiled, these get timestamps.

  Args:
    program: number of the step's program.
    before: how many slots of the step come before the equation; left out, this is how the names of
      all such scopes of the step begin.
  """
  return f"jaxpace.nested.{program}.{before}"


def slots_before(stack: str, program: int) -> int | None:
  """Slots of a program's step before such an equation, by the stack of what is in its body; None
  for what is in none.

  >>> slots_before("jit(step)/jaxpace.nested.7.2/while/body/psum", 7)
  2
  """
  found = _NESTED.search(stack)
  return int(found[2]) if found and int(found[1]) == program else None


def without_nested(stack: str) -> str:
  """The stack without such scopes: processes number their programs each by itself."""
  return _NESTED.sub("", stack)


def collective_name(stack: str) -> str:
  """Name of a collective with this joined stack.

  The one given to it, else that of the module it stands in, else "".
  """
  given = re.findall(re.escape(_COLLECTIVE) + r"([A-Za-z_][A-Za-z0-9_]*)", stack)
  if given:
    return given[-1]
  # transpose(jvp(Net))/Dense_0 -> Net/Dense_0
  bare = re.sub(r"[a-z_]+\(|[()]", "", stack)
  return "/".join(part for part in bare.split("/") if part and not part.startswith(_SCOPE))


def join(outer: str, inner: str) -> str:
  """Joins two name stacks, either of which may be empty."""
  return f"{outer}/{inner}" if outer and inner else outer or inner


def classify(stack: str) -> str:
  """Phase of an equation with this joined name stack.

  "forward", "backward", a user's phase, or `OTHER`.
  """
  named, jvp, transpose = "", False, False
  opened: list[str] = []
  for match in _TOKEN.finditer(stack):
    user, transform = match.groups()
    if user:
      # Inside transpose(...) stands the scope of the forward equation whose gradient this one is.
      if "transpose" not in opened:
        named = user
    elif match.group() == ")":
      if opened:
        opened.pop()
    else:
      opened.append(transform or "")
      jvp |= transform == "jvp"
      transpose |= transform == "transpose"
  if named:
    return named
  if transpose:
    return BACKWARD
  return FORWARD if jvp else OTHER
