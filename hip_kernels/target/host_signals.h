// The CPU's signals and fences. Under ThreadSanitizer, which knows no fences, each is told to it as C++ defines them.
#pragma once

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define KOSMOS_TSAN 1
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* p);
void __tsan_release(void* p);
}
#endif
#endif

namespace target {
#ifdef KOSMOS_TSAN
// A fiber is used as nothing but a vector clock. What a store publishes is what its WG knew at its last release; what an
// acquire learns is what the loads before it have found published.
struct Clocks {
  void *released, *found;  // fibers, made before all that matters happens, so that they know nothing of it
  char through;            // whose address carries a clock from one fiber to another
};
inline thread_local Clocks* clocks;  // of this WG
inline bool no_release = false, no_acquire = false;  // mutations

__attribute__((no_sanitize("thread"), noinline)) inline void as(void* fiber, void (*what)(void*), void* p) {
  void* const me = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(fiber, 1);  // 1: no order comes of the switch
  what(p);
  __tsan_switch_to_fiber(me, 1);
}
inline void found(const void* p) { as(clocks->found, __tsan_acquire, (void*)p); }
inline void publish(void* p) { as(clocks->released, __tsan_release, p); }
inline void tell_release() {
  if (no_release) return;
  __tsan_release(&clocks->through);
  as(clocks->released, __tsan_acquire, &clocks->through);
}
inline void tell_acquire() {
  if (no_acquire) return;
  as(clocks->found, __tsan_release, &clocks->through);
  __tsan_acquire(&clocks->through);
}
#else
inline void found(const void*) {}
inline void publish(void*) {}
inline void tell_release() {}
inline void tell_acquire() {}
#endif

inline u32 load(const u32* p, Scope) {
  const u32 v = __atomic_load_n(p, __ATOMIC_RELAXED);
  found(p);
  return v;
}
inline void store(u32* p, u32 v, Scope) {
  publish(p);
  __atomic_store_n(p, v, __ATOMIC_RELAXED);
}
inline u32 add(u32* p, u32 v, Scope) {
  if (most_delay_us) come_late();
  publish(p);
  const u32 was = __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
  found(p);
  return was;
}
inline bool swap_if(u32* p, u32 was, u32 now, Scope) {
  if (most_delay_us) come_late();
  publish(p);
  const bool swapped = __atomic_compare_exchange_n(p, &was, now, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  found(p);
  return swapped;
}
inline void release(Scope) {
  tell_release();
  __atomic_thread_fence(__ATOMIC_RELEASE);
}
inline void acquire(Scope) {
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  tell_acquire();
}
}  // namespace target
