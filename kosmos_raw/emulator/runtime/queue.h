// Memory instructions that have been issued: what each one does, and when. Without late memory everything happens at
// once; with it an access waits here until a wait instruction demands it, as hardware may let it, so that a missing wait
// shows.
#pragma once
#include "cache.h"
#include "emulator.h"

constexpr u32 POISON = 0x7fc5dead;  // what a register holds while its load is on the way
constexpr u32 QUEUE_ROOM = 64, MEMORY_LIMIT = 63, LDS_QUEUE_LIMIT = 15;  // hardware stalls when a counter is full

struct AccessQueue {
  u32 first, count;
  Access entries[QUEUE_ROOM];
  Access& at(u32 i) { return entries[(first + i) % QUEUE_ROOM]; }
};

// What the runtime knows of a wave's workgroup when it performs an access.
struct MemoryMode {
  View view;
  u32 late, outside, without_fences, barred_count;
  const EmulatorRange* barred;
  bool caches;
};

// ---- what an access does ----
inline void perform_load(Wave& w, const Access& x, const View& view) {
  const u32 bytes = bytes_of(x.format, x.dwords);
  each_active(x.exec, [&](int l) {
    u8 data[16] = {};
    const u64 a = x.address[l];
    const u8* from = data;
    if (a) {
      if (Cache* cache = view.level(x.scope, a, bytes)) cache->read(data, a, bytes);
      else from = (const u8*)a;
    }
    load_lane(x.format, x.dwords, w.v + x.to, l, from);
  });
}
inline void perform_store(const Access& x, const View& view) {
  const u32 bytes = bytes_of(x.format, x.dwords);
  each_active(x.exec, [&](int l) {
    const u64 a = x.address[l];
    if (!a) return;
    u8 data[16];
    if (Cache* cache = view.level(x.scope, a, bytes)) {
      store_lane(x.format, x.dwords, x.data, l, data);
      cache->write(a, data, bytes);
    } else {
      store_lane(x.format, x.dwords, x.data, l, (u8*)a);
    }
  });
}
inline void perform_atomic(Wave& w, const Access& x, const View& view) {
  each_active(x.exec, [&](int l) {
    (void)view.level(SYSTEM, x.address[l], 4 * x.dwords);  // atomics happen in memory
    atomic_lane(x.op, x.dwords, (u8*)x.address[l], x.data, x.returns ? w.v + x.to : nullptr, l);
  });
}
inline void perform_load_to_lds(Wave& w, const Access& x, const MemoryMode& mode) {
  const u32 bytes = 4 * x.dwords;
  each_active(x.exec, [&](int l) {
    u8* to = w.lds + x.to + l * bytes;
    const u64 a = x.address[l];
    if (!a) {
      if (mode.outside != EMULATOR_OUTSIDE_NOTHING) memset(to, mode.outside == EMULATOR_OUTSIDE_GARBAGE ? 0x7f : 0, bytes);
    } else if (Cache* cache = mode.view.level(x.scope, a, bytes)) {
      cache->read(to, a, bytes);
    } else {
      memcpy(to, (const u8*)a, bytes);
    }
  });
}
inline void perform_scalar_load(Wave& w, const Access& x, const View& view) {
  if (view.near) view.near->read((u8*)&w.s[x.to], x.address[0], 4 * x.dwords);
  else memcpy(&w.s[x.to], (const void*)x.address[0], 4 * x.dwords);
}
inline void perform_lds_load(Wave& w, const Access& x) {
  each_active(x.exec, [&](int l) {
    load_lane(x.format, x.dwords, w.v + x.to, l, w.lds + x.address[l]);
    if (x.returns) load_lane(x.format, x.dwords, w.v + x.to + x.dwords, l, w.lds + x.address[l] + (i32)x.data[0][0]);
  });
}
inline void perform_lds_store(Wave& w, const Access& x) {
  each_active(x.exec, [&](int l) {
    store_lane(x.format, x.dwords, x.data, l, w.lds + x.address[l]);
    if (x.returns) store_lane(x.format, x.dwords, x.data + x.dwords, l, w.lds + x.address[l] + (i32)x.to);
  });
}

inline void perform(Wave& w, Access& x, const MemoryMode& mode) {
  if (x.done) return;
  x.done = true;
  switch (x.action) {
    case LOAD: return perform_load(w, x, mode.view);
    case STORE: return perform_store(x, mode.view);
    case ATOMIC: return perform_atomic(w, x, mode.view);
    case LOAD_TO_LDS: return perform_load_to_lds(w, x, mode);
    case SCALAR_LOAD: return perform_scalar_load(w, x, mode.view);
    case LDS_LOAD: return perform_lds_load(w, x);
    case LDS_LOAD_TRANSPOSED:
      return each_active(x.exec, [&](int l) {
        load_transposed_lane(w.v + x.to, l, w.lds, [&](int k) { return x.address[k]; });
      });
    case LDS_STORE: return perform_lds_store(w, x);
    case LDS_ATOMIC:
      return each_active(x.exec, [&](int l) {
        atomic_lane(x.op, x.dwords, w.lds + x.address[l], x.data, x.returns ? w.v + x.to : nullptr, l);
      });
    case WRITE_BACK: return mode.view.write_back(x.scope);
  }
}

