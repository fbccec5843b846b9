// The native CPU clock: XLA FFI handlers that read the monotonic clock and sleep on it.
//
// A plain shared library, loaded with ctypes: it needs no Python headers and serves every Python version. No
// handler declares a side effect, which would make dispatch synchronous; they are kept because their results are used.

#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdlib>
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

// Marks: the layout of a ring is that of jaxpace/core/ring_layout.py.

constexpr uint32_t kMostLanes = 1024;
constexpr uint32_t kMostPrograms = 4096;
constexpr size_t kLaneStride = 64;
constexpr uint32_t kNumber = 0xFFFFE;  // tag of the event whose "ns" is the number of the execution that starts

struct Event {
  std::atomic<int64_t> ns;
  std::atomic<uint32_t> tag;
  std::atomic<uint32_t> seq;  // index + 1: stored last, so a slot that is being written holds another
};
static_assert(sizeof(Event) == 16, "an event has 16 bytes");

struct Ring {
  char* heads;  // a lane's 64 bytes: head
  Event* events;
  uint64_t capacity;  // a power of two
  uint32_t lanes;
};

std::atomic<Ring*> current_ring{nullptr};

// Executions that have started on a device so far, by program. Zero pages until they are used.
std::atomic<uint32_t> executions[kMostLanes][kMostPrograms];

// What XLA calls each device of this process, by lane. Written before the first mark.
int32_t devices[kMostLanes];
uint32_t device_count = 0;

uint32_t LaneOf(int32_t device) {
  const int64_t place = static_cast<int64_t>(device) - devices[0];  // numbers mostly follow each other
  if (place >= 0 && place < device_count && devices[place] == device) return static_cast<uint32_t>(place);
  for (uint32_t lane = 0; lane < device_count; ++lane) {
    if (devices[lane] == device) return lane;
  }
  // Should XLA number a process's devices by themselves one day: in the same order.
  return device >= 0 && static_cast<uint32_t>(device) < device_count ? static_cast<uint32_t>(device) : kMostLanes;
}

void Put(Ring* ring, uint64_t base, uint64_t index, int64_t ns, uint32_t tag) {
  Event& event = ring->events[base + (index & (ring->capacity - 1))];
  event.seq.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  event.ns.store(ns, std::memory_order_relaxed);
  event.tag.store(tag, std::memory_order_relaxed);
  event.seq.store(static_cast<uint32_t>(index + 1), std::memory_order_release);
}

// When each execution on the first device ended, and what the process had used by then; the layout is
// `host_ring.USAGE`.
struct Usage {
  std::atomic<int64_t> ns, cpu_ns, switches, faults, queued_ns;
  std::atomic<uint64_t> seq;  // index + 1: stored last
};
std::atomic<Usage*> usage{nullptr};
std::atomic<uint64_t> usage_head{0};
uint64_t usage_capacity = 0;
constexpr int64_t kApart = 10000000;  // asking the kernel takes 8 to 20 us of a step: short ones are asked for together
std::atomic<int64_t> usage_read{0};   // when the kernel was last asked
int main_thread = -1;  // its schedstat, open

int64_t Microseconds(const timeval& time) { return static_cast<int64_t>(time.tv_sec) * 1000000 + time.tv_usec; }

// How long the main thread has waited for a processor so far; -1 where the kernel doesn't say.
int64_t Queued() {
  char text[96];
  const ssize_t size = main_thread < 0 ? -1 : pread(main_thread, text, sizeof(text) - 1, 0);
  if (size <= 0) return -1;
  text[size] = '\0';
  char* rest = text;
  std::strtoull(text, &rest, 10);  // the time it ran
  return static_cast<int64_t>(std::strtoull(rest, nullptr, 10));
}

