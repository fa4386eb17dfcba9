// Streams and events. A stream is a thread that takes operations from its queue one by one; an operation first waits for
// points of other streams. So kernels of different streams and GPUs really run at the same time, as kernels that wait for
// each other must.
//
// The null stream of a GPU waits for its blocking streams, and those for it. One lock guards it all: operations are few and
// long.
#include <time.h>
#include <unistd.h>

#include "node.h"

constexpr u32 NON_BLOCKING = 1;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Array<Stream*> streams;  // never freed: an event may outlive its stream, and a stale handle must be recognised
static Stream* null_streams[MAX_GPUS];
Error lasting_error;

static u64 now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}
static bool is_done(const Point& p) { return !p.stream || p.stream->done >= p.ticket; }
static void wait_locked(const Point& p) {
  while (!is_done(p)) pthread_cond_wait(&changed, &lock);
}
void wait_for(const Point& p) {
  Locked locked(lock);
  wait_locked(p);
}
static Error lasting() { return __atomic_load_n(&lasting_error, __ATOMIC_RELAXED); }

// ---- the thread of a stream ----
static void run_late(Stream& s) {
  if (options.jitter_us) usleep(s.random.next() % options.jitter_us);
}
static void* work(void* self) {
  Stream& s = *(Stream*)self;
  Locked locked(lock);
  for (;;) {
    while (!s.first && !s.destroyed) pthread_cond_wait(&changed, &lock);
    Operation* o = s.first;
    if (!o) return nullptr;
    for (u32 i = 0; i < o->wait_count; i++) wait_locked(o->waits[i]);
    pthread_mutex_unlock(&lock);
    run_late(s);
    o->run(o);
    pthread_mutex_lock(&lock);
    s.first = o->next;
    s.done++;
    free(o->waits);
    free(o);
    pthread_cond_broadcast(&changed);
  }
}
static void start_thread(Stream& s) {
  if (s.has_thread) return;
  pthread_t thread;
  if (pthread_create(&thread, nullptr, work, &s)) {
    perror("emulated node: no thread for a stream");
    abort();
  }
  pthread_detach(thread);
  s.has_thread = true;
}

// ---- making and finding; the lock is held ----
static Stream* make_stream(int gpu, u32 flags, int priority) {
  watch_for_forks();
  Stream* s = (Stream*)calloc(1, sizeof *s);
  s->gpu = gpu;
  s->flags = flags;
  s->priority = priority;
  s->random.seed(options.seed, 0x2000 + streams.count);
  streams.add(s);
  return s;
}
static Stream& null_stream(int gpu) {
  if (!null_streams[gpu]) {
    null_streams[gpu] = make_stream(gpu, 0, 0);
    null_streams[gpu]->is_null = true;
  }
  return *null_streams[gpu];
}
static bool waits_for_null(const Stream& s) { return !s.is_null && !(s.flags & NON_BLOCKING); }

Stream* stream_of(void* handle) {
  Locked locked(lock);
  if ((u64)handle <= 2) return &null_stream(current_gpu());  // null, legacy, per thread
  for (Stream* s : streams)
    if (s == handle && !s->destroyed) return s;
  return nullptr;
}

static void add_wait(Operation& o, const Point& p) {
  if (is_done(p)) return;
  o.waits = (Point*)realloc((void*)o.waits, (o.wait_count + 1) * sizeof(Point));
  o.waits[o.wait_count++] = p;
}
static void add_waits_of_the_null_stream(const Stream& s, Operation& o) {
  if (waits_for_null(s)) {
    Stream& null = null_stream(s.gpu);
    add_wait(o, {&null, null.queued});
  }
  for (Stream* other : streams)
    if (s.is_null && other->gpu == s.gpu && waits_for_null(*other)) add_wait(o, {other, other->queued});
}
Point queue_operation(Stream& s, Operation* o, const Point* extra) {
  Locked locked(lock);
  o->next = nullptr;
  o->waits = nullptr;
  o->wait_count = 0;
  if (extra) add_wait(*o, *extra);
  add_waits_of_the_null_stream(s, *o);
  Operation** end = &s.first;
  while (*end) end = &(*end)->next;
  *end = o;
  start_thread(s);
  pthread_cond_broadcast(&changed);
  return {&s, ++s.queued};
}
Error wait_for_gpu(int gpu) {
  Locked locked(lock);
  for (u32 i = 0; i < streams.count; i++)
    if (streams[i]->gpu == gpu) wait_locked({streams[i], streams[i]->queued});
  return lasting();
}

