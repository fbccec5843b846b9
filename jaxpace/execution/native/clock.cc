// The native CPU clock: XLA FFI handlers that read the monotonic clock and sleep on it.
//
// A plain shared library, loaded with ctypes: it needs no Python headers and serves every Python version. No
// handler declares a side effect, which would make dispatch synchronous; they are kept because their results are used.

#include <time.h>

#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "xla/ffi/api/c_api.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kSecond = 1000000000;

using Words = ffi::BufferR1<ffi::U32>;

int64_t Now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<int64_t>(time.tv_sec) * kSecond + time.tv_nsec;
}

void Write(int64_t nanoseconds, ffi::Result<Words>& words) {
  words->typed_data()[0] = static_cast<uint32_t>(static_cast<uint64_t>(nanoseconds) >> 32);
  words->typed_data()[1] = static_cast<uint32_t>(static_cast<uint64_t>(nanoseconds));
}

// Sleeps until the clock reads at least `deadline`. An absolute deadline survives interruption by signals.
void SleepUntil(int64_t deadline) {
  while (Now() < deadline) {
#if defined(__linux__)
    timespec until;
    until.tv_sec = deadline / kSecond;
    until.tv_nsec = deadline % kSecond;
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr);
#else
    const int64_t left = deadline - Now();
    if (left <= 0) return;
    timespec span;
    span.tv_sec = left / kSecond;
    span.tv_nsec = left % kSecond;
    nanosleep(&span, nullptr);
#endif
  }
}

// The operands are waited for by XLA; nothing reads them.
ffi::Error Stamp(ffi::RemainingArgs, ffi::Result<Words> stamp) {
  Write(Now(), stamp);
  return ffi::Error::Success();
}

ffi::Error Delay(Words, ffi::BufferR0<ffi::F32> seconds, ffi::RemainingArgs, ffi::Result<Words> before,
                 ffi::Result<Words> after, int64_t limit_ns) {
  const int64_t start = Now();
  int64_t end = start;
  const double asked = static_cast<double>(seconds.typed_data()[0]) * 1e9;
  if (asked > 0.0 && limit_ns > 0) {  // false for NaN
    const double limit = static_cast<double>(limit_ns);
    SleepUntil(start + static_cast<int64_t>(std::ceil(asked < limit ? asked : limit)));
    end = Now();
  }
  Write(start, before);
  Write(end, after);
  return ffi::Error::Success();
}

// Hands its operands through, all but the last, once that, the stamp, is there. Operands and results share their
// memory; where XLA made a copy all the same, it is filled.
ffi::Error Hold(ffi::RemainingArgs values, ffi::RemainingRets held) {
  for (size_t i = 0; i < held.size(); ++i) {
    auto from = values.get<ffi::AnyBuffer>(i);
    auto to = held.get<ffi::AnyBuffer>(i);
    if (!from.has_value() || !to.has_value()) return ffi::Error::Internal("jaxpace_hold: operand without result");
    if ((*to)->untyped_data() != from->untyped_data()) {
      std::memcpy((*to)->untyped_data(), from->untyped_data(), from->size_bytes());
    }
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpace_stamp, Stamp,
                              ffi::Ffi::Bind().RemainingArgs().Ret<Words>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpace_delay, Delay,
                              ffi::Ffi::Bind()
                                  .Arg<Words>()
                                  .Arg<ffi::BufferR0<ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<Words>()
                                  .Ret<Words>()
                                  .Attr<int64_t>("limit_ns"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpace_hold, Hold,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets());

// Raised whenever a handler's operands change: a library left over from another version must not be called.
extern "C" int jaxpace_handlers() { return 2; }

// The version of the headers this was built on: a newer one than the running jaxlib's must not be registered.
extern "C" int jaxpace_ffi_major() { return XLA_FFI_API_MAJOR; }
extern "C" int jaxpace_ffi_minor() { return XLA_FFI_API_MINOR; }
