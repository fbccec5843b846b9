"""Coins that every rank tosses alike without a message: a hash of a key and a number."""

from __future__ import annotations

from jaxpace.coordination.maths import ARRAYS, PLAIN, Maths, Number


def mixed(word: Number, maths: Maths = ARRAYS) -> Number:
  """Mixes the 32 bits of a word so that each depends on all: the finaliser of MurmurHash3.

  Args:
    word: [] uint32; in `PLAIN` a Python int in [0, 2^32).
    maths: what kind of numbers.

  Returns:
    The same kind.
  """
  whole = maths.word(0xFFFFFFFF)
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
    word = word ^ (word >> maths.word(shift))
    word = (word * maths.word(factor)) & whole
  return word ^ (word >> maths.word(16))


def coin(key: int, number: Number, maths: Maths = ARRAYS) -> Number:
  """Tosses the coin of this number.

  Args:
    key: of the run, 0 to 2^32 - 1.
    number: [] int32; in `PLAIN` a Python int.
    maths: what kind of numbers.

  Returns:
    [] bool: the top bit of a hash of both, the same on every rank, machine and backend.
  """
  salt = mixed((key + 0x9E3779B9) & 0xFFFFFFFF, PLAIN)
  return mixed(maths.word(number) ^ maths.word(salt), maths) >= maths.word(0x80000000)
