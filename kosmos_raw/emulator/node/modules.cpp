// Code objects and launches. Python reads and translates code objects (code_objects.py); here are the functions that it
// found, the checks that HIP makes before a launch, and the launch itself, on the emulator.
#include "node.h"

// ---- what Python says of a code object; code_objects.py mirrors these structs ----
// All but the first are hidden ones, which the runtime fills in.
enum ArgumentKind : u32 { GIVEN, BLOCK_COUNT, GROUP_SIZE, GRID_DIMS, DYNAMIC_LDS, ZERO };
struct Argument {
  u32 offset, bytes, kind, axis;
};
struct Function {
  const char* name;
  const EmulatorModule* translated;
  const Argument* arguments;
  u32 argument_count, params_bytes, lds_bytes, scratch_bytes, vector_registers, scalar_registers, max_threads;
};
struct CodeObject {
  const Function* functions;
  u32 count;
};
// Finds or makes the translation of a file (path) or of a code object in memory (image). 0, or a HIP error; says why itself.
using Loader = Error (*)(const char* path, const void* image, const CodeObject** to);
static Loader loader;
PUBLIC void kosmos_node_set_loader(Loader given) { loader = given; }

API(hipModuleLoad, const CodeObject** to, const char* path) {
  BEGIN;
  wait_if_loading_waits();
  return fail(to && path && loader ? loader(path, nullptr, to) : hipErrorInvalidValue);
}
API(hipModuleLoadData, const CodeObject** to, const void* image) {
  BEGIN;
  wait_if_loading_waits();
  return fail(to && image && loader ? loader(nullptr, image, to) : hipErrorInvalidValue);
}
API(hipModuleLoadDataEx, const CodeObject** to, const void* image, u32, void*, void*) {
  BEGIN;
  wait_if_loading_waits();
  return fail(to && image && loader ? loader(nullptr, image, to) : hipErrorInvalidValue);
}
API(hipModuleUnload, const CodeObject*) {  // translations are kept: the next load of the same code finds them
  BEGIN;
  for (int gpu = 0; gpu < gpu_count(); gpu++) wait_for_gpu(gpu);
  return hipSuccess;
}
API(hipModuleGetFunction, const Function** to, const CodeObject* module, const char* name) {
  BEGIN;
  if (!to || !module || !name) return fail(hipErrorInvalidValue);
  for (u32 i = 0; i < module->count; i++) {
    if (strcmp(module->functions[i].name, name)) continue;
    *to = &module->functions[i];
    return hipSuccess;
  }
  return fail(hipErrorNotFound);
}
API(hipModuleGetGlobal, void**, size_t*, const CodeObject*, const char* name) {
  BEGIN;
  fprintf(stderr, "emulated node: variables of a module are not there (%s)\n", name);
  return fail(hipErrorNotFound);
}

// ---- what a function takes of a compute unit ----
static u32 resident_per_unit(const Function& f, u32 threads, u64 dynamic_lds) {
  const u32 waves = (threads + WAVE - 1) / WAVE;
  const u64 lds = f.lds_bytes + dynamic_lds, registers = (larger(f.vector_registers, 8u) + 7) & ~7u;
  const u64 by_threads = 2048 / (waves * WAVE), by_lds = lds ? LDS_BYTES / lds : 32;
  const u64 by_registers = 4 * smaller(512 / registers, (u64)8) / waves;  // four SIMDs with 512 registers a lane
  return (u32)smaller(smaller(by_threads, by_lds), by_registers);
}
static u32 units_of(const Stream& s) {
  if (!s.mask_words) return COMPUTE_UNITS;
  u32 units = 0;
  for (u32 i = 0; i < s.mask_words; i++) units += __builtin_popcount(s.mask[i]);
  return units;
}
API(hipFuncGetAttribute, int* value, int which, const Function* f) {
  BEGIN;
  if (!value || !f) return fail(hipErrorInvalidValue);
  switch (which) {
    case HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = f->max_threads; break;
    case HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = f->lds_bytes; break;
    case HIP_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: *value = f->scratch_bytes; break;
    case HIP_FUNC_ATTRIBUTE_NUM_REGS: *value = f->vector_registers; break;
    case HIP_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = LDS_BYTES - f->lds_bytes; break;
    default: *value = 0;
  }
  return hipSuccess;
}
API(hipFuncSetAttribute, const void*, int, int) {  // LDS needs no permission on AMD
  BEGIN;
  return hipSuccess;
}
API(hipModuleOccupancyMaxActiveBlocksPerMultiprocessor, int* count, const Function* f, int threads, size_t dynamic_lds) {
  BEGIN;
  if (!count || !f || threads < 1) return fail(hipErrorInvalidValue);
  *count = (int)resident_per_unit(*f, threads, dynamic_lds);
  return hipSuccess;
}

