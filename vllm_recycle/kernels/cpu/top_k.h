// The most probable tokens of a row of logits.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lanes.h"

namespace {

// The k largest of a row, largest first; of equal ones the lower index first.
template <typename T>
inline void top_k(const T* logits, int64_t vocab, int64_t k, int32_t* best) {
  std::vector<float> value(k + 1, -__builtin_inff());
  auto offer = [&](float x, int64_t index) {
    int64_t at = k;
    for (; at > 0 && x > value[at - 1]; at--) {
      if (at < k) value[at] = value[at - 1], best[at] = best[at - 1];
    }
    if (at < k) value[at] = x, best[at] = int32_t(index);
  };
  std::fill(best, best + k, -1);
  int64_t c = 0;
  for (; c + WIDTH <= vocab; c += WIDTH) {
    Vec chunk = load(logits + c);
    IntVec above = chunk > value[k - 1];
    bool any = false;
    for (int64_t lane = 0; lane < WIDTH; lane++) any |= above[lane] != 0;
    if (!any) continue;
    for (int64_t lane = 0; lane < WIDTH; lane++) {
      if (chunk[lane] > value[k - 1]) offer(chunk[lane], c + lane);
    }
  }
  for (; c < vocab; c++) {
    if (to_float(logits[c]) > value[k - 1]) offer(to_float(logits[c]), c);
  }
}

// The same of the row that begins at an element, of either type.
inline void top_k(const void* logits, int64_t begin, bool is_bf16, int64_t vocab, int64_t k,
                  int32_t* best) {
  if (is_bf16) top_k(static_cast<const bf16*>(logits) + begin, vocab, k, best);
  else top_k(static_cast<const float*>(logits) + begin, vocab, k, best);
}

}  // namespace
