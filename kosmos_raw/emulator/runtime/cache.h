// Caches as unhelpful as the memory model allows: a line, once read, stays as it was until the code invalidates, and what
// was written stays private until the code writes back. A missing fence then gives wrong data every time.
//
// Two levels: one cache for each XCD (or workgroup), below them one for each device, below that memory. Device-scope
// fences and accesses reach the device's cache, system-scope ones reach memory. So a fence of too small a scope shows as
// well.
#pragma once
#include <stdlib.h>

#include "transfer.h"

constexpr u64 LINE_BYTES = 128;
INLINE u64 line_of(u64 address) { return address & ~(LINE_BYTES - 1); }

// What memory held when a launch started: a cache may have read any line then.
struct Snapshot {
  struct Range {
    u64 begin, end;
    u8* bytes;
  };
  Range* ranges;
  u32 count, users;
  // Puts what a line held then over what it holds now. Exact to the byte: who knows what lies beside a range.
  void restore(u8* line, u64 address) const {
    for (u32 i = 0; i < count; i++) {
      const u64 begin = larger(address, ranges[i].begin), end = smaller(address + LINE_BYTES, ranges[i].end);
      if (begin < end) memcpy(line + (begin - address), ranges[i].bytes + (begin - ranges[i].begin), end - begin);
    }
  }
};

struct Line {
  u64 address;
  u32 generation;  // of the cache when its clean bytes were read; older ones must be read again
  bool listed;     // in the list of dirty lines
  bool passed_by;  // an access has gone to memory itself
  u64 dirty[2];    // one bit a byte
  u8 bytes[LINE_BYTES];
  bool is_dirty(u64 i) const { return dirty[i / 64] >> (i % 64) & 1; }
};

struct LinePool {  // lines are made in bunches and live as long as their cache
  LinePool* older;
  u32 used;
  Line lines[64];
};

struct Cache {
  Cache* below;              // null: memory
  const Snapshot* snapshot;  // what it may hold from before
  u32 generation;
  Line** slots;              // hash table, open addressing
  u64 slot_count, line_count;
  Line** dirty_lines;
  u64 dirty_count, dirty_room;
  Line* last;                // the one fetched last
  LinePool* pool;

  // ---- lines ----
  Line*& slot(u64 address) const {
    u64 i = (address / LINE_BYTES * 0x9e3779b97f4a7c15ull >> 20) & (slot_count - 1);
    while (slots[i] && slots[i]->address != address) i = (i + 1) & (slot_count - 1);
    return slots[i];
  }
  void grow() {
    Line** old = slots;
    const u64 old_count = slot_count;
    slot_count = old_count ? 2 * old_count : 1024;
    slots = (Line**)calloc(slot_count, sizeof *slots);
    for (u64 i = 0; i < old_count; i++)
      if (old[i]) slot(old[i]->address) = old[i];
    free(old);
  }
  Line* find(u64 address) const { return slot_count ? slot(address) : nullptr; }

  Line* new_line() {
    if (!pool || pool->used == sizeof pool->lines / sizeof *pool->lines) {
      LinePool* fresh = (LinePool*)calloc(1, sizeof(LinePool));
      fresh->older = pool;
      pool = fresh;
    }
    return &pool->lines[pool->used++];
  }
  Line& find_or_add(u64 address) {
    if (2 * line_count >= slot_count) grow();
    Line*& place = slot(address);
    if (!place) {
      place = new_line();
      place->address = address;
      place->generation = generation - 1;
      line_count++;
    }
    return *place;
  }
  // The line, its clean bytes filled.
  Line& fetch(u64 address) {
    if (last && last->address == address && last->generation == generation) return *last;  // neighbouring lanes
    Line& line = find_or_add(address);
    if (line.generation != generation) refill(line);
    last = &line;
    return line;
  }
  void refill(Line& line) {
    u8 fresh[LINE_BYTES];
    if (below) below->read(fresh, line.address, LINE_BYTES);
    else memcpy(fresh, (const u8*)line.address, LINE_BYTES);
    // It may have been here since before the launch, unless an access went past it or an invalidate threw it away.
    if (snapshot && generation == 0 && !line.passed_by) snapshot->restore(fresh, line.address);
    if (!line.dirty[0] && !line.dirty[1]) memcpy(line.bytes, fresh, LINE_BYTES);
    else
      for (u64 i = 0; i < LINE_BYTES; i++)
        if (!line.is_dirty(i)) line.bytes[i] = fresh[i];
    line.generation = generation;
  }

