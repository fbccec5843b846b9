// What the host does for the timestamps of GPUs. No CUDA header is needed: the driver's functions are given by their addresses.
//
// The timestamps themselves are kernels (jaxpace/observation/clocks/kernels.py). What they need, the addresses of this device's ring
// and counters, lies in a block of a few words in the device's memory, which differs by process and device. In observed
// programs `jaxpace_mark` launches the kernel of a timestamp on the stream that it is called for. In instrumented steps,
// whose kernels are a part of the program, `jaxpace_device_buffer` copies the block on the stream. Nothing waits for either.
// CUDA graphs take both in: a block stays where it is as long as the process lives.
//
// The hash is that of the files in which XLA writes programs for GPUs (jaxpace/observation/partitioned/gpu_thunks.py).

#include <atomic>
#include <cstdint>
#include <cstring>

#include "xla/ffi/api/c_api.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int32_t kMostDevices = 64;
// As in jaxpace/core/observed.py and ring_layout.py.
constexpr uint32_t kTagBits = 20;
constexpr uint32_t kStartTag = 0, kNumberTag = (1 << kTagBits) - 2;
// As in jaxpace/observation/clocks/kernels.py: where the counters of programs begin.
constexpr uint32_t kCounters = 16;

// cuMemcpyDtoDAsync_v2 and cuMemsetD8Async of the CUDA driver: (to, from, bytes, stream), (to, value, bytes, stream).
using Copy = int (*)(uint64_t, uint64_t, size_t, void*);
using Fill = int (*)(uint64_t, unsigned char, size_t, void*);

std::atomic<Copy> copy{nullptr};
std::atomic<Fill> fill{nullptr};
std::atomic<uint64_t> blocks[kMostDevices];

// cuLaunchKernel: (function, grid and block in three directions, shared memory, stream, parameters, extra), and
// cuCtxPushCurrent_v2, cuCtxPopCurrent_v2.
using Launch = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
using Push = int (*)(void*);
using Pop = int (*)(void**);

struct Kernels {
  void* context = nullptr;
  void* mark = nullptr;
  void* start = nullptr;
};

std::atomic<Launch> launch{nullptr};
std::atomic<Push> push{nullptr};
std::atomic<Pop> pop{nullptr};
Kernels kernels[kMostDevices];

// Starts the kernel of a timestamp; nothing where this device has no ring. Where the driver refuses, the program goes on
// without: what is wrong with the device, it will say itself.
ffi::Error Mark(void* stream, int32_t device, int64_t mark) {
  const Launch launches = launch.load();
  uint64_t block = device >= 0 && device < kMostDevices ? blocks[device].load() : 0;
  if (block == 0 || launches == nullptr) return ffi::Error::Success();
  const uint32_t program = static_cast<uint32_t>(mark >> 32), tag = static_cast<uint32_t>(mark);
  // As `tagged` in kernels.py has them.
  uint64_t word = program << kTagBits | tag, counter = kCounters + 4 * program, number = word | kNumberTag;
  void* parameters[] = {&block, &word, &counter, &number};
  const Kernels& own = kernels[device];
  if (push.load()(own.context) != 0) return ffi::Error::Success();
  launches(tag == kStartTag ? own.start : own.mark, 1, 1, 1, 1, 1, 1, 0, stream, parameters, nullptr);
  void* before = nullptr;
  pop.load()(&before);
  return ffi::Error::Success();
}

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

// HighwayHash (J. Alakuijala, B. Cox, J. Wassenberg: Fast keyed hash/pseudo-random function using SIMD multiply and permute,
// arXiv:1612.06257), 64 bits, as Riegeli's files of records have it.
class Highway {
 public:
  Highway() {
    // Nothing up their sleeve: digits of pi.
    static constexpr uint64_t kFirst[4] = {0xdbe6d5d5fe4cce2f, 0xa4093822299f31d0, 0x13198a2e03707344, 0x243f6a8885a308d3};
    static constexpr uint64_t kSecond[4] = {0x3bd39e10cb0ef593, 0xc0acf169b5f18a8c, 0xbe5466cf34e90c6c, 0x452821e638d01377};
    // "Riegeli/", "records\n", twice.
    static constexpr uint64_t kKey[4] = {0x2f696c6567656952, 0x0a7364726f636572, 0x2f696c6567656952, 0x0a7364726f636572};
    for (int lane = 0; lane < 4; ++lane) {
      mul0_[lane] = kFirst[lane];
      mul1_[lane] = kSecond[lane];
      v0_[lane] = kFirst[lane] ^ kKey[lane];
      v1_[lane] = kSecond[lane] ^ (kKey[lane] >> 32 | kKey[lane] << 32);
    }
  }

