// Which nodes a step verifies, and what is accepted of them; twins of core/price.py and
// core/verification.py.

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

// Nodes of a request that are taken together.
struct Block {
  double worth;
  int64_t size, request;

  double average() const { return worth / double(size); }
};

}  // namespace

extern "C" {

double choose(const double* worths, const double* times, int64_t num_times, int64_t num_other_rows,
              int64_t batch, int64_t nodes, int64_t* counts) {
  std::vector<Block> blocks;
  for (int64_t b = 0; b < batch; b++) {
    const size_t first = blocks.size();
    for (int64_t node = 0; node < nodes; node++) {
      Block block = {worths[b * nodes + node], 1, b};
      while (blocks.size() > first &&
             blocks.back().worth * double(block.size) < block.worth * double(blocks.back().size)) {
        block.worth = blocks.back().worth + block.worth;
        block.size += blocks.back().size;
        blocks.pop_back();
      }
      blocks.push_back(block);
    }
    while (blocks.size() > first && blocks.back().worth <= 0.0) blocks.pop_back();
  }
  std::stable_sort(blocks.begin(), blocks.end(), [](const Block& a, const Block& b) {
    return a.average() > b.average();
  });
  int64_t rows = batch + num_other_rows;
  double total = double(rows), best = total / times[std::min(rows, num_times - 1)];
  size_t num_taken = 0;
  for (size_t i = 0; i < blocks.size(); i++) {
    total += blocks[i].worth, rows += blocks[i].size;
    if (rows >= num_times) break;
    if (total / times[rows] > best) best = total / times[rows], num_taken = i + 1;
  }
  std::fill(counts, counts + batch, 0);
  for (size_t i = 0; i < num_taken; i++) counts[blocks[i].request] += blocks[i].size;
  return best;
}

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
