// What a GPU says of itself: properties, attributes, addresses, versions, and who can reach whom. All GPUs are MI355X.
#include "node.h"

constexpr int VERSION = 70051831;  // HIP 7.0.51831, of ROCm 7.0.2
static const char NAME[] = "AMD Instinct MI355X", ARCH[] = "gfx950:sramecc+:xnack-";
static __thread int current;

// ---- which GPUs are visible ----
struct Visible {
  int count, physical[MAX_GPUS];
  // Keeps the GPUs that a mask names, by their place in what other masks left. The first bad entry ends the list.
  void apply(const char* mask) {
    if (!mask) return;
    Visible left = {};
    for (char* end; *mask; mask = *end == ',' ? end + 1 : end) {
      const long i = strtol(mask, &end, 10);
      if (end == mask || i < 0 || i >= count || left.count == MAX_GPUS) break;
      left.physical[left.count++] = physical[i];
    }
    *this = left;
  }
};
static Visible read_masks() {
  Visible v = {(int)smaller(options.gpus, (u32)MAX_GPUS), {}};
  for (int i = 0; i < v.count; i++) v.physical[i] = i;
  v.apply(getenv("ROCR_VISIBLE_DEVICES"));
  const char* hip = getenv("HIP_VISIBLE_DEVICES");
  v.apply(hip ? hip : getenv("CUDA_VISIBLE_DEVICES"));
  return v;
}
static const Visible& visible() {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  static Visible v;
  pthread_once(&once, [] { v = read_masks(); });
  return v;
}
int gpu_count() { return visible().count; }
int current_gpu() { return current; }
int physical_gpu(int ordinal) { return visible().physical[ordinal]; }
int ordinal_of(int physical) {
  for (int i = 0; i < gpu_count(); i++)
    if (physical_gpu(i) == physical) return i;
  return -1;
}
static bool exists(int ordinal) { return ordinal >= 0 && ordinal < gpu_count(); }
static int bus_of(int ordinal) { return 5 + 16 * physical_gpu(ordinal); }

API(hipInit, u32) {
  BEGIN;
  return hipSuccess;
}
API(hipGetDeviceCount, int* count) {
  BEGIN;
  if (!count) return fail(hipErrorInvalidValue);
  *count = gpu_count();
  return fail(*count ? hipSuccess : hipErrorNoDevice);
}
API(hipSetDevice, int gpu) {
  BEGIN;
  if (!exists(gpu)) return fail(hipErrorInvalidDevice);
  current = gpu;
  return hipSuccess;
}
API(hipGetDevice, int* gpu) {
  BEGIN;
  if (!gpu) return fail(hipErrorInvalidValue);
  *gpu = current;
  return hipSuccess;
}
API(hipDeviceGet, int* handle, int gpu) {
  BEGIN;
  if (!exists(gpu)) return fail(hipErrorInvalidDevice);
  *handle = gpu;
  return hipSuccess;
}

// ---- names, sizes, versions ----
API(hipDeviceGetName, char* to, int room, int) {
  BEGIN;
  snprintf(to, room, "%s", NAME);
  return hipSuccess;
}
API(hipDeviceTotalMem, size_t* bytes, int) {
  BEGIN;
  *bytes = HBM_BYTES;
  return hipSuccess;
}
API(hipDriverGetVersion, int* version) {
  BEGIN;
  *version = VERSION;
  return hipSuccess;
}
API(hipRuntimeGetVersion, int* version) {
  BEGIN;
  *version = VERSION;
  return hipSuccess;
}
API(hipDeviceGetPCIBusId, char* to, int room, int gpu) {
  BEGIN;
  if (!exists(gpu)) return fail(hipErrorInvalidDevice);
  snprintf(to, room, "0000:%02x:00.0", bus_of(gpu));
  return hipSuccess;
}
API(hipDeviceGetByPCIBusId, int* gpu, const char* address) {
  BEGIN;
  unsigned bus = 0;
  if (sscanf(address, "0000:%x:", &bus) != 1) return fail(hipErrorInvalidValue);
  for (int i = 0; i < gpu_count(); i++) {
    if (bus_of(i) != (int)bus) continue;
    *gpu = i;
    return hipSuccess;
  }
  return fail(hipErrorInvalidDevice);
}
API(hipDeviceGetLimit, size_t* value, int which) {
  BEGIN;
  const bool stack = which == 0, heap = which == 2;
  if (!stack && !heap) return fail(hipErrorUnsupportedLimit);
  *value = stack ? 1024 : 4 << 20;
  return hipSuccess;
}

