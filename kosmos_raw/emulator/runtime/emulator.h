/* The emulator as a C library: plain structs, no globals, usable from several threads. A machine is some host threads that
   run the workgroups of any number of launches of any number of ranks. Launches are started and waited for apart, as on a
   stream. */
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct EmulatorMachine EmulatorMachine;
typedef struct EmulatorTicket EmulatorTicket;  /* one launch that has been started */
typedef struct ModuleInfo EmulatorModule;      /* what emulator_module() of a translated library returns */

enum { EMULATOR_NO_CACHES, EMULATOR_CACHES_PER_XCD, EMULATOR_CACHES_PER_WORKGROUP };
/* What takes effect only when a wait demands it. */
enum {
  EMULATOR_LATE_DIRECT = 1,
  EMULATOR_LATE_LDS = 2,
  EMULATOR_LATE_LOADS = 4,
  EMULATOR_LATE_STORES = 8,
  EMULATOR_LATE_BY_CHANCE = 16
};
/* What a direct load to LDS does for lanes outside the buffer: unknown on hardware. */
enum { EMULATOR_OUTSIDE_ZERO, EMULATOR_OUTSIDE_NOTHING, EMULATOR_OUTSIDE_GARBAGE };
/* Fences that do nothing, to see whether somebody notices. */
enum {
  EMULATOR_NO_DEVICE_WRITE_BACK = 1,
  EMULATOR_NO_DEVICE_INVALIDATE = 2,
  EMULATOR_NO_SYSTEM_WRITE_BACK = 4,
  EMULATOR_NO_SYSTEM_INVALIDATE = 8
};
enum { EMULATOR_OK, EMULATOR_TIME_LIMIT, EMULATOR_FAULT, EMULATOR_NO_KERNEL, EMULATOR_BAD_SHAPE, EMULATOR_NO_THREADS };

typedef struct EmulatorOptions {
  double limit_seconds;     /* of one launch */
  uint32_t seed;            /* of preemption, chance and the permutation of XCC ids; 0 leaves the ids in order */
  uint32_t preempt_one_in;  /* 0: waves run until they wait */
  uint32_t caches, late, outside;
  uint32_t threads;         /* at least 1 */
  uint32_t resident_wgs;    /* of one launch at a time; 0: all of them */
  uint32_t without_fences;
} EmulatorOptions;

typedef struct EmulatorRange {
  uint64_t begin, end;
  const char* why;          /* what a fault there says, before the address; must outlive the launch */
} EmulatorRange;

typedef struct EmulatorLaunch {
  const EmulatorModule* module;
  const char* kernel;
  const void* params;       /* copied */
  uint64_t params_bytes;
  uint32_t grid[3], block[3];
  uint32_t rank;
  uint32_t dynamic_lds_bytes;
  uint32_t barred_count;
  const EmulatorRange* barred;  /* memory that it must not touch: of GPUs without peer access. Copied; slow, when any */
} EmulatorLaunch;

typedef struct EmulatorReport {
  uint64_t instructions;    /* of waves */
  uint64_t matrix_flops;
  uint64_t masked_barriers; /* executed with lanes masked off: the sign of a loop that diverged round a barrier */
  double seconds;
  int32_t status;
  char message[8192];
} EmulatorReport;

EmulatorMachine* emulator_create(const EmulatorOptions* options);
/* Memory that caches may hold old contents of: what it held when a launch started. */
int emulator_remember(EmulatorMachine* machine, const void* from, uint64_t bytes);
/* Starts `count` launches as one step, so that none runs before all are there. 0, or an error; then nothing was started. */
int emulator_launch(EmulatorMachine* machine, const EmulatorLaunch* launches, uint32_t count, EmulatorTicket** tickets);
int emulator_ended(EmulatorTicket* ticket);
/* Waits for the end, fills the report, frees the ticket. */
void emulator_wait(EmulatorTicket* ticket, EmulatorReport* report);
/* Only when nothing runs any more. */
void emulator_destroy(EmulatorMachine* machine);

#ifdef __cplusplus
}
#endif
