"""The few functions of NVIDIA's driver that timestamps on GPUs need, and the handlers that start
them and tell them where to write.

No CUDA toolkit: the driver's own library is there wherever a GPU is. What is called is its
documented interface (CUDA Driver API: memory management, modules, streams).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from jaxpace.observation.clocks import kernels
from jaxpace.observation.clocks.native import library

HANDLERS = 2
"""Version of the handlers' operands and results, as in gpu.cc."""

_PORTABLE, _MAPPED = 1, 2
_NON_BLOCKING = 1


class DriverError(RuntimeError):
  """NVIDIA's driver refused something; the message says what, as the end of a sentence."""


class Driver:
  """`libcuda`, and the GPUs that JAX uses in this process."""

  def __init__(self) -> None:
    """Loads it.

    Raises:
      DriverError: there is none.
    """
    try:
      self.library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
      raise DriverError(f"NVIDIA's driver is not there: {error}") from error
    self.call("cuInit", 0)

  def call(self, name: str, *arguments: Any) -> None:
    """Calls a function by its name in the library.

    Raises:
      DriverError: it did not succeed.
    """
    function = getattr(self.library, name, None)
    if function is None:
      raise DriverError(f"NVIDIA's driver has no {name}: it is older than any that JAX takes")
    if status := function(*arguments):
      said = ctypes.c_char_p()
      self.library.cuGetErrorString(status, ctypes.byref(said))
      raise DriverError(f"{name} of NVIDIA's driver said: "
                        f"{said.value.decode() if said.value else f'error {status}'}")

  def address(self, name: str) -> int:
    """Address of one of its functions."""
    return int(ctypes.cast(getattr(self.library, name), ctypes.c_void_p).value or 0)


class DriverGpu:
  """Memory, kernels and a stream of one GPU, in the context that JAX has for it."""

  def __init__(self, driver: Driver, ordinal: int):
    """Takes a GPU by its number in this process."""
    self._driver = driver
    number = ctypes.c_int()
    driver.call("cuDeviceGet", ctypes.byref(number), ordinal)
    self.context = ctypes.c_void_p()
    # The primary context is JAX's too. It is kept: timestamps go on until the process ends.
    driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), number)
    self._stream = ctypes.c_void_p()
    self._call("cuStreamCreate", ctypes.byref(self._stream), _NON_BLOCKING)

  def _call(self, name: str, *arguments: Any) -> None:
    self._driver.call("cuCtxPushCurrent_v2", self.context)
    try:
      self._driver.call(name, *arguments)
    finally:
      self._driver.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

  def host_memory(self, size: int) -> tuple[int, int]:
    """Zeros in the host's memory that the GPU can write to: their address here, and on the GPU."""
    here, there = ctypes.c_void_p(), ctypes.c_uint64()
    self._call("cuMemHostAlloc", ctypes.byref(here), ctypes.c_size_t(size), _PORTABLE | _MAPPED)
    ctypes.memset(here, 0, size)
    self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(there), here, 0)
    return int(here.value or 0), int(there.value)

  def memory(self, size: int) -> int:
    """Zeros in the GPU's memory; their address."""
    address = ctypes.c_uint64()
    self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    self._call("cuMemsetD8_v2", address, 0, ctypes.c_size_t(size))
    return int(address.value)

  def upload(self, address: int, data: bytes) -> None:
    """Fills memory of the GPU."""
    self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))

  def load(self, kernel: kernels.Kernel) -> Any:
    """Translates a kernel of one thread."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    self._call("cuModuleLoadData", ctypes.byref(module), kernel.text.encode())
    self._call("cuModuleGetFunction", ctypes.byref(function), module, kernel.name.encode())
    return function

  def launch(self, loaded: Any, addresses: Sequence[int]) -> None:
    """Starts it on a stream of its own, and returns at once."""
    values = [ctypes.c_uint64(address) for address in addresses]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    self._call("cuLaunchKernel", loaded, 1, 1, 1, 1, 1, 1, 0, self._stream, pointers, None)


@functools.cache
def unavailable() -> str:
  """Registers the handlers; returns why that can't be, in a sentence."""
  return library.registered(
      "The clock of NVIDIA's GPUs", library.built_as("gpu"), ("jaxpace_gpu_handlers", HANDLERS),
      (kernels.DEVICE_BUFFER, library.MARK), "CUDA")


def tell(driver: Driver, blocks: Sequence[tuple[int, DriverGpu, int]]) -> None:
  """Tells the handlers where the blocks of this process's GPUs are, and with what kernels they take
  timestamps; only where `unavailable` is empty.

  Raises:
    DriverError: a GPU has a number that is too high, or refuses a kernel.
  """
  loaded = _functions()
  for ordinal, device, address in blocks:
    if not loaded.jaxpace_block(ordinal, address, device.context, device.load(kernels.mark()),
                                device.load(kernels.start())):
      raise DriverError(f"GPU {ordinal} of a process is more than timestamps are written for")
  loaded.jaxpace_driver(*map(driver.address, (
      "cuMemcpyDtoDAsync_v2", "cuMemsetD8Async", "cuLaunchKernel", "cuCtxPushCurrent_v2",
      "cuCtxPopCurrent_v2")))


def riegeli_hash(data: bytes) -> int:
  """HighwayHash of the files in which XLA writes programs; only where the library was built."""
  return int(_functions().jaxpace_riegeli_hash(data, len(data)))


@functools.cache
def _functions() -> ctypes.CDLL:
  loaded = ctypes.CDLL(str(library.built_as("gpu")))
  pointer, long = ctypes.c_void_p, ctypes.c_uint64
  loaded.jaxpace_block.argtypes = [ctypes.c_int32, long, pointer, pointer, pointer]
  loaded.jaxpace_driver.argtypes = [pointer] * 5
  loaded.jaxpace_riegeli_hash.argtypes, loaded.jaxpace_riegeli_hash.restype = [
      ctypes.c_char_p, long], long
  return loaded
