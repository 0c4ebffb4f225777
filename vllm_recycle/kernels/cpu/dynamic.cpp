// Growing trees and learning from them; twins of the functions in core/.
//
// Plain C interface, tensors as pointers; all integers are int64 unless said otherwise. Compiled on
// the machine that runs it (native.py).

#include <algorithm>
#include <cstdint>
#include <queue>
#include <vector>

#include "top_k.h"

namespace {

constexpr int64_t STEADINESSES = 4;
constexpr int64_t ANY_STEADINESS = STEADINESSES;
constexpr int64_t MAX_REACH = 8;
constexpr double MOST_SEEN = 2000.0;
constexpr uint64_t MIX = 0x9E3779B97F4A7C15u, FINISH = 0xD6E8FEB86659FD93u;

struct Rows {
  int32_t* table;
  const int64_t* lengths;  // of contexts, ascending from 1
  int64_t num_contexts, vocab, k, slots, has_own, reads_shared, writes_shared, parts;

  int64_t reach() const { return lengths[num_contexts - 1]; }
  int32_t* row(int64_t address) const { return table + address * (k + 2); }
  bool is_token(int64_t token) const { return uint64_t(token) < uint64_t(vocab); }
};

// Tokens, the newest first.
struct Context {
  int64_t tokens[MAX_REACH];

  Context below(int64_t token) const {
    Context child;
    child.tokens[0] = token;
    std::copy(tokens, tokens + MAX_REACH - 1, child.tokens + 1);
    return child;
  }
};

Context tail_of(const int64_t* tail, int64_t reach) {
  Context context;
  std::fill(context.tokens, context.tokens + MAX_REACH, -1);
  std::copy(tail, tail + reach, context.tokens);
  return context;
}

struct Place {
  int64_t index, own;
  int32_t* row;
  int32_t head, salt;
  int64_t k;

  bool is_known() const { return row[0] >> 2 == head >> 2 && row[k + 1] == salt; }
};

// Calls `visit` with the place of each row of a context, the shortest first, shared before own.
template <typename Visit>
void each_place(const Rows& rows, const Context& context, int64_t salt, Visit visit) {
  uint64_t hashed = 0;
  int64_t seen = 0;
  const int64_t slots = rows.slots / rows.parts;
  const int64_t first = rows.vocab + (salt & (rows.parts - 1)) * slots;
  for (int64_t index = 0; index < rows.num_contexts; index++) {
    const int64_t length = rows.lengths[index];
    for (; seen < length; seen++) {
      if (!rows.is_token(context.tokens[seen])) return;
      hashed = (hashed ^ uint64_t(context.tokens[seen] + 1)) * MIX;
      hashed ^= hashed >> 32;
    }
    for (int64_t own = 0; own < 2; own++) {
      if (length == 1 && !own) {
        int32_t* row = rows.row(context.tokens[0]);
        visit(Place{index, 0, row, int32_t(context.tokens[0] << 3), 0, rows.k});
        continue;
      }
      const uint64_t salted = own && rows.parts == 1 ? uint64_t(salt) : 0;
      uint64_t key = (hashed + salted * FINISH + uint64_t(length)) * FINISH;
      key = (key ^ key >> 29) * MIX;
      const int64_t address = first + int64_t(key & uint64_t(slots - 1));
      const int32_t head = int32_t(key >> 36 << 3 | uint64_t(own) << 2);
      visit(Place{index, own, rows.row(address), head, int32_t(own ? salt : 0), rows.k});
    }
  }
}

// The row to draft from; its `row` is null where nothing is known.
Place find_entry(const Rows& rows, const Context& context, int64_t salt) {
  Place found = {};
  each_place(rows, context, salt, [&](const Place& place) {
    if ((place.own ? rows.has_own : rows.reads_shared) && place.is_known()) found = place;
  });
  return found;
}

void write_entry(const Rows& rows, const Place& place, const int32_t* successors) {
  const bool stays = place.is_known() && place.row[1] == successors[0];
  const int32_t steadiness = stays ? std::min(3, (place.row[0] & 3) + 1) : 0;
  place.row[0] = place.head | steadiness;
  std::copy(successors, successors + rows.k, place.row + 1);
  place.row[1 + rows.k] = place.salt;
}

void count(const Rows& rows, double* counts, const Context& context, int64_t salt,
           int64_t token) {
  const Place found = find_entry(rows, context, salt);
  if (!found.row) return;
  for (int64_t rank = 0; rank < rows.k; rank++) {
    if (found.row[1 + rank] < 0) continue;
    const int64_t ranks = (found.index * 2 + found.own) * rows.k + rank;
    for (int64_t steadiness : {int64_t(found.row[0] & 3), ANY_STEADINESS}) {
      double* cell = counts + (ranks * (STEADINESSES + 1) + steadiness) * 2;
      cell[0] += found.row[1 + rank] == token;
      cell[1] += 1.0;
      if (cell[1] > MOST_SEEN) cell[0] *= 0.5, cell[1] *= 0.5;
    }
  }
}

struct Candidate {
  double worth;
  int64_t order, request, parent, token;