void Used(int64_t ns) {
  Usage* entries = usage.load(std::memory_order_acquire);
  if (entries == nullptr) return;
  rusage used;
  const bool read = ns - usage_read.load(std::memory_order_relaxed) >= kApart && getrusage(RUSAGE_SELF, &used) == 0;
  const int64_t queued = read ? Queued() : -1;
  if (read) usage_read.store(ns, std::memory_order_relaxed);
  const uint64_t index = usage_head.fetch_add(1, std::memory_order_relaxed);
  Usage& entry = entries[index & (usage_capacity - 1)];
  entry.seq.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  entry.ns.store(ns, std::memory_order_relaxed);
  entry.cpu_ns.store(read ? (Microseconds(used.ru_utime) + Microseconds(used.ru_stime)) * 1000 : -1,
                     std::memory_order_relaxed);
  if (read) {
    entry.switches.store(used.ru_nivcsw, std::memory_order_relaxed);
    entry.faults.store(used.ru_majflt, std::memory_order_relaxed);
    entry.queued_ns.store(queued, std::memory_order_relaxed);
  }
  entry.seq.store(index + 1, std::memory_order_release);
}

// No lock, no allocation: several threads of one device may mark at once.
void Record(uint32_t lane, uint32_t program, uint32_t tag, int64_t ns) {
  if (lane >= kMostLanes) return;
  if (tag == 1 && lane == 0) Used(ns);
  uint32_t number = 0;
  if (tag == 0 && program < kMostPrograms) number = executions[lane][program].fetch_add(1, std::memory_order_relaxed);
  Ring* ring = current_ring.load(std::memory_order_seq_cst);
  if (ring == nullptr || lane >= ring->lanes) return;
  auto* head = reinterpret_cast<std::atomic<uint64_t>*>(ring->heads + lane * kLaneStride);
  const uint64_t base = static_cast<uint64_t>(lane) * ring->capacity;
  uint64_t index = head->fetch_add(tag == 0 ? 2 : 1, std::memory_order_seq_cst);
  if (tag == 0) Put(ring, base, index++, number, (program << 20) | kNumber);
  Put(ring, base, index, ns, (program << 20) | tag);
}

// The operands are waited for by XLA; nothing reads them. A stamp with a program is an event of that, too.
ffi::Error Stamp(int32_t device, ffi::RemainingArgs, ffi::Result<Words> stamp, int32_t program, int32_t tag) {
  const int64_t now = Now();
  Write(now, stamp);
  if (program > 0) Record(LaneOf(device), static_cast<uint32_t>(program), static_cast<uint32_t>(tag), now);
  return ffi::Error::Success();
}

