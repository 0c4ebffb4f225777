// Products of bfloat16 matrices by AMX, over keys and values as vLLM's AMX layout has them:
//
//   keys    for each 16 tokens, pairs of dimensions: [dim / 2][16 tokens][2]
//   values  for each 16 dimensions, pairs of tokens: [block_size / 2][16 dimensions][2]
//
// Both are what the right side of a product is loaded from, 16 pairs (32 numbers deep) at a time.

#pragma once

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define HAS_AMX 1

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "lanes.h"

namespace {

constexpr int64_t TILE_ROWS = 16, TILE_DEPTH = 32;
constexpr int64_t AMX_QUERIES = 2 * TILE_ROWS;  // of one product: each right side is loaded once

// Linux gives a process the registers on request.
inline bool may_use_amx() {
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;
  static const bool may = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  return may;
}

// While it lives, all tiles of the thread are of 16 rows of 64 bytes.
struct Tiles {
  Tiles() {
    struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = TILE_ROWS;
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
};

// To the compiler a tile's load reads no memory: what was stored must be there before it.
inline void finish_stores() { asm volatile("" ::: "memory"); }

// scores[i][0..15] = queries[i] . keys of 16 tokens, for 16 queries or, if TWO, for 32.
template <bool TWO>
void score_tile(const bf16* queries, int64_t dim, const bf16* keys, float* scores,
                int64_t stride) {
  finish_stores();
  _tile_zero(0);
  if (TWO) _tile_zero(1);
  for (int64_t d = 0; d < dim; d += TILE_DEPTH) {
    _tile_loadd(4, keys + d * LANES, 64);
    _tile_loadd(2, queries + d, dim * 2);
    _tile_dpbf16ps(0, 2, 4);
    if (TWO) {
      _tile_loadd(3, queries + TILE_ROWS * dim + d, dim * 2);
      _tile_dpbf16ps(1, 3, 4);
    }
  }
  _tile_stored(0, scores, stride * 4);
  if (TWO) _tile_stored(1, scores + TILE_ROWS * stride, stride * 4);
}

// Tiles 0 and 1 += weights[i] . values of the next 32 tokens, of which `tokens` were written.
template <bool TWO>
void weigh_tile(const bf16* weights, int64_t stride, const bf16* values, int64_t tokens) {
  alignas(64) bf16 tail[TILE_DEPTH * LANES];
  if (tokens < TILE_DEPTH) {
    // What was never written for this request may be anything: 0 * NaN is NaN.
    std::memset(tail, 0, sizeof(tail));
    std::memcpy(tail, values, (tokens + 1) / 2 * 64);
    if (tokens % 2) {
      for (int64_t lane = 0; lane < LANES; lane++) tail[tokens / 2 * 32 + lane * 2 + 1] = {};
    }
    values = tail;
  }
  finish_stores();
  _tile_loadd(4, values, 64);
  _tile_loadd(2, weights, stride * 2);
  _tile_dpbf16ps(0, 2, 4);
  if (TWO) {
    _tile_loadd(3, weights + TILE_ROWS * stride, stride * 2);
    _tile_dpbf16ps(1, 3, 4);
  }
}

inline void store_halves(bf16* out, const float* in, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES) {
    _mm256_storeu_si256((__m256i*)(out + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(in + i)));
  }
}

}  // namespace

#endif
