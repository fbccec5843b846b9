"""A GPU made of the host's memory: it runs the very text of jaxpace's kernels, one instruction at a
time."""

import ctypes
import re
import struct
import time

_MASK = {32: 2**32 - 1, 64: 2**64 - 1}


class Gpu:
  """A `jaxpace.observation.clocks.native.cuda.Device`. Its timer is off from the host's clock by
  `off_ns`."""

  def __init__(self, off_ns=0, timer=None):
    self.off_ns, self.kept, self.launched = off_ns, [], []
    self.timer = timer or (lambda: time.monotonic_ns() - self.off_ns)

  def host_memory(self, size):
    memory = ctypes.create_string_buffer(size + 64)
    self.kept.append(memory)
    address = -(-ctypes.addressof(memory) // 64) * 64
    return address, address

  def memory(self, size):
    return self.host_memory(size)[0]

  def upload(self, address, data):
    ctypes.memmove(address, data, len(data))

  def load(self, kernel):
    return kernel

  def launch(self, loaded, addresses):
    self.launched.append(loaded.name)
    run(loaded.text, addresses, self.timer)


def run(text, addresses, timer):
  """Runs a kernel of one thread, its PTX one instruction a line, its parameters addresses in this
  process's memory; `timer` is what `%globaltimer` reads."""
  head, body = re.search(r"\.entry \w+\((.*?)\)\n\{(.*)\}", text, re.DOTALL).groups()
  parameters = dict(zip(re.findall(r"\.u64 (\w+)", head), addresses, strict=True))
  lines = [line.strip() for line in body.splitlines() if line.strip()
           and not line.strip().startswith(".reg")]
  labels = {line[:-1]: place for place, line in enumerate(lines) if line.endswith(":")}
  registers, place = {}, 0
  declared = {name for line in re.findall(r"\.reg \.\w+ (.*);", body)
              for name in line.replace(" ", "").split(",")}

  def value(word):
    return registers[word] if word in registers else int(word)

  def at(word):
    inside = re.fullmatch(r"\[(\w+)(?:\+(\d+))?\]", word)
    return registers[inside[1]] + int(inside[2] or 0)

  while True:
    line = lines[place]
    place += 1
    if line.endswith(":"):
      continue
    if line.startswith("@"):
      name, line = line[1:].split(" ", 1)
      if not registers[name]:
        continue
    op, _, rest = line.rstrip(";").partition(" ")
    words = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[%\w]+", rest)
    kind = op.split(".")
    bits = int(re.search(r"\d+$", kind[-1])[0]) if re.search(r"\d+$", kind[-1]) else 0
    if op == "ret":
      return
    if op == "bra":
      place = labels[words[0]]
      continue
    if op == "mov.u64" and words[1] == "%globaltimer":
      result = timer()
    elif op == "mov.b64" and words[1].startswith("{"):
      low, high = map(value, re.findall(r"\w+", words[1]))
      result = high << 32 | low
    elif op == "mov.b64":
      low, high = re.findall(r"\w+", words[0])
      registers[low], registers[high] = value(words[1]) & _MASK[32], value(words[1]) >> 32
      continue
    elif kind[0] == "mov":
      result = value(words[1])
    elif op == "ld.param.u64":
      result = parameters[words[1][1:-1]]
    elif kind[:2] == ["ld", "global"]:
      result = struct.unpack("<I" if bits == 32 else "<Q",
                             ctypes.string_at(at(words[1]), bits // 8))[0]
    elif kind[:3] == ["atom", "global", "add"]:
      target = at(words[1])
      result = struct.unpack("<I" if bits == 32 else "<Q", ctypes.string_at(target, bits // 8))[0]
      ctypes.memmove(target,
                     ((result + value(words[2])) & _MASK[bits]).to_bytes(bits // 8, "little"),
                     bits // 8)
    elif kind[0] == "st":
      assert "v4" in kind and at(words[0]) % 16 == 0
      ctypes.memmove(at(words[0]), struct.pack("<4I", *map(value, re.findall(r"\w+", words[1]))),
                     16)
      continue
    elif kind[0] == "add":
      result = value(words[1]) + value(words[2])
    elif kind[0] == "and":
      result = value(words[1]) & value(words[2])
    elif op == "mul.wide.u32":
      result, bits = value(words[1]) * value(words[2]), 64
    elif op == "cvt.u32.u64":
      result, bits = value(words[1]), 32
    elif op == "cvt.u64.u32":
      result, bits = value(words[1]), 64
    elif kind[:2] == ["setp", "eq"]:
      result, bits = value(words[1]) == value(words[2]), 64
    else:
      raise AssertionError(f"not known: {line}")
    assert words[0] in declared, line
    registers[words[0]] = result & _MASK[bits]