  uint64_t Of(const uint8_t* data, uint64_t size) {
    for (; size >= 32; data += 32, size -= 32) Packet(data);
    if (size != 0) Rest(data, size);
    for (int round = 0; round < 4; ++round) {
      uint64_t turned[4];
      for (int lane = 0; lane < 4; ++lane) {
        const uint64_t value = v0_[lane ^ 2];
        turned[lane] = value >> 32 | value << 32;
      }
      Update(turned);
    }
    return v0_[0] + v1_[0] + mul0_[0] + mul1_[0];
  }

 private:
  void Packet(const uint8_t* data) {
    uint64_t lanes[4];
    std::memcpy(lanes, data, sizeof(lanes));
    Update(lanes);
  }

  void Update(const uint64_t* lanes) {
    for (int lane = 0; lane < 4; ++lane) {
      v1_[lane] += mul0_[lane] + lanes[lane];
      mul0_[lane] ^= (v1_[lane] & 0xffffffff) * (v0_[lane] >> 32);
      v0_[lane] += mul1_[lane];
      mul1_[lane] ^= (v0_[lane] & 0xffffffff) * (v1_[lane] >> 32);
    }
    for (int pair = 0; pair < 4; pair += 2) {
      Merge(v1_[pair + 1], v1_[pair], v0_ + pair);
    }
    for (int pair = 0; pair < 4; pair += 2) {
      Merge(v0_[pair + 1], v0_[pair], v1_ + pair);
    }
  }

  // Adds the bytes of two lanes in another order.
  static void Merge(uint64_t v1, uint64_t v0, uint64_t* sum) {
    const auto byte = [](uint64_t value, int place) { return value >> (8 * place) & 0xff; };
    sum[0] += byte(v0, 3) | byte(v1, 4) << 8 | byte(v0, 2) << 16 | byte(v0, 5) << 24 | byte(v1, 6) << 32 |
              byte(v0, 1) << 40 | byte(v1, 7) << 48 | byte(v0, 0) << 56;
    sum[1] += byte(v1, 3) | byte(v0, 4) << 8 | byte(v1, 2) << 16 | byte(v1, 5) << 24 | byte(v1, 1) << 32 |
              byte(v0, 6) << 40 | byte(v1, 0) << 48 | byte(v0, 7) << 56;
  }

  // The last 1 to 31 bytes.
  void Rest(const uint8_t* data, uint64_t size) {
    const uint64_t size32 = size << 32 | size;
    for (int lane = 0; lane < 4; ++lane) v0_[lane] += size32;
    for (int lane = 0; lane < 4; ++lane) {
      const uint32_t low = static_cast<uint32_t>(v1_[lane]), high = static_cast<uint32_t>(v1_[lane] >> 32);
      v1_[lane] = Turned(low, size) | static_cast<uint64_t>(Turned(high, size)) << 32;
    }
    uint8_t packet[32] = {};
    const uint64_t words = size & ~uint64_t{3}, left = size & 3;
    std::memcpy(packet, data, words);
    if (size & 16) {
      std::memcpy(packet + 28, data + size - 4, 4);
    } else if (left != 0) {
      packet[16] = data[words];
      packet[17] = data[words + (left >> 1)];
      packet[18] = data[size - 1];
    }
    Packet(packet);
  }

  static uint32_t Turned(uint32_t value, uint64_t by) { return value << by | value >> (32 - by); }

  uint64_t v0_[4], v1_[4], mul0_[4], mul1_[4];
};

uint64_t Hash(const uint8_t* data, uint64_t size) { return Highway().Of(data, size); }

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpace_device_buffer, DeviceBuffer,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ret<ffi::BufferR1<ffi::U32>>(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpace_mark, Mark,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Attr<int64_t>("mark"),
                              {ffi::Traits::kCmdBufferCompatible});

// The driver's functions, by address.
extern "C" void jaxpace_driver(void* copies, void* fills, void* launches, void* pushes, void* pops) {
  copy.store(reinterpret_cast<Copy>(copies));
  fill.store(reinterpret_cast<Fill>(fills));
  push.store(reinterpret_cast<Push>(pushes));
  pop.store(reinterpret_cast<Pop>(pops));
  launch.store(reinterpret_cast<Launch>(launches));
}

// Address of a device's block in its memory, 0 for none, and its context and kernels. Returns 0 where there can be no such
// device.
extern "C" int jaxpace_block(int32_t device, uint64_t address, void* context, void* mark, void* start) {
  if (device < 0 || device >= kMostDevices) return 0;
  kernels[device] = {context, mark, start};
  blocks[device].store(address);
  return 1;
}

// HighwayHash with 64 bits, by the key of Riegeli's files.
extern "C" uint64_t jaxpace_riegeli_hash(const uint8_t* data, uint64_t size) { return Hash(data, size); }

// Raised whenever the handlers' operands or results change.
extern "C" int jaxpace_gpu_handlers() { return 2; }

extern "C" int jaxpace_ffi_major() { return XLA_FFI_API_MAJOR; }
extern "C" int jaxpace_ffi_minor() { return XLA_FFI_API_MINOR; }