// ---- machines: one for each number of workgroups that may be resident, none for "all" ----
struct Machine {
  u32 resident;
  EmulatorMachine* emulator;
};
static EmulatorMachine* machine_for(u32 resident) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  static Array<Machine> machines;
  Locked locked(lock);
  for (const Machine& m : machines)
    if (m.resident == resident) return m.emulator;
  EmulatorOptions o = {};
  o.limit_seconds = options.limit_seconds;
  o.seed = options.seed;
  o.preempt_one_in = options.preempt_one_in;
  o.caches = options.caches;
  o.late = options.late;
  o.threads = options.threads;
  o.resident_wgs = resident;
  machines.add({resident, emulator_create(&o)});
  return machines[machines.count - 1].emulator;
}

// ---- launching ----
struct Shape {
  u32 grid[3], block[3], dynamic_lds;
  u64 groups() const { return (u64)grid[0] * grid[1] * grid[2]; }
  u64 threads() const { return (u64)block[0] * block[1] * block[2]; }
};

static u64 filled_in(const Argument& a, const Shape& s) {
  const u32 *grid = s.grid, *block = s.block;
  switch (a.kind) {
    case BLOCK_COUNT: return grid[a.axis];
    case GROUP_SIZE: return block[a.axis];
    case GRID_DIMS: return grid[2] > 1 || block[2] > 1 ? 3 : grid[1] > 1 || block[1] > 1 ? 2 : 1;
    case DYNAMIC_LDS: return s.dynamic_lds;
    default: return 0;
  }
}
// `extra`: pairs of a key and a value, ended by the key 3; 1 is followed by the arguments, 2 by a pointer to their size.
static Error copy_packed(const Function& f, void** extra, u8* to) {
  void* from = nullptr;
  u64 bytes = 0, wanted = 0;
  for (; (u64)*extra != 3; extra += 2) {
    if ((u64)*extra == 1) from = extra[1];
    else if ((u64)*extra == 2) bytes = *(size_t*)extra[1];
    else return hipErrorInvalidValue;
  }
  for (u32 i = 0; i < f.argument_count; i++)
    if (f.arguments[i].kind == GIVEN) wanted = larger(wanted, (u64)f.arguments[i].offset + f.arguments[i].bytes);
  if (from && bytes >= wanted && bytes <= f.params_bytes) {
    memcpy(to, from, bytes);
    return hipSuccess;
  }
  fprintf(stderr, "emulated node: %s takes %llu bytes of arguments, got %llu\n", f.name, wanted, bytes);
  return hipErrorInvalidValue;
}
static Error copy_arguments(const Function& f, const Shape& shape, void** params, void** extra, u8* to) {
  if (extra)
    if (const Error e = copy_packed(f, extra, to)) return e;
  for (u32 i = 0, next = 0; i < f.argument_count; i++) {
    const Argument& a = f.arguments[i];
    if (a.kind == GIVEN) {
      if (params) memcpy(to + a.offset, params[next++], a.bytes);  // nobody knows how large the caller's value is
      continue;
    }
    const u64 value = filled_in(a, shape);
    memcpy(to + a.offset, &value, smaller(a.bytes, 8u));
  }
  return hipSuccess;
}