void wait_if_loading_waits() {
  for (int gpu = 0; has_fault(LOAD_WAITS) && gpu < gpu_count(); gpu++) wait_for_gpu(gpu);
}

// ---- the interface: streams ----
#define FIND_STREAM(s, handle)         \
  Stream* const s = stream_of(handle); \
  if (!s) return fail(hipErrorInvalidHandle)

static Error create(void** to, u32 flags, int priority) {
  if (!to || flags > NON_BLOCKING) return hipErrorInvalidValue;
  Locked locked(lock);
  *to = make_stream(current_gpu(), flags, priority);
  return hipSuccess;
}
API(hipStreamCreate, void** to) {
  BEGIN;
  return fail(create(to, 0, 0));
}
API(hipStreamCreateWithFlags, void** to, u32 flags) {
  BEGIN;
  return fail(create(to, flags, 0));
}
API(hipStreamCreateWithPriority, void** to, u32 flags, int priority) {
  BEGIN;
  return fail(create(to, flags, priority));
}
API(hipExtStreamCreateWithCUMask, void** to, u32 words, const u32* mask) {
  BEGIN;
  if (!words || !mask) return fail(hipErrorInvalidValue);
  if (const Error e = create(to, 0, 0)) return fail(e);
  Stream& s = *(Stream*)*to;
  s.mask_words = smaller(words, COMPUTE_UNITS / 32);
  memcpy(s.mask, mask, s.mask_words * sizeof *mask);
  return hipSuccess;
}
API(hipExtStreamGetCUMask, void* handle, u32 words, u32* mask) {
  BEGIN;
  FIND_STREAM(s, handle);
  if (!mask || words < COMPUTE_UNITS / 32) return fail(hipErrorInvalidValue);
  memset(mask, 0, words * sizeof *mask);
  if (s->mask_words) memcpy(mask, s->mask, sizeof s->mask);
  else memset(mask, 0xff, sizeof s->mask);
  return hipSuccess;
}
API(hipStreamDestroy, void* handle) {
  BEGIN;
  FIND_STREAM(s, handle);
  if (s->is_null) return fail(hipErrorInvalidHandle);
  Locked locked(lock);
  wait_locked({s, s->queued});
  s->destroyed = true;
  pthread_cond_broadcast(&changed);
  return hipSuccess;
}
API(hipStreamSynchronize, void* handle) {
  BEGIN;
  FIND_STREAM(s, handle);
  Locked locked(lock);
  wait_locked({s, s->queued});
  for (u32 i = 0; s->is_null && i < streams.count; i++)
    if (streams[i]->gpu == s->gpu && waits_for_null(*streams[i])) wait_locked({streams[i], streams[i]->queued});
  return fail(lasting());
}
API(hipDeviceSynchronize) {
  BEGIN;
  return fail(wait_for_gpu(current_gpu()));
}
API(hipStreamQuery, void* handle) {
  BEGIN;
  FIND_STREAM(s, handle);
  Locked locked(lock);
  return fail(is_done({s, s->queued}) ? lasting() : hipErrorNotReady);
}
API(hipStreamGetFlags, void* handle, u32* flags) {
  BEGIN;
  FIND_STREAM(s, handle);
  *flags = s->flags;
  return hipSuccess;
}
API(hipStreamGetPriority, void* handle, int* priority) {
  BEGIN;
  FIND_STREAM(s, handle);
  *priority = s->priority;
  return hipSuccess;
}
API(hipStreamGetDevice, void* handle, int* gpu) {
  BEGIN;
  FIND_STREAM(s, handle);
  *gpu = s->gpu;
  return hipSuccess;
}
PUBLIC int hipGetStreamDeviceId(void* handle) {
  const Stream* s = stream_of(handle);
  return s ? s->gpu : -1;
}
API(hipDeviceGetStreamPriorityRange, int* least, int* greatest) {
  BEGIN;
  *least = 1;
  *greatest = -1;
  return hipSuccess;
}
API(hipStreamIsCapturing, void*, int* capturing) {  // graphs are not there, so nothing ever does
  BEGIN;
  *capturing = 0;
  return hipSuccess;
}
API(hipLaunchHostFunc, void* handle, void (*f)(void*), void* data) {
  BEGIN;
  FIND_STREAM(s, handle);
  queue_on(*s, [=] { f(data); });
  return hipSuccess;
}
API(hipStreamAddCallback, void* handle, void (*f)(void*, Error, void*), void* data, u32) {
  BEGIN;
  FIND_STREAM(s, handle);
  queue_on(*s, [=] { f(handle, lasting(), data); });
  return hipSuccess;
}

