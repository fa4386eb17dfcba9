// DOING IT, rows by teams of lanes. A row's lanes have 256 neighbouring bytes at a time, and what a row needs besides its words
// (where it lies, its weight) is asked for once, not for each word.
#pragma once
#include "../schedule/moe_params.h"
#include "bf16.h"

DEVICE inline u32 team_lanes() { return target::lanes() < TEAM ? 1 : TEAM; }

// each(row, place, lanes): by all lanes of a team, `place` being the lane's among them.
template <class Each> DEVICE inline void each_row(u32 rows, Each each) {
  const u32 lanes = team_lanes(), teams = target::lanes() / lanes;
  for (u32 row = target::lane() / lanes; row < rows; row += teams) each(row, target::lane() % lanes, lanes);
}

// A row to be moved. Null: one of zeros.
struct SourceRow {
  const Vec16* at = nullptr;
  float weight = 1;
  bool weighs = false;
  DEVICE Vec16 read(u32 word) const { return at ? target::read(at + word) : Vec16{}; }
  DEVICE Vec16 weighted(const Vec16& v) const {
    if (!weighs) return v;
    float x[8];
    for (u32 i = 0; i < 8; i++) x[i] = weight * bf16_at(v, i);
    return eight_bf16(x);
  }
};

// Rows of `words` words that follow each other at `to`: source(row) -> SourceRow.
template <class Source> DEVICE inline void gather_rows(Vec16* to, u32 rows, u32 words, Source source) {
  constexpr u32 BATCH = target::COPY_BATCH;
  each_row(rows, [&](u32 row, u32 place, u32 lanes) {
    const SourceRow from = source(row);
    for (u32 c = place; c < words; c += BATCH * lanes) {
      Vec16 v[BATCH];
#pragma unroll
      for (u32 j = 0; j < BATCH; j++) v[j] = c + j * lanes < words ? from.read(c + j * lanes) : Vec16{};
#pragma unroll
      for (u32 j = 0; j < BATCH; j++)
        if (c + j * lanes < words) target::write(to + (u64)row * words + c + j * lanes, from.weighted(v[j]));
    }
  });
}
