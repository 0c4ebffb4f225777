// The softmax of one row of scores.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "lanes.h"

namespace {

inline Vec exponential(Vec x) {
  for (int64_t lane = 0; lane < LANES; lane++) x[lane] = std::exp(x[lane]);
  return x;
}

// As vLLM adds the lanes up.
inline float sum_of(Vec x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps(__m512(x));
#else
  float low = 0, high = 0;
  for (int64_t lane = 0; lane < LANES / 2; lane++) low += x[lane], high += x[lane + LANES / 2];
  return low + high;
#endif
}

constexpr float HIDDEN = -1e30f;  // the score of what a row does not see

// Exponentiates one row of scores in place; returns 1 / sum. A sink is one more score in the sum;
// -infinity is none.
inline float softmax_row(float* scores, int64_t padded, float sink) {
  Vec top = splat(HIDDEN);
  for (int64_t c = 0; c < padded; c += LANES) {
    Vec value = load(scores + c);
    top = value > top ? value : top;
  }
  float max = HIDDEN;
  for (int64_t lane = 0; lane < LANES; lane++) max = std::max(max, top[lane]);
  if (sink - max >= -8) max = sink;  // as in vLLM: weights may be above one
  Vec sum = {};
  for (int64_t c = 0; c < padded; c += LANES) {
    Vec weight = exponential(load(scores + c) - max);
    store(scores + c, weight);
    sum += weight;
  }
  return 1.0f / (sum_of(sum) + std::exp(sink - max));
}

}  // namespace
