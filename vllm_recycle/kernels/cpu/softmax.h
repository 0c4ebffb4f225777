// The softmax of one row of scores.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "lanes.h"

namespace {

// e^x for x <= 0: 2^n * p(f) with x = (n + f) ln 2, |f| <= 1/2; relative error about 2e-7.
inline Vec exp_negative(Vec x) {
  const Vec magic = splat(12582912.0f);
  Vec scaled = x * 1.44269504088896341f;
  Vec n = (scaled + magic) - magic;
  Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  IntVec exponent = (__builtin_convertvector(n, IntVec) + 127) << 23;
  Vec result = p * reinterpret_cast<Vec&>(exponent);
  IntVec in_range = x > -87.0f;
  IntVec bits = reinterpret_cast<IntVec&>(result) & in_range;
  return reinterpret_cast<Vec&>(bits);
}

constexpr float HIDDEN = -1e30f;  // the score of what a row does not see

// Scales and exponentiates one row of scores in place; returns 1 / sum. A sink, already scaled, is one
// more score in the sum; -infinity is none.
inline float softmax_row(float* scores, int64_t padded, float scale, float sink) {
  Vec top = splat(HIDDEN);
  for (int64_t c = 0; c < padded; c += LANES) {
    Vec value = load(scores + c);
    top = value > top ? value : top;
  }
  float max = std::max(HIDDEN, sink / scale);
  for (int64_t lane = 0; lane < LANES; lane++) max = std::max(max, top[lane]);
  Vec sum = {};
  for (int64_t c = 0; c < padded; c += LANES) {
    Vec weight = exp_negative((load(scores + c) - max) * scale);
    *reinterpret_cast<Vec*>(scores + c) = weight;
    sum += weight;
  }
  float total = std::exp(sink - max * scale);
  for (int64_t lane = 0; lane < LANES; lane++) total += sum[lane];
  return 1.0f / total;
}

}  // namespace
