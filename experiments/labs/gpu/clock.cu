// Stamp and delay as XLA FFI handlers: measured beside the clock of the package, which needs no CUDA compiler.
//
//   nvcc -shared -Xcompiler -fPIC -std=c++17 -O2 -arch=sm_90 -I $(python -c 'import jax; print(jax.ffi.include_dir())')
//     -o clock.so clock.cu

#include <cuda_runtime_api.h>

#include <cstdint>

#include "xla/ffi/api/c_api.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using Words = ffi::BufferR1<ffi::U32>;

__device__ uint64_t Now() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

__device__ void Write(uint64_t time, uint32_t* words) {
  words[0] = static_cast<uint32_t>(time >> 32);
  words[1] = static_cast<uint32_t>(time);
}

__global__ void StampKernel(uint32_t* stamp) { Write(Now(), stamp); }

// Waits in naps of half of what is left; the count of cycles ends it should the timer stand still.
__global__ void DelayKernel(const float* seconds, int64_t limit_ns, uint32_t* before, uint32_t* after) {
  const uint64_t start = Now();
  const long long first = clock64();
  uint64_t end = start;
  const float asked = *seconds * 1e9f;
  if (asked > 0.0f && limit_ns > 0) {  // false for NaN
    const uint64_t wait = asked < static_cast<float>(limit_ns) ? static_cast<uint64_t>(ceilf(asked)) : limit_ns;
    while ((end = Now()) - start < wait && clock64() - first < 10000000000LL) {
      const uint64_t nap = (wait - (end - start)) / 2;
      __nanosleep(nap < 500000 ? static_cast<unsigned>(nap) : 500000u);
    }
  }
  Write(start, before);
  Write(end, after);
}

ffi::Error Launched() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? ffi::Error::Success() : ffi::Error::Internal(cudaGetErrorString(error));
}

// The operands are waited for by the stream; nothing reads them.
ffi::Error Stamp(cudaStream_t stream, ffi::RemainingArgs, ffi::Result<Words> stamp) {
  StampKernel<<<1, 1, 0, stream>>>(stamp->typed_data());
  return Launched();
}

ffi::Error Delay(cudaStream_t stream, Words, ffi::BufferR0<ffi::F32> seconds, ffi::RemainingArgs,
                 ffi::Result<Words> before, ffi::Result<Words> after, int64_t limit_ns) {
  DelayKernel<<<1, 1, 0, stream>>>(seconds.typed_data(), limit_ns, before->typed_data(), after->typed_data());
  return Launched();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(check_stamp, Stamp,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .Ret<Words>(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(check_delay, Delay,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Words>()
                                  .Arg<ffi::BufferR0<ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<Words>()
                                  .Ret<Words>()
                                  .Attr<int64_t>("limit_ns"),
                              {ffi::Traits::kCmdBufferCompatible});
