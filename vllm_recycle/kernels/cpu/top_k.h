// The most probable tokens of a row of logits.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lanes.h"

namespace {

// Logits that are looked at together: few groups have one that is among the largest.
constexpr int64_t GROUP = 64;

// The k largest of a row, largest first; of equal ones the lower index first.
template <typename T>
inline void top_k(const T* logits, int64_t vocab, int64_t k, int32_t* best) {
  std::vector<float> value(k + 1, -__builtin_inff());
  auto offer = [&](float x, int64_t index) {
    int64_t place = k;
    for (; place > 0 && x > value[place - 1]; place--) {
      if (place < k) value[place] = value[place - 1], best[place] = best[place - 1];
    }
    if (place < k) value[place] = x, best[place] = int32_t(index);
  };
  std::fill(best, best + k, -1);
  for (int64_t start = 0; start < vocab; start += GROUP) {
    const int64_t end = std::min(start + GROUP, vocab);
    const float least = value[k - 1];
    int32_t is_larger = 0;
    for (int64_t c = start; c < end; c++) is_larger |= to_float(logits[c]) > least;
    for (int64_t c = start; is_larger && c < end; c++) {
      if (to_float(logits[c]) > value[k - 1]) offer(to_float(logits[c]), c);
    }
  }
}

// The same of the row that begins at an element, of either type.
inline void top_k(const void* logits, int64_t begin, bool is_bf16, int64_t vocab, int64_t k,
                  int32_t* best) {
  if (is_bf16) top_k(static_cast<const bf16*>(logits) + begin, vocab, k, best);
  else top_k(static_cast<const float*>(logits) + begin, vocab, k, best);
}

}  // namespace