  // ---- what waves do ----
  void read(u8* to, u64 address, u64 bytes) {
    while (bytes) {
      const u64 line = line_of(address), n = smaller(bytes, line + LINE_BYTES - address);
      memcpy(to, fetch(line).bytes + (address - line), n);
      to += n;
      address += n;
      bytes -= n;
    }
  }
  void write(u64 address, const u8* from, u64 bytes) {
    while (bytes) {
      Line& line = fetch(line_of(address));
      const u64 first = address - line.address, n = smaller(bytes, LINE_BYTES - first);
      memcpy(line.bytes + first, from, n);
      for (u64 i = first; i < first + n; i++) line.dirty[i / 64] |= 1ull << (i % 64);
      if (!line.listed) list(line);
      from += n;
      address += n;
      bytes -= n;
    }
  }
  void list(Line& line) {
    if (dirty_count == dirty_room) {
      dirty_room = dirty_room ? 2 * dirty_room : 256;
      dirty_lines = (Line**)realloc(dirty_lines, dirty_room * sizeof *dirty_lines);
    }
    dirty_lines[dirty_count++] = &line;
    line.listed = true;
  }
  // Runs of dirty bytes go down whole: a run is what somebody wrote.
  void clean(Line& line) {
    for (u64 i = 0; i < LINE_BYTES; i++) {
      if (!line.is_dirty(i)) continue;
      u64 end = i + 1;
      while (end < LINE_BYTES && line.is_dirty(end)) end++;
      if (below) below->write(line.address + i, line.bytes + i, end - i);
      else memcpy((u8*)line.address + i, line.bytes + i, end - i);
      i = end;
    }
    line.dirty[0] = line.dirty[1] = 0;
  }
  void write_back() {
    for (u64 i = 0; i < dirty_count; i++) {
      dirty_lines[i]->listed = false;
      clean(*dirty_lines[i]);
    }
    dirty_count = 0;
  }
  void invalidate() { generation++; }
  // Makes room for an access that goes past this cache. (A line may always be evicted.)
  void evict(u64 address, u64 bytes) {
    for (u64 at = line_of(address); at < address + bytes; at += LINE_BYTES) {
      Line* line = snapshot ? &find_or_add(at) : find(at);
      if (!line) continue;
      clean(*line);
      line->generation = generation - 1;
      line->passed_by = true;
    }
  }
  void release() {
    for (LinePool *p = pool, *older; p; p = older) {
      older = p->older;
      free(p);
    }
    free(slots);
    free(dirty_lines);
  }
};

// Memory as one workgroup sees it.
struct View {
  Cache *near, *device;  // both null: no caches
  // The cache where an access of this scope happens, or null for memory; caches above it give the line up.
  Cache* level(Coherence scope, u64 address, u64 bytes) const {
    if (!near || scope == WORKGROUP) return near;
    near->evict(address, bytes);
    if (scope == DEVICE) return device;
    device->evict(address, bytes);
    return nullptr;
  }
  void write_back(Coherence scope) const {
    if (!near || scope == WORKGROUP) return;
    near->write_back();
    if (scope == SYSTEM) device->write_back();
  }
  void invalidate(Coherence scope) const {
    if (!near || scope == WORKGROUP) return;
    near->invalidate();
    if (scope == SYSTEM) device->invalidate();
  }
};