// ---- the properties struct: 1472 bytes, HIP's layout R0600 ----
struct Field {
  u32 offset, bytes;
  u64 value;
  const char* name;  // HIP's; tests compare with what hip-python reads
};
constexpr u64 MANY = 0x7fffffff;
static const Field FIELDS[] = {
    {288, 8, HBM_BYTES, "totalGlobalMem"},
    {296, 8, LDS_BYTES, "sharedMemPerBlock"},
    {304, 4, 65536, "regsPerBlock"},
    {308, 4, WAVE, "warpSize"},
    {312, 8, MANY, "memPitch"},
    {320, 4, 1024, "maxThreadsPerBlock"},
    {324, 4, 1024, "maxThreadsDim[0]"},
    {328, 4, 1024, "maxThreadsDim[1]"},
    {332, 4, 1024, "maxThreadsDim[2]"},
    {336, 4, MANY, "maxGridSize[0]"},
    {340, 4, 65536, "maxGridSize[1]"},
    {344, 4, 65536, "maxGridSize[2]"},
    {348, 4, 2400000, "clockRate"},
    {352, 8, MANY, "totalConstMem"},
    {360, 4, 9, "major"},
    {364, 4, 5, "minor"},
    {368, 8, 256, "textureAlignment"},
    {376, 8, 256, "texturePitchAlignment"},
    {388, 4, COMPUTE_UNITS, "multiProcessorCount"},
    {400, 4, 1, "canMapHostMemory"},
    {576, 4, 1, "concurrentKernels"},
    {580, 4, 1, "ECCEnabled"},
    {600, 4, 8, "asyncEngineCount"},
    {604, 4, 1, "unifiedAddressing"},
    {608, 4, 2000000, "memoryClockRate"},
    {612, 4, 8192, "memoryBusWidth"},
    {616, 4, 4 << 20, "l2CacheSize"},
    {624, 4, 2048, "maxThreadsPerMultiProcessor"},
    {628, 4, 1, "streamPrioritiesSupported"},
    {640, 8, LDS_BYTES, "sharedMemPerMultiprocessor"},
    {648, 4, 65536, "regsPerMultiprocessor"},
    {652, 4, 1, "managedMemory"},
    {688, 4, 1, "cooperativeLaunch"},
    {696, 8, LDS_BYTES, "sharedMemPerBlockOptin"},
    {712, 4, 2, "maxBlocksPerMultiProcessor"},
    {1416, 8, LDS_BYTES, "maxSharedMemoryPerMultiProcessor"},
    {1424, 4, 100000, "clockInstructionRate"},
    {1428, 4, 0x3ffff, "arch"},
    {1464, 4, 1, "isLargeBar"},
};
API(hipGetDevicePropertiesR0600, u8* to, int gpu) {
  BEGIN;
  if (!exists(gpu)) return fail(hipErrorInvalidDevice);
  if (!to) return fail(hipErrorInvalidValue);
  memset(to, 0, 1472);
  memcpy(to, NAME, sizeof NAME);
  snprintf((char*)to + 256, 16, "emulated%02d", physical_gpu(gpu));  // uuid
  memcpy(to + 1160, ARCH, sizeof ARCH);
  for (const Field& f : FIELDS) memcpy(to + f.offset, &f.value, f.bytes);
  write_as(to + 584, bus_of(gpu));
  return hipSuccess;
}