static Error check_shape(const Function* f, const Shape& s, void** params, void** extra) {
  if (!f) return hipErrorInvalidHandle;
  if (!s.groups() || !s.threads() || (params && extra)) return hipErrorInvalidValue;
  if (s.threads() > 1024 || s.threads() > f->max_threads) return hipErrorLaunchFailure;
  if ((u64)f->lds_bytes + s.dynamic_lds > LDS_BYTES) return hipErrorInvalidValue;
  if (has_fault(LAUNCH_FAILS) && strncmp(f->name, "cupy_", 5)) return hipErrorLaunchFailure;
  return lasting_error;
}

// A launch that failed fails for good: every wait reports it from now on, as after a fault on a real GPU.
static void report_failure(const Function& f, int gpu, const EmulatorReport& r) {
  const bool fault = r.status == EMULATOR_FAULT;
  const char* what = fault ? "faulted" : r.status == EMULATOR_TIME_LIMIT ? "does not end" : "cannot run";
  fprintf(stderr, "emulated node: %s on GPU %d %s\n%s", f.name, gpu, what, r.message);
  __atomic_store_n(&lasting_error, fault ? hipErrorIllegalAddress : hipErrorLaunchFailure, __ATOMIC_RELAXED);
}
static void run(const Function& f, const Shape& shape, int gpu, u32 resident, u8* params) {
  EmulatorLaunch l = {};
  l.module = f.translated;
  l.kernel = f.name;
  l.params = params;
  l.params_bytes = f.params_bytes;
  l.rank = (u32)gpu;
  l.dynamic_lds_bytes = shape.dynamic_lds;
  memcpy(l.grid, shape.grid, sizeof l.grid);
  memcpy(l.block, shape.block, sizeof l.block);
  EmulatorRange barred[64];
  l.barred = barred;
  l.barred_count = barred_memory(gpu, barred, 64);
  EmulatorTicket* ticket = nullptr;
  EmulatorReport* report = (EmulatorReport*)calloc(1, sizeof *report);
  report->status = emulator_launch(machine_for(shape.groups() <= resident ? 0 : resident), &l, 1, &ticket);
  if (ticket) emulator_wait(ticket, report);
  if (report->status) report_failure(f, gpu, *report);
  if (options.trace) {
    const u64 instructions = report->instructions;
    fprintf(stderr, "emulated node: %s ran %llu wave instructions in %.3f s\n", f.name, instructions, report->seconds);
  }
  free(report);
  free(params);
}

static Error launch(const Function* f, const Shape& shape, void* stream, void** params, void** extra, bool cooperative) {
  Stream* s = stream_of(stream);
  if (!s) return hipErrorInvalidHandle;
  if (const Error e = check_shape(f, shape, params, extra)) return e;
  const u64 fit = (u64)units_of(*s) * resident_per_unit(*f, (u32)shape.threads(), shape.dynamic_lds);
  if (!fit) return hipErrorLaunchFailure;
  if (cooperative && shape.groups() > fit) return hipErrorCooperativeLaunchTooLarge;
  // Who counts on residency has one workgroup a compute unit; more at a time would only cost memory.
  const u32 resident = (u32)smaller(fit, (u64)(options.resident_wgs ? options.resident_wgs : COMPUTE_UNITS));
  u8* copied = (u8*)calloc(1, f->params_bytes + 8);
  if (const Error e = copy_arguments(*f, shape, params, extra, copied)) {
    free(copied);
    return e;
  }
  const int gpu = s->gpu;
  queue_on(*s, [=] { run(*f, shape, gpu, resident, copied); });
  return hipSuccess;
}
API(hipModuleLaunchKernel, const Function* f, u32 gx, u32 gy, u32 gz, u32 bx, u32 by, u32 bz, u32 lds, void* stream,
    void** params, void** extra) {
  BEGIN;
  return fail(launch(f, {{gx, gy, gz}, {bx, by, bz}, lds}, stream, params, extra, false));
}
API(hipModuleLaunchCooperativeKernel, const Function* f, u32 gx, u32 gy, u32 gz, u32 bx, u32 by, u32 bz, u32 lds,
    void* stream, void** params) {
  BEGIN;
  return fail(launch(f, {{gx, gy, gz}, {bx, by, bz}, lds}, stream, params, nullptr, true));
}