// With a program, `tag` is the first stamp's and `end_tag` the second one's.
ffi::Error Delay(int32_t device, Words, ffi::BufferR0<ffi::F32> seconds, ffi::RemainingArgs,
                 ffi::Result<Words> before, ffi::Result<Words> after, int64_t limit_ns, int32_t program, int32_t tag,
                 int32_t end_tag) {
  const int64_t start = Now();
  if (program > 0) Record(LaneOf(device), static_cast<uint32_t>(program), static_cast<uint32_t>(tag), start);
  int64_t end = start;
  const double asked = static_cast<double>(seconds.typed_data()[0]) * 1e9;
  if (asked > 0.0 && limit_ns > 0) {  // false for NaN
    const double limit = static_cast<double>(limit_ns);
    SleepUntil(start + static_cast<int64_t>(std::ceil(asked < limit ? asked : limit)));
    end = Now();
  }
  if (program > 0) Record(LaneOf(device), static_cast<uint32_t>(program), static_cast<uint32_t>(end_tag), end);
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

// Writes numbers as events, one for each (high, low) pair of `numbers`, with tags from `tag` on; hands `chain` through,
// so that what follows comes after.
ffi::Error Note(int32_t device, Words chain, ffi::AnyBuffer numbers, ffi::Result<Words> held, int32_t program,
                int32_t tag) {
  if (held->typed_data() != chain.typed_data()) std::memcpy(held->typed_data(), chain.typed_data(), 8);
  const auto* words = static_cast<const uint32_t*>(numbers.untyped_data());
  const uint32_t lane = LaneOf(device);
  for (size_t i = 0; i < numbers.element_count() / 2; ++i) {
    const uint64_t number = (static_cast<uint64_t>(words[2 * i]) << 32) | words[2 * i + 1];
    Record(lane, static_cast<uint32_t>(program), static_cast<uint32_t>(tag + i), static_cast<int64_t>(number));
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpace_stamp, Stamp,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .Ret<Words>()
                                  .Attr<int32_t>("program")
                                  .Attr<int32_t>("tag"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpace_delay, Delay,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<Words>()
                                  .Arg<ffi::BufferR0<ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<Words>()
                                  .Ret<Words>()
                                  .Attr<int64_t>("limit_ns")
                                  .Attr<int32_t>("program")
                                  .Attr<int32_t>("tag")
                                  .Attr<int32_t>("end_tag"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpace_hold, Hold,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpace_note, Note,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<Words>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<Words>()
                                  .Attr<int32_t>("program")
                                  .Attr<int32_t>("tag"));

// A timestamp of a compiled program: an event, `mark` is its program << 32 | its tag. Operands are waited for, results
// are the same memory: XLA sees to both, and nothing is read here. A step runs this where caches are cold, so the frame
// is taken as it comes: decoding it by names and types touches as much memory again.
extern "C" XLA_FFI_Error* jaxpace_mark(XLA_FFI_CallFrame* frame) {
  const int64_t now = Now();
  if (frame->extension_start != nullptr && frame->extension_start->type == XLA_FFI_Extension_Metadata) {
    // XLA asks what the handler was built on.
    static auto* described = ffi::Ffi::Bind().To([] { return ffi::Error::Success(); }).release();
    return described->Call(frame);
  }
  const uint64_t mark = *static_cast<const uint64_t*>(static_cast<const XLA_FFI_Scalar*>(frame->attrs.attrs[0])->value);
  if (mark >> 32 == 0) return nullptr;  // nobody's: it only waits
  XLA_FFI_DeviceOrdinal_Get_Args device{XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE, nullptr, frame->ctx, 0};
  if (XLA_FFI_Error* error = frame->api->XLA_FFI_DeviceOrdinal_Get(&device)) return error;
  // On CPU the device's id in the job: 2048, 2049, ... in the second process.
  Record(LaneOf(device.device_ordinal), static_cast<uint32_t>(mark >> 32), static_cast<uint32_t>(mark) & 0xFFFFF, now);
  return nullptr;
}

// Says which lane each device marks in: `ids[lane]` is XLA's number of the device.
extern "C" void jaxpace_lanes(const int32_t* ids, uint32_t count) {
  device_count = 0;
  for (uint32_t lane = 0; lane < count && lane < kMostLanes; ++lane) devices[lane] = ids[lane];
  device_count = count < kMostLanes ? count : kMostLanes;
}

// Where marks go from now on; null `heads` drops them. The memory stays for good: marks under way may still go there.
extern "C" void jaxpace_ring(void* heads, void* events, uint64_t capacity, uint32_t lanes) {
  Ring* next = heads == nullptr ? nullptr
                                : new Ring{static_cast<char*>(heads), static_cast<Event*>(events), capacity, lanes};
  current_ring.store(next, std::memory_order_seq_cst);
}

extern "C" uint32_t jaxpace_executions(uint32_t lane, uint32_t program) {
  return lane < kMostLanes && program < kMostPrograms ? executions[lane][program].load() : 0;
}

// Where the usage of the process goes from now on, once: a buffer of a power of two of entries that stays for good.
// `schedstat` is a descriptor of the main thread's, or negative.
extern "C" void jaxpace_used(void* entries, uint64_t capacity, int schedstat) {
  usage_capacity = capacity;
  main_thread = schedstat;
  usage.store(static_cast<Usage*>(entries), std::memory_order_release);
}

extern "C" uint64_t jaxpace_usage_head() { return usage_head.load(); }

// A mark as a handler leaves it, for measuring and tests.
extern "C" void jaxpace_mark_here(uint32_t lane, uint32_t program, uint32_t tag, uint32_t times) {
  for (uint32_t i = 0; i < times; ++i) Record(lane, program, tag, Now());
}

// An event as a handler leaves it, from the host: of clocks that are callbacks.
extern "C" void jaxpace_record(uint32_t lane, uint32_t program, uint32_t tag, int64_t ns) {
  Record(lane, program, tag, ns);
}

// Raised whenever a handler's operands change: a library left over from another version must not be called.
extern "C" int jaxpace_handlers() { return 5; }

// The version of the headers this was built on: a newer one than the running jaxlib's must not be registered.
extern "C" int jaxpace_ffi_major() { return XLA_FFI_API_MAJOR; }
extern "C" int jaxpace_ffi_minor() { return XLA_FFI_API_MINOR; }
