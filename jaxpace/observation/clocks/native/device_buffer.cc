// Where the timestamps of a GPU go: the one thing that the host hands to its kernels, once at the start of each program.
//
// The timestamps themselves are kernels (jaxpace/observation/clocks/kernels.py). What they need, the addresses of this device's ring
// and counters, differs by process and device, and the program is the same in all: so it is no constant of the program.
// This handler copies a few words of device memory on the stream, nothing waits for it, and no CUDA header is needed: the
// driver's function is given by its address. A CUDA graph takes the copy in: the block stays where it is as long as the
// process lives, so it says the same whenever the graph is launched.

#include <atomic>
#include <cstdint>

#include "xla/ffi/api/c_api.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int32_t kMostDevices = 64;

// cuMemcpyDtoDAsync_v2 and cuMemsetD8Async of the CUDA driver: (to, from, bytes, stream), (to, value, bytes, stream).
using Copy = int (*)(uint64_t, uint64_t, size_t, void*);
using Fill = int (*)(uint64_t, unsigned char, size_t, void*);

std::atomic<Copy> copy{nullptr};
std::atomic<Fill> fill{nullptr};
std::atomic<uint64_t> blocks[kMostDevices];

// Words of this device's block; zeros, with which timestamps go nowhere, where it has none.
ffi::Error DeviceBuffer(void* stream, int32_t device, ffi::Result<ffi::BufferR1<ffi::U32>> words) {
  const uint64_t to = reinterpret_cast<uint64_t>(words->untyped_data());
  const uint64_t from = device >= 0 && device < kMostDevices ? blocks[device].load() : 0;
  const Copy copies = copy.load();
  const Fill fills = fill.load();
  if (copies == nullptr || fills == nullptr) {
    return ffi::Error::Internal("jaxpace: this process has not said where the timestamps of its GPUs go");
  }
  const int status = from == 0 ? fills(to, 0, words->size_bytes(), stream)
                               : copies(to, from, words->size_bytes(), stream);
  return status == 0 ? ffi::Error::Success() : ffi::Error::Internal("jaxpace: the CUDA driver refused to copy 32 bytes");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpace_device_buffer, DeviceBuffer,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ret<ffi::BufferR1<ffi::U32>>(),
                              {ffi::Traits::kCmdBufferCompatible});

// The driver's two functions, by address.
extern "C" void jaxpace_driver(void* copies, void* fills) {
  copy.store(reinterpret_cast<Copy>(copies));
  fill.store(reinterpret_cast<Fill>(fills));
}

// Address of a device's block in its memory; 0 for none. Returns 0 where there can be no such device.
extern "C" int jaxpace_block(int32_t device, uint64_t address) {
  if (device < 0 || device >= kMostDevices) return 0;
  blocks[device].store(address);
  return 1;
}

// Raised whenever the handler's results change.
extern "C" int jaxpace_device_buffer_handlers() { return 1; }

extern "C" int jaxpace_ffi_major() { return XLA_FFI_API_MAJOR; }
extern "C" int jaxpace_ffi_minor() { return XLA_FFI_API_MINOR; }
