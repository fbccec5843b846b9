"""XML out of files that somebody else wrote: no entities, and limits of size, depth and number of
elements."""

from __future__ import annotations

import xml.etree.ElementTree as xml
from typing import NoReturn
from xml.parsers import expat

from jaxpace.hosts.locality.described import TopologyError

_DEEPEST = 128
"""The deepest trees known, of machines with switches behind switches, have some 30 levels."""
_MOST = 400_000
"""Elements. A machine of 2,000 CPUs has some 20,000."""


def parse_xml(text: bytes) -> xml.Element:
  """The outermost element.

  Raises:
    TopologyError: it is no XML, it declares entities, or it is beyond all that machines have.
  """
  builder = xml.TreeBuilder()
  parser = expat.ParserCreate()
  depth = elements = 0

  def start(tag: str, attributes: dict[str, str]) -> None:
    nonlocal depth, elements
    depth += 1
    elements += 1
    if depth > _DEEPEST:
      raise TopologyError(f"this XML is nested more than {_DEEPEST} levels deep: no machine is.")
    if elements > _MOST:
      raise TopologyError(f"this XML has more than {_MOST:,} elements: no machine has.")
    builder.start(tag, attributes)

  def end(tag: str) -> None:
    nonlocal depth
    depth -= 1
    builder.end(tag)

  def refuse(*_: object) -> NoReturn:
    # Entities of entities make gigabytes of a kilobyte; no writer of topologies uses any.
    raise TopologyError("this XML declares entities, which no topology needs: it isn't read.")

  parser.StartElementHandler = start
  parser.EndElementHandler = end
  parser.EntityDeclHandler = refuse
  # A document type may be named, as hwloc does; it is never fetched.
  parser.SetParamEntityParsing(expat.XML_PARAM_ENTITY_PARSING_NEVER)
  try:
    parser.Parse(text, True)
  except (expat.ExpatError, ValueError, LookupError) as error:
    if isinstance(error, TopologyError):
      raise
    raise TopologyError(f"this is no XML ({error}).") from error
  return builder.close()
