// Which functions of the interface were called, which of them are stubs, and how calls fail.
#include "node.h"

NodeOptions options;
bool forked;
static __thread Error last_error;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Called* all_called;

// ---- calls ----
void count_call(Called& called) {
  if (__atomic_fetch_add(&called.times, 1, __ATOMIC_RELAXED) == 0) {
    Locked locked(lock);
    called.next = all_called;
    all_called = &called;
  }
  if (!options.trace) return;
  if (called.library) fprintf(stderr, "emulated node: %s has no %s\n", called.library, called.name);
  else fprintf(stderr, "emulated node: %s\n", called.name);
}

static Called* stub_called(const char* library, const char* name) {
  Locked locked(lock);
  for (Called* c = all_called; c; c = c->next)
    if (c->library && !strcmp(c->library, library) && !strcmp(c->name, name)) return c;
  return nullptr;
}
// Every stub calls this: what is not there fails by its name, and sets the last error, for some callers look at nothing
// else.
PUBLIC int kosmos_node_stub(const char* library, const char* name, int error) {
  Called* called = stub_called(library, name);
  if (!called) {
    called = (Called*)calloc(1, sizeof *called);
    called->library = library;
    called->name = name;
    fprintf(stderr, "emulated node: %s has no %s\n", library, name);
  }
  count_call(*called);
  fail(hipErrorNotSupported);
  return error;
}

// One line a function: name and calls, and the library before the name of a stub. Returns the bytes that it takes.
PUBLIC u64 kosmos_node_calls(char* to, u64 room) {
  Locked locked(lock);
  u64 used = 0;
  for (const Called* c = all_called; c; c = c->next) {
    const bool fits = used < room;
    used += snprintf(fits ? to + used : nullptr, fits ? room - used : 0, "%s%s%s %llu\n", c->library ? c->library : "",
                     c->library ? ":" : "", c->name, c->times);
  }
  return used;
}

// ---- errors ----
Error fail(Error e) {
  if (e != hipSuccess && e != hipErrorNotReady) last_error = e;
  return e;
}

static const char* name_of(Error e) {
  for (const ErrorName& x : ERROR_NAMES)
    if (x.code == e) return x.name;
  return "hipErrorUnknown";
}
PUBLIC const char* hipGetErrorName(Error e) { return name_of(e); }
PUBLIC const char* hipGetErrorString(Error e) { return name_of(e); }
API(hipDrvGetErrorName, Error e, const char** to) {
  BEGIN;
  *to = name_of(e);
  return hipSuccess;
}
API(hipDrvGetErrorString, Error e, const char** to) {
  BEGIN;
  *to = name_of(e);
  return hipSuccess;
}
API(hipGetLastError) {
  const Error e = last_error;
  last_error = hipSuccess;
  return e;
}
API(hipPeekAtLastError) { return last_error; }

// ---- forks ----
void watch_for_forks() {
  static bool watching;
  if (!__atomic_exchange_n(&watching, true, __ATOMIC_RELAXED)) pthread_atfork(nullptr, nullptr, [] { forked = true; });
}

PUBLIC void kosmos_node_configure(const NodeOptions* given) { options = *given; }

// ---- what CuPy's own extension modules register when they are loaded: accepted, never run ----
PUBLIC void** __hipRegisterFatBinary(const void*) {
  static void* handle;
  return &handle;
}
PUBLIC void __hipUnregisterFatBinary(void*) {}
PUBLIC void __hipRegisterFunction(void*, const void*, char*, const char*, u32, void*, void*, void*, void*, int*) {}
PUBLIC void __hipRegisterVar(void*, void*, char*, char*, int, u64, int, int) {}
