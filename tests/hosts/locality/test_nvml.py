import sys
import types

from jaxpace.hosts.locality import nvml, read
from jaxpace.hosts.locality.types import Gpu


class NvmlError(Exception):
  pass


def fake(clocks=(1980, 1200), lost=()):
  """A binding with two GPUs."""
  def handle(index):
    if index in lost:
      raise NvmlError("GPU is lost")
    return index

  def link_state(index, link):
    if link >= 6:
      raise NvmlError("not supported")
    return 1 if index == 0 else 0

  return types.SimpleNamespace(
      nvmlInit=lambda: None, NVML_CLOCK_SM=1, nvmlDeviceGetCount=lambda: 2,
      nvmlDeviceGetHandleByIndex=handle,
      nvmlDeviceGetPciInfo=lambda h: types.SimpleNamespace(
          busId=f"00000000:0{h + 1}:00.0".encode()), nvmlDeviceGetName=lambda h: b"NVIDIA H200",
      nvmlDeviceGetUUID=lambda h: f"GPU-{h}", nvmlDeviceGetNvLinkState=link_state,
      nvmlDeviceGetClockInfo=lambda h, kind: clocks[h],
      nvmlDeviceGetPowerUsage=lambda h: 400_000 + h * 100_000)


def test_gpus_of_the_driver_join_those_of_the_bus():
  told, notes = nvml.read_gpus(fake())
  assert notes == []
  first, second = read._join_nvml((Gpu("0000:01:00.0", "NVIDIA GPU", numa_node=1),), told)
  assert first == Gpu("0000:01:00.0", "NVIDIA H200", "GPU-0", 1, nvlinks=6, interconnect="nvlink")
  assert (second.pci, second.nvlinks, second.interconnect) == ("0000:02:00.0", 0, "pcie")


def test_a_lost_gpu_is_a_note():
  told, notes = nvml.read_gpus(fake(lost=(1,)))
  assert [gpu.uuid for gpu in told] == ["GPU-0"] and "GPU 1 does not answer" in notes[0]


def test_gauges_take_the_lowest_clock_and_the_mean_power():
  assert nvml.Gauges(fake()).read() == (1200.0, 450.0)
  assert nvml.Gauges(fake(), ("0000:01:00.0",)).read() == (1980.0, 400.0)
  assert nvml.Gauges(fake(lost=(0, 1))).read() == (None, None)


def test_without_the_binding_or_the_driver_there_is_none(monkeypatch):
  monkeypatch.setitem(sys.modules, "pynvml", None)
  assert nvml.load() is None

  def no_driver():
    raise NvmlError("driver not loaded")
  monkeypatch.setitem(sys.modules, "pynvml", types.SimpleNamespace(nvmlInit=no_driver))
  assert nvml.load() is None
