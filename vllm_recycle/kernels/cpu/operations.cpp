// Drafting, the walk, learning and the phrase pool; twins of the torch functions in core/.
//
// Plain C interface, tensors as pointers; all integers are int64 unless said otherwise. Compiled on
// the machine that runs it (native.py).

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lanes.h"
#include "top_k.h"

extern "C" {

// Parents come before their children, so one pass over the nodes fills the tree.
void fill_tree(const int32_t* table, const int64_t* idx_mapping, const int64_t* last_token_ids,
               const int64_t* parents, const int64_t* ranks, int64_t batch, int64_t rows,
               int64_t vocab, int64_t width, int64_t overlay_rows, int64_t reads_shared,
               int64_t* filled) {
  for (int64_t b = 0; b < batch; b++) {
    int64_t* tokens = filled + b * rows;
    tokens[0] = last_token_ids[b];
    const int32_t* overlay = table + (vocab + 2 + idx_mapping[b] * overlay_rows) * width;
    for (int64_t row = 1; row < rows; row++) {
      const int64_t token = tokens[parents[row]];
      const int32_t* found = table + (reads_shared ? token + 1 : 0) * width;
      if (overlay_rows) {
        const int32_t* own = overlay + (token & (overlay_rows - 1)) * width;
        if (own[0] == token) found = own;
      }
      tokens[row] = found[1 + ranks[row]];
    }
  }
}

void walk(const int64_t* sampled, const int64_t* drafts, const int64_t* cu_num_logits,
          const int64_t* all_parents, const int64_t* all_depths, int64_t parents_stride,
          int64_t depths_stride, int64_t batch, int64_t nodes, int64_t length, int64_t* path, int64_t* token_ids, int32_t* lengths) {
  std::vector<uint8_t> reached(nodes + 1);
  for (int64_t b = 0; b < batch; b++) {
    const int64_t* produced = sampled + cu_num_logits[b];
    const int64_t* parents = all_parents + b * parents_stride;
    const int64_t* depths = all_depths + b * depths_stride;
    const int64_t rows = cu_num_logits[b + 1] - cu_num_logits[b];
    int64_t deepest = 0;
    reached[0] = 1;
    for (int64_t row = 1; row < rows; row++) {
      const int64_t parent = parents[row];
      reached[row] = reached[parent] && produced[parent] == drafts[b * nodes + row - 1];
      if (reached[row] && depths[row] > depths[deepest]) deepest = row;
    }
    std::fill(path + b * length, path + (b + 1) * length, -1);
    std::fill(token_ids + b * length, token_ids + (b + 1) * length, -1);
    lengths[b] = int32_t(depths[deepest] + 1);
    int64_t row = deepest;
    for (int64_t depth = depths[deepest]; depth >= 0; depth--, row = parents[row]) {
      path[b * length + depth] = row;
      token_ids[b * length + depth] = produced[row];
    }
  }
}

// Rows are written in order, so of several for one place the last stays.
void update_from_logits(int32_t* table, const int64_t* expanded_idx_mapping,
                        const int64_t* token_ids, const void* logits, int64_t count,
                        int64_t logits_stride, int64_t vocab, int64_t num_logits, int64_t k,
                        int64_t overlay_rows, int64_t writes_shared, int64_t is_bf16,
                        int64_t threads) {
  const int64_t width = k + 1;
  std::vector<int32_t> best(count * width);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < count; row++) {
    if (token_ids[row] < 0) continue;
    int32_t* found = best.data() + row * width;
    found[0] = int32_t(token_ids[row]);
    top_k(logits, row * logits_stride, is_bf16, num_logits, k, found + 1);
  }
  for (int64_t row = 0; row < count; row++) {
    const int64_t token = token_ids[row];
    if (token < 0) continue;
    const int32_t* found = best.data() + row * width;
    if (writes_shared) std::copy(found, found + width, table + (token + 1) * width);
    if (overlay_rows) {
      const int64_t slot = expanded_idx_mapping[row] * overlay_rows + (token & (overlay_rows - 1));
      std::copy(found, found + width, table + (vocab + 2 + slot) * width);
    }
  }
}

void newest_phrases(const int32_t* rows, const int64_t* token_ids, int64_t num_tokens,
                    int64_t count, int64_t per_token, int64_t length, int64_t* newest) {
  for (int64_t i = 0; i < num_tokens; ++i) {
    for (int64_t place = 1; place <= count; ++place, newest += length) {
      if (token_ids[i] < 0) {
        std::fill(newest, newest + length, -1);
      } else {
        const int32_t* phrase = rows + ((token_ids[i] + 1) * per_token - place) * length;
        std::copy(phrase, phrase + length, newest);
      }
    }
  }
}

void insert_phrases(int32_t* rows, const int64_t* token_ids, const int64_t* phrases,
                    const int64_t* replaced, int64_t num_phrases, int64_t per_token,
                    int64_t length) {
  auto is_phrase = [&](int64_t i) {
    const int64_t* phrase = phrases + i * length;
    return token_ids[i] >= 0 && *std::min_element(phrase, phrase + length) >= 0;
  };
  // Where a token has a phrase; beyond its last place where it has not.
  auto find = [&](int32_t* row, const int64_t* phrase) {
    int64_t place = 0;
    while (place < per_token && !std::equal(phrase, phrase + length, row + place * length)) ++place;
    return place;
  };
  if (replaced != nullptr) {
    for (int64_t i = 0; i < num_phrases; ++i) {
      if (!is_phrase(i)) continue;
      int32_t* row = rows + token_ids[i] * per_token * length;
      int64_t place = find(row, replaced + i * length);
      if (place == per_token) continue;
      std::copy_backward(row, row + place * length, row + (place + 1) * length);
      std::fill(row, row + length, -1);
    }
  }
  for (int64_t i = 0; i < num_phrases; ++i) {
    if (!is_phrase(i)) continue;
    int32_t* row = rows + token_ids[i] * per_token * length;
    int64_t place = find(row, phrases + i * length);
    // In the place of an equal one or of the oldest, and then as the newest.
    int32_t* gone = row + (place == per_token ? 0 : place) * length;
    int32_t* newest = std::copy(gone + length, row + per_token * length, gone);
    std::copy(phrases + i * length, phrases + (i + 1) * length, newest);
  }
}

}  // extern "C"