// ---- when ----
inline bool is_delayed(Wave& w, const Access& x, const MemoryMode& mode) {
  u32 bit = 0;
  switch (x.action) {
    case WRITE_BACK: return true;  // takes long on hardware: the wait behind it matters most
    case LOAD_TO_LDS: bit = EMULATOR_LATE_DIRECT; break;
    case LDS_LOAD: case LDS_LOAD_TRANSPOSED: case LDS_STORE: case LDS_ATOMIC: bit = EMULATOR_LATE_LDS; break;
    case LOAD: case SCALAR_LOAD: bit = EMULATOR_LATE_LOADS; break;
    case ATOMIC: bit = x.returns ? EMULATOR_LATE_LOADS : EMULATOR_LATE_STORES; break;
    case STORE:
      if (mode.caches && x.scope == SYSTEM) return w.random.one_in(2);  // over a link: others may overtake it
      bit = EMULATOR_LATE_STORES;
      break;
  }
  return (mode.late & bit) && (!(mode.late & EMULATOR_LATE_BY_CHANCE) || w.random.one_in(2));
}

inline u32 registers_written(const Access& x) {
  switch (x.action) {
    case LOAD: case LDS_LOAD_TRANSPOSED: return x.dwords;
    case LDS_LOAD: return x.dwords * (x.returns ? 2 : 1);
    case ATOMIC: case LDS_ATOMIC: return x.returns ? x.dwords : 0;
    default: return 0;
  }
}
inline void poison(Wave& w, const Access& x) {
  if (x.action == SCALAR_LOAD)
    for (u32 i = 0; i < x.dwords; i++) w.s[x.to + i] = POISON;
  const u32 keep = x.format == SHORT_LOW ? 0xffff0000u : x.format == SHORT_HIGH ? 0xffffu : 0;
  for (u32 i = 0; i < registers_written(x); i++)
    each_active(x.exec, [&](int l) {
      u32& r = w.v[x.to + i][l];
      r = (r & keep) | (POISON & ~keep);
    });
}

// The bytes that an access may touch, roughly: first and last address.
struct Extent {
  u64 begin = ~0ull, end = 0;
  explicit Extent(const Access& x) {
    each_active(x.exec, [&](int l) {
      begin = smaller(begin, x.address[l]);
      end = larger(end, x.address[l] + 16);
    });
  }
  bool meets(const Extent& o) const { return begin < o.end && o.begin < end; }
};
inline bool is_lds(Action a) { return a == LDS_LOAD || a == LDS_LOAD_TRANSPOSED || a == LDS_STORE || a == LDS_ATOMIC; }
inline bool writes_memory(Action a) { return a == STORE || a == ATOMIC; }

// Must `younger` see what `older` does? One wave's accesses to one address, and its results in one register, keep their
// order; LDS keeps all of it.
inline bool keeps_order(const Access& older, const Access& younger) {
  if (is_lds(younger.action)) return true;
  const u32 written = registers_written(older), also = registers_written(younger);
  if (written && also && older.to < younger.to + also && younger.to < older.to + written) return true;
  if (older.action == WRITE_BACK || younger.action == WRITE_BACK || younger.action == SCALAR_LOAD) return false;
  if (!writes_memory(older.action) && !writes_memory(younger.action)) return false;
  return Extent(older).meets(Extent(younger));
}

inline void perform_oldest(Wave& w, AccessQueue& q, const MemoryMode& mode) {
  perform(w, q.at(0), mode);
  q.first = (q.first + 1) % QUEUE_ROOM;
  q.count--;
}
inline void leave_at_most(Wave& w, AccessQueue& q, u32 left, const MemoryMode& mode) {
  while (q.count > left) perform_oldest(w, q, mode);
}
inline void refuse_barred(Wave& w, const Access& x, const MemoryMode& mode) {
  for (u32 i = 0; i < mode.barred_count; i++) {
    const EmulatorRange& r = mode.barred[i];
    const u64 lanes = x.action == SCALAR_LOAD ? 1 : x.exec;
    each_active(lanes, [&](int l) {
      if (x.address[l] >= r.begin && x.address[l] < r.end) w.services->fault(w, r.why, x.address[l]);
    });
  }
}
// The newest entry has been filled in by translated code.
inline void issue(Wave& w, AccessQueue& q, Access& x, const MemoryMode& mode) {
  x.done = false;
  x.at = w.at;
  if (mode.barred_count && !is_lds(x.action) && x.action != WRITE_BACK) refuse_barred(w, x, mode);
  if (is_delayed(w, x, mode)) {
    poison(w, x);
    q.count++;
    return;
  }
  u32 must_be_done = 0;
  for (u32 i = 0; i < q.count; i++)
    if (!q.at(i).done && keeps_order(q.at(i), x)) must_be_done = i + 1;
  for (u32 i = 0; i < must_be_done; i++) perform(w, q.at(i), mode);
  perform(w, x, mode);
  q.count++;
}
