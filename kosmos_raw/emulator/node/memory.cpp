// Memory: of the GPUs, pinned, opened from other processes; copies and fills.
//
// The HBM of all GPUs is one sparse file in memory, which other processes can map through /proc: an IPC handle says which
// process, which file, which part. Outside allocations nothing is mapped, so that what runs past an end faults.
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "node.h"

constexpr u64 PAGE = 4096, LARGE = 2 << 20;
constexpr u64 EXPORTS = 4096;  // how many allocations may have been exported at once
constexpr u8 FRESH = 0xa5;     // what new memory holds: nothing is cleared for anybody

struct Block {       // one allocation of a GPU
  u64 begin, bytes;  // offset in the file
  u32 flags, exported;  // exported: its entry in the table of exports, plus one
  u64 end() const { return begin + (bytes + PAGE - 1) / PAGE * PAGE + PAGE; }  // a page behind it stays unmapped
};
struct Range {       // pinned, or opened from another process
  u8* base;
  u64 bytes;
  int gpu;           // that was current then
  int owner;         // opened: the GPU whose memory it is; -1: hidden here
  u32 flags;         // pinned
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int file = -1;
static u8* hbm;                 // where the file is mapped
static u64* exports;            // behind the HBM in the file: which exported allocations still live
static u64 serial;              // of the last export
static Array<Block> blocks;     // by address
static Array<Range> pinned, opened;

static u64 whole_pages(u64 bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

static void map_hbm() {
  if (hbm) return;
  watch_for_forks();
  const u64 bytes = MAX_GPUS * HBM_BYTES, table = EXPORTS * sizeof(u64);
  file = memfd_create("kosmos-emulated-hbm", MFD_CLOEXEC);
  void* base = MAP_FAILED;
  if (file >= 0 && !ftruncate(file, bytes + table))
    base = mmap(nullptr, bytes + table, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
  if (base == MAP_FAILED || mprotect((u8*)base + bytes, table, PROT_READ | PROT_WRITE)) {
    perror("emulated node: no memory for the GPUs");
    abort();
  }
  hbm = (u8*)base;
  exports = (u64*)(hbm + bytes);
}

// ---- finding ----
static int block_at(u64 offset) {  // index, or -1
  for (u32 i = 0; i < blocks.count; i++)
    if (offset >= blocks[i].begin && offset < blocks[i].begin + blocks[i].bytes) return (int)i;
  return -1;
}
static int range_at(const Array<Range>& ranges, const u8* p) {
  for (u32 i = 0; i < ranges.count; i++)
    if (p >= ranges[i].base && p < ranges[i].base + ranges[i].bytes) return (int)i;
  return -1;
}
static bool is_in_hbm(const u8* p) { return hbm && p >= hbm && p < hbm + MAX_GPUS * HBM_BYTES; }

Found find_allocation(const void* address) {
  const u8* p = (const u8*)address;
  Locked locked(lock);
  if (is_in_hbm(p)) {
    const int i = block_at(p - hbm);
    if (i < 0) return {};
    const Block& b = blocks[i];
    return {DEVICE_MEMORY, (int)(b.begin / HBM_BYTES), hbm + b.begin, b.bytes, (u64)(p - hbm) - b.begin, b.flags};
  }
  int i = range_at(pinned, p);
  const MemoryKind kind = i >= 0 ? PINNED : PEER_MEMORY;
  const Array<Range>& ranges = i >= 0 ? pinned : opened;
  if (i < 0) i = range_at(opened, p);
  if (i < 0) return {};
  return {kind, ranges[i].gpu, ranges[i].base, ranges[i].bytes, (u64)(p - ranges[i].base), ranges[i].flags};
}

u32 barred_memory(int gpu, EmulatorRange* to, u32 room) {
  Locked locked(lock);
  u32 count = 0, holders = 0;  // holders: GPUs with allocations
  for (const Block& b : blocks) holders |= 1u << (b.begin / HBM_BYTES);
  for (int other = 0; other < MAX_GPUS && count < room; other++)
    if (holders >> other & 1 && !can_reach(gpu, other))
      to[count++] = {(u64)hbm + other * HBM_BYTES, (u64)hbm + (other + 1) * HBM_BYTES, why_not_reached(gpu, other)};
  for (const Range& r : opened) {
    const bool lazily = r.gpu == gpu && !has_fault(IPC_NOT_LAZY);  // the one flag that opening takes asks for it
    if (count < room && !lazily && (r.owner < 0 || !can_reach(gpu, r.owner)))
      to[count++] = {(u64)r.base, (u64)r.base + r.bytes, why_not_reached(gpu, r.owner)};
  }
  return count;
}

// ---- allocating ----
static Error allocate(void** to, u64 bytes, u32 flags) {
  if (!to) return hipErrorInvalidValue;
  *to = nullptr;
  if (!bytes) return hipSuccess;
  if (has_fault(NO_MEMORY)) return hipErrorOutOfMemory;
  wait_if_loading_waits();
  Locked locked(lock);
  map_hbm();
  const u64 align = bytes >= LARGE ? LARGE : PAGE, end = (current_gpu() + 1) * HBM_BYTES;
  Block b = {current_gpu() * HBM_BYTES, bytes, flags, 0};
  u32 at = 0;  // first fit between the blocks
  for (; at < blocks.count; at++) {
    if (blocks[at].end() <= b.begin) continue;
    if (b.end() <= blocks[at].begin) break;
    b.begin = (blocks[at].end() + align - 1) / align * align;
  }
  if (b.end() > end || mprotect(hbm + b.begin, whole_pages(bytes), PROT_READ | PROT_WRITE)) return hipErrorOutOfMemory;
  if (bytes <= 64 << 20) memset(hbm + b.begin, FRESH, whole_pages(bytes));
  blocks.insert(at, b);
  *to = hbm + b.begin;
  return hipSuccess;
}
API(hipMalloc, void** to, size_t bytes) {
  BEGIN;
  return fail(allocate(to, bytes, 0));
}
API(hipExtMallocWithFlags, void** to, size_t bytes, u32 flags) {
  BEGIN;
  enum { SIGNAL = 2, CONTIGUOUS = 4 };
  if (flags > CONTIGUOUS || (flags == SIGNAL && bytes != 8)) return fail(hipErrorInvalidValue);
  return fail(allocate(to, bytes, flags));
}
API(hipMallocManaged, void** to, size_t bytes, u32 flags) {
  BEGIN;
  return fail(allocate(to, bytes, flags));
}
API(hipFree, void* p) {
  BEGIN;
  if (!p) return hipSuccess;
  const Found f = find_allocation(p);
  if (f.kind != DEVICE_MEMORY || f.base != p) return fail(hipErrorInvalidValue);
  wait_for_gpu(f.gpu);
  Locked locked(lock);
  const int i = block_at((u8*)p - hbm);
  if (i < 0) return fail(hipErrorInvalidValue);
  if (blocks[i].exported) exports[blocks[i].exported - 1] = 0;
  madvise(p, whole_pages(f.bytes), MADV_REMOVE);
  mprotect(p, whole_pages(f.bytes), PROT_NONE);
  blocks.remove(i);
  return hipSuccess;
}
API(hipMemGetInfo, size_t* free_bytes, size_t* total) {
  BEGIN;
  Locked locked(lock);
  u64 used = 0;
  for (const Block& b : blocks)
    if (b.begin / HBM_BYTES == (u64)current_gpu()) used += b.end() - b.begin;
  if (free_bytes) *free_bytes = has_fault(NO_MEMORY) ? 0 : HBM_BYTES - used;
  if (total) *total = HBM_BYTES;
  return hipSuccess;
}

API(hipHostMalloc, void** to, size_t bytes, u32 flags) {
  BEGIN;
  if (!to) return fail(hipErrorInvalidValue);
  const u64 room = whole_pages(bytes ? bytes : 1);
  void* p = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return fail(hipErrorOutOfMemory);
  watch_for_forks();
  Locked locked(lock);
  pinned.add({(u8*)p, room, current_gpu(), -1, flags});
  *to = p;
  return hipSuccess;
}
API(hipHostFree, void* p) {
  BEGIN;
  if (!p) return hipSuccess;
  const Found f = find_allocation(p);
  if (f.kind != PINNED || f.base != p) return fail(hipErrorInvalidValue);
  wait_for_gpu(f.gpu);
  Locked locked(lock);
  const int i = range_at(pinned, (u8*)p);
  if (i < 0) return fail(hipErrorInvalidValue);
  munmap(p, pinned[i].bytes);
  pinned.remove(i);
  return hipSuccess;
}
API(hipHostGetFlags, u32* flags, void* p) {
  BEGIN;
  const Found f = find_allocation(p);
  if (!flags || f.kind != PINNED) return fail(hipErrorInvalidValue);
  *flags = f.flags;
  return hipSuccess;
}
API(hipHostGetDevicePointer, void** to, void* host, u32) {
  BEGIN;
  if (find_allocation(host).kind != PINNED) return fail(hipErrorInvalidValue);
  *to = host;
  return hipSuccess;
}

// ---- asking ----
struct PointerAttributes {
  int type, device;  // type: 0 unknown, 1 host, 2 device
  const void *device_pointer, *host_pointer;
  int managed;
  u32 flags;
};
API(hipPointerGetAttributes, PointerAttributes* to, const void* p) {
  BEGIN;
  if (!to || !p) return fail(hipErrorInvalidValue);
  const Found f = find_allocation(p);
  if (f.kind == PAGEABLE) *to = {0, -2, nullptr, nullptr, 0, 0};
  else if (f.kind == PINNED) *to = {1, f.gpu, p, p, 0, 0};
  else *to = {2, f.gpu, p, nullptr, 0, f.flags};
  return hipSuccess;
}
API(hipMemGetAddressRange, void** base, size_t* bytes, void* p) {
  BEGIN;
  const Found f = find_allocation(p);
  if (f.kind != DEVICE_MEMORY && f.kind != PEER_MEMORY) return fail(hipErrorInvalidDevicePointer);
  if (base) *base = f.base;
  if (bytes) *bytes = f.bytes;
  return hipSuccess;
}

// ---- copies and fills ----
static bool fits(const Found& f, u64 bytes) { return f.kind == PAGEABLE || f.offset + bytes <= f.bytes; }

static Error copy(void* to, const void* from, u64 bytes, void* stream, bool wait) {
  if (!bytes) return hipSuccess;
  if (!to || !from) return hipErrorInvalidValue;
  Stream* s = stream_of(stream);
  if (!s) return hipErrorContextIsDestroyed;
  const Found a = find_allocation(to), b = find_allocation(from);
  if (is_in_hbm((u8*)to) && a.kind == PAGEABLE) return hipErrorInvalidValue;
  if (is_in_hbm((const u8*)from) && b.kind == PAGEABLE) return hipErrorInvalidValue;
  if (!fits(a, bytes) || !fits(b, bytes)) return hipErrorInvalidValue;
  const Point end = queue_on(*s, [=] { memmove(to, from, bytes); });
  // The caller may free pageable memory as soon as the call returns.
  if (!wait && a.kind != PAGEABLE && b.kind != PAGEABLE) return hipSuccess;
  wait_for(end);
  return lasting_error;
}
API(hipMemcpy, void* to, const void* from, size_t bytes, int) {
  BEGIN;
  return fail(copy(to, from, bytes, nullptr, true));
}
API(hipMemcpyAsync, void* to, const void* from, size_t bytes, int, void* stream) {
  BEGIN;
  return fail(copy(to, from, bytes, stream, false));
}
API(hipMemcpyWithStream, void* to, const void* from, size_t bytes, int, void* stream) {
  BEGIN;
  return fail(copy(to, from, bytes, stream, true));
}
API(hipMemcpyHtoD, void* to, void* from, size_t bytes) {
  BEGIN;
  return fail(copy(to, from, bytes, nullptr, true));
}
API(hipMemcpyDtoH, void* to, void* from, size_t bytes) {
  BEGIN;
  return fail(copy(to, from, bytes, nullptr, true));
}
API(hipMemcpyPeer, void* to, int, const void* from, int, size_t bytes) {
  BEGIN;
  return fail(copy(to, from, bytes, nullptr, true));
}
API(hipMemcpyPeerAsync, void* to, int, const void* from, int, size_t bytes, void* stream) {
  BEGIN;
  return fail(copy(to, from, bytes, stream, false));
}
static Error fill(void* to, int value, u64 bytes, void* stream) {
  if (!bytes) return hipSuccess;
  const Found f = find_allocation(to);
  if (f.kind == PAGEABLE || !fits(f, bytes)) return hipErrorInvalidValue;
  Stream* s = stream_of(stream);
  if (!s) return hipErrorContextIsDestroyed;
  queue_on(*s, [=] { memset(to, value, bytes); });
  return hipSuccess;
}
API(hipMemset, void* to, int value, size_t bytes) {
  BEGIN;
  return fail(fill(to, value, bytes, nullptr));
}
API(hipMemsetAsync, void* to, int value, size_t bytes, void* stream) {
  BEGIN;
  return fail(fill(to, value, bytes, stream));
}
API(hipMemPrefetchAsync, const void*, size_t, int, void*) {
  BEGIN;
  return hipSuccess;
}
API(hipMemAdvise, const void*, size_t, int, int) {
  BEGIN;
  return hipSuccess;
}

// ---- memory of other processes ----
struct IpcHandle {
  u32 magic;
  int pid, file;
  u32 entry;  // in the owner's table of exports
  u64 serial, begin, bytes, offset;
  u32 gpu;    // physical
  u8 unused[12];
};
static_assert(sizeof(IpcHandle) == 64);
constexpr u32 MAGIC = 0x6b6f736d;

// An entry that tells importers whether the allocation still lives.
static Error export_block(Block& b) {
  if (b.exported) return hipSuccess;
  for (u32 i = 0; i < EXPORTS; i++) {
    if (exports[i]) continue;
    exports[i] = ++serial;
    b.exported = i + 1;
    return hipSuccess;
  }
  return hipErrorOutOfMemory;
}
API(hipIpcGetMemHandle, IpcHandle* handle, void* p) {
  BEGIN;
  if (!handle || !is_in_hbm((u8*)p) || has_fault(IPC_LEGACY)) return fail(hipErrorInvalidValue);
  Locked locked(lock);
  const u64 offset = (u8*)p - hbm;
  const int i = block_at(offset);
  if (i < 0) return fail(hipErrorInvalidValue);
  Block& b = blocks[i];
  if (const Error e = export_block(b)) return fail(e);
  const u32 entry = b.exported - 1;
  *handle = {MAGIC, getpid(), file, entry, exports[entry], b.begin, b.bytes, offset - b.begin,
             (u32)physical_gpu((int)(b.begin / HBM_BYTES)), {}};
  return hipSuccess;
}

static bool still_lives(const IpcHandle& h, int owners_file) {
  const u64 bytes = EXPORTS * sizeof(u64);
  void* table = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, owners_file, MAX_GPUS * HBM_BYTES);
  if (table == MAP_FAILED) return false;
  const bool lives = h.entry < EXPORTS && ((u64*)table)[h.entry] == h.serial;
  munmap(table, bytes);
  return lives;
}
static u8* map_part(const IpcHandle& h) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", h.pid, h.file);
  const int owners_file = open(path, O_RDWR | O_CLOEXEC);
  if (owners_file < 0) return nullptr;
  void* p = MAP_FAILED;
  const u64 bytes = whole_pages(h.bytes);
  if (still_lives(h, owners_file)) p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, owners_file, h.begin);
  close(owners_file);
  return p == MAP_FAILED ? nullptr : (u8*)p;
}
API(hipIpcOpenMemHandle, void** to, IpcHandle h, u32 flags) {
  BEGIN;
  constexpr u32 LAZY_PEER_ACCESS = 1;
  if (!to || flags != LAZY_PEER_ACCESS || h.magic != MAGIC) return fail(hipErrorInvalidValue);
  if (h.pid == getpid()) return fail(hipErrorInvalidContext);
  u8* p = has_fault(IPC_CLOSED) ? nullptr : map_part(h);
  if (!p) return fail(hipErrorInvalidDevicePointer);
  const u64 bytes = whole_pages(h.bytes);
  Locked locked(lock);
  if (has_fault(IPC_36) && opened.count >= 36)
    mmap(p, bytes, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  opened.add({p, bytes, current_gpu(), ordinal_of((int)h.gpu), 0});
  *to = p + (has_fault(IPC_KEEPS_OFFSET) ? h.offset : 0);
  return hipSuccess;
}
API(hipIpcCloseMemHandle, void* p) {
  BEGIN;
  wait_for_gpu(current_gpu());
  Locked locked(lock);
  const int i = range_at(opened, (u8*)p);
  if (i < 0) return fail(hipErrorInvalidValue);
  munmap(opened[i].base, opened[i].bytes);
  opened.remove(i);
  return hipSuccess;
}