static int attribute(int which, int gpu) {
  switch (which) {
    case hipDeviceAttributeWarpSize: return WAVE;
    case hipDeviceAttributeMultiprocessorCount: return COMPUTE_UNITS;
    case hipDeviceAttributeComputeCapabilityMajor: return 9;
    case hipDeviceAttributeComputeCapabilityMinor: return 5;
    case hipDeviceAttributeMaxSharedMemoryPerBlock:
    case hipDeviceAttributeSharedMemPerBlockOptin:
    case hipDeviceAttributeMaxSharedMemoryPerMultiprocessor: return LDS_BYTES;
    case hipDeviceAttributeMaxThreadsPerBlock:
    case hipDeviceAttributeMaxBlockDimX:
    case hipDeviceAttributeMaxBlockDimY:
    case hipDeviceAttributeMaxBlockDimZ: return 1024;
    case hipDeviceAttributeMaxGridDimX: return MANY;
    case hipDeviceAttributeMaxGridDimY:
    case hipDeviceAttributeMaxGridDimZ:
    case hipDeviceAttributeMaxRegistersPerBlock: return 65536;
    case hipDeviceAttributeClockRate: return 2400000;
    case hipDeviceAttributeWallClockRate: return 100000;
    case hipDeviceAttributeMaxThreadsPerMultiProcessor: return 2048;
    case hipDeviceAttributePciBusId: return bus_of(gpu);
    case hipDeviceAttributeConcurrentKernels:
    case hipDeviceAttributeUnifiedAddressing:
    case hipDeviceAttributeCooperativeLaunch:
    case hipDeviceAttributeIsLargeBar:
    case hipDeviceAttributeManagedMemory: return 1;
    default: return 0;
  }
}
API(hipDeviceGetAttribute, int* value, int which, int gpu) {
  BEGIN;
  if (!value) return fail(hipErrorInvalidValue);
  if (!exists(gpu)) return fail(hipErrorInvalidDevice);
  *value = attribute(which, gpu);
  return hipSuccess;
}

// ---- peers ----
static u32 reachable[MAX_GPUS];  // bit mask of GPUs
bool can_reach(int from, int to) { return from == to || __atomic_load_n(&reachable[from], __ATOMIC_RELAXED) >> to & 1; }
const char* why_not_reached(int from, int to) {
  static char texts[MAX_GPUS][MAX_GPUS + 1][80];
  char* text = texts[from][to + 1];
  if (to < 0) snprintf(text, sizeof texts[0][0], "GPU %d reads or writes memory of a GPU that is hidden from it, at", from);
  else snprintf(text, sizeof texts[0][0], "GPU %d has no peer access to GPU %d, whose memory is at", from, to);
  return text;
}
API(hipDeviceCanAccessPeer, int* can, int from, int to) {
  BEGIN;
  if (!exists(from) || !exists(to)) return fail(hipErrorInvalidDevice);
  *can = from != to && !has_fault(NO_PEER);
  return hipSuccess;
}
API(hipDeviceEnablePeerAccess, int to, u32 flags) {
  BEGIN;
  if (flags) return fail(hipErrorInvalidValue);
  if (!exists(to) || to == current || has_fault(NO_PEER)) return fail(hipErrorInvalidDevice);
  const u32 before = __atomic_fetch_or(&reachable[current], 1u << to, __ATOMIC_RELAXED);
  return fail(before >> to & 1 ? hipErrorPeerAccessAlreadyEnabled : hipSuccess);
}
API(hipDeviceDisablePeerAccess, int to) {
  BEGIN;
  if (!exists(to)) return fail(hipErrorInvalidDevice);
  const u32 before = __atomic_fetch_and(&reachable[current], ~(1u << to), __ATOMIC_RELAXED);
  return fail(before >> to & 1 ? hipSuccess : hipErrorPeerAccessNotEnabled);
}