  bool operator<(const Candidate& other) const {  // what comes later from a priority queue
    return worth != other.worth ? worth < other.worth : order > other.order;
  }
};

struct Node {
  Context context;
  int64_t parent, depth;
};

}  // namespace

extern "C" {

// Parents, depths and masks come filled with 0.
void grow(int32_t* table, const int64_t* lengths, int64_t num_contexts, int64_t vocab, int64_t k,
          int64_t slots, int64_t has_own, int64_t reads_shared, int64_t writes_shared,
          int64_t parts, const double* rates, const int64_t* salts, const int64_t* tails,
          const int64_t* max_depths, const double* times, const double* slopes, int64_t num_times,
          int64_t num_other_rows, int64_t batch, int64_t max_nodes, int64_t* num_nodes,
          int64_t* token_ids, int64_t* parents, int64_t* depths, uint8_t* masks) {
  const Rows rows_of = {table, lengths, num_contexts, vocab, k,
                        slots, has_own, reads_shared, writes_shared, parts};
  const int64_t reach = rows_of.reach(), width = max_nodes + 1;
  std::vector<std::vector<Node>> trees(batch);
  std::priority_queue<Candidate> heap;
  int64_t pushed = 0;
  auto expand = [&](int64_t b, int64_t row, double value) {
    const Node& node = trees[b][row];
    if (node.depth == max_depths[b] || int64_t(trees[b].size()) > max_nodes) return;
    const Place found = find_entry(rows_of, node.context, salts[b]);
    if (!found.row) return;
    const int64_t ranks = (found.index * 2 + found.own) * k;
    for (int64_t rank = 0; rank < k; rank++) {
      const int64_t token = found.row[1 + rank];
      if (token < 0) continue;
      const double rate = rates[(ranks + rank) * STEADINESSES + (found.row[0] & 3)];
      heap.push({value * rate, pushed++, b, row, token});
    }
  };
  int64_t rows = num_other_rows + batch;
  const int64_t last = num_times - 1;
  double total = double(rows);
  for (int64_t b = 0; b < batch; b++) {
    trees[b].push_back({tail_of(tails + b * reach, reach), 0, 0});
    expand(b, 0, 1.0);
  }
  double best = total / times[std::min(rows, last)];
  std::vector<int64_t> grown;  // whose each node is
  size_t num_kept = 0;
  while (!heap.empty() && rows < last) {
    const Candidate top = heap.top();
    heap.pop();
    auto& tree = trees[top.request];
    if (int64_t(tree.size()) > max_nodes) continue;
    // No number of nodes like this one, or worse, makes the step better.
    if (top.worth <= best * slopes[rows]) break;
    total += top.worth, rows++;
    const int64_t row = tree.size();
    token_ids[top.request * max_nodes + row - 1] = top.token;
    const Node& parent = tree[top.parent];
    tree.push_back({parent.context.below(top.token), top.parent, parent.depth + 1});
    grown.push_back(top.request);
    if (total / times[rows] > best) best = total / times[rows], num_kept = grown.size();
    expand(top.request, row, top.worth);
  }
  std::fill(num_nodes, num_nodes + batch, 0);
  for (size_t i = 0; i < num_kept; i++) num_nodes[grown[i]]++;
  for (int64_t b = 0; b < batch; b++) {
    uint8_t* mask = masks + b * width * width;
    std::fill(token_ids + b * max_nodes + num_nodes[b], token_ids + (b + 1) * max_nodes, -1);
    for (int64_t row = 0; row < width; row++) {
      if (row <= num_nodes[b] && row) {
        parents[b * width + row] = trees[b][row].parent;
        depths[b * width + row] = trees[b][row].depth;
      } else if (row) {
        depths[b * width + row] = 1;  // as any row below the root
      }
      if (row) {
        const uint8_t* above = mask + parents[b * width + row] * width;
        std::copy(above, above + width, mask + row * width);
      }
      mask[row * width + row] = 1;
    }
  }
}

void learn(int32_t* table, const int64_t* lengths, int64_t num_contexts, int64_t vocab, int64_t k,
           int64_t slots, int64_t has_own, int64_t reads_shared, int64_t writes_shared,
           int64_t parts, double* counts, const int64_t* salts, const int64_t* tails,
           const int64_t* parents, int64_t parents_stride, const int64_t* row_token_ids,
           const int64_t* cu_num_logits, const int32_t* successors, const int64_t* path,
           const int64_t* token_ids, int64_t path_length, int64_t batch) {
  const Rows rows_of = {table, lengths, num_contexts, vocab, k,
                        slots, has_own, reads_shared, writes_shared, parts};
  const int64_t reach = rows_of.reach();
  std::vector<Context> contexts;
  std::vector<uint8_t> visited;
  for (int64_t b = 0; b < batch; b++) {
    const int64_t first = cu_num_logits[b], rows = cu_num_logits[b + 1] - first;
    contexts.resize(rows);
    visited.assign(rows, 0);
    contexts[0] = tail_of(tails + b * reach, reach);
    for (int64_t row = 1; row < rows; row++) {
      const int64_t parent = parents[b * parents_stride + row];
      contexts[row] = contexts[parent].below(row_token_ids[first + row]);
    }
    const int64_t* visits = path + b * path_length;
    int64_t num_visits = 0;
    for (; num_visits < path_length && visits[num_visits] >= 0; num_visits++) {
      const int64_t row = visits[num_visits];
      visited[row] = 1;
      if (counts) {
        count(rows_of, counts, contexts[row], salts[b], token_ids[b * path_length + num_visits]);
      }
    }
    auto write = [&](int64_t row) {
      each_place(rows_of, contexts[row], salts[b], [&](const Place& place) {
        if (place.own ? has_own : writes_shared) {
          write_entry(rows_of, place, successors + (first + row) * k);
        }
      });
    };
    for (int64_t row = 0; row < rows; row++) {
      if (!visited[row]) write(row);
    }
    for (int64_t i = 0; i < num_visits; i++) write(visits[i]);
  }
}

void seed(int32_t* table, const int64_t* lengths, int64_t num_contexts, int64_t vocab, int64_t k,
          int64_t slots, int64_t has_own, int64_t reads_shared, int64_t writes_shared,
          int64_t parts, const int64_t* tokens, int64_t num_tokens, int64_t salt) {
  const Rows rows = {table, lengths, num_contexts, vocab, k,
                     slots, has_own, reads_shared, writes_shared, parts};
  Context context = tail_of(tokens, 0);
  std::vector<const int32_t*> known(num_contexts);
  std::vector<int32_t> merged(num_contexts * k);
  for (int64_t end = 1; end < num_tokens; end++) {
    context = context.below(tokens[end - 1]);
    if (!rows.is_token(tokens[end])) continue;
    std::fill(known.begin(), known.end(), nullptr);
    each_place(rows, context, salt, [&](const Place& place) {
      if ((place.own ? has_own : reads_shared) && place.is_known()) {
        known[place.index] = place.row + 1;
      }
    });
    // All are read before one is written.
    const int32_t follower = int32_t(tokens[end]);
    for (int64_t index = 0; index < num_contexts; index++) {
      int32_t* out = merged.data() + index * k;
      const int32_t* rest = known[index] ? known[index] : known[0];
      int64_t size = 0;
      out[size++] = follower;
      for (int64_t rank = 0; rest && rank < k && size < k; rank++) {
        if (rest[rank] != follower && rest[rank] >= 0) out[size++] = rest[rank];
      }
      std::fill(out + size, out + k, -1);
    }
    each_place(rows, context, salt, [&](const Place& place) {
      if (bool(place.own) == bool(has_own)) {
        write_entry(rows, place, merged.data() + place.index * k);
      }
    });
  }
}

void top_k_rows(const void* logits, int64_t count, int64_t stride, int64_t num_logits, int64_t k,
                int64_t is_bf16, int64_t threads, int32_t* best) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && count > 1)
  for (int64_t row = 0; row < count; row++) {
    top_k(logits, row * stride, is_bf16, num_logits, k, best + row * k);
  }
}

}  // extern "C"
