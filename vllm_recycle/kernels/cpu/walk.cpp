// What is accepted of the nodes that a step verifies; the twin of core/verification.py.

#include <algorithm>
#include <cstdint>
#include <vector>

extern "C" {

void walk(const int64_t* sampled, const int64_t* drafts, int64_t drafts_stride,
          const int64_t* cu_num_logits, const int64_t* all_parents, const int64_t* all_depths,
          int64_t parents_stride, int64_t depths_stride, int64_t batch, int64_t nodes,
          int64_t length, int64_t* path, int64_t* token_ids, int32_t* lengths) {
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
      reached[row] = reached[parent] && produced[parent] == drafts[b * drafts_stride + row - 1];
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

}  // extern "C"
