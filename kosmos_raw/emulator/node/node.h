// What the files of the node share: growing arrays, locks, the record of calls, the options, and who offers what to whom.
//
// The node is a HIP runtime for eight emulated MI355X. It uses no ROCm header and no C++ standard library. Numbers of errors
// and attributes come from hip-python (hip_names.h, generated).
#pragma once
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "../runtime/emulator.h"
#include "../runtime/types.h"
#include "hip_names.h"

#define PUBLIC extern "C" __attribute__((visibility("default")))
#define API(name, ...) PUBLIC Error name(__VA_ARGS__)
using Error = int;

constexpr int MAX_GPUS = 8;
constexpr u64 HBM_BYTES = 288ull << 30;
constexpr u32 COMPUTE_UNITS = 256, LDS_BYTES = 163840, WAVE = 64;

// ---- options and faults, set once by preload.py; options.py mirrors the struct ----
enum Fault : u32 {
  IPC_KEEPS_OFFSET = 1,  // a handle of an inner pointer opens at that pointer; else at the base of its allocation
  IPC_LEGACY = 2,        // no handle can be made, as with HSA_ENABLE_IPC_MODE_LEGACY=1 on newer Linux kernels
  IPC_36 = 4,            // what is opened beyond 36 handles maps unrelated memory
  NO_PEER = 8,           // GPUs cannot use each other's memory
  NO_MEMORY = 16,        // every allocation on a GPU fails
  LAUNCH_FAILS = 32,     // every launch is refused, but of CuPy's own kernels
  IPC_CLOSED = 64,       // no handle can be opened, as between containers
  IPC_NOT_LAZY = 128,    // opening a handle does not enable peer access by itself, whatever its flag says
  LOAD_WAITS = 256,      // loading code and allocating wait for all kernels of the process, as they may
};
struct NodeOptions {
  double limit_seconds;  // of one launch
  u32 gpus, threads, caches, late, preempt_one_in, seed, jitter_us, faults, resident_wgs, trace;
};
extern NodeOptions options;
inline bool has_fault(Fault f) { return options.faults & f; }

// ---- containers and locks ----
inline void* operator new(size_t, void* place) noexcept { return place; }

// Grows; holds plain values, which are moved as bytes.
template <class T> struct Array {
  T* items = nullptr;
  u32 count = 0, room = 0;
  T* begin() const { return items; }
  T* end() const { return items + count; }
  T& operator[](u32 i) const { return items[i]; }
  void insert(u32 at, const T& x) {
    if (count == room) {
      room = room ? 2 * room : 16;
      items = (T*)realloc((void*)items, room * sizeof(T));
      if (!items) abort();
    }
    memmove((void*)(items + at + 1), (const void*)(items + at), (count - at) * sizeof(T));
    items[at] = x;
    count++;
  }
  void add(const T& x) { insert(count, x); }
  void remove(u32 at) {
    count--;
    memmove((void*)(items + at), (const void*)(items + at + 1), (count - at) * sizeof(T));
  }
};

struct Locked {
  pthread_mutex_t& mutex;
  explicit Locked(pthread_mutex_t& m) : mutex(m) { pthread_mutex_lock(&mutex); }
  ~Locked() { pthread_mutex_unlock(&mutex); }
};

// ---- record.cpp: which functions were called, and how calls fail ----
struct Called {
  const char *name, *library;  // library: null for functions that the node has; else the name is a stub's
  u64 times;
  Called* next;
};
void count_call(Called& called);
Error fail(Error e);  // sets the thread's last error
extern bool forked;   // this is a child that a process using the node has forked: HIP does not survive that
void watch_for_forks();

// Begins every function of the interface.
#define BEGIN                                          \
  static Called called = {__func__, nullptr, 0, nullptr}; \
  count_call(called);                                  \
  if (forked) return fail(hipErrorNotInitialized)

// ---- properties.cpp ----
int gpu_count();  // that the masks leave visible
int current_gpu();
int physical_gpu(int ordinal);
int ordinal_of(int physical);           // -1: hidden
bool can_reach(int from, int to);       // peer access is enabled, or it is one GPU
const char* why_not_reached(int from, int to);

// ---- memory.cpp ----
enum MemoryKind { PAGEABLE, PINNED, DEVICE_MEMORY, PEER_MEMORY };
struct Found {  // the allocation round an address
  MemoryKind kind = PAGEABLE;
  int gpu = 0;
  u8* base = nullptr;
  u64 bytes = 0, offset = 0;
  u32 flags = 0;
};
Found find_allocation(const void* address);
// Memory that kernels of a GPU must not touch, for want of peer access. Returns how many ranges.
u32 barred_memory(int gpu, EmulatorRange* to, u32 room);

// ---- streams.cpp ----
struct Stream {
  int gpu, priority;
  u32 flags;                // 1: does not wait for the null stream, nor that for this
  bool is_null, destroyed, has_thread;
  u32 mask_words, mask[COMPUTE_UNITS / 32];  // compute units; no words: all
  u64 queued, done;         // operations
  struct Operation *first, *last;
  Random random;
};
struct Point {  // all that was queued on a stream up to an operation
  Stream* stream;
  u64 ticket;
};
struct Operation {
  Operation* next;
  void (*run)(Operation*);
  u32 wait_count;
  Point* waits;
};
Stream* stream_of(void* handle);     // null when there is no such stream
Point queue_operation(Stream& s, Operation* o, const Point* extra);  // extra: also waits for this
void wait_for(const Point& p);
Error wait_for_gpu(int gpu);         // everything queued on it
void wait_if_loading_waits();
extern Error lasting_error;          // of a kernel that failed: every later wait reports it

// Queues f() on the stream. f is copied byte by byte.
template <class F> Point queue_on(Stream& s, F f, const Point* extra = nullptr) {
  struct Holder : Operation {
    F f;
    explicit Holder(F g) : f(g) {}
  };
  Operation* o = new (malloc(sizeof(Holder))) Holder(f);
  o->run = [](Operation* self) { ((Holder*)self)->f(); };
  return queue_operation(s, o, extra);
}