// ---- events ----
struct Event {
  u32 flags;
  Point point;   // where it was recorded last
  u64 time_ns;   // when that point was reached
  u32 pending;   // recordings under way
  bool destroyed;
};
// Recordings on one stream are reached in order, so the last to be reached is the one that counts.
static void reach(Event* e) {
  Locked locked(lock);
  e->pending--;
  e->time_ns = now_ns();
  if (e->destroyed && !e->pending) free(e);
}
API(hipEventCreateWithFlags, Event** to, u32 flags) {
  BEGIN;
  if (!to) return fail(hipErrorInvalidValue);
  *to = (Event*)calloc(1, sizeof(Event));
  (*to)->flags = flags;
  return hipSuccess;
}
API(hipEventCreate, Event** to) {
  BEGIN;
  if (!to) return fail(hipErrorInvalidValue);
  *to = (Event*)calloc(1, sizeof(Event));
  return hipSuccess;
}
API(hipEventDestroy, Event* e) {
  BEGIN;
  if (!e) return fail(hipErrorInvalidHandle);
  Locked locked(lock);
  e->destroyed = true;
  if (!e->pending) free(e);
  return hipSuccess;
}
API(hipEventRecord, Event* e, void* handle) {
  BEGIN;
  if (!e) return fail(hipErrorInvalidHandle);
  FIND_STREAM(s, handle);
  {
    Locked locked(lock);
    e->pending++;
  }
  const Point p = queue_on(*s, [=] { reach(e); });
  Locked locked(lock);
  e->point = p;
  return hipSuccess;
}
API(hipEventSynchronize, Event* e) {
  BEGIN;
  if (!e) return fail(hipErrorInvalidHandle);
  Locked locked(lock);
  wait_locked(e->point);
  return fail(lasting());
}
API(hipEventQuery, Event* e) {
  BEGIN;
  if (!e) return fail(hipErrorInvalidHandle);
  Locked locked(lock);
  return fail(is_done(e->point) ? lasting() : hipErrorNotReady);
}
API(hipEventElapsedTime, float* ms, Event* from, Event* to) {
  BEGIN;
  constexpr u32 NO_TIME = 2;
  if (!ms || !from || !to || !from->point.stream || !to->point.stream || (from->flags | to->flags) & NO_TIME)
    return fail(hipErrorInvalidHandle);
  Locked locked(lock);
  if (!is_done(from->point) || !is_done(to->point)) return hipErrorNotReady;
  *ms = (float)((double)(i64)(to->time_ns - from->time_ns) * 1e-6);
  return hipSuccess;
}
API(hipStreamWaitEvent, void* handle, Event* e, u32) {
  BEGIN;
  if (!e) return fail(hipErrorInvalidHandle);
  FIND_STREAM(s, handle);
  Point p;
  {
    Locked locked(lock);
    p = e->point;
  }
  if (p.stream) queue_on(*s, [] {}, &p);
  return hipSuccess;
}
