// One wave: its registers, where it stands, and what it asks of the runtime. The translated kernels and the runtime are
// two libraries; this header is all that they share, so a change here must raise ABI.
#pragma once
#include "types.h"

constexpr u32 ABI = 2;
constexpr int LANES = 64;
constexpr u32 LDS_LIMIT = 163840;

// Numbers of the special registers in the scalar register file.
enum ScalarRegister { VCC = 106, M0 = 124, EXEC = 126, SCALARS = 128 };

// Why a kernel function returned to the scheduler. Calling it again goes on where it stopped.
enum Stop : int { ENDED, YIELDED, SLEEPING, AT_BARRIER };

// How a lane's value lies in memory.
enum Format : u8 { DWORDS, UBYTE, SBYTE, USHORT, SSHORT, SHORT_LOW, SHORT_HIGH };

enum Action : u8 {
  LOAD, STORE, ATOMIC, LOAD_TO_LDS, SCALAR_LOAD, WRITE_BACK, LDS_LOAD, LDS_LOAD_TRANSPOSED, LDS_STORE, LDS_ATOMIC
};

enum AtomicOp : u8 {
  ATOMIC_ADD, ATOMIC_SUB, ATOMIC_UMAX, ATOMIC_UMIN, ATOMIC_SMAX, ATOMIC_SMIN, ATOMIC_AND, ATOMIC_OR, ATOMIC_XOR,
  ATOMIC_SWAP, ATOMIC_CMPSWAP, ATOMIC_ADD_F32, ATOMIC_PK_ADD_F16, ATOMIC_PK_ADD_BF16, ATOMIC_INC, ATOMIC_DEC,
  ATOMIC_ADD_F64, ATOMIC_MIN_F64, ATOMIC_MAX_F64
};

// Who must see a store, or whose stores a load must see: the sc0 and sc1 bits.
enum Coherence : u8 { WORKGROUP, DEVICE, SYSTEM };

// One memory instruction of one wave, held apart from the registers, so that it can take effect later than it was issued.
struct Access {
  Action action;
  Format format;
  AtomicOp op;
  Coherence scope;
  bool done;          // has taken effect; it still counts until the queue's older entries have, too
  bool returns;       // an atomic that gives the old value
  u8 dwords;          // registers a lane, for DWORDS
  u32 to;             // first register of the result, or the LDS address of a direct load
  u32 at;             // assembly line
  u64 exec;
  u64 address[LANES]; // memory address, or offset in LDS; 0 in a direct load: outside the buffer
  u32 data[6][LANES]; // what to store; for compare-and-swap also what to expect
};

struct Wave;

// What translated code cannot do alone.
struct Services {
  Access& (*begin)(Wave&, Action);
  void (*issue)(Wave&, Access&);
  void (*wait)(Wave&, u32 vector_memory, u32 lds_and_scalar);  // at most so many may be left
  void (*fence)(Wave&, bool write_back, bool invalidate, Coherence);
  __attribute__((noreturn)) void (*fault)(Wave&, const char* what, u64 value);
  u64 (*realtime)();  // 100 MHz
};

struct AccessQueue;
struct Workgroup;

struct Wave {
  alignas(64) u32 s[SCALARS];
  u32 (*v)[LANES];    // vector registers, then accumulation registers
  u8* lds;
  u32 lds_bytes;
  u32 at;             // assembly line of the last instruction that can wait, fault or yield
  int resume;         // where the kernel function goes on
  int budget;         // backward branches until it yields
  u32 scc;
  bool plain;         // memory takes effect at once and has no caches: the fast path
  u32 preempt_one_in; // 0: never
  Random random;
  const Services* services;
  u64 instructions, matrix_flops, masked_barriers;
  u64 launched_lanes; // EXEC at the start
  u8* scratch;
  u32 scratch_bytes;  // a lane
  u32 xcc, hardware_id, index;
  u32 mode;           // the register: of it, only what becomes of float32 subnormals has an effect
  u32 vector_registers;
  Workgroup* group;
  AccessQueue *memory_queue, *lds_queue;  // vmcnt, lgkmcnt
  alignas(64) u32 permuted[2][LANES];      // a DPP operand

  u64 s64(u32 r) const { return read_as<u64>(&s[r]); }
  void set_s64(u32 r, u64 x) { write_as(&s[r], x); }
  u64 exec() const { return s64(EXEC); }
  bool preempted() { return preempt_one_in && random.one_in(preempt_one_in); }
};

struct KernelInfo {
  const char* name;
  Stop (*run)(Wave&);
  u32 vector_registers, lds_bytes, scratch_bytes, params_bytes;
  u32 user_sgprs;          // the workgroup's ids follow
  u32 workgroup_id_dims;   // bit 0 x, 1 y, 2 z
  u32 max_block;
  u32 mode;                // MODE at the start
};

struct ModuleInfo {
  u32 abi;
  u32 count;
  const char* source;  // file name of the assembly text, for messages
  const KernelInfo* kernels;
};

// Runs f(lane) for each set bit.
template <class F> INLINE void each_active(u64 mask, F f) {
  if (mask == ~0ull) {
    for (int l = 0; l < LANES; l++) f(l);
    return;
  }
  for (; mask; mask &= mask - 1) f(lowest_bit(mask));
}
