// What tests/forced/forced.py calls. Included last by the library of an operator.
#pragma once
#include "player.h"
#ifdef KOSMOS_FORCED

#define API extern "C" __attribute__((visibility("default")))

// --- a log of one history: what each WG claimed, had ready and did, in the order in which it happened ---

struct Line {
  u64 time, event;
  u32 rank, wg, launch;
};
static target::List<Line> lines;

void log_launch(u32 me, u32 launch) {
  if (!H.s.log) return;
  for (u32 row = 0; row < H.fibers_per_rank(); row++)
    for (auto& event : H.ranks[me].trace[row])
      if (event[0]) lines.push({event[0], event[1], me, row % H.wgs, launch});
  memset(H.ranks[me].trace, 0, sizeof H.ranks[me].trace);
}

static int by_time(const void* a, const void* b) {
  const u64 x = ((const Line*)a)->time, y = ((const Line*)b)->time;
  return x < y ? -1 : x > y;
}

static void print_log() {
  for (u32 q = 0; q < H.s.ranks; q++) log_launch(q, *H.ranks[q].launch);
  qsort(lines.at, lines.size, sizeof(Line), by_time);
  const char *events[] = {"claimed", "ready", "done", "placed"}, *kinds[] = {
      "leave", "pull", "pull_columns", "drain", "poison", "reduce", "sum",   "topk",    "scan",    "plan",  "sort", "gate",
      "push",  "send", "fold", "dweight", "quant", "tile",  "half",   "wgrad",  "route", "shared1", "shared2", "gemm1", "gemm2",
      "dgrad2", "wgrad2", "dgrad1", "wgrad1", "shared_d2", "shared_w2", "shared_w1", "own_dx", "router_dw"};
  for (u32 i = 0; i < lines.size; i++) {
    const Line& l = lines.at[i];
    printf("%8llu  launch %u  rank %u wg %u  %-7s %-7s", l.time, l.launch, l.rank, l.wg, events[l.event >> 62],
           kinds[l.event >> 56 & 63]);
    printf(" chunk %u row %u part %u\n", (u32)(l.event >> 48 & 255), (u32)(l.event >> 24 & 0xffffff),
           (u32)(l.event & 0xffffff));
  }
  for (u32 i = 0; i < W.num_fibers; i++) {
    const target::Fiber& f = W.fibers[i];
    if (f.done) continue;
    const bool works = i % H.fibers_per_rank() >= H.wgs;
    printf("rank %u wg %u%s %s", f.rank, f.wg, works ? " (worker)" : "", f.polling ? "polls" : "runs");
    for (u32 k = 0; f.polling && k < f.num_watched; k++) {
      const u32 word = f.watched[k].word;
      if (word >= target::MAX_SIGNALS) {
        const u64* data = W.data + (word - target::MAX_SIGNALS);
        printf("%s %s = %016llx", k ? "," : "", target::Name(data).text, *data);
        continue;
      }
      const u32* signal = W.signals + word;
      printf("%s %s = %u", k ? "," : "", target::Name(signal).text, *signal);
    }
    printf("\n");
  }
  fflush(stdout);
  lines.size = 0;
}

// --- what Python calls ---

struct Result {  // mirrored by forced.py
  u64 histories, bad, first_bad_seed, steps, digest;
  u64 symptoms[target::SYMPTOMS];  // histories that show each
  char message[sizeof W.message];  // of the first bad history
};

API void forced_run(const Setup* setup, u64 first_seed, u32 histories, Result* result) {
  *result = {};
  for (target::Fence& f : W.fences) f.passed = 0;
  for (u64 seed = first_seed; seed < first_seed + histories; seed++) {
    run_history(*setup, seed);
    bool bad = false;
    for (u32 i = 0; i < target::SYMPTOMS; i++) {
      result->symptoms[i] += W.symptoms[i] != 0;
      bad |= W.symptoms[i] != 0;
    }
    if (bad && !result->bad++) {
      result->first_bad_seed = seed;
      memcpy(result->message, W.message, sizeof W.message);
    }
    result->histories++;
    result->steps += W.steps;
    result->digest = (result->digest ^ W.digest) * 0x9e3779b97f4a7c15ull;
    if (setup->log) print_log();
  }
}

#define NAME(name) #name,
static const char* const kind_names[] = {KINDS(NAME) nullptr};
static const char* const mutation_names[] = {COMMON_MUTATIONS(NAME) MUTATIONS(NAME) nullptr};
static const char* const symptom_names[] = {SYMPTOM_NAMES(NAME) nullptr};

API const char* forced_kind(u32 i) { return kind_names[i]; }
API const char* forced_mutation(u32 i) { return mutation_names[i]; }
API const char* forced_symptom(u32 i) { return symptom_names[i]; }
API u32 forced_setup_bytes() { return sizeof(Setup); }
API u32 forced_result_bytes() { return sizeof(Result); }

// Fence i, in the order of their first use: "file function release|acquire device|system". Has the last run passed it?
API const char* forced_fence(u32 i, u32* passed) {
  static char text[256];
  if (i >= W.num_fences) return nullptr;
  const target::Fence& f = W.fences[i];
  const char* slash = strrchr(f.file, '/');
  snprintf(text, sizeof text, "%s %s %s %s", slash ? slash + 1 : f.file, f.function, f.releases ? "release" : "acquire",
           f.scope == SYSTEM_SCOPE ? "system" : "device");
  *passed = f.passed > 0;
  return text;
}
#endif
